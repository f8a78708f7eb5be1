"""The command ``gruppetto``: one file per command; errors in one sentence.

Exit 0 done, 1 failed, 2 bad usage, 130 interrupted and resumable.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from gruppetto.cli.compare import compare, report
from gruppetto.cli.listing import (
    clips,
    compensations,
    delays,
    guards,
    methods,
    models,
    modulations,
    optimizers,
    protocols,
    scalings,
    tasks,
    warmups,
)
from gruppetto.cli.output import Failed, Interrupted, print_json
from gruppetto.cli.plan import plan
from gruppetto.cli.replay import export, replay
from gruppetto.cli.simulate import simulate
from gruppetto.cli.split import split
from gruppetto.cli.train import resume, train
from gruppetto.errors import GruppettoError, RunFailed

__all__ = ["cli", "main"]


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start here: gruppetto train digits --protocol async --delay exponential:mean=1",
)
@click.version_option(package_name="gruppetto")
def cli() -> None:
    """Train PyTorch models with gradients that arrive late."""


for _command in (
    train,
    compare,
    simulate,
    plan,
    split,
    resume,
    replay,
    report,
    export,
    tasks,
    models,
    protocols,
    methods,
    warmups,
    modulations,
    scalings,
    compensations,
    delays,
    optimizers,
    clips,
    guards,
):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_run(words))


def _run(words: list[str]) -> int:
    as_json = "--json" in words
    try:
        cli.main(args=words, prog_name="gruppetto", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        return _fail(error.format_message(), 2)
    except Interrupted as error:
        return _fail(str(error), 130)
    except Failed as error:
        return _fail(str(error), 1)
    except RunFailed as error:
        if as_json:
            print_json({"run": None, **error.result, "error": str(error)})
        return _fail(str(error), 1)
    except GruppettoError as error:
        return _fail(str(error), 2)
    except (click.Abort, KeyboardInterrupt) as error:
        # click puts its own exception around an interrupt; a run says there where it is.
        told = (error.__cause__ or error).args
        run = str(told[0]) if told else None
        if as_json:
            print_json({"run": run, "interrupted": True})
        return _fail("interrupted" if run is None else f"interrupted; the run is in {run}", 130)
    except BrokenPipeError:
        # The reader of our output has gone; nothing is left to say, also not at shutdown.
        sys.stderr.close()
        return 1
    return 0


def _fail(message: str, code: int) -> int:
    # One line, whatever a library put into it.
    click.echo(f"gruppetto: {' '.join(message.split())}", err=True)
    return code
