"""The command line: load the nouns, call the verbs, print. Data goes to stdout, everything else to stderr.

parameters · request_options   a command's arguments and options, of its request schema
options · arguments · completion · errors   what commands share; records of words or a file; exit codes
plan · playbook · search · across · compare · dryrun · run · closing · slurm   predict ask ratios; …; train data show
calibrate · sweep · trace               this computer; many layouts; traces of any trainer
doctor · explain · numerics · generate · huggingface · formats · web   their commands; read and write; the page
pictures · draw · report · reproduce   charts; as a file, with its command
trace_compare · hosts                  a run's traces; many hosts
A user's mistake is one line and exit code 2, a fault of the system one line and exit code 1.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, NoReturn

import typer

from fivefold.cli.errors import launcher, remark, settle
from fivefold.trainer.faults.signals import install_signal_handlers, leave
from fivefold.version import __version__

COMMANDS = {  # each by the function that is called
    "predict": "plan.predict", "search": "search.search", "ask": "plan.ask", "plan": "playbook.plan",
    "compare": "compare.compare", "ratios": "plan.ratios", "dryrun": "dryrun.dryrun", "sweep": "sweep.sweep",
    "doctor": "doctor.doctor", "train": "run.train", "data": "run.data", "calibrate": "calibrate.calibrate",
    "generate": "generate.generate", "numerics": "numerics.numerics", "trace": "trace.trace",
    "explain": "explain.explain", "report": "report.report", "draw": "draw.draw", "write": "formats.write",
    "web": "web.web", "show": "run.show_run", "read": "formats.read", "import": "huggingface.import_weights",
    "export": "huggingface.export_weights",
}  # fmt: skip
SETTINGS = {"read": {"ignore_unknown_options": True}}  # what it is given are words of other commands


def build_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the command line with the commands of ``names``; the modules of no other are loaded."""
    commands = typer.Typer(name="fivefold", pretty_exceptions_enable=False)
    commands.callback()(face)
    for name in names:
        module, _, function = COMMANDS[name].partition(".")
        command = getattr(import_module(f"fivefold.cli.{module}"), function)
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
