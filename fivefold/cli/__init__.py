"""The command line: load the nouns, call the verbs, print. Data goes to stdout, everything else to stderr.

A user's mistake is one line and exit code 2, a fault of the system one line and exit code 1.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn, TextIO

import typer

from fivefold.cli import doctor, exchange, generate, numerics, plan, rehearse, run
from fivefold.cli.run import launcher
from fivefold.cli.words import say
from fivefold.record import Fault, Mistake, Remark, reworded
from fivefold.train.ending import Stopped, heed_signals, tell

app = typer.Typer(
    name="fivefold", add_completion=False, pretty_exceptions_enable=False,
    help="Plans, rehearses, trains and proves the training step of a large language model.",
)  # fmt: skip
COMMANDS = (
    plan.predict, plan.search, plan.ask, plan.ratios, plan.published, rehearse.dryrun,
    doctor.doctor, run.train, run.data, run.calibrate, generate.generate, numerics.numerics,
)  # fmt: skip
LONG_WORD = 300  # in characters; of what a user typed, or has in a file
for command in COMMANDS:
    app.command()(command)
app.command("show")(run.show_run)
app.command("import")(exchange.import_weights)
app.command("export")(exchange.export_weights)

_UsageError: Any = typer.BadParameter.__base__  # click's, wherever this typer keeps its click


def main() -> None:
    """Run the command line; every foreseen failure is one line on stderr."""
    heed_signals(launcher=launcher())
    warnings.showwarning = _remark
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except _UsageError as error:
        _fail(reworded(error.format_message()), code=2)
    except Mistake as error:
        _fail(str(error), code=2)
    except Fault as error:
        _fail(str(error), code=1)
    except Stopped as stop:
        _fail(f"stopped by {stop}; nothing is half-done, and the same command takes it up again", code=1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.filename or 'the system'}: {error.strerror or error}", code=1)


def _remark(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    file: TextIO | None = None, line: str | None = None,
) -> None:  # fmt: skip
    """Say our own warnings in one line, and once: the processes of a run leave it to who started them."""
    if not issubclass(category, Remark):
        print(warnings.formatwarning(message, category, filename, lineno, line), file=file or sys.stderr, end="")
    elif launcher() is None:
        say(f"fivefold: {message}")


def _fail(line: str, *, code: int) -> NoReturn:
    """Say why and exit; a process of ours says it to its launcher, which says one line for all."""
    line = " ".join(word if len(word) < LONG_WORD else f"{word[:100]}…{word[-50:]}" for word in line.split())
    if line and launcher() is not None and tell(line, to=Path(os.environ["TORCHELASTIC_ERROR_FILE"])):
        os._exit(code)  # a peer may be gone: libraries that take leave of it in an orderly exit can abort
    if line:
        say(f"fivefold: {line}")
    sys.exit(code)
