"""Live bytes at a moment of a pass, by part, and at which units of a run of equal ones they can be the peak."""

from __future__ import annotations

from typing import Any, NamedTuple

from fivefold.planner.counts.memory.stage import RunMemory

Cause = tuple[Any, ...]  # (index of the run, of the unit in it, phase, operation), or one word


class LiveBytes(NamedTuple):
    """Live bytes at a moment, by part."""

    cause: Cause
    gradients: int  # change since the pass began
    activations: int
    gathers: int
    rest: int  # everything else, with the logits
    logits: int = 0

    @property
    def bytes(self) -> int:
        """The sum of the parts."""
        return self.gradients + self.activations + self.gathers + self.rest


def ends(unit: RunMemory, *, second: bool = False, but_one: bool = False) -> tuple[int, ...]:
    """Indices in a run: first, last, on request ``second`` and last ``but_one``; none if none can be the peak."""
    times = unit.run.times
    if not unit.noted or times == 1:
        return (0,) if unit.noted else ()
    between = ([1] if second else []) + ([times - 2] if but_one else [])
    return (0, *sorted({place for place in between if 0 < place < times - 1}), times - 1)
