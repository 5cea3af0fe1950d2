"""The command line: load the nouns, call the verbs, print. Data goes to stdout, everything else to stderr.

parameters · request_options   a command's arguments and options, of its request schema
options · arguments · completion · errors   what commands share; records of words or a file; exit codes
commands/   a module for each command, which has its name (``import_``), with a function of that name
across · corpus · closing · slurm · hosts   several machines; a run's folder and corpus; its end; clusters; many hosts
pictures · reproduce · trace_compare · written_configs   charts; the command of a page; a run's traces; files of configs
A user's mistake is one line and exit code 2, a fault of the system one line and exit code 1.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, NoReturn

import typer

from fivefold.cli.errors import launcher, remark, settle
from fivefold.requests.commands import COMMANDS
from fivefold.trainer.faults.signals import install_signal_handlers, leave
from fivefold.version import __version__

SETTINGS = {"read": {"ignore_unknown_options": True}}  # what it is given are words of other commands


def build_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the command line with the commands of ``names``; the modules of no other are loaded."""
    commands = typer.Typer(name="fivefold", pretty_exceptions_enable=False)
    commands.callback()(face)
    for name in names:
        module = f"{name}_" if iskeyword(name) else name
        command = getattr(import_module(f"fivefold.cli.commands.{module}"), module)
        commands.command(name, context_settings=SETTINGS.get(name))(command)
    return commands


def __getattr__(name: str) -> typer.Typer:
    """Return ``app``, the command line with all commands."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app = globals()["app"] = build_app()
    return app


def say_version(asked: bool) -> None:
    """Print the version of the package, and end."""
    if asked:
        print(f"fivefold {__version__}")
        raise typer.Exit


def face(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=say_version, help="Print the version and end.")
    ] = False,
) -> None:
    """Plans, rehearses, trains and proves the training step of a large language model."""


def entry() -> NoReturn:
    """``main`` as a process of its own; one that has trained leaves without finalising the interpreter."""
    try:
        main()
    except SystemExit as done:
        if "fivefold.trainer.loop" in sys.modules:
            leave(done.code if isinstance(done.code, int) else 1)
        raise


def main() -> NoReturn:
    """Run the command line; every foreseen failure is one line on stderr."""
    install_signal_handlers(launcher=launcher())
    warnings.showwarning = remark
    words = sys.argv[1:] or ["--help"]
    names = words[:1] if words[0] in COMMANDS else COMMANDS
    sys.exit(settle(lambda: build_app(names)(words, standalone_mode=False)))
