"""Live bytes at the moments of one pass that could be its peak, without what other micro-batches hold.

    F   gather? forward …        BW   gather? backward reduce? …        B   backward …        W   weights reduce? …

The order of events is that of ``train/parallel/zero.py``: under overlap the next unit's weights are gathered ahead;
what becomes of gradients is in ``reductions.py``.
In a run of equal units live bytes grow or shrink evenly, so only its first and last can be the peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from fivefold.layout.sharding import joins_ends, policy, regathers
from fivefold.layout.spec import Layout
from fivefold.plan.count.counts import NO_SUMS, Counts, Run
from fivefold.plan.count.memory.in_flight import Before, Kind
from fivefold.plan.count.memory.joined import Joined
from fivefold.plan.count.memory.liveness import Profile, SplitProfile, Sums
from fivefold.plan.count.memory.reductions import Change, Reductions, cut
from fivefold.plan.count.memory.stage import RunMemory, Stages, held_bytes
from fivefold.plan.count.memory.states import UnitStates
from fivefold.plan.count.operations.part import part_of

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


class PeakFinder:
    """Finds the peak of each pass through each stage of one layout."""

    def __init__(self, counts: Counts, layout: Layout, stages: Stages) -> None:
        job, part = counts.job, part_of(layout)
        self.counts, self.stages, self.policy = counts, stages, policy(layout, job)
        self.stream = counts.local(part).stream_bytes
        self.own_tokens = 16 * counts.local(part).rows if layout.cp > 1 else 0  # ids and targets, copied under cp
        self.offloads = "activations" in job.offload
        self.regathers, self.root = regathers(layout, job), joins_ends(layout, job)
        self.keeps = not self.policy.weights_stay and not self.regathers  # gathered from an F to a B
        self.ahead = "dp" in job.stack.overlap and job.stack.weights == "ahead"  # the next unit's weights are gathered
        self.reductions, self.joined = Reductions(counts, layout), Joined(counts, layout)

    def fullest(
        self, kind: Kind, stage: int, first: bool, last: bool, before: Before | None = None, held: bool = False
    ) -> tuple[int, Cause]:  # fmt: skip
        """Peak bytes of a pass and their cause; cached, shared by stages with equal units."""
        last, lag = last and not self.policy.gradients_stay, self.lag_bytes(kind, stage, before)
        key = self.stages.chunks[stage].alike, kind, first, last, lag, held, self.reductions.each
        found = self.stages.pass_peaks.get(key)
        if found is None:
            every = self.moments(kind, stage, first, last, before, held, all_ends=self.joined.uneven)
            found = self.stages.pass_peaks[key] = max(((at.bytes, at.cause) for at in every), key=itemgetter(0))
        return found

    def late_bytes(self, stage: int) -> int:
        """Bytes that one micro-batch keeps between B and W of a stage."""
        chunk = self.stages.chunks[stage]
        key = chunk.alike, self.reductions.each
        if key not in self.stages.late:
            self.stages.late[key] = sum(each.run.times * self._split(each).late_bytes for each in chunk.runs)
        return self.stages.late[key]

    def lag_bytes(self, kind: Kind, stage: int, before: Before | None) -> int:
        """Bytes of gradient sums whose reduction the pass ``before`` has left under way, beside this one."""
        if before is None:
            return 0
        units = self.stages.chunks[before.stage].runs
        late = [self._split(unit).late_bytes if before.kind != "BW" else 0 for unit in units]
        return self.reductions.under_way(units, before, late, then=(kind, stage))

    def made_by_w(self, stage: int) -> int:
        """Bytes of this rank's reduced gradients that W of a stage makes, not its B."""
        units = self.stages.chunks[stage].runs
        return sum(unit.run.times * unit.state.reduced for unit in units if self._split(unit).late_bytes)

    def moments(
        self, kind: Kind, stage: int, first: bool, last: bool, before: Before | None, held: bool, *,
        all_ends: bool = False,
    ) -> Iterator[LiveBytes]:  # fmt: skip
        """The moments of a pass in order; ``all_ends``: also of units that cannot be the peak."""
        units: Sequence[RunMemory] = self.stages.chunks[stage].runs
        if all_ends:
            units = [unit._replace(noted=True) for unit in units]
        first, lag = first and not self.reductions.lasting, self.lag_bytes(kind, stage, before)
        if kind == "W":
            return self._weights(units, first=first, last=last, lagging=lag)
        found = self._forward(units, first=first, held=held, lagging=lag)
        if kind != "F":
            found = self._backward(units, first=first, last=last, split=kind == "B", held=held, lagging=lag)
        return self.joined.changed(found, units, stage=stage, backward=kind != "F")

    def _split(self, unit: RunMemory, born: Sums = NO_SUMS) -> SplitProfile:
        return self.counts.split(unit.part, unit.run.name, born, together=self.reductions.each)

    def _played(self, unit: RunMemory, born: Sums, *, split: bool) -> Profile | SplitProfile:
        return self._split(unit, born) if split else self.counts.profile(unit.part, unit.run.name, born)

    def _earlier(self, each: int, units: int, kept: int) -> int:
        """Activations on the device: ``units`` that keep ``each``, and ``kept`` bytes; offloaded: those of one unit."""
        if self.offloads and units:
            return each
        return kept + units * each

    def _coming(self, part: UnitStates) -> int:
        """Bytes of weights that are being gathered ahead."""
        return part.travel + (0 if self.policy.weights_stay else part.whole)

    def _fetched(self, unit: RunMemory) -> int:
        """Peak bytes while a unit's parts (dense, experts) are gathered one after another."""
        whole = top = 0
        for part in unit.parts:
            whole += 0 if self.policy.weights_stay else part.whole
            top = max(top, whole + part.travel)
        return top

    def _forward(
        self, units: Sequence[RunMemory], *, first: bool, held: bool, lagging: int
    ) -> Iterator[LiveBytes]:  # fmt: skip
        kept, whole = 0, 0 if units[0].run.name == "embed" else self._table_whole(units)
        whole += held_bytes(units) if held else 0
        for place, unit in enumerate(units):
            run, profile, state = unit.run, unit.later, unit.state
            gathered = 0 if self.policy.weights_stay or (held and run.name != "embed") else state.whole
            stale = first or bool(gathered)
            entering = (self.stream if run.name != "embed" else 0) + self.own_tokens
            for before in _ends(unit):
                earlier = self._earlier(profile.kept_bytes, before, kept)
                if stale and not (self.ahead and place + before):
                    yield LiveBytes((place, before, "gather"), lagging, earlier, whole + self._fetched(unit), entering)
                coming = 0
                if self.ahead and (first or not self.policy.weights_stay):
                    following = unit if before < run.times - 1 else units[place + 1] if unit is not units[-1] else None
                    coming = self._coming(following.parts[0]) if following and not held else 0
                mine = gathered * (1 + before if self.keeps and not held else 1)
                yield LiveBytes(
                    (place, before, "forward"), lagging, earlier, whole + mine + coming,
                    profile.forward_peak_bytes + self.own_tokens, unit.logits,
                )  # fmt: skip
            whole += gathered if self._stays(run) else 0
            whole += run.times * gathered if self.keeps and run.name not in ("embed", "head") else 0
            kept = self._earlier(profile.kept_bytes, run.times, kept)

    def _backward(
        self, units: Sequence[RunMemory], *, first: bool, last: bool, split: bool, held: bool, lagging: int
    ) -> Iterator[LiveBytes]:  # fmt: skip
        """``held``: weights are gathered; ``lagging``: bytes of sums that are reduced but not yet freed."""
        sums, kept, gathers = self.reductions, self._kept_before(units), not self.policy.weights_stay
        whole = self._table_whole(units) + (units[-1].state.whole if gathers and units[-1].run.name == "head" else 0)
        whole += held_bytes(units, but="head") if held else 0
        grown = after = 0  # gradients; kept for W
        for place, unit in reversed([*enumerate(units)]):
            run, state = unit.run, unit.state
            off = self._split(unit).late_bytes if split else 0  # kept for W
            born = sums.born(unit, first=first, deferred=off > 0)
            block = gathers and run.name not in ("embed", "head")
            stays, regathered = block and held, state.whole if block and not held else 0
            let_go, reduces = self._let_go(unit, stays=stays), sums.reduces(unit, last=last) and not off
            change, lag = self._change(unit, first=first, reduces=reduces, off=off), sums.lag_bytes(unit) * reduces
            profile, table = self._with_table(unit, born, first=first, last=last, reduces=reduces, split=split)
            for done in _ends(unit, second=bool(lag), but_one=self._comes_ahead(place)):
                earlier = self._earlier(unit.later.kept_bytes, run.times - done - 1, kept[place]) + after + done * off
                still, at, gone = lag if done and reduces else lagging, run.times - done - 1, 0
                gradients = grown + done * change.lasting + still
                if unit.born.experts and reduces and sums.midway and not split:
                    profile, gone = self._reducing(unit, born, first=first, lagging=still)
                mine, born_then = profile.backward_kept_bytes, profile.backward_sums_bytes
                if regathered and not (self.ahead and (done or place + 1 < len(units))):
                    yield LiveBytes(
                        (place, at, "gather"), gradients, earlier + unit.later.kept_bytes,
                        whole + self._fetched(unit), self.stream,
                    )  # fmt: skip
                before = unit if done < run.times - 1 else units[place - 1] if place else None
                coming = 0 if held else self._coming_back(unit, before)
                here = whole - (done * state.whole if stays else 0)
                if coming and regathered and unit.born.experts:  # gathered before the dense weights, waited for after
                    yield LiveBytes(
                        (place, at, "gather"), gradients, earlier + unit.later.kept_bytes,
                        here + regathered + unit.parts[-1].travel + coming, self.stream,
                    )  # fmt: skip
                yield LiveBytes(
                    (place, at, "backward", profile.backward_cause), gradients + born_then + table, earlier + mine,
                    here + regathered + coming, profile.backward_peak_bytes - mine - born_then, unit.logits,
                )  # fmt: skip
                if reduces:
                    beginning, rest = gradients + change.reducing - gone, self._made_last(unit)
                    yield LiveBytes((place, at, "reduce"), beginning, earlier, here - let_go, rest)
            grown += run.times * change.lasting + change.waits
            whole, after = whole - let_go * (run.times if stays else 1), after + run.times * off
            lagging = lag if reduces else lagging

    def _let_go(self, unit: RunMemory, *, stays: bool) -> int:
        """Bytes of weights gathered before a backward that it frees; ``stays``: a block's are gathered."""
        own = unit.state.whole if not self.policy.weights_stay and (stays or self._stays(unit.run)) else 0
        if not self.reductions.adds or self.policy.weights_stay:
            return own
        return {"head": own + self.reductions.table.whole, "embed": 0}.get(str(unit.run.name), own)

    def _made_last(self, unit: RunMemory) -> int:
        """Bytes that live when the last gradient of a unit is made: of the stream, or of the table."""
        narrow, wide = self.reductions.of_sums
        return unit.state.sums * narrow // wide if unit.run.name == "embed" else self.stream

    def _with_table(
        self, unit: RunMemory, born: Sums, *, first: bool, last: bool, reduces: bool, split: bool
    ) -> tuple[Profile | SplitProfile, int]:  # fmt: skip
        """Profile of a unit, and bytes of the reduced gradients of a head's own table, which live beside it."""
        copies = unit.parts[1:-1] if unit.born.experts else unit.parts[1:]  # the table lies before the experts
        reduces = unit.run.name == "head" and (reduces or self.reductions.ends_in_b(unit, last=last))
        table = sum(map(cut, copies)) if reduces else 0
        table = min(table, self.reductions.shards(unit, first=first))
        if table and self.counts.job.stack.loss == "chunked":  # allocated after the last chunk
            return self._played(unit, born._replace(reduced=table), split=split), 0
        return self._played(unit, born, split=split), table

    def _change(self, unit: RunMemory, *, first: bool, reduces: bool, off: int) -> Change:
        """What a backward does to gradients; ``off``: bytes that it keeps for W, which then makes them all if they are
        reduced with every micro-batch.
        """
        if off and self.reductions.each:
            return Change(0, 0, 0)
        made_later = self._split(unit).made_bytes if off and self.reductions.late else 0
        return self.reductions.change(unit, first=first, reduces=reduces, made_later=made_later)

    def _comes_ahead(self, place: int) -> bool:
        """Whether, in the backward, the last unit of this run gathers nothing ahead while the one before it does."""
        return self.ahead and not self.policy.weights_stay and place <= 1

    def _coming_back(self, unit: RunMemory, before: RunMemory | None) -> int:
        """Bytes of weights of the unit ``before`` that are gathered ahead in the backward of ``unit``."""
        ahead = self.ahead and not self.policy.weights_stay and unit.run.name != "embed"
        return self._coming(before.parts[-1]) if ahead and before and before.run.name != "embed" else 0

    def _reducing(self, unit: RunMemory, born: Sums, *, first: bool, lagging: int) -> tuple[Profile, int]:
        """Profile of a unit whose experts' gradients are reduced midway, and bytes freed then: ``lagging``, or sums."""
        experts, sums = unit.parts[-1], self.reductions
        shard = min(cut(experts), sums.shards(unit, first=first))
        gone = lagging if sums.lags else cut(experts) and experts.sums
        return self.counts.profile(unit.part, unit.run.name, born._replace(reduced=shard, gone=gone)), gone

    def _weights(
        self, units: Sequence[RunMemory], *, first: bool, last: bool, lagging: int
    ) -> Iterator[LiveBytes]:  # fmt: skip
        """Moments of W: deferred weight gradients from the last unit to the first."""
        left, grown, sums = 0, 0, self.reductions
        for unit in units:
            late = self._split(unit).late_bytes
            left += unit.run.times * late
            if not late and not (sums.each or sums.bucketed) and sums.reduces(unit, last=last):  # reduced in B
                grown += unit.state.reduced - unit.state.sums
        for place in reversed(range(len(units))):
            unit, profile = units[place], self._split(units[place])
            if not profile.late_bytes:
                continue
            reduces, change = sums.reduces(unit, last=last), self._change_by_w(unit, first=first, last=last)
            # those of experts are allocated with their first gradient; all are, if they are reduced every time
            born = sums.born(unit, first=first)
            born = born if sums.each and not sums.bucketed else born._replace(dense=0)
            allocated = born.dense + born.experts + (born.table if born.tied and sums.each else 0)
            lag = sums.lag_bytes(unit) if reduces else 0
            for done in _ends(unit, second=bool(lag)):
                still, at = lag if done and reduces else lagging, unit.run.times - done - 1
                here, gradients = left - done * profile.late_bytes, grown + done * change.lasting + still
                rest = profile.weights_peak_bytes - profile.late_bytes
                yield LiveBytes((place, at, "weights"), gradients + allocated, here, 0, rest)
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

    def _change_by_w(self, unit: RunMemory, *, first: bool, last: bool) -> Change:
        """What W does to gradients whose dense sums B has allocated, unless they are reduced every time."""
        sums = self.reductions
        reduces = sums.reduces(unit, last=last)
        if sums.each or sums.bucketed:
            return sums.change(unit, first=first, reduces=reduces)
        experts = unit.born.experts if first else 0
        lasting = unit.state.reduced - unit.state.sums if reduces else sums.late * self._split(unit).made_bytes
        return Change(experts + sums.shards(unit, first=first), experts + lasting, 0)

    def _kept_before(self, units: Sequence[RunMemory]) -> list[int]:
        """For each run, activations kept by the runs before it."""
        found, kept = [], 0
        for unit in units:
            found.append(kept)
            kept = self._earlier(unit.later.kept_bytes, unit.run.times, kept)
        return found

    def _table_whole(self, units: Sequence[RunMemory]) -> int:
        """Bytes of a gathered tied table that stays from the embedding's forward for the head on the same rank."""
        shared = not self.policy.weights_stay and units[-1].run.name == "head"
        return (units[0].state if self.root else self.reductions.table).whole if shared else 0

    def _stays(self, run: Run) -> bool:
        """Whether gathered weights stay until the backward: of the head, which follows, or a table that it shares."""
        return run.name == "head" or (run.name == "embed" and (self.root or self.reductions.tied))


def _ends(unit: RunMemory, *, second: bool = False, but_one: bool = False) -> tuple[int, ...]:
    """Indices in a run: first, last, on request ``second`` and last ``but_one``; none if none can be the peak."""
    times = unit.run.times
    if not unit.noted or times == 1:
        return (0,) if unit.noted else ()
    between = ([1] if second else []) + ([times - 2] if but_one else [])
    return (0, *sorted({place for place in between if 0 < place < times - 1}), times - 1)
