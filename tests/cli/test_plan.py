"""``gruppetto plan`` and ``gp.plan``: what they recommend, their keys, and their mistakes."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gruppetto as gp
from gruppetto.cli import _run
from gruppetto.delays import Constant
from gruppetto.protocols import PROTOCOLS
from gruppetto.runs import plan_pilot
from gruppetto.runs.plan_pilot import Entry
from gruppetto.runs.plan_race import run_race
from gruppetto.staleness import RATE_SCALINGS
from gruppetto.theory.machines import Machines, RunTimes, time_updates
from gruppetto.theory.planner import Choice, candidates

#: Keys that scripts rely on.
KEYS = {"delay", "candidates", "recommendation", "why", "report"}
ROW_KEYS = {"protocol", "batch_size", "learning_rate_factor", "update_time", "update_time_band",
            "time_to_target", "time_to_target_band", "staleness", "error_floor"}  # fmt: skip
EASY = ("digits", "--target", "accuracy=0.8", "--budget", "10")


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert _run(["plan", *words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, Any] = json.loads(captured.out)
    assert found.keys() >= KEYS and found["report"] is None
    assert all(row.keys() >= ROW_KEYS for row in found["candidates"])
    assert found["recommendation"]["protocol"] == found["candidates"][0]["protocol"]
    return found


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one learner that is four times slower."""
    folder = tmp_path_factory.mktemp("traced") / "run"
    gp.train(
        "digits", engine="virtual", protocol="async", learners=4, epochs=3, batch_size=24,
        delay="gamma:shape=9,scale=0.1", delays={2: "gamma:shape=9,scale=0.4"}, out=folder,
        progress=False, optimizer="sgd:lr=0.05", target="accuracy=0.99",
    )  # fmt: skip
    return folder


# -------------------------------------------------------------- what is recommended


