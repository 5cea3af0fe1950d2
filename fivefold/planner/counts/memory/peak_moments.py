"""Live bytes at the moments of one pass that could be its peak, without what other micro-batches hold.

    F   gather? forward …        BW   gather? backward reduce? …        B   backward …        W   weights reduce? …

The order of events is that of ``trainer/parallel/zero.py``: under overlap the next unit's weights are gathered
ahead; or that of FSDP2 (``held``). What becomes of gradients is in ``reductions.py``.
In a run of equal units live bytes grow or shrink evenly, so only its first and last can be the peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from fivefold.layout.sharding import gathers_again, joins_ends, policy, regathers
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import NO_SUMS, Counts, Run
from fivefold.planner.counts.memory.backward import Sums
from fivefold.planner.counts.memory.coalesced_gradients import Joined
from fivefold.planner.counts.memory.in_flight import Before, Kind
from fivefold.planner.counts.memory.live_bytes import Cause, LiveBytes, ends
from fivefold.planner.counts.memory.liveness import Profile, SplitProfile
from fivefold.planner.counts.memory.reductions import Change, Reductions, cut
from fivefold.planner.counts.memory.stage import RunMemory, Stages, held_bytes
from fivefold.planner.counts.memory.stage_buffers import StageBuffers
from fivefold.planner.counts.memory.states import UnitStates
from fivefold.planner.counts.memory.weights_pass import WeightsPass
from fivefold.planner.counts.operations.local_shapes import part_of


class PeakFinder:
    """Finds the peak of each pass through each stage of one layout."""

    def __init__(self, counts: Counts, layout: Layout, stages: Stages) -> None:
        job, part = counts.job, part_of(layout)
        self.counts, self.stages, self.policy = counts, stages, policy(layout, job)
        self.stream = counts.local(part).entry_bytes
        self.own_tokens = 16 * counts.local(part).rows if layout.cp > 1 else 0  # ids and targets, copied under cp
        self.offloads = "activations" in layout.offloads(job)
        self.regathers, self.root = regathers(layout, job), joins_ends(layout, job)
        self.keeps = not self.policy.weights_stay and not self.regathers  # gathered from an F to a B
        self.reductions, self.joined = Reductions(counts, layout), Joined(counts, layout)
        # What a gather brought lives beside the weights, or the next unit's weights are gathered.
        self.holds = job.stack.unit_buffers == "held" and layout.shards > 1 and not self.joined.by_weights
        self.ahead = "dp" in job.stack.overlap and job.stack.weights == "ahead" and not self.holds
        self.embed = self.holds and gathers_again("embed", layout, job)  # is gathered for its backward
        self.graph = job.stack.deferred == "graph"  # stays between B and W
        self.lingers = job.stack.loss == "narrow"  # whose caller holds the logits until the backward has ended
        self.weights = WeightsPass(self.reductions, self._split, graph=self.graph)
        self.buffers = StageBuffers(layout, job, stages=len(stages.chunks), stream=self.stream)
        first: dict[tuple[int, int], int] = {}  # stage of those that are equal in everything
        outputs = map(self.buffers.output, range(len(stages.chunks)))
        alike = [(chunk.alike, output) for chunk, output in zip(stages.chunks, outputs, strict=True)]
        self.kinds = tuple(first.setdefault(each, stage) for stage, each in enumerate(alike))

    def fullest(
        self, kind: Kind, stage: int, first: bool, last: bool, before: Before | None = None, held: bool = False
    ) -> tuple[int, Cause]:  # fmt: skip
        """Peak bytes of a pass and their cause; cached, shared by stages with equal units."""
        last, lag = last and not self.policy.gradients_stay, self.lag_bytes(kind, stage, before)
        alike = self.stages.chunks[stage].alike, self.buffers.output(stage)
        key = *alike, kind, first, last, lag, held, self.reductions.each
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
            late = sum(each.run.times * self._split(each).late_bytes for each in chunk.runs)
            self.stages.late[key] = chunk.kept if self.graph and stage == 0 else late - self.buffers.of_graph(stage)
        return self.stages.late[key]

    def lag_bytes(self, kind: Kind, stage: int, before: Before | None) -> int:
        """Bytes of gradient sums whose reduction the pass ``before`` has left under way, beside this one."""
        if before is None:
            return 0
        units = self.stages.chunks[before.stage].runs
        late = [self._split(unit).late_bytes if before.kind != "BW" else 0 for unit in units]
        experts_first = any(self._split(unit).experts_peak_bytes for unit in units)
        return self.reductions.under_way(units, before, late, then=(kind, stage), experts_first=experts_first)

    def made_by_w(self, stage: int) -> int:
        """Bytes of this rank's reduced gradients that W of a stage makes, not its B."""
        late = [unit for unit in self.stages.chunks[stage].runs if self._split(unit).late_bytes]
        return sum(unit.run.times * (unit.state.reduced - self.reductions.by_biases(unit)) for unit in late)

    def moments(
        self, kind: Kind, stage: int, first: bool, last: bool, before: Before | None, held: bool, *,
        all_ends: bool = False,
    ) -> Iterator[LiveBytes]:  # fmt: skip
        """The moments of a pass in order; ``all_ends``: also of units that cannot be the peak."""
        units: Sequence[RunMemory] = self.stages.chunks[stage].runs
        if all_ends:
            units = [unit._replace(noted=True) for unit in units]
        first, lag = first and not self.reductions.lasting, self.lag_bytes(kind, stage, before)
        whole = self.graph and stage == 0  # its backward is not split: B only waits
        if kind == "B" and whole:
            kept, there = self.stages.chunks[stage].kept, held_bytes(units) if held else 0
            cause, rest = (len(units) - 1, 0, "backward", "waits"), self.stream + self.buffers.output(stage)
            return iter([LiveBytes(cause, lag, kept, there, rest)])
        if kind == "W" and not whole:
            found = self.weights.moments(units, first=first, last=last, lagging=lag)
            return self._without(found, self.buffers.of_graph(stage)) if self.graph else found
        found = self._forward(units, first=first, held=held, lagging=lag)
        if kind != "F":
            found = self._backward(units, stage, first=first, last=last, split=kind == "B", held=held, lagging=lag)
        if kind == "W":  # the gradient of its output is a buffer that W does not count as its own
            found = self._without(found, self.stream * self.buffers.received)
        return self.joined.changed(found, units, stage=stage, backward=kind != "F")

    def _without(self, found: Iterator[LiveBytes], size: int) -> Iterator[LiveBytes]:
        """The moments less ``size`` bytes of activations, which are counted beside the pass."""
        return (at._replace(activations=max(0, at.activations - size)) for at in found)

    def _split(self, unit: RunMemory, born: Sums = NO_SUMS) -> SplitProfile:
        return self.counts.split(unit.part, unit.run.name, born, waits=self.reductions.waits(unit))

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

    def _fetched(self, unit: RunMemory, before: RunMemory | None = None) -> int:
        """Peak bytes while a unit's parts (dense, experts) are gathered one after another; held: beside what was
        brought for the unit ``before``, which goes before they are copied.
        """
        if self.holds:
            return unit.state.whole + max(self._whole(unit), before.state.whole if before else 0)
        whole = top = 0
        for part in unit.parts:
            whole += 0 if self.policy.weights_stay else part.whole
            top = max(top, whole + part.travel)
        return top

    def _whole(self, unit: RunMemory) -> int:
        """Bytes of a unit's weights that a gather allocates."""
        return 0 if self.policy.weights_stay else unit.state.whole

    def _forward(
        self, units: Sequence[RunMemory], *, first: bool, held: bool, lagging: int
    ) -> Iterator[LiveBytes]:  # fmt: skip
        """``held``: weights are gathered already; of those that are not kept from an F to a B, the head's alone."""
        kept, casts, whole = 0, 0, 0 if units[0].run.name == "embed" else self._table_whole(units)
        names = [str(unit.run.name) for unit in units]
        there = [held and (name == "head" or (self.keeps and name != "embed")) for name in names]
        whole += sum(unit.run.times * unit.state.whole for unit, some in zip(units, there, strict=True) if some)
        for place, unit in enumerate(units):
            run, profile, state = unit.run, unit.later, unit.state
            gathered = 0 if self.policy.weights_stay or there[place] else state.whole
            stale = first or bool(gathered)
            entering = (self.stream if run.name != "embed" else 0) + self.own_tokens
            for before in ends(unit):
                earlier = self._earlier(profile.kept_bytes, before, kept) + casts + before * profile.cached_bytes
                former = unit if before else units[place - 1] if place else None
                if stale and not (self.ahead and place + before):
                    fetched = whole + self._fetched(unit, former)
                    yield LiveBytes((place, before, "gather"), lagging, earlier, fetched, entering)
                coming = 0
                if self.ahead and (first or not self.policy.weights_stay):
                    following = place + (before == run.times - 1)
                    more = following < len(units) and not there[following]
                    coming = self._coming(units[following].parts[0]) if more else 0
                mine = gathered * (1 + before if self.keeps and not held else 1)
                if self.holds and stale:  # what was brought for the head goes before the loss
                    coming = state.whole
                    if run.name == "head":
                        rest = entering + unit.logits
                        yield LiveBytes((place, before, "forward"), lagging, earlier, whole + mine + coming, rest)
                        coming = 0
                yield LiveBytes(
                    (place, before, "forward"), lagging, earlier, whole + mine + coming,
                    profile.forward_peak_bytes + self.own_tokens, unit.logits,
                )  # fmt: skip
            whole += gathered if self._stays(run) else 0
            whole += run.times * gathered if self.keeps and run.name not in ("embed", "head") else 0
            kept = self._earlier(profile.kept_bytes, run.times, kept)
            casts += run.times * profile.cached_bytes

    def _backward(
        self, units: Sequence[RunMemory], stage: int, *, first: bool, last: bool, split: bool, held: bool, lagging: int,
    ) -> Iterator[LiveBytes]:  # fmt: skip
        """``held``: weights are gathered; ``lagging``: bytes of sums that are reduced but not yet freed."""
        sums, kept, gathers = self.reductions, self._kept_before(units), not self.policy.weights_stay
        whole = self._table_whole(units) + (units[-1].state.whole if gathers and units[-1].run.name == "head" else 0)
        whole += held_bytes(units, but="head") if held else 0
        grown = after = 0  # gradients; kept for W
        logits = self.buffers.output(stage)  # and outputs, that live until the pass has ended
        for place, unit in reversed([*enumerate(units)]):
            run, state = unit.run, unit.state
            off = self._split(unit).late_bytes if split else 0  # kept for W
            stays, regathered = self._is_block(run) and held, state.whole if self._again(run) and not held else 0
            let_go, reduces = self._let_go(unit, stays=stays), sums.reduces(unit, last=last) and not off
            born = sums.born(unit, first=first, deferred=off > 0 and self.weights.makes_all, reduces=reduces)
            change, lag = self._change(unit, first=first, reduces=reduces, off=off), sums.lag_bytes(unit) * reduces
            profile, table = self._with_table(unit, born, first=first, last=last, reduces=reduces, split=split)
            for done in ends(unit, second=bool(lag), but_one=self._comes_ahead(place)):
                earlier = self._earlier(unit.later.kept_bytes, run.times - done - 1, kept[place]) + after + done * off
                still, at, gone = lag if done and reduces else lagging, run.times - done - 1, 0
                gradients = grown + done * change.lasting + still
                if unit.born.experts and reduces and sums.midway and not split:
                    profile, gone = self._reducing(unit, born, first=first, lagging=still)
                mine, born_then = profile.backward_kept_bytes, profile.backward_sums_bytes
                before = unit if done < run.times - 1 else units[place - 1] if place else None
                coming = 0 if held else self._coming_back(unit, before)
                here = whole - (done * state.whole if stays else 0)
                alone = not (self.ahead and (done or place + 1 < len(units)))
                for size in self._arrivals(unit, whole, here, coming, alone=alone) if regathered else ():
                    kept_here, rest = earlier + unit.later.kept_bytes, self.stream + logits
                    yield LiveBytes((place, at, "gather"), gradients, kept_here, size, rest)
                late = self.holds and isinstance(profile, Profile) and profile.after_loss_bytes
                if late:  # what the head gathers ahead, after its loss
                    cause = (place, at, "backward", "head.out")
                    yield LiveBytes(cause, gradients, earlier, here + coming, late, unit.logits)
                yield LiveBytes(
                    (place, at, "backward", profile.backward_cause), gradients + born_then + table, earlier + mine,
                    here + regathered + (0 if late else coming),
                    profile.backward_peak_bytes - mine - born_then + logits, unit.logits,
                )  # fmt: skip
                if reduces:
                    gone, still_coming = (still, coming) if sums.holds else (gone, 0)
                    beginning, rest = gradients + change.reducing - gone, self._made_last(unit) + logits
                    yield LiveBytes((place, at, "reduce"), beginning, earlier, here - let_go + still_coming, rest)
            grown += run.times * change.lasting + change.waits
            whole, after = whole - let_go * (run.times if stays else 1), after + run.times * off
            lagging, logits = lag if reduces else lagging, logits + self._lingering(unit, split=split)

    def _lingering(self, unit: RunMemory, *, split: bool) -> int:
        """Bytes that a unit's backward no longer needs and that live until the pass has ended."""
        return unit.logits * self.lingers + (self._split(unit).released_bytes if split else 0)

    def _arrivals(self, unit: RunMemory, whole: int, here: int, coming: int, *, alone: bool) -> Iterator[int]:
        """Bytes of gathered weights while a unit's come for its backward; ``alone``: not ahead."""
        if alone:
            yield whole + self._fetched(unit)
        if coming and unit.born.experts and self.ahead:  # before the dense ones, awaited after
            yield here + unit.state.whole + unit.parts[-1].travel + coming

    def _let_go(self, unit: RunMemory, *, stays: bool) -> int:
        """Bytes of weights gathered before a backward that it frees; ``stays``: a block's are gathered."""
        own = unit.state.whole if not self.policy.weights_stay and (stays or self._stays(unit.run)) else 0
        if not self.reductions.adds or self.policy.weights_stay:
            return own
        return {"head": own + self.reductions.table.whole, "embed": 0}.get(str(unit.run.name), own)

    def _is_block(self, run: Run) -> bool:
        """Whether the gathered weights of a unit are let go after its forward, or stay for its backward."""
        return not self.policy.weights_stay and run.name not in ("embed", "head")

    def _again(self, run: Run) -> bool:
        """Whether a unit is gathered for its backward."""
        return self._is_block(run) or (self.embed and run.name == "embed")

    def _made_last(self, unit: RunMemory) -> int:
        """Bytes that live when the last gradient of a unit is made: of the stream, or of the table."""
        narrow, wide = self.reductions.of_sums
        if self.reductions.holds and unit.run.name == "embed":
            return 0  # its gradient counts as such
        return unit.state.sums * narrow // wide if unit.run.name == "embed" else self.stream

    def _with_table(
        self, unit: RunMemory, born: Sums, *, first: bool, last: bool, reduces: bool, split: bool
    ) -> tuple[Profile | SplitProfile, int]:  # fmt: skip
        """Profile of a unit, and bytes of the reduced gradients of a head's own table, which live beside it."""
        ends = reduces or self.reductions.ends_in_b(unit, last=last)
        table = self.reductions.of_table(unit, first=first) if ends else 0
        if table and self.counts.job.stack.loss == "chunked":  # allocated after the last chunk
            return self._played(unit, born._replace(reduced=table), split=split), 0
        return self._played(unit, born, split=split), table

    def _change(self, unit: RunMemory, *, first: bool, reduces: bool, off: int) -> Change:
        """What a backward does to gradients; ``off``: bytes that it keeps for W, which then makes them all, but for
        ``by_biases``, if they are reduced with every micro-batch.
        """
        if off and self.weights.makes_all:
            born = first * self.reductions.by_biases(unit)
            return Change(born, born, 0)
        made_later = self._split(unit).made_bytes if off and self.reductions.late else 0
        return self.reductions.change(unit, first=first, reduces=reduces, made_later=made_later)

    def _comes_ahead(self, place: int) -> bool:
        """Whether, in the backward, the last unit of this run gathers nothing ahead while the one before it does."""
        return (self.ahead or self.holds) and not self.policy.weights_stay and place <= 1

    def _coming_back(self, unit: RunMemory, before: RunMemory | None) -> int:
        """Bytes of weights of the unit ``before`` that are gathered ahead in the backward of ``unit``."""
        if self.holds:
            return before.state.whole if before and self._again(before.run) else 0
        ahead = self.ahead and not self.policy.weights_stay and unit.run.name != "embed"
        return self._coming(before.parts[-1]) if ahead and before and before.run.name != "embed" else 0

    def _reducing(self, unit: RunMemory, born: Sums, *, first: bool, lagging: int) -> tuple[Profile, int]:
        """Profile of a unit whose experts' gradients are reduced midway, and bytes freed then: ``lagging``, or sums."""
        experts, sums = unit.parts[-1], self.reductions
        shard = min(cut(experts), sums.shards(unit, first=first))
        gone = lagging if sums.lags else cut(experts) and experts.sums
        return self.counts.profile(unit.part, unit.run.name, born._replace(reduced=shard, gone=gone)), gone

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
