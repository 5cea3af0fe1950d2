"""Moments of W: the weight gradients that B has put off, from the last unit to the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fivefold.plan.count.memory.backward import Sums
from fivefold.plan.count.memory.liveness import SplitProfile
from fivefold.plan.count.memory.moment import LiveBytes, ends
from fivefold.plan.count.memory.reductions import Change, Reductions, cut
from fivefold.plan.count.memory.stage import RunMemory


class WeightsPass:
    """W of one layout; ``split``: of a unit, and of ``Sums`` that B allocates; ``graph``: it stays between B and W."""

    def __init__(self, reductions: Reductions, split: Callable[..., SplitProfile], *, graph: bool) -> None:
        self.reductions, self.split = reductions, split
        self.makes_all = reductions.each or graph  # gradients of a unit that puts any off

    def moments(
        self, units: Sequence[RunMemory], *, first: bool, last: bool, lagging: int
    ) -> Iterator[LiveBytes]:  # fmt: skip
        """The moments in order; ``lagging``: bytes of sums that are reduced but not yet freed."""
        left, grown, sums = 0, 0, self.reductions
        for unit in units:
            late = self.split(unit).late_bytes
            left += unit.run.times * late
            if not late and not (self.makes_all or sums.bucketed) and sums.reduces(unit, last=last):  # reduced in B
                grown += unit.state.reduced - unit.state.sums
        for place in reversed(range(len(units))):
            unit, profile = units[place], self.split(units[place], Sums(tied=units[place].born.tied))
            if not profile.late_bytes:
                continue
            reduces, change = sums.reduces(unit, last=last), self._change(unit, first=first, last=last)
            # those of experts are allocated with their first gradient; all are, if they are reduced every time
            born = sums.born(unit, first=first)
            born = born if self.makes_all and not sums.bucketed else born._replace(dense=0)
            tables = born.tied and self.makes_all and not sums.adds  # else they live from the first backward on
            allocated = born.dense + born.experts + (born.table if tables else 0)
            lag = sums.lag_bytes(unit) if reduces else 0
            for done in ends(unit, second=bool(lag)):
                still, at = lag if done and reduces else lagging, unit.run.times - done - 1
                here, gradients = left - done * profile.late_bytes, grown + done * change.lasting + still
                rest = profile.weights_peak_bytes - profile.late_bytes
                kept = here + min(0, rest)  # negative: of the first gradients' operands, which are gone
                yield LiveBytes((place, at, "weights"), gradients + allocated, kept, 0, max(0, rest))
                if profile.table_peak_bytes:  # the first gradients are a table's, and only then come the unit's own
                    early = profile.table_peak_bytes - profile.late_bytes
                    yield LiveBytes((place, at, "weights"), gradients + allocated - born.dense, here, 0, early)
                if reduces:
                    here -= profile.late_bytes
                    if unit.born.experts:
                        shard = min(cut(unit.parts[-1]), sums.shards(unit, first=first))
                        midway = gradients + born.experts + shard
                        yield LiveBytes((place, at, "reduce"), midway, here, 0, profile.experts_bytes)
                    beginning = gradients + change.reducing
                    yield LiveBytes((place, at, "reduce"), beginning, here, 0, profile.closing_bytes)
            left -= unit.run.times * profile.late_bytes
            grown += unit.run.times * change.lasting
            lagging = lag if reduces else lagging

    def _change(self, unit: RunMemory, *, first: bool, last: bool) -> Change:
        """What W does to gradients whose dense sums B has allocated, unless they are reduced every time."""
        sums = self.reductions
        reduces = sums.reduces(unit, last=last)
        if self.makes_all or sums.bucketed:
            return sums.change(unit, first=first, reduces=reduces)
        experts = unit.born.experts if first else 0
        lasting = unit.state.reduced - unit.state.sums if reduces else sums.late * self.split(unit).made_bytes
        return Change(experts + sums.shards(unit, first=first), experts + lasting, 0)
