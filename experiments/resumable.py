"""What experiments of many runs share: rows saved as runs end, runs side by side, the command line.

A row is what is kept of one run. What is there is not computed again; a run that is stopped midway
goes on from its own folder where the experiment keeps one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import multiprocessing
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gruppetto as gp
from gruppetto.trace import Trace, read_trace

Row = dict[str, Any]


def parse(text: str, out: Path, given: list[str] | None, needs: str = "") -> argparse.Namespace:
    """The command line of such an experiment: ``out``, ``at_once``, ``tables``, and ``data``.

    Args:
        text: the script's docstring.
        out: where rows lie unless told otherwise.
        given: words; None for those of the process.
        needs: what folder it reads; empty for none.
    """
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    if needs:
        parser.add_argument("--data", help=f"folder of {needs}")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--tables", action="store_true", help="only print what there is")
    arguments = parser.parse_args(given)
    if needs and not arguments.tables and arguments.data is None:
        parser.error(f"expected --data DIR, the folder of {needs}, or --tables")
    return arguments


def read(path: Path) -> list[Row]:
    """The rows there are."""
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    return rows


def save(rows: Iterable[Row], path: Path) -> None:
    """One line for each row; whole or not at all."""
    text = ",\n".join(json.dumps(row) for row in rows)
    beside = path.with_suffix(".part")
    beside.write_text(f"[\n{text}\n]\n")
    beside.replace(path)


def trained(
    folder: Path, begin: Callable[[], object], go_on: Callable[[], object], ends: Iterable[str] = ()
) -> tuple[Trace, Row]:
    """Trace and summary of a run that came to its end, however often it was stopped or killed.

    Args:
        folder: of the run.
        begin: trains it from its beginning.
        go_on: resumes it.
        ends: ``stopped_by`` of a run that may end there, though it could be gone on with; besides
            all epochs, and divergence.

    Raises:
        KeyboardInterrupt: it was stopped otherwise, which ends well and is not what was asked for.
    """
    final = ("epochs", "diverged")

    def ended() -> tuple[Trace, Row]:
        trace = read_trace(folder)
        return trace, {"stopped_by": None} if trace.end is None else trace.end.result

    if any(folder.glob("checkpoint-*")):
        trace, result = ended()
        if result["stopped_by"] in final:  # only its row is missing
            return trace, result
        work = go_on
    else:
        if folder.exists():  # killed too early to be gone on with
            shutil.rmtree(folder)
        work = begin
    with contextlib.suppress(gp.Diverged):  # its trace says so
        work()
    trace, result = ended()
    if result["stopped_by"] not in (*final, *ends):
        raise KeyboardInterrupt
    return trace, result


def as_they_end(
    work: Callable[..., Row], jobs: Iterable[tuple[Any, ...]], at_once: int
) -> Iterator[Row]:
    """Do all jobs in so many processes; rows in the order in which they come.

    When one fails or is interrupted no further one is begun, so that Ctrl-C ends them all. (A pool
    that is given all jobs at once goes on with those it has handed to its processes.)
    """
    context, left = multiprocessing.get_context("spawn"), iter(jobs)
    with concurrent.futures.ProcessPoolExecutor(at_once, context) as pool:
        running = {pool.submit(work, *job) for job in itertools.islice(left, at_once)}
        while running:
            done, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            rows = [future.result() for future in done]
            running |= {pool.submit(work, *job) for job in itertools.islice(left, len(done))}
            yield from rows


def run_planned(
    train: Callable[..., Row],
    planned: Iterable[Row],
    name_of: Callable[[Row], str],
    say: Callable[[Row], str],
    arguments: argparse.Namespace,
) -> list[Row]:
    """Train whatever is planned and not there yet; with ``tables`` nothing.

    Args:
        train: from a run, ``data`` and the run's folder to its row.
        planned: runs.
        name_of: a run or a row; its folder, and what tells it from others.
        say: of a row, behind its name.
        arguments: of :func:`parse`.

    Returns:
        All rows there are.
    """
    rows = read(arguments.out)
    done = {name_of(row) for row in rows}
    folders = arguments.out.with_suffix(".runs")
    left = [] if arguments.tables else [run for run in planned if name_of(run) not in done]
    jobs = [(run, arguments.data, folders / name_of(run)) for run in left]
    for row in as_they_end(train, jobs, arguments.at_once) if jobs else ():
        rows.append(row)
        save(rows, arguments.out)
        print(f"{name_of(row)}: {say(row)}", flush=True)
    return rows


def percent(values: list[float]) -> str:
    """The mean, and each seed's behind it."""
    if not values:
        return "not run"
    each = ", ".join(f"{100 * value:.1f}" for value in values)
    return f"{100 * statistics.mean(values):.1f} ({each})"
