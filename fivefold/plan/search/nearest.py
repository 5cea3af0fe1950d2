"""Figures of a unit's time for the bounds: with messages, of kernels alone, with the nearest places of all groups.

forward, backward, weight, exposed tp, cp, ep, all exposed of the forward
as halves of an FB: kernels with exposed messages, forward and backward; what is beside them, without tp
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fivefold.plan.count.counts import Run, run_part
from fivefold.plan.count.operations.part import Part
from fivefold.plan.price.unit_time import AXES, UnitTime
from fivefold.plan.price.units import Units

Floats = NDArray[np.float64]


def figures(unit: UnitTime) -> tuple[float, ...]:
    """The first seven for one unit; forward and backward include exposed messages."""
    tp, cp, ep, etp = (a + b for a, b in zip(unit.forward_exposed, unit.backward_exposed, strict=True))
    front, back = sum(unit.forward_exposed), sum(unit.backward_exposed)
    return unit.forward + front, unit.backward + back, unit.weight, tp, cp, ep + etp, front


def nearest(units: Units, part: Part, runs: Sequence[Run], *, pairs: bool) -> Floats:
    """All figures [11, units], were the ranks of each group next to one another; without ``pairs`` the last are 0."""
    rows, overlap = [], units.job.stack.overlap
    hides = np.array([axis in overlap for axis in AXES])
    beside = hides & np.array([axis != "tp" for axis in AXES])
    for run in runs:
        unit = units.nearest(part, run)
        row: list[float] = [*figures(unit), 0.0, 0.0, 0.0, 0.0]
        if pairs:
            apart, alone = units.apart.nearest(part, run), _seconds(units, part, run, ranks=1)
            for back in (0, 1):
                row[7 + back] = sum(alone[1:] if back else alone[:1]) + np.array(unit[3 + back])[~hides].sum()
                row[9 + back] = np.array(apart[3 + back])[beside].sum()
        rows.append(row)
    return np.array(rows).T


def kernels(units: Units, part: Part, runs: Sequence[Run], *, ranks: int) -> Floats:
    """The first three of [11, units] without any message; ``ranks`` share a calibrated machine."""
    return np.array([(*_seconds(units, part, run, ranks=ranks), *[0.0] * 8) for run in runs]).T


def _seconds(units: Units, part: Part, run: Run, *, ranks: int) -> tuple[float, float, float]:
    """Seconds of a unit's kernels, forward, backward and weight gradient."""
    times = units.kernels(part, run, ranks=ranks)
    ops = units.counts.unit(run_part(part, run), run.name).ops
    again = sum(time.forward for op, time in zip(ops, times, strict=True) if op.recomputed)
    return sum(t.forward for t in times), sum(t.backward for t in times) + again, sum(t.weight for t in times)
