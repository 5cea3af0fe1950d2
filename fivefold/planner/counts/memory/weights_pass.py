"""Moments of W: the weight gradients that B has put off, from the last unit to the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fivefold.planner.counts.memory.backward import Sums
from fivefold.planner.counts.memory.live_bytes import LiveBytes, ends
from fivefold.planner.counts.memory.liveness import SplitProfile
from fivefold.planner.counts.memory.reductions import Change, Reductions, cut
from fivefold.planner.counts.memory.stage import RunMemory


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
            born = born._replace(experts=0) if sums.by_biases(unit) else born
            tables = born.tied and self.makes_all and not sums.adds  # else they live from the first backward on
            allocated = born.dense + born.experts + (born.table if tables else 0)
            lag = sums.lag_bytes(unit) if reduces else 0
            shard = min(cut(unit.parts[-1]), sums.shards(unit, first=first)) if unit.born.experts else 0
            # experts' gradients come first, and the others' sums only once those are being reduced
            apart = profile.experts_peak_bytes > 0 and born.dense > 0 and reduces and cut(unit.parts[-1]) > 0
            early = profile.experts_peak_bytes or profile.table_peak_bytes
            for done in ends(unit, second=bool(lag)):
                still, at = lag if done and reduces else lagging, unit.run.times - done - 1
                here, gradients = left - done * profile.late_bytes, grown + done * change.lasting + still
                if early:
                    yield _moment(place, at, gradients + allocated - born.dense, here, early - profile.late_bytes)
                if reduces and unit.born.experts:
                    midway, others = gradients + born.experts + shard, here - profile.late_bytes
                    yield LiveBytes((place, at, "reduce"), midway, others, 0, profile.experts_bytes)
                if apart:
                    gradients -= still + (0 if sums.lags else born.experts)
                rest = profile.weights_peak_bytes - profile.late_bytes
                table = sums.of_table(unit, first=first) if reduces else 0
                yield _moment(place, at, gradients + allocated + shard * apart + table, here, rest)
                if reduces:
                    beginning, others = gradients + change.reducing, here - profile.late_bytes
                    yield LiveBytes((place, at, "reduce"), beginning, others, 0, profile.closing_bytes)
            left -= unit.run.times * profile.late_bytes
            grown += unit.run.times * change.lasting
            lagging = lag if reduces else lagging

    def _change(self, unit: RunMemory, *, first: bool, last: bool) -> Change:
        """What W does to gradients whose dense sums B has allocated, unless they are reduced every time."""
        sums = self.reductions
        reduces = sums.reduces(unit, last=last)
        if self.makes_all or sums.bucketed:
            change, there = sums.change(unit, first=first, reduces=reduces), first * sums.by_biases(unit)
            return Change(change.reducing - there, change.lasting - there, change.waits)
        experts = first * (unit.born.experts - sums.by_biases(unit))
        lasting = unit.state.reduced - unit.state.sums if reduces else sums.late * self.split(unit).made_bytes
        return Change(experts + sums.shards(unit, first=first), experts + lasting, 0)


def _moment(place: int, index: int, gradients: int, here: int, rest: int) -> LiveBytes:
    """A moment of W with ``here`` bytes kept for it; ``rest``: negative: of the operands of those, which are gone."""
    return LiveBytes((place, index, "weights"), gradients, here + min(0, rest), 0, max(0, rest))