def test_nobody_waits_where_delays_do_not_vary(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = as_json(capsys, *EASY, "--delay", "constant:value=2", "--learners", "4")
    best = found["recommendation"]
    assert (best["protocol"], best["update_time"]) == ("hardsync", 2.0)
    assert best["update_time_band"] == [2.0, 2.0] and best["time_to_target"] > 0
    assert "do not vary" in found["why"]
    assert not list(tmp_path.glob("*gruppetto*")) + list(tmp_path.glob("runs*"))


def test_one_slow_machine_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--delay", "constant:value=1", "--delay", "1=constant:value=10", "--learners", "4")
    found = as_json(capsys, *EASY, *words)
    best = found["recommendation"]
    assert best["protocol"] != "hardsync" and "faster" in found["why"]
    low, high = best["time_to_target_band"]
    assert low < best["time_to_target"] < high
    hardsync = next(row for row in found["candidates"] if row["protocol"] == "hardsync")
    known = hardsync["time_to_target"] or hardsync["time_is_above"]
    assert known > 2.0 * best["time_to_target"]
    assert found["delay"]["delays"] == {"1": "constant:value=10.0"}
    # The same SGD, so one pilot run tells of both.
    by_name = {(r["protocol"], r["learning_rate_factor"]): r for r in found["candidates"]}
    one, other = by_name["k-sync:k=2", 1.0], by_name["k-batch-sync:k=2", 1.0]
    assert one["seeds"] == other["seeds"]
    assert one["updates_to_target"] == pytest.approx(other["updates_to_target"])
    # By times alone it is the same.
    assert as_json(capsys, *words)["recommendation"]["protocol"] != "hardsync"


def test_the_command_it_gives_trains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--delay", "exponential:mean=1", "--learners", "4", "--optimizer", "sgd:lr=0.05")
    command = as_json(capsys, *EASY, *words)["recommendation"]["command"]
    assert "--optimizer sgd:lr=0.05" in command
    # It finds the target when the pilot runs did.
    assert "--evaluate-every 0.1" in command
    name, *rest = shlex.split(command)
    assert name == "gruppetto"
    assert _run([*rest, "--updates", "2", "--out", str(tmp_path / "run"), "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["engine"], result["learners"], result["updates"]) == ("virtual", 4, 2)


def test_the_same_seed_gives_the_same_plan() -> None:
    def make(seed: int) -> dict[str, Any]:
        return gp.plan(
            "digits", delay="exponential:mean=1", learners=3, target="accuracy=0.8", budget=6,
            seed=seed, progress=False,
        ).as_dict()  # fmt: skip

    first = make(3)
    assert make(3) == first
    assert make(4)["candidates"] != first["candidates"]


def test_the_budget_is_kept() -> None:
    found = gp.plan(
        "digits", delay="exponential:mean=1", learners=4, target="accuracy=0.9", budget=8,
        progress=False,
    )  # fmt: skip
    assert 4 < found.spent < 9


def test_a_target_out_of_reach_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--target", "accuracy=0.9999", "--budget", "10", "--learners", "4")
    found = as_json(capsys, "digits", *words, "--delay", "exponential:mean=1")
    assert all(row["time_to_target"] is None for row in found["candidates"])
    assert "lies outside what a budget of 10 epochs measured" in found["why"]
    best, *others = found["candidates"]
    seen = [row["measured_loss"] for row in others if row["measured_time"] <= best["measured_time"]]
    assert seen and best["measured_loss"] <= 1.05 * min(seen)


def test_without_a_task_times_and_staleness_count(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--delay", "exponential:mean=1", "--learners", "8")
    best = found["recommendation"]
    assert (best["protocol"], best["batch_size"], best["command"]) == (
        "k-batch-sync:k=8",
        None,
        None,
    )
    assert "only a task with a target can tell" in found["why"]
    assert {row["learning_rate_factor"] for row in found["candidates"]} == {1.0}
    constant = as_json(capsys, "--delay", "constant:value=1", "--learners", "8")
    assert constant["recommendation"]["protocol"] == "hardsync"


def test_other_mini_batches_only_where_their_time_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*EASY, "--delay", "uniform:low=1,high=2", "--learners", "2", "--fixed-share", "0.5")
    rows = as_json(capsys, *words)["candidates"]
    assert {row["batch_size"] for row in rows} == {16, 8, 32}
    times = {row["batch_size"]: row["update_time"] for row in rows if row["protocol"] == "hardsync"}
    assert times[8] == pytest.approx(0.75 * times[16])
    assert times[32] == pytest.approx(1.5 * times[16])


def test_times_to_the_target_are_as_fine_as_evaluations_are() -> None:
    def updates(every: float | None) -> float | None:
        """Of hardsync."""
        found = gp.plan(
            "digits", delay="constant:value=1", learners=2, target="accuracy=0.8", budget=12,
            progress=False, evaluate_every=every,
        )  # fmt: skip
        return next(row.updates_to_target for row in found.candidates if row.protocol == "hardsync")

    coarse, fine = updates(1.0), updates(None)
    # An epoch is 1,437 samples by twice 16.
    assert coarse is not None and coarse > 44.5
    assert fine is not None and fine < 40


class Scripted:
    """Stands in for training: name of a protocol -> updates that its seeds need."""

    samples_per_epoch = 64

    def __init__(self, updates: dict[str, list[int]], budget: float) -> None:
        self.updates, self.budget, self.left = updates, budget, budget

    def train(self, entry: Entry, seed: int, limit: float) -> None:
        need = self.updates[PROTOCOLS.format(entry.choice.protocol)][seed]
        before = entry.horizon if seed == 0 else 0.0
        seconds = min(entry.run_times.at(need), limit)
        self.left -= (seconds - before) * entry.samples_per_second
        if seconds < limit:
            entry.updates[seed] = need
        elif seed == 0:
            entry.horizon = entry.depth = entry.at_least = limit
            entry.loss = 1.0

    def drop(self, entry: Entry, seed: int = 0) -> None:
        pass


def race(updates: dict[str, list[int]], budget: float) -> dict[str, Entry]:
    """All of P = 8, each update a second and of 8 samples for every mini-batch."""
    machines = Machines(Constant(value=1.0), {}, 8)
    entries = {}
    for name in updates:
        choice = Choice(PROTOCOLS.parse(name), 8, 1.0)
        update = time_updates(choice.protocol, machines)
        run_times = RunTimes(choice.protocol, machines, update.seconds)
        samples = 8.0 * choice.protocol.num_to_wait(8)
        entries[name] = Entry(choice, machines, update, run_times, samples)
    run_race(list(entries.values()), Scripted(updates, budget))  # type: ignore[arg-type]
    return entries


def test_who_was_out_comes_back_when_others_were_lucky() -> None:
    lucky = [10] * 4 + [30] * 20
    found = race(
        {"hardsync": [60] * 24, "k-sync:k=4": lucky, "k-sync:k=5": lucky, "k-sync:k=6": [15] * 24},
        1e6,
    )
    assert min(found, key=lambda name: found[name].center) == "k-sync:k=6"
    assert len(found["k-sync:k=6"].updates) > 4
    # What nobody takes for the best is not repeated more than it must be.
    assert len(found["hardsync"].updates) == 4


def test_seeds_go_to_those_that_may_be_the_best() -> None:
    close = {"hardsync": [40] * 24, "k-sync:k=4": [20] * 24, "k-sync:k=5": [20, 21] * 12}
    rest = {f"k-sync:k={k}": [35] * 24 for k in (1, 2, 3, 6, 7)}
    found = race({**close, **rest}, 1e6)
    assert len(found["k-sync:k=4"].updates) == len(found["k-sync:k=5"].updates) == 24
    assert all(len(found[name].updates) <= 4 for name in rest)
    # The budget ends it.
    poor = race({**close, **rest}, 20_000.0)
    assert 1 <= len(poor["k-sync:k=4"].updates) < 24


def test_a_run_that_takes_too_long_counts_as_that_long() -> None:
    slow_once = [20, 1000, 20] + [20] * 21
    found = race({"hardsync": [25] * 24, "k-sync:k=4": slow_once}, 1e6)
    times = found["k-sync:k=4"].times
    assert found["k-sync:k=4"].num_cut == 1
    assert max(times) == times[1] == pytest.approx(4 * 20.0, rel=0.1)


def test_rudras_rule_becomes_a_setting_of_train() -> None:
    for choice in candidates(8, 16, fixed_share=0.5, total=64):
        for own in (None, "sqrt-batch:batch=32"):
            given = plan_pilot.rate_keywords(choice, 8, {"batch_size": 16, "scale_lr": own})
            before = 1.0 if own is None else RATE_SCALINGS.parse(own).factor(16, 8)
            after = 1.0
            if given:
                after = RATE_SCALINGS.parse(given["scale_lr"]).factor(choice.batch_size, 8)
            assert after / before == pytest.approx(choice.rate_factor, rel=0.01), choice


# --------------------------------------------------------------------------- traces


def test_a_trace_brings_task_and_laws(capsys: pytest.CaptureFixture[str], traced: Path) -> None:
    words = ("--trace", str(traced), "--target", "accuracy=0.7", "--budget", "5")
    found = as_json(capsys, *words)
    assert found["learners"] == 4 and found["delay"]["is_fitted"] and found["delay"]["n"] > 150
    assert set(found["delay"]["delays"]) == {"0", "1", "2", "3"}
    assert any("learners differ" in text for text in found["delay"]["warnings"])
    best = found["recommendation"]
    assert best["batch_size"] == 24 and "--optimizer sgd:lr=0.05" in best["command"]
    assert best["protocol"] != "hardsync"
    low, high = best["update_time_band"]
    assert low < high
    assert _run(["plan", *words, "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "own laws of 4 learners" in shown and best["command"] in shown


def test_the_target_of_a_run_is_a_default(traced: Path) -> None:
    found = gp.plan(trace=traced, budget=4, progress=False)
    assert found.target == "accuracy=0.99" and found.recommendation.time_to_target is None


def test_a_file_of_seconds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "seconds.csv"
    times = np.random.default_rng(0).exponential(2.0, 400)
    path.write_text("seconds\n" + "\n".join(map(str, times)))
    found = as_json(capsys, "--trace", str(path), "--learners", "6")
    assert found["delay"]["spec"].startswith("exponential:mean=")
    assert found["delay"]["n"] == 400
    hardsync = next(row for row in found["candidates"] if row["protocol"] == "hardsync")
    low, high = hardsync["update_time_band"]
    expected = times.mean() * sum(1 / n for n in range(1, 7))
    assert hardsync["update_time"] == pytest.approx(expected, rel=1e-6)
    # 80 % of means of 400 lie within 1.28 / sqrt(400) of theirs.
    assert 0.03 < (high - low) / 2.0 / expected < 0.1


def test_measured_times_that_no_family_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "seconds.txt"
    times = np.random.default_rng(0).choice([1.0, 1.5, 1.51, 9.0], 400)
    path.write_text("\n".join(map(str, times)))
    words = ("digits", "--target", "accuracy=0.8", "--budget", "8", "--learners", "3")
    found = as_json(capsys, *words, "--trace", str(path))
    assert found["delay"]["spec"] == "empirical"
    assert "the measured times themselves" in " ".join(found["delay"]["warnings"])
    command = found["recommendation"]["command"]
    # His machines, not ours: nor do they evaluate ten times an epoch unasked.
    assert not {"--delay", "--engine", "--evaluate-every"} & set(command.split())


def test_a_run_that_was_cut_off_will_do(traced: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    (folder / "trace").mkdir(parents=True)
    (folder / "config.json").write_bytes((traced / "config.json").read_bytes())
    for path in sorted((traced / "trace").iterdir()):
        content = path.read_bytes()
        (folder / "trace" / path.name).write_bytes(content[: len(content) // 2])
    found = gp.plan(trace=folder, target=None, learners=4, budget=4, progress=False)
    assert any("did not end" in text for text in found.delay["warnings"])


# ------------------------------------------------------------------------- mistakes

LAW = ("--delay", "exponential:mean=1")
CASES = [
    ((), "either a delay or a trace"),
    ((*LAW, "--trace", "x"), "either a delay or a trace"),
    (("--delay", "pareto:shape=1,scale=1"), "infinite mean"),
    (
        ("digits", "--delay", "pareto:shape=0.9,scale=1", "--target", "accuracy=0.9"),
        "infinite mean",
    ),
    (("--delay", "constant:value=0"), "takes no time"),
    ((*LAW, "--target", "accuracy=0.9"), "only training a task can tell"),
    (("digits", *LAW, "--target", "accuracy=high"), "expected metric=number"),
    (("digits", *LAW, "--target", "beauty=1"), "has no 'beauty'"),
    (("digits", *LAW, "--target", "accuracy=0.9", "--budget", "0.1"), "budget: expected at least"),
    (("digits", *LAW, "--target", "accuracy=0.9", "--budget", "-1"), "budget: expected epochs"),
    (
        ("digits", *LAW, "--target", "accuracy=0.9", "--learners", "0"),
        "learners: expected at least",
    ),
    (("digits", *LAW, "--batch-size", "0"), "batch size"),
    (("digits", *LAW, "--fixed-share", "2"), "fixed share: expected a number from 0 to 1"),
    ((*LAW, "--fixed-share", "0.5"), "expected a batch size"),
    ((*LAW, "--seed", "-1"), "seed: expected"),
    (("digit", *LAW), "digit"),
    (("digits", *LAW, "--optimizer", "sdg:lr=1"), "sdg"),
    (("--trace", "nowhere"), "nowhere does not exist"),
    (("--trace", "."), "holds no run"),
    (("--trace", "empty.csv"), "holds no seconds"),
    (("--trace", "words.txt"), "expected seconds"),
    (("--trace", "one.txt"), "at least 2"),
    ((*LAW, "--delay", "constant:value=1"), "one law for all learners"),
    ((*LAW, "--delay", "9=constant:value=1"), "learner 9"),
]


@pytest.mark.parametrize(("words", "message"), CASES, ids=lambda x: str(x)[:40])
def test_a_mistake_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.csv").write_text("")
    Path("words.txt").write_text("1.0\nlong\n")
    Path("one.txt").write_text("1.0\n")
    assert _run(["plan", *words, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and captured.err.count("\n") == 1


def test_an_interrupt_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(plan_pilot, "start_run", interrupted)
    assert _run(["plan", *EASY, *LAW, "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["interrupted"] is True
    assert not list(tmp_path.glob("*gruppetto*"))


def test_every_candidate_is_named_as_a_protocol() -> None:
    for choice in candidates(8, 16):
        again = Choice(PROTOCOLS.parse(PROTOCOLS.format(choice.protocol)), 16, choice.rate_factor)
        assert again == choice
