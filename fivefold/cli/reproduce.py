"""The command line that asks again what a record says was asked: for reports, to make what they show once more."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fivefold.record import Mistake
from fivefold.requests.job import load_job
from fivefold.step import FITS_RISK

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.step import Step


def job_said(step: Step) -> Job:
    """The job that a step says."""
    from fivefold.job import Job

    return Job.read(dict(step.job), origin="job")


def command(verb: str, words: Sequence[str], job: Job, *, risk: float = FITS_RISK) -> str:
    """The command line that asks the same; where options cannot say the job, it names a file of it."""
    words = words if risk == FITS_RISK else [*words, "--risk", f"{risk:g}"]
    options = _options(job)
    said = ["fivefold", verb, *words, *(text for option in options for text in option)]
    plain: dict[str, Any] = {name[2:]: value for name, value in options if name != "--set"}
    try:
        same = load_job(settings=[value for name, value in options if name == "--set"], **plain) == job
    except Mistake:
        same = False
    if same:
        return shlex.join(said)
    return shlex.join(["fivefold", verb, *words, "--job", "job.json"]) + "    # with the job's fields, above"


def _options(job: Job) -> list[tuple[str, str]]:
    """The options that make ``job`` of the default one."""
    from fivefold.job import RECIPES
    from fivefold.job import Job as Default
    from fivefold.rendering.question import changed_settings

    default, stack = Default(), job.stack
    found: list[tuple[str, str]] = [("--seq", str(job.sequence)), ("--gbs", str(job.global_batch))]
    if stack.name != default.stack.name:
        found.append(("--stack", stack.name))
    if job.precision != default.precision:
        wide = stack.reduce_in_fp32
        names = [name for name, each in RECIPES.items() if each.reduced(in_fp32=wide) == job.precision]
        found.append(("--precision", names[0] if names else job.precision.name))
    for name, text in changed_settings(job):
        found.append(("--attention", text) if name == "attention" else ("--set", f"{name}={text}"))
    return found
