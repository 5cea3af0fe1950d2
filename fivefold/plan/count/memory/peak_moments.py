"""Live bytes at the moments of one pass that could be its peak, without what other micro-batches hold.

    F   gather? forward …        BW   gather? backward reduce? …        B   backward …        W   weights reduce? …

The order of events is that of ``train/parallel/zero.py``: gradient sums are allocated with a unit's first gradient;
under overlap the next unit's weights are gathered ahead, and a unit's sums are freed when the next one's are reduced.
In a run of equal units live bytes grow or shrink evenly, so only its first and last can be the peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fivefold.layout.sharding import policy
from fivefold.layout.spec import Layout
from fivefold.plan.count.counts import NO_SUMS, Counts, Run
from fivefold.plan.count.memory.in_flight import Kind
from fivefold.plan.count.memory.liveness import Profile, SplitProfile, Sums
from fivefold.plan.count.memory.stage import Chunk, RunMemory, Stages
from fivefold.plan.count.memory.states import UnitStates
from fivefold.plan.count.operations.part import part_of

Cause = tuple[Any, ...]  # (index of the run, whether its last unit, phase, operation), or one word


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
        job, model, part = counts.job, counts.model, part_of(layout)
        self.counts, self.stages, self.policy = counts, stages, policy(layout)
        self.stream = counts.local(part).stream_bytes
        self.own_tokens = 16 * counts.local(part).rows if layout.cp > 1 else 0  # ids and targets, copied under cp
        # Gradients that matmuls accumulate are one buffer, allocated from the start.
        self.lasting = job.stack.weight_gradients != "apart" and self.policy.gradients_stay
        # All weight gradients of a backward live until its end, and only then are added to the sums.
        self.late = job.stack.weight_gradients in ("late", "buckets") and self.policy.gradients_stay
        self.offloads = "activations" in job.offload
        self.each = job.stack.reduce == "micro_batch" and not self.policy.gradients_stay  # reduced after every backward
        self.midway = not self.each and job.stack.linears == "fanned"  # experts reduced within their block's backward
        self.ahead = "dp" in job.stack.overlap and job.stack.weights == "ahead"  # the next unit's weights are gathered
        # A unit's sums live until the next unit's are reduced.
        self.lags = "dp" in job.stack.overlap and not self.policy.gradients_stay and not self.each
        # If embedding and head of a tied table are on one rank, the head's gradient is added to the sums at once and
        # the head frees the table (``adds``), or it waits for the embedding's gradient (``waiting`` bytes).
        self.adds = counts.adds(layout)
        self.tied = self.adds or (model.tied_embeddings and layout.pp == 1)
        self.table = counts.states(layout, "embed") if self.tied else UnitStates()
        recipe = job.precision
        self.of_sums = recipe.gradients_bytes, recipe.summed_bytes  # per element of a gradient, of its sum
        waiting = model.vocab * model.width * recipe.gradients_bytes // layout.tp
        self.waiting = waiting if self.tied and not self.adds else 0

    def fullest(self, kind: Kind, stage: int, first: bool, last: bool) -> tuple[int, Cause]:
        """Peak bytes of a pass and their cause; cached, shared by stages with equal units."""
        last = last and not self.policy.gradients_stay
        key = self.stages.chunks[stage].alike, kind, first, last
        found = self.stages.pass_peaks.get(key)
        if found is None:
            top = max(self.moments(kind, stage, first, last), key=lambda at: at.bytes)
            found = self.stages.pass_peaks[key] = top.bytes, top.cause
        return found

    def late_bytes(self, stage: int) -> int:
        """Bytes that one micro-batch keeps between B and W of a stage."""
        chunk = self.stages.chunks[stage]
        if chunk.alike not in self.stages.late:
            self.stages.late[chunk.alike] = sum(each.run.times * self._split(each).late_bytes for each in chunk.runs)
        return self.stages.late[chunk.alike]

    def lag_bytes(self, unit: RunMemory) -> int:
        """Bytes of a unit's sums that live until the next unit's are reduced: not experts', but a head's tied table."""
        parts = unit.parts if unit.run.name == "head" else unit.parts[:1]
        return sum(part.sums for part in parts) if self.lags else 0

    def moments(
        self, kind: Kind, stage: int, first: bool, last: bool, *, all_ends: bool = False
    ) -> Iterator[LiveBytes]:  # fmt: skip
        """The moments of a pass in order; ``all_ends``: also of units that cannot be the peak."""
        units: Sequence[RunMemory] = self.stages.chunks[stage].runs
        if all_ends:
            units = [unit._replace(noted=True) for unit in units]
        first = first and not self.lasting
        if kind == "F":
            return self._forward(units, first=first)
        if kind == "W":
            return self._weights(units, first=first, last=last)
        return self._backward(units, first=first, last=last, split=kind == "B")

    def _split(self, unit: RunMemory) -> SplitProfile:
        return self.counts.split(unit.part, unit.run.name)

    def _played(self, unit: RunMemory, born: Sums, *, split: bool) -> Profile | SplitProfile:
        return (self.counts.split if split else self.counts.profile)(unit.part, unit.run.name, born)

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

    def _forward(self, units: Sequence[RunMemory], *, first: bool) -> Iterator[LiveBytes]:
        kept, whole = 0, 0 if units[0].run.name == "embed" else self._table_whole(units)
        for place, unit in enumerate(units):
            run, profile, state = unit.run, unit.later, unit.state
            gathered = 0 if self.policy.weights_stay else state.whole
            stale = first or bool(gathered)
            entering = (self.stream if run.name != "embed" else 0) + self.own_tokens
            for before in _ends(unit):
                earlier, end = self._earlier(profile.kept_bytes, before, kept), before > 0
                if stale and not (self.ahead and place + before):
                    yield LiveBytes((place, end, "gather"), 0, earlier, whole + self._fetched(unit), entering)
                coming = 0
                if self.ahead and (first or not self.policy.weights_stay):
                    following = unit if before < run.times - 1 else units[place + 1] if unit is not units[-1] else None
                    coming = self._coming(following.parts[0]) if following else 0
                yield LiveBytes(
                    (place, end, "forward"), 0, earlier, whole + gathered + coming,
                    profile.forward_peak_bytes + self.own_tokens, unit.logits,
                )  # fmt: skip
            whole += gathered if self._stays(run) else 0
            kept = self._earlier(profile.kept_bytes, run.times, kept)

    def _backward(self, units: Sequence[RunMemory], *, first: bool, last: bool, split: bool) -> Iterator[LiveBytes]:
        kept, gathers = self._kept_before(units), not self.policy.weights_stay
        whole = self._table_whole(units) + (units[-1].state.whole if gathers and units[-1].run.name == "head" else 0)
        grown = lagging = after = 0  # gradients; sums reduced but not yet freed; kept for W
        for place in reversed(range(len(units))):
            unit = units[place]
            run, state, born = unit.run, unit.state, unit.born if first or self.each else NO_SUMS
            off = self._split(unit).late_bytes if split else 0  # kept for W
            born = NO_SUMS if off and self.each else born  # W allocates them
            profile = self._played(unit, born, split=split)
            regathered = state.whole if gathers and run.name not in ("embed", "head") else 0
            let_go = state.whole if gathers and self._stays(run) else 0
            if self.adds and gathers:
                let_go = {"head": let_go + self.table.whole, "embed": 0}.get(str(run.name), let_go)
            reduces = (last or self.each) and not self.policy.gradients_stay and not off
            reduced, lasting, waits = self._gradients(unit, first=first, reduces=reduces, split=bool(off))
            lag = self.lag_bytes(unit) if reduces else 0
            table = unit.parts[-1].reduced if reduces and run.name == "head" and len(unit.parts) > 1 else 0
            if table and self.counts.job.stack.loss == "chunked":  # allocated after the last chunk
                profile, table = self._played(unit, born._replace(reduced=table), split=split), 0
            for done in _ends(unit, second=bool(lag), but_one=self._comes_ahead(place)):
                earlier = self._earlier(unit.later.kept_bytes, run.times - done - 1, kept[place]) + after + done * off
                still, end, gone = lag if done else lagging, done == 0, 0
                gradients = grown + done * lasting + still
                if unit.born.experts and reduces and self.midway and not split:
                    profile, gone = self._reducing(unit, first=first, lagging=still)
                mine, born_then = profile.backward_kept_bytes, profile.backward_sums_bytes
                if regathered and not (self.ahead and (done or place + 1 < len(units))):
                    yield LiveBytes(
                        (place, end, "gather"), gradients, earlier + unit.later.kept_bytes,
                        whole + self._fetched(unit), self.stream,
                    )  # fmt: skip
                coming = self._coming_back(unit, unit if done < run.times - 1 else units[place - 1] if place else None)
                if coming and unit.born.experts:  # gathered before the dense weights, waited for after
                    yield LiveBytes(
                        (place, end, "gather"), gradients, earlier + unit.later.kept_bytes,
                        whole + regathered + unit.parts[-1].travel + coming, self.stream,
                    )  # fmt: skip
                yield LiveBytes(
                    (place, end, "backward", profile.backward_cause), gradients + born_then + table, earlier + mine,
                    whole + regathered + coming, profile.backward_peak_bytes - mine - born_then, unit.logits,
                )  # fmt: skip
                if reduces:  # beside the last gradient made: of the stream, or of the table
                    rest = state.sums * self.of_sums[0] // self.of_sums[1] if run.name == "embed" else self.stream
                    yield LiveBytes((place, end, "reduce"), gradients + reduced - gone, earlier, whole - let_go, rest)
            grown += run.times * lasting + waits
            whole -= let_go
            lagging = lag
            after += run.times * off

    def _gradients(self, unit: RunMemory, *, first: bool, reduces: bool, split: bool) -> tuple[int, int, int]:
        """Bytes that a unit's backward adds to gradients: at its reduction, after it, and waiting for a tied table."""
        state, reduced = unit.state, 0 if self.each and not first else unit.state.reduced
        born = state.sums if first or self.each else 0
        if self.late:  # separate gradients, not their sums
            put_off = self._split(unit).made_bytes if split else 0
            born = max(0, state.sums * self.of_sums[0] // self.of_sums[1] - put_off)
        elif split and self.each:
            born = reduced
        waiting = self.table.sums if self.adds and first and not self.late else self.waiting
        waits = {"head": waiting, "embed": -waiting}.get(str(unit.run.name), 0)
        parts = reduced and sum(_cut(part) for part in unit.parts)
        return born + waits + parts, born + (reduced - state.sums if reduces else 0), waits

    def _comes_ahead(self, place: int) -> bool:
        """Whether, in the backward, the last unit of this run gathers nothing ahead while the one before it does."""
        return self.ahead and not self.policy.weights_stay and place <= 1

    def _coming_back(self, unit: RunMemory, before: RunMemory | None) -> int:
        """Bytes of weights of the unit ``before`` that are gathered ahead in the backward of ``unit``."""
        ahead = self.ahead and not self.policy.weights_stay and unit.run.name != "embed"
        return self._coming(before.parts[-1]) if ahead and before and before.run.name != "embed" else 0

    def _reducing(self, unit: RunMemory, *, first: bool, lagging: int) -> tuple[Profile, int]:
        """Profile of a unit whose experts' gradients are reduced midway, and bytes freed then: ``lagging``, or sums."""
        experts = unit.parts[-1]
        gone = lagging if self.lags else _cut(experts) and experts.sums
        sums = (unit.born if first else NO_SUMS)._replace(reduced=_cut(experts), gone=gone)
        return self.counts.profile(unit.part, unit.run.name, sums), gone

    def _weights(self, units: Sequence[RunMemory], *, first: bool, last: bool) -> Iterator[LiveBytes]:
        """Moments of W: deferred weight gradients from the last unit to the first."""
        left = grown = lagging = 0
        reduces = last and not self.policy.gradients_stay and not self.each
        for unit in units:
            late = self._split(unit).late_bytes
            left += unit.run.times * late
            grown += unit.state.reduced - unit.state.sums if reduces and not late else 0  # reduced in B
        for place in reversed(range(len(units))):
            unit, profile = units[place], self._split(units[place])
            if not profile.late_bytes:
                continue
            experts = unit.born.experts if first and not self.each else 0  # allocated with their first gradient
            lasting = experts + (unit.state.reduced - unit.state.sums if reduces else self.late * profile.made_bytes)
            lag = self.lag_bytes(unit) if reduces else 0
            for done in _ends(unit, second=bool(lag)):
                here, gradients = left - done * profile.late_bytes, grown + done * lasting + (lag if done else lagging)
                rest = profile.weights_peak_bytes - profile.late_bytes
                born = unit.state.sums if self.each else experts
                yield LiveBytes((place, done == 0, "weights"), gradients + born, here, 0, rest)
                if reduces:
                    here, reduced = here - profile.late_bytes, experts + sum(map(_cut, unit.parts))
                    if unit.born.experts:
                        midway = gradients + experts + _cut(unit.parts[-1])
                        yield LiveBytes((place, done == 0, "reduce"), midway, here, 0, profile.experts_bytes)
                    yield LiveBytes((place, done == 0, "reduce"), gradients + reduced, here, 0, profile.closing_bytes)
            left -= unit.run.times * profile.late_bytes
            grown += unit.run.times * lasting
            lagging = lag

    def _kept_before(self, units: Sequence[RunMemory]) -> list[int]:
        """For each run, activations kept by the runs before it."""
        found, kept = [], 0
        for unit in units:
            found.append(kept)
            kept = self._earlier(unit.later.kept_bytes, unit.run.times, kept)
        return found

    def _table_whole(self, units: Sequence[RunMemory]) -> int:
        """Bytes of a gathered tied table that stays from the embedding's forward for the head on the same rank."""
        return self.table.whole if self.tied and not self.policy.weights_stay and units[-1].run.name == "head" else 0

    def _stays(self, run: Run) -> bool:
        """Whether gathered weights stay until the backward: of the head, which follows, or a table that it shares."""
        return run.name == "head" or (run.name == "embed" and self.tied)


def describe(cause: Cause, chunk: Chunk | None = None) -> str:
    """A cause as text, e.g. ``block 3 backward mlp.act``."""
    if len(cause) == 1 or chunk is None:
        return str(cause[0])
    place, last, *words = cause
    return " ".join((chunk.runs[place].run.called(last=last), *words)).strip()


def _cut(part: UnitStates) -> int:
    """Bytes of a rank's shard of reduced gradients; 0 if there is one shard, which is the buffer of the sums."""
    return part.reduced if part.reduced < part.sums else 0


def _ends(unit: RunMemory, *, second: bool = False, but_one: bool = False) -> tuple[int, ...]:
    """Indices in a run: first, last, on request ``second`` and last ``but_one``; none if none can be the peak."""
    times = unit.run.times
    if not unit.noted or times == 1:
        return (0,) if unit.noted else ()
    between = ([1] if second else []) + ([times - 2] if but_one else [])
    return (0, *sorted({place for place in between if 0 < place < times - 1}), times - 1)
