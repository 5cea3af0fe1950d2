"""Figures of a unit's time for the bounds: with messages, of kernels alone, with the nearest places of all groups.

forward, backward, weight, exposed tp, cp, ep, all exposed of the forward
as halves of an FB: kernels with exposed messages, forward and backward; what is beside them, without tp
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fivefold.plan.count.counts import Name, Run, run_part
from fivefold.plan.count.operations.part import Part
from fivefold.plan.price.unit_time import AXES, UnitTime
from fivefold.plan.price.units import Units
from fivefold.plan.search.columns import Floats


def figures(unit: UnitTime) -> tuple[float, ...]:
    """The first seven for one unit; forward and backward include exposed messages."""
    tp, cp, ep, etp = (a + b for a, b in zip(unit.forward_exposed, unit.backward_exposed, strict=True))
    front, back = sum(unit.forward_exposed), sum(unit.backward_exposed)
    return unit.forward + front, unit.backward + back, unit.weight, tp, cp, ep + etp, front


def nearest(units: Units, part: Part, runs: Sequence[Run], *, pairs: bool) -> Floats:
    """All figures [11, units], were the ranks of each group next to one another; without ``pairs`` the last are 0."""
    known: dict[tuple[Part, Name], list[float]] = {}  # units of which nothing is recomputed come twice
    for run in runs:
        key = run_part(part, run), run.name
        if key not in known:
            known[key] = [*figures(units.nearest(part, run).time), *(_halves(units, part, run) if pairs else [0.0] * 4)]
    return np.array([known[run_part(part, run), run.name] for run in runs]).T


def _halves(units: Units, part: Part, run: Run) -> list[float]:
    """The last four figures; where messages are not NCCL's, no pass is beside another."""
    overlap, (unit, alone, *sent) = units.job.stack.overlap, units.nearest(part, run)
    both = [
        kernels + sum(some for axis, some in zip(AXES, exposed, strict=True) if axis not in overlap)
        for kernels, exposed in ((alone[0], unit.forward_exposed), (alone[1] + alone[2], unit.backward_exposed))
    ]
    if units.machine.backend != "nccl":
        return [*both, 0.0, 0.0]
    beside = [
        sum(every for axis, every in zip(AXES, each, strict=True) if axis in overlap and axis != "tp") for each in sent
    ]
    return [*both, *beside]


def kernels(units: Units, part: Part, runs: Sequence[Run], *, ranks: int) -> Floats:
    """The first three of [11, units] without any message; ``ranks`` share a calibrated machine."""
    return np.array([(*_seconds(units, part, run, ranks=ranks), *[0.0] * 8) for run in runs]).T


def least(units: Units, part: Part, run: Run) -> tuple[float, float]:
    """Seconds of a unit's passes, and of its kernels, that no ep and etp undercut; ``part``: with both 1.

    Routed experts take as long as their FLOPs at the chip's sustained rate, whatever their number on a rank.
    """
    unit, kernels = units.nearest(part, run).time, sum(units.nearest(part, run).kernels)
    if not run.routes:
        return sum(figures(unit)[:3]), kernels
    recipe, chip = units.job.precision, units.machine.chip
    rate = max(chip.sustained(each) for each in {recipe.compute, "bf16" if recipe.narrow else recipe.compute})
    ops = units.counts.in_order(run_part(part, run), run.name)
    for op, time in zip(ops, units.kernels(part, run), strict=True):
        if op.name.startswith("moe.experts"):
            rows, outof, into = op.shape if op.kind == "matmul" else (0, 0, 0)
            kernels += 6 * op.batch * rows * outof * into / rate - time.forward - time.backward - time.weight
    return kernels + sum(unit.forward_exposed[:2]) + sum(unit.backward_exposed[:2]), kernels


def _seconds(units: Units, part: Part, run: Run, *, ranks: int) -> tuple[float, float, float]:
    """Seconds of a unit's kernels, forward, backward and weight gradient."""
    times = units.kernels(part, run, ranks=ranks)
    ops = units.counts.in_order(run_part(part, run), run.name)
    again = sum(time.forward for op, time in zip(ops, times, strict=True) if op.recomputed)
    return sum(t.forward for t in times), sum(t.backward for t in times) + again, sum(t.weight for t in times)
