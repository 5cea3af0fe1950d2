"""Single changes of a job: its number formats, its kernels, the length of its sequences.

``ask changes`` tries those that may save time. The advice for layouts that do not fit tries those that save memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from fivefold.job import RECIPES, Job, Recipe, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.stack.spec import FUSED_SCANS

NUMERICS_CHANGES = ("fp8", "adamw8bit")  # of those for time, the ones that alter the numerics of training


class JobChange(NamedTuple):
    """A changed job, how the change is called, and what it is tried for."""

    words: str
    job: Job
    goal: Literal["time", "memory", "either"]


def list_job_changes(model: Model, job: Job, layout: Layout) -> Iterator[JobChange]:
    """Yield the single changes of a job under a layout; some change nothing."""
    if not job.precision.is_low_precision:
        yield JobChange("fp8", job.replace(precision=get_recipe("fp8")), "time")
    if job.optimizer.kind == "adamw":
        smaller = job.replace(optimizer=job.optimizer.replace(kind="adamw8bit"))
        yield JobChange("adamw8bit", smaller, "either")
    if job.precision.accumulated_bytes:
        recipe = job.precision.replace(name=f"{job.precision.name}, gradients not widened", accumulated_bytes=0)
        yield JobChange("gradients summed in their own width", job.replace(precision=recipe), "memory")
    if not job.stack.loss_facts.chunked:
        yield JobChange("loss in chunks", job.replace(loss="chunked"), "memory")
    if layout.zero >= 2 and job.stack.reduce == "step":  # unsharded gradients stay for all of the step
        yield JobChange("reduce=micro_batch", job.replace(reduce="micro_batch"), "memory")
    if layout.ep > 1 and job.stack.runs.fused_dispatcher:
        yield JobChange("dispatcher=fused", job.replace(dispatcher="fused"), "time")
    yield JobChange("flash attention", job.replace(attention="flash"), "time")
    if job.stack.can_compile_blocks:
        yield JobChange("compile=true", job.replace(compile=True), "time")
    if any(mixer in FUSED_SCANS and job.stack.launches_scan(mixer) for mixer in model.non_attention_mixers):
        yield JobChange("fused_scans=true", job.replace(fused_scans=True), "time")
    yield JobChange("fused kernels", job.replace(kernels="fused", compile=False), "time")
    yield JobChange("all messages overlapped", job.replace(overlap=("dp", "tp", "cp", "ep", "pp")), "time")
    for parts in (2, 4, 8):
        if job.sequence % (2 * parts) == 0:
            length = job.sequence // parts
            yield JobChange(f"sequences of {length}", job.replace(sequence=length), "memory")


def list_smaller_precisions(model: Model, job: Job) -> list[Recipe]:
    """Return the precisions of the job's software with smaller states than the job's, the largest first.

    One that only sums gradients in their own width is one of ``list_job_changes``.
    """
    own = job.precision.replace(name="", accumulated_bytes=0)
    names = job.stack.runs.list_precisions(experts=model.moe is not None) or tuple(RECIPES)
    recipes = (RECIPES[name] for name in names if name in RECIPES)
    smaller = [
        recipe
        for recipe in recipes
        if recipe.total_bytes < job.precision.total_bytes and recipe.replace(name="") != own
    ]
    return sorted(smaller, key=lambda recipe: -recipe.total_bytes)
