"""States in host memory."""

from __future__ import annotations

from collections.abc import Iterable

from fivefold.job import Job
from fivefold.layout.names import Offloaded


def explain_unsupported_offload(offloaded: Iterable[Offloaded], *, zero: int, job: Job) -> str | None:
    """Return why what is in host memory is not modelled with this ZeRO stage or job, in one line; None if it is."""
    stack, recipe = job.stack, job.precision
    if "parameters" in offloaded:
        if zero < 3:
            return (
                f"offload=parameters is not modelled with zero{zero}; use zero3, on one rank too, or offload=optimizer"
            )
        if recipe.gathers == "fp8":
            what = f"precision {recipe.name}, which gathers weights in fp8"
            return f"offload=parameters is not modelled with {what}; use bf16"
        if job.copies_reference:
            return "offload=parameters is not modelled with objective=dpo without an adapter; use an adapter"
    if "optimizer" in offloaded and zero not in stack.runs.optimizer_offload_zero:
        fix = " or ".join(f"zero{stage}" for stage in stack.runs.optimizer_offload_zero)
        return f"{stack.name} does not run offload=optimizer with zero{zero}; use {fix}, on one rank too"
    return None
