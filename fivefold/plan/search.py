"""The best layouts first, and why the others lost. For now: every dp, ZeRO stage and micro-batch of one node."""

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
from fivefold.units import show_bytes


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
    if not steps and not refused:
        raise Mistake(
            f"no layout of {machine.name} divides the global batch {job.global_batch}; try gbs {machine.ranks}"
        )
    return Found(sorted(steps, key=lambda step: (step.time.step_seconds, step.memory.peak_bytes)), refused)


def space(*, machine: Machine, job: Job) -> Iterator[Layout]:
    """Every legal layout of dp on all or fewer ranks, ZeRO stage and micro-batch."""
    for dp in (d for d in range(1, machine.ranks + 1) if machine.ranks % d == 0 and job.global_batch % d == 0):
        per_rank = job.global_batch // dp
        for mbs in (m for m in range(1, per_rank + 1) if per_rank % m == 0):
            for zero in range(4 if dp > 1 else 1):
                yield Layout(dp=dp, zero=zero, mbs=mbs)
