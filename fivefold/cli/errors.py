"""Exit codes, and one-line messages for expected errors."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from errno import ENAMETOOLONG
from pathlib import Path
from typing import Any, TextIO

import typer

from fivefold.cli.options import print_line
from fivefold.record import RunFailure, StopSignal, UsageWarning, UserError, reword
from fivefold.requests.extras import describe_missing
from fivefold.trainer.faults.signals import LAUNCHER, write_error_file

LONG_WORD = 300  # characters of a word in a message; longer ones, from user input or a file, are shortened
OTHER_OPTIONS = {"--also": "; compare takes several precisions by --precisions bf16,fp8, --also is one of search"}
_UsageError: Any = typer.BadParameter.__base__  # click's, wherever this typer keeps its click


def settle(action: Callable[[], object]) -> int:
    """Run ``action``, flush its output, and return its exit code: 2 for a user error, 1 for a system error."""
    try:
        code = action()
        sys.stdout.flush()
    except SystemExit as system_exit:
        code = system_exit.code
    except _UsageError as error:
        option = getattr(error, "option_name", None)  # of an option that the command does not have
        return _print_line(reword(error.format_message()) + OTHER_OPTIONS.get(option or "", ""), code=2)
    except UserError as error:
        return _print_line(str(error), code=2)
    except RunFailure as error:
        return _print_line(str(error), code=1)
    except StopSignal as stop:
        return _print_line(f"stopped by {stop}; nothing is half-done, and the same command takes it up again", code=1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if (line := describe_missing(error)) is None:
            raise
        return _print_line(line, code=2)
    except MemoryError:
        return _print_line(
            "the memory is used up, perhaps by a limit (ulimit -v, a container); allow more of it", code=1
        )
    except OSError as error:
        if error.errno == ENAMETOOLONG:
            return _print_line(f"{error.filename}: too long for a file name; check the spelling", code=2)
        return _print_line(f"{error.filename or 'the system'}: {error.strerror or error}", code=1)
    return code if isinstance(code, int) else 0


def _print_line(line: str, *, code: int) -> int:
    """Print ``line`` and return ``code``; a child process passes the line to its launcher, which prints one for all."""
    line = " ".join(word if len(word) < LONG_WORD else f"{word[:100]}…{word[-50:]}" for word in line.split())
    if line and not (
        find_launcher() is not None and write_error_file(line, to=Path(os.environ["TORCHELASTIC_ERROR_FILE"]))
    ):
        print_line(f"fivefold: {line}")
    return code


def print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print our own warnings in one line, and only once: the processes of a run leave it to their launcher."""
    if not issubclass(category, UsageWarning):
        print(warnings.formatwarning(message, category, filename, lineno, line), file=file or sys.stderr, end="")
    elif find_launcher() is None:
        print_line(f"fivefold: {message}")


def find_launcher() -> int | None:
    """Return the process that started this one as one of several; None if the user or torchrun did."""
    return int(os.environ[LAUNCHER]) if LAUNCHER in os.environ else None
