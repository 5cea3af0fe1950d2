"""The commands as one application of typer, and its run: every expected failure is one line."""

from __future__ import annotations

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
from fivefold.trainer.faults.signals import install_signal_handlers
from fivefold.version import __version__

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


def main() -> NoReturn:
    """Run the command line; every expected failure is one line on stderr."""
    install_signal_handlers(launcher=find_launcher())
    warnings.showwarning = print_warning
    words = sys.argv[1:] or ["--help"]
    names = words[:1] if words[0] in COMMANDS else COMMANDS
    sys.exit(settle(lambda: build_app(names)(words, standalone_mode=False)))
