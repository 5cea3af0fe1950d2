"""The best layouts first, and why the others lost. For now: every ZeRO stage and micro-batch of dp over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.plan.predict import predict
from fivefold.record import Mistake
from fivefold.step import Step
from fivefold.units import ceil_div, show_bytes


class Found(NamedTuple):
    """``steps`` fit and are ranked by time, then memory; ``refused`` pairs a layout with its reason."""

    steps: list[Step]
    refused: list[tuple[str, str]]


def search(*, model: Model, machine: Machine, job: Job) -> Found:
    """Try every layout of ``space`` and rank those that fit."""
    steps: list[Step] = []
    refused: list[tuple[str, str]] = []
    for layout in space(machine=machine, job=job):
        step = predict(model=model, machine=machine, layout=layout, job=job)
        if step.memory.fits:
            steps.append(step)
        else:
            need, have = show_bytes(step.memory.peak_bytes), show_bytes(machine.chip.memory_bytes)
            refused.append((str(layout), f"needs {need} of {have}: {step.memory.stages[0].peak_cause}"))
    return Found(sorted(steps, key=lambda step: (step.time.step_seconds, step.memory.peak_bytes)), refused)


def space(*, machine: Machine, job: Job) -> Iterator[Layout]:
    """Every legal layout that uses all of the machine's ranks."""
    dp = machine.ranks
    if job.global_batch % dp:
        near = ceil_div(job.global_batch, dp) * dp
        raise Mistake(
            f"global batch {job.global_batch} is not divisible by the {dp} ranks of {machine.name}; try gbs {near}"
        )
    per_rank = job.global_batch // dp
    for mbs in (m for m in range(1, per_rank + 1) if per_rank % m == 0):
        for zero in range(4 if dp > 1 else 1):
            yield Layout(dp=dp, zero=zero, mbs=mbs)
