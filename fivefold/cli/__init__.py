"""The command line: resolves its arguments, runs a command, prints. Data goes to stdout, the rest to stderr.

parameters · request_options   a command's arguments and options, derived from its request schema
options · arguments · completion · errors   shared by all commands; records from words or a file; exit codes
strict_command   refuses an option that is given twice
user_settings   fills what is left open from the user's settings, and names those that took effect
first_calibration   measures a computer that is not calibrated yet
commands/   a module for each command, which has its name (``import_``), with a function of that name
offers · corpus · closing · slurm · hosts   several machines; a run's folder and corpus; its end; clusters; many hosts
pictures · reproduce · trace_compare · written_configs   charts; a page's command; a run's traces; config files
tools · tool_server   commands as tools of coding assistants, and the Model Context Protocol
A user error is one line and exit code 2, a system error one line and exit code 1.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterable
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, NoReturn

import typer

from fivefold.cli.errors import find_launcher, print_warning, settle
from fivefold.cli.strict_command import PlainCommand, PlainGroup, StrictCommand
from fivefold.requests.commands import COMMANDS
from fivefold.trainer.faults.signals import install_signal_handlers, leave
from fivefold.version import __version__

# Commands that end before garbage matters: to look for it would take a tenth of their time.
BRIEF_COMMANDS = {"predict", "models", "machines", "stacks", "read", "write", "config", "schema"}
SETTINGS = {"read": {"ignore_unknown_options": True}}  # its arguments are launch commands of other software


def build_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Build the command line with the commands of ``names``, importing only their modules."""
    commands = typer.Typer(name="fivefold", cls=PlainGroup, pretty_exceptions_enable=False)
    commands.callback()(read_global_options)
    for name in names:
        module = f"{name}_" if iskeyword(name) else name
        command = getattr(import_module(f"fivefold.cli.commands.{module}"), module)
        panel = COMMANDS[name].panel
        example = f"Example: fivefold {COMMANDS[name].example}"
        shape = PlainCommand if name in SETTINGS else StrictCommand
        commands.command(name, cls=shape, context_settings=SETTINGS.get(name), rich_help_panel=panel, epilog=example)(
            command
        )
    return commands


def __getattr__(name: str) -> typer.Typer:
    """Build ``app``, the command line with all commands, on first use."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app = globals()["app"] = build_app()
    return app


def print_version(asked: bool) -> None:
    """Print the version of the package and exit."""
    if asked:
        print(f"fivefold {__version__}")
        raise typer.Exit


def read_global_options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version and end.")
    ] = False,
) -> None:
    """Plan, dry-run, train and verify the training step of a large language model."""


def entry() -> NoReturn:
    """Run ``main`` as a process; one that has trained exits without finalizing the interpreter."""
    if BRIEF_COMMANDS.intersection(sys.argv[1:2]):
        gc.disable()
    try:
        main()
    except SystemExit as system_exit:
        if "fivefold.trainer.loop" in sys.modules:
            leave(system_exit.code if isinstance(system_exit.code, int) else 1)
        raise


def main() -> NoReturn:
    """Run the command line; every expected failure is one line on stderr."""
    install_signal_handlers(launcher=find_launcher())
    warnings.showwarning = print_warning
    words = sys.argv[1:] or ["--help"]
    names = words[:1] if words[0] in COMMANDS else COMMANDS
    sys.exit(settle(lambda: build_app(names)(words, standalone_mode=False)))
