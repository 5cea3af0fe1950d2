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
from typing import Annotated, NoReturn

import typer

from fivefold.cli import (
    calibrate,
    compare,
    doctor,
    draw,
    dryrun,
    explain,
    formats,
    generate,
    huggingface,
    numerics,
    plan,
    playbook,
    report,
    run,
    search,
    sweep,
    trace,
    web,
)
from fivefold.cli.errors import launcher, remark, settle
from fivefold.trainer.faults.signals import install_signal_handlers, leave
from fivefold.version import __version__

app = typer.Typer(name="fivefold", pretty_exceptions_enable=False)
COMMANDS = (
    plan.predict, search.search, plan.ask, playbook.plan, compare.compare, plan.ratios,
    dryrun.dryrun, sweep.sweep, doctor.doctor, run.train, run.data, calibrate.calibrate, generate.generate,
    numerics.numerics, trace.trace, explain.explain, report.report, draw.draw, formats.write, web.web,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)
app.command("show")(run.show_run)
app.command("read", context_settings={"ignore_unknown_options": True})(formats.read)
app.command("import")(huggingface.import_weights)
app.command("export")(huggingface.export_weights)


def say_version(asked: bool) -> None:
    """Print the version of the package, and end."""
    if asked:
        print(f"fivefold {__version__}")
        raise typer.Exit


@app.callback()
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
    sys.exit(settle(lambda: app(sys.argv[1:] or ["--help"], standalone_mode=False)))
