"""Exit codes, and one-line messages for expected errors."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable
from errno import ENAMETOOLONG
from pathlib import Path
from typing import Any, TextIO

import typer

from fivefold.cli.options import drop_warnings, hold_warning, print_line, print_warnings
from fivefold.errors import RunFailure, StopSignal, UsageWarning, UserError
from fivefold.record import reword
from fivefold.requests.extras import describe_missing
from fivefold.trainer.faults.signals import LAUNCHER, write_error_file

LONG_WORD = 300  # characters of a word in a message; longer ones, from user input or a file, are shortened
OTHER_OPTIONS = {
    "--also": "; compare takes several precisions by --precisions bf16,fp8, --also is one of search",
    **dict.fromkeys(
        (
            "--micro-batch",
            "--micro-batch-size",
            "--mbs",
            "--batch-size",
            "--tp",
            "--pp",
            "--cp",
            "--dp",
            "--ep",
            "--zero",
        ),
        "; degrees, ZeRO stage and micro-batch are written in the layout, such as 'dp4 tp2 zero1 mbs2'",
    ),
    **dict.fromkeys(("--batch", "--global-batch", "--global-batch-size"), "; the global batch is --gbs, in sequences"),
    **dict.fromkeys(
        ("--gradient-accumulation-steps", "--gradient-accumulation", "--grad-accum", "--ga"),
        "; gradients are accumulated over gbs / (dp · mbs) micro-batches: set --gbs, and mbs in the layout",
    ),
    **dict.fromkeys(
        ("--seq-length", "--sequence", "--seq-len", "--seqlen", "--max-seq-len", "--max-seq-length"),
        "; the tokens of a sequence are --seq",
    ),
    **dict.fromkeys(("--dtype", "--mixed-precision"), "; the numbers of a step are --precision, such as bf16 or fp8"),
    **dict.fromkeys(("--machine", "--machines"), "; machines are arguments after the model, such as h100:64 gb200:64"),
    "--lr": "; the learning rate is --set learning_rate.peak=3e-4",
}
IN_RUN_FILE = {  # what a run file has in its table [job] in place of an option of predict
    "--adapter": 'adapter = "qlora:16"',
    "--seq": "sequence = 4096",
    "--gbs": "global_batch = 16",
    "--precision": 'precision = "bf16"',
    "--lr": "learning_rate = { peak = 3e-4 }",
    "--set": "each field of --set",
}
NEEDS_SEQUENCES = (
    "; it counts sequences: a batch given in tokens is divided by --seq, so 2M tokens of --seq 4096 are 512"
)
TAKEN_BY = {  # by command: its arguments, where others take a model and a machine
    "write": "write takes a layout or a file; name the model with --model and the machine with --gpus",
    "train": "train takes a run file, which names model, machine and layout",
    "sweep": "sweep takes a sweep file, which lists models, machines and layouts; `fivefold compare` takes them here",
}
_UsageError: Any = typer.BadParameter.__base__  # click's, wherever this typer keeps its click


def run_with_exit_code(action: Callable[[], object]) -> int:
    """Run ``action``, flush its output, and return its exit code: 2 for a user error, 1 for a system error."""
    try:
        code = action()
        print_warnings()
        sys.stdout.flush()
    except SystemExit as system_exit:
        code = system_exit.code
    except _UsageError as error:
        option = getattr(error, "option_name", None)  # of an option that the command does not have
        command = getattr(getattr(error.ctx, "command", None), "name", None)
        return _print_line(_explain_usage(error.format_message(), option or "", command or ""), code=2)
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


def _explain_usage(message: str, option: str, command: str) -> str:
    """Reword one of click's messages, and add what to write instead."""
    if command == "train" and option in IN_RUN_FILE:
        return f"No such option: {option}; train reads a run file, which has {IN_RUN_FILE[option]} in its table [job]"
    if option in OTHER_OPTIONS:
        return f"No such option: {option}{OTHER_OPTIONS[option]}"
    if message == "Option '--against' requires 3 arguments.":
        return "--against needs MODEL MACHINE LAYOUT, such as --against llama3-8b h100:8 'dp8 zero3 mbs1'"
    if match := re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
        fix = TAKEN_BY.get(command, "quote a value that contains spaces, as 'dp8 zero3 mbs1'")
        return f"{match[1]!r}: one argument too many; {fix}"
    if message.startswith("No such command 'watch'"):
        return f"{message.rstrip('.')}; ff.watch is a function of Python, see docs/how-to/watch.md"
    if message.startswith(f"No such option: {option}") and (commands := _list_commands_with(option)):
        names = ", ".join(f"`fivefold {name}`" for name in commands)
        return f"{message.rstrip('.')}; {names} {'has' if len(commands) == 1 else 'have'} it"
    return reword(message) + NEEDS_SEQUENCES * (message.startswith("Invalid value for '--gbs'"))


def _list_commands_with(option: str) -> list[str]:
    """Return the commands that have an option; none if there are more than three, which would say nothing."""
    from fivefold.cli.parameters import list_options
    from fivefold.requests.commands import COMMANDS

    commands = [name for name, schema in COMMANDS.items() if option and option in list_options(schema)]
    return commands if len(commands) <= 3 else []


def _print_line(line: str, *, code: int) -> int:
    """Print ``line`` and return ``code``; a child process passes the line to its launcher, which prints one for all."""
    line = " ".join(word if len(word) < LONG_WORD else f"{word[:100]}…{word[-50:]}" for word in line.split())
    if line and not (
        find_launcher() is not None and write_error_file(line, to=Path(os.environ["TORCHELASTIC_ERROR_FILE"]))
    ):
        if code == 2:
            drop_warnings()
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
    """Print our own warnings in one line each before the answer, and only once: a run's launcher does for all."""
    if not issubclass(category, UsageWarning):
        print(warnings.formatwarning(message, category, filename, lineno, line), file=file or sys.stderr, end="")
    elif find_launcher() is None:
        hold_warning(f"fivefold: {message}")


def find_launcher() -> int | None:
    """Return the process that started this one as one of several; None if the user or torchrun did."""
    return int(os.environ[LAUNCHER]) if LAUNCHER in os.environ else None
