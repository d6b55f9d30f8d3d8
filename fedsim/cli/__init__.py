"""The command line. `runs` has the commands that make a run, `inspection` those that only look,
`assets` those that bring what is missing, `board` those of the board, `cluster` those for a Ray
that stays up, `deployment` those of a real deployment; `shared` is what they have in common."""

from __future__ import annotations

import io
import sys
from typing import NoReturn

import typer

import fedsim.core.environment  # noqa: F401  before Flower or Ray is imported
from fedsim.cli import assets, board, cluster, deployment, inspection, runs
from fedsim.cli.shared import err
from fedsim.cli.signals import Asked, Stopped, stoppable
from fedsim.core.console import styled
from fedsim.core.errors import FedsimError

app = typer.Typer(
    help="Audit what a federated-learning server could see of its clients' pictures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for part in (runs, deployment, inspection, board, assets, cluster):
    app.add_typer(part.app)


def main() -> NoReturn:
    """The console script: a user's mistake is one sentence, never a traceback; a signal to end is
    one too, once all that was started is put away."""
    for stream in (sys.stdout, sys.stderr):  # a terminal need not know every character
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with stoppable() as asked:
        _run(asked)


def _run(asked: Asked) -> NoReturn:
    try:
        code = app(standalone_mode=False)
        asked.check()
        sys.exit(code if isinstance(code, int) else 0)
    except typer.Abort:
        sys.exit(130)
    except Stopped as stopped:
        err.print(str(stopped))
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        err.print("stopped.")
        sys.exit(130)
    except FedsimError as error:
        err.print(styled(("error:", "bold red"), f" {error}"), soft_wrap=True)
        sys.exit(error.exit_code)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        words = f" {error.strerror or error}{where}."
        err.print(styled(("error:", "bold red"), words), soft_wrap=True)
        sys.exit(1)
    except Exception as error:
        import click

        if isinstance(error, click.ClickException):
            error.show()
            sys.exit(error.exit_code)
        raise
