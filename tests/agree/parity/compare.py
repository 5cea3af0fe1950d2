"""Judges a case: every loss and gradient against one process, every message against the planner's count.

loss |Δ| / |loss| · gradients ‖Δ‖ / ‖g‖ of each weight, Δ the worst of all copies · messages and bytes equal
"""

from __future__ import annotations

from functools import lru_cache
from math import inf, isfinite
from typing import NamedTuple

import numpy as np
import torch

from fivefold.job import Job
from fivefold.layout.schedule import schedule
from fivefold.layout.sharding import is_trained, list_units
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.flops import work
from tests.agree.parity.cases import FEW, Case, text, use_one_process
from tests.agree.parity.rank import Array, Part, Told, train_rank
from tests.agree.said import Compared, Said, add_up, count_planned
from tests.processes import run_forked

TOLERANCE = 1e-5
PADDED = 1.25


class Verdict(NamedTuple):
    """How far a case is from one process. ``said`` lists what is said otherwise than planned."""

    loss_error: float
    norm_error: float
    gradient_error: float
    weight: str  # the worst
    said: tuple[str, ...]
    flops: tuple[int, int]  # ours and the planner's
    forwards: float  # of a block per micro-batch
    cores: float  # of attention per block and micro-batch

    @property
    def is_equal(self) -> bool:
        return max(self.loss_error, self.norm_error, self.gradient_error) <= TOLERANCE


def judge(case: Compared, told: list[Told], *, like: Told | None = None) -> Verdict:
    """``told`` by each rank, against one process (or ``like``)."""
    model, layout, job = case.model, case.layout, case.job
    like = like or reference(model, job, len(told[0].norms))
    whole = {step: assemble(like.gradients[step], model, job) for step in like.gradients}
    worst = max(
        (
            (error, f"{name} (step {step + 1})")
            for step in whole
            for name, error in errors(
                [part for item in told for part in item.gradients[step]],
                whole[step],
                still=[name for name in list_without_gradient(model) if name in whole[step]],
            ).items()
        )
    )
    moved = [name for item in told for name, bias in item.biases.items() if not np.array_equal(bias, like.biases[name])]
    runs = model.layers * job.global_batch // layout.mbs
    # the kernels of CPUs
    blocks = job if job.stack.attention == "unfused" else job.replace(attention="blocks")
    return Verdict(
        loss_error=max(_relative_difference(item.losses, like.losses) for item in told),
        norm_error=max(_relative_difference(item.norms, like.norms) for item in told),
        gradient_error=inf if moved else worst[0],
        weight=moved[0] if moved else worst[1],
        said=differences(sum_traffic(told), count_expected(model, layout, job)),
        flops=(sum(item.flops for item in told), work(model, layout=layout, job=blocks).hardware_flops),
        forwards=sum(item.forwards for item in told) / runs / (layout.tp * layout.cp),
        cores=sum(item.cores for item in told) / runs / (layout.tp * layout.cp),
    )


def _relative_difference(ours: list[float], theirs: list[float]) -> float:
    if not all(map(isfinite, ours)):
        return inf
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


@lru_cache(maxsize=64)
def reference(model: Model, job: Job, steps: int = FEW, seconds: float = 120.0) -> Told:
    """One process on the same batches, in a process of its own."""
    layout, plain = use_one_process(job)
    told: Told = run_forked(1, train_rank, model, layout, plain, None, steps, seconds=seconds)[0]
    return told


def assemble(parts: list[Part], model: Model, job: Job) -> dict[str, Array]:
    """Return the full gradients of one process by name, of the weights that are trained."""
    trained = (weight for unit in list_units(model, job) for weight in unit.weights if is_trained(weight, job))
    shapes = {weight.name: weight.shape for weight in trained}
    whole = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    for part in parts:
        whole[part.name][_place(part)] = part.values
    return whole


def _place(part: Part) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(part.offsets, part.values.shape, strict=True))


