"""Live bytes at a moment of a pass, by part."""

from __future__ import annotations

from typing import NamedTuple

from fivefold.planner.counts.memory.stages import Cause, UnitGroupMemory


class LiveBytes(NamedTuple):
    """Live bytes at a moment, by part."""

    cause: Cause
    gradients: int  # change since the pass began
    activations: int
    gathered: int
    other: int  # everything else, with the logits
    logits: int = 0

    @property
    def bytes(self) -> int:
        """Return the sum of the parts."""
        return self.gradients + self.activations + self.gathered + self.other


def list_peak_candidates(unit: UnitGroupMemory, *, second: bool = False, second_last: bool = False) -> tuple[int, ...]:
    """Return the indices of the units of a group that can be the peak: none, or first and last.

    ``second`` and ``second_last`` add the second and the last but one.
    """
    times = unit.group.times
    if not unit.can_be_peak or times == 1:
        return (0,) if unit.can_be_peak else ()
    inner = ([1] if second else []) + ([times - 2] if second_last else [])
    return (0, *sorted({index for index in inner if 0 < index < times - 1}), times - 1)


def make_w_moment(group_index: int, unit_index: int, gradients: int, kept_bytes: int, other: int) -> LiveBytes:
    """Return a moment of W with ``kept_bytes`` bytes kept for it; a negative ``other`` is of freed operands."""
    return LiveBytes((group_index, unit_index, "weights"), gradients, kept_bytes + min(0, other), 0, max(0, other))


RECOMPUTATION = "recomputation"  # the cause of a peak in a backward while its unit is recomputed, with ZeRO-3's gathers
