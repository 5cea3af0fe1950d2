"""Builds the command line that reproduces a record, for reports."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fivefold.record import UserError
from fivefold.requests.job import load_job
from fivefold.step import FITS_RISK

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.step import Step


def get_job(step: Step) -> Job:
    """Return the job of a step."""
    from fivefold.job import Job

    return Job.read(dict(step.job), origin="job")


def format_command(verb: str, words: Sequence[str], job: Job, *, risk: float = FITS_RISK) -> str:
    """Return the command line that asks the same question; if options cannot express the job, it names a file."""
    words = words if risk == FITS_RISK else [*words, "--risk", f"{risk:g}"]
    options = _list_options(job)
    arguments = ["fivefold", verb, *words, *(text for option in options for text in option)]
    named_options: dict[str, Any] = {name[2:]: value for name, value in options if name != "--set"}
    try:
        is_reproduced = load_job(settings=[value for name, value in options if name == "--set"], **named_options) == job
    except UserError:
        is_reproduced = False
    if is_reproduced:
        return shlex.join(arguments)
    return shlex.join(["fivefold", verb, *words, "--job", "job.json"]) + "    # with the job's fields, above"


def _list_options(job: Job) -> list[tuple[str, str]]:
    """Return the options that turn the default job into ``job``."""
    from fivefold.job import RECIPES
    from fivefold.job import Job as Default
    from fivefold.rendering.question import list_changed_settings

    default_job, stack = Default(), job.stack
    options: list[tuple[str, str]] = [("--seq", str(job.sequence)), ("--gbs", str(job.global_batch))]
    if stack.name != default_job.stack.name:
        options.append(("--stack", stack.name))
    if job.precision != default_job.precision:
        reduces_in_fp32 = stack.reduce_in_fp32
        names = [
            name
            for name, recipe in RECIPES.items()
            if recipe.with_reduce_dtype(in_fp32=reduces_in_fp32) == job.precision
        ]
        options.append(("--precision", names[0] if names else job.precision.name))
    for name, text in list_changed_settings(job):
        options.append(("--attention", text) if name == "attention" else ("--set", f"{name}={text}"))
    return options