def list_without_gradient(model: Model) -> list[str]:
    """Return the biases of keys, or of their norms, that are not rotated: they add the same to all scores."""
    normed = model.norm == "layernorm" and model.norm_bias and model.qk_norm in ("head", "heads", "full")
    if model.mla or not (model.qkv_bias or normed):
        return []
    blocks = [f"blocks.{layer}" for layer in range(model.layers) if stills(model, layer)]
    further = range(model.mtp_depth)
    blocks += [f"head.mtp.{depth}.block" for depth in further if stills(model, model.layers + depth)]
    last = "k_norm.bias" if normed else "k.bias"  # a norm of keys changes what their own bias adds
    return [f"{block}.attention.{last}" for block in blocks]


def stills(model: Model, layer: int) -> bool:
    """Whether a layer attends without rotary positions."""
    return model.has_attention(layer) and not model.has_rope(layer)


def errors(parts: list[Part], whole: dict[str, Array], *, still: list[str]) -> dict[str, float]:
    """Per weight ‖Δ‖ / ‖g‖ with, in each place, the farthest of all copies; infinite where no rank has it.

    ``still``: biases of keys whose gradient vanishes, measured by those of the queries.
    """
    apart = {name: np.full(gradient.shape, -1.0) for name, gradient in whole.items()}
    for part in parts:
        place = _place(part)
        delta = np.abs(part.values.astype(np.float64) - whole[part.name][place])
        apart[part.name][place] = np.maximum(apart[part.name][place], np.nan_to_num(delta, nan=inf))
    norms = {name: float(np.linalg.norm(gradient.astype(np.float64))) for name, gradient in whole.items()}
    for name in still:  # zero but for rounding
        norms[name] = max(norms[name], norms[name.replace("attention.k", "attention.q")])
    # These sum a signed term of every token to one number per head and nearly cancel. Of the model "delta", the norm is
    # as small as 0.03 of the size of what is added up; under "dp4 zero3 mbs1" rounding is 3.1e-5 of the norm and 9.5e-6
    # of that size. Layouts that add in the same order (pp alone) differ by 0. A gradient that is lost is wrong by 0.03
    # or more, and no other weight is measured in this way.
    for name in norms:
        rates = f"{name.rpartition('.')[0]}.a.weight"
        if name.endswith(("mixer.a_log", "mixer.dt_bias")) and rates in norms:
            norms[name] = max(norms[name], norms[rates] / whole[rates].shape[-1] ** 0.5)
    return {
        name: inf if (delta < 0).any() else float(np.linalg.norm(delta)) / (norms[name] or 1.0)
        for name, delta in apart.items()
    }


def sum_traffic(told: list[Told]) -> Said:
    """What all ranks said, added up."""
    return add_up((line.axis, line.collective, line.calls, line.bytes) for item in told for line in item.traffic)


def count_expected(model: Model, layout: Layout, job: Job) -> Said:
    """What the planner expects of all ranks."""
    held: tuple[tuple[int, ...], ...] = ((0,),)
    if layout.pp > 1:
        table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=layout.micro_batches(job))
        held = table.rank_stages
    return count_planned(Counts(model, job), layout, held, ranks=layout.world // layout.pp)


def differences(ours: Said, plan: Said) -> tuple[str, ...]:
    """One line for each axis and collective that differ."""
    lines = []
    for axis, collective in sorted({*ours, *plan}):
        said, planned = ours.get((axis, collective), (0, 0)), plan.get((axis, collective), (0, 0))
        # over etp rows are padded to the fullest of its ranks, so that what is sent depends on the routing
        padded = axis == "etp" and said[0] == planned[0] and planned[1] <= said[1] <= PADDED * planned[1]
        # what a rank sends of its uneven rows is rounded down to a byte, message by message
        rounded = axis == "ep" and said[0] == planned[0] and abs(said[1] - planned[1]) <= said[0]
        if said != planned and not padded and not rounded:
            lines.append(f"{axis} {collective}: {said} said, {planned} planned")
    return tuple(lines)


def run(case: Case, *, steps: int = FEW, seconds: float = 120.0) -> Verdict:
    """Train the case in forked processes and compare it with one process."""
    torch.set_num_threads(1)
    text()  # once, and not in every process
    return judge(
        case, run_forked(case.layout.world, train_rank, case.model, case.layout, case.job, None, steps, seconds=seconds)
    )
