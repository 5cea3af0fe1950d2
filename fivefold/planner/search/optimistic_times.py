"""Optimistic times of a unit, as the bounds use them: with the ranks of every group as near as possible.

For each unit: forward, backward, weight gradient; exposed messages of tp, cp and ep; all exposed messages of the
forward. For the halves of an FB also: kernels with exposed messages, and the messages that overlap with them (no tp).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fivefold.planner.counts.counts import Name, UnitGroup, get_group_degrees
from fivefold.planner.counts.operations.local_shapes import LocalDegrees
from fivefold.planner.search.columns import Floats
from fivefold.planner.time.unit_time import AXES, UnitTime
from fivefold.planner.time.units import OptimisticUnitTime, Units


def list_figures(unit: UnitTime) -> tuple[float, ...]:
    """Return the first seven figures for one unit; forward and backward include exposed messages."""
    tp, cp, ep, etp = (
        forward + backward for forward, backward in zip(unit.forward_exposed, unit.backward_exposed, strict=True)
    )
    forward_exposed = sum(unit.forward_exposed)
    backward_exposed = sum(unit.backward_exposed)
    return (
        unit.forward + forward_exposed,
        unit.backward + backward_exposed,
        unit.weight,
        tp,
        cp,
        ep + etp,
        forward_exposed,
    )


def bound_adjacent_figures(
    units: Units, part: LocalDegrees, runs: Sequence[UnitGroup], *, pairs: bool, complete: bool = True
) -> Floats:
    """Return all figures [11, units], as if the ranks of each group were adjacent.

    Without ``pairs`` the last ones are 0. Not ``complete``: the figures of ``bound_unit``.
    """
    known: dict[tuple[LocalDegrees, Name], list[float]] = {}  # units of which nothing is recomputed come twice
    for run in runs:
        timer = units.bound_adjacent_unit(part, run) if complete or not run.routes else bound_unit(units, part, run)
        known[get_group_degrees(part, run), run.name] = [
            *list_figures(timer.time),
            *(_bound_halves(units, timer) if pairs else [0.0] * 4),
        ]
    return np.array([known[get_group_degrees(part, run), run.name] for run in runs]).T


def _bound_halves(units: Units, unit_time: OptimisticUnitTime) -> list[float]:
    """Return the last four figures. Where messages are not NCCL's, no pass is concurrent with another."""
    overlap, (unit, kernels, *messages) = units.job.stack.overlap, unit_time
    kernels_with_messages = [
        kernel_seconds + sum(seconds for axis, seconds in zip(AXES, exposed, strict=True) if axis not in overlap)
        for kernel_seconds, exposed in (
            (kernels[0], unit.forward_exposed),
            (kernels[1] + kernels[2], unit.backward_exposed),
        )
    ]
    if not units.machine.has_gpus:
        return [*kernels_with_messages, 0.0, 0.0]
    overlappable = [
        sum(seconds for axis, seconds in zip(AXES, message, strict=True) if axis in overlap and axis != "tp")
        for message in messages
    ]
    return [*kernels_with_messages, *overlappable]


def bound_kernels(units: Units, part: LocalDegrees, runs: Sequence[UnitGroup], *, ranks: int) -> Floats:
    """Return the first three figures of [11, units] without any message; ``ranks`` share a calibrated machine."""
    return np.array([(*_bound_seconds(units, part, run, ranks=ranks), *[0.0] * 8) for run in runs]).T


def bound_unit(units: Units, part: LocalDegrees, run: UnitGroup) -> OptimisticUnitTime:
    """Return a lower bound of ``Units.bound_adjacent_unit`` of a unit with experts, for any etp.

    The host's launches, and the slowdown by overlapped messages, are not counted. Experts take as long as their FLOPs
    at the chip's sustained rate, whatever their number on a rank, so that the operations are those of two ranks that
    share them, for any larger number of ranks.
    """
    moe = units.counts.model.moe
    expert_ranks = (
        part.ep if moe is None or part.ep == moe.experts else min(2, part.ep)
    )  # one expert on a rank: rows in order
    timer = units.with_expert_ranks(part._replace(ep=expert_ranks, etp=1), run, ep=part.ep)
    recipe = units.job.precision
    chip = units.machine.chip
    seconds = np.array(timer.unit.seconds)
    rate = max(
        chip.sustained_flops(dtype) for dtype in {recipe.compute, "bf16" if recipe.is_low_precision else recipe.compute}
    )
    for op, time in zip(timer.ops, timer.times, strict=True):
        if op.name.startswith("moe.experts") and op.kind == "matmul":
            rows, out_features, in_features = op.shape
            seconds += 2 * op.batch * rows * out_features * in_features / rate - np.array(
                [time.forward, time.backward, time.weight]
            )
    forward_exposed, backward_exposed, *messages = (
        tuple(by_axis.values()) for by_axis in (*timer.exposed, *timer.sent)
    )
    kernel_seconds: tuple[float, float, float] = tuple(seconds.tolist())
    return OptimisticUnitTime(
        UnitTime(*kernel_seconds, forward_exposed, backward_exposed, forward_exposed, backward_exposed, ""),
        kernel_seconds,
        *messages,
    )


def _bound_seconds(units: Units, part: LocalDegrees, run: UnitGroup, *, ranks: int) -> tuple[float, float, float]:
    """Return the seconds of a unit's kernels: forward, backward and weight gradient."""
    times = units.kernels(part, run, ranks=ranks)
    ops = units.counts.list_ops(get_group_degrees(part, run), run.name)
    recomputed = sum(time.forward for op, time in zip(ops, times, strict=True) if op.recomputed)
    return (
        sum(time.forward for time in times),
        sum(time.backward for time in times) + recomputed,
        sum(time.weight for time in times),
    )
