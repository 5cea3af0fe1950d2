"""The command line: resolves its arguments, runs a command, prints. Data goes to stdout, the rest to stderr.

command_line   all commands as one application, and its run
parameters · request_options   a command's arguments and options, derived from its request schema
options · arguments · completion · errors   shared by all commands; records from words or a file; exit codes
user_settings   fills what is left open from the user's settings, and names those that took effect
first_calibration   measures a computer that is not calibrated yet
commands/   a module for each command, which has its name (``import_``), with a function of that name
offers · corpus · slurm · hosts   several machines; a run's folder and corpus; clusters; many hosts
pictures · trace_compare · written_configs   charts; a run's traces; config files
tools   commands as tools of coding assistants, and the Model Context Protocol
A user error is one line and exit code 2, a system error one line and exit code 1.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import typer

# Commands that end before garbage matters: to look for it would take a tenth of their time.
BRIEF_COMMANDS = {"predict", "models", "machines", "stacks", "read", "write", "config", "schema"}


def __getattr__(name: str) -> typer.Typer:
    """Build ``app``, the command line with all commands, on first use."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fivefold.cli.command_line import build_app

    app = globals()["app"] = build_app()
    return app


def entry() -> NoReturn:
    """Run the command line as a process; one that has trained exits without finalizing the interpreter.

    What is imported stays, so no garbage is looked for before that is done, and none of it when the process ends.
    """
    gc.disable()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # pydantic would read the metadata of all packages
    from fivefold.cli.command_line import main

    if not BRIEF_COMMANDS.intersection(sys.argv[1:2]):
        gc.enable()
    try:
        main()
    except SystemExit as system_exit:
        if "fivefold.trainer.loop" in sys.modules:
            from fivefold.trainer.faults.signals import leave

            leave(system_exit.code if isinstance(system_exit.code, int) else 1)
        gc.freeze()
        raise
