"""Bytes that live on one rank: states at rest, and the fullest moment of a step with its cause.

    peak = the largest of: gathers, each unit forward and backward over what the earlier ones keep, the update

The order of events is that of ``train/parallel/zero.py``: gradient sums are born with a unit's first gradient. Of a
run of equal units only the ends can be the fullest, since what lives grows or shrinks evenly along it. Under a
pipeline the schedule's table says how many micro-batches are alive on a rank when one more runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from heapq import nlargest
from operator import itemgetter, mul
from typing import Any, NamedTuple

from fivefold.job import Job
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.table import Table
from fivefold.layout.sharding import Policy, policy
from fivefold.layout.spec import Layout
from fivefold.plan.count.chunk import Chunk, Held, stages_of
from fivefold.plan.count.counts import Counts, Run
from fivefold.plan.count.part import part_of
from fivefold.plan.count.standing import inputs_bytes, spare_gradients_bytes
from fivefold.plan.count.states import UnitStates


class Moment(NamedTuple):
    """What lives at one moment of a step: the last five and ``gradients_bytes`` add up to ``live_bytes``."""

    cause: str
    live_bytes: int
    kept_bytes: int  # activations of the other micro-batches in flight
    gradients_bytes: int  # sums, and reduced parts of them
    states_bytes: int  # weights that stay, the optimizer's, inputs
    activations_bytes: int  # kept for a backward, of all micro-batches
    gathers_bytes: int  # weights that come and go
    logits_bytes: int
    temporary_bytes: int  # all else: gradients of activations and of single weights, scratch, the update's copies


class RankMemory(NamedTuple):
    """Bytes of one pipeline rank; the fields are those of ``step.StageMemory``."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    peak_bytes: int
    peak_cause: str
    updated: int  # elements that the optimizer updates here
    passes_bytes: int = 0  # the peak before the update


def memory(counts: Counts, layout: Layout) -> list[RankMemory]:
    """Of every pipeline rank."""
    if layout.pp == 1:
        return [_Rank(counts, layout, held=(0,)).flat()]
    table = table_of(layout, counts.job)
    return [_Rank(counts, layout, held=held).piped(table, rank) for rank, held in enumerate(table.held)]


def over_time(counts: Counts, layout: Layout, *, rank: int = 0) -> list[Moment]:
    """What lives on a rank at every moment that could be its fullest, in order.

    Without a pipeline the first micro-batch, the second, which is like all others, and the last; under a pipeline one
    micro-batch through each chunk beside the most that live with it (``price/levels.py`` has every action).
    """
    trace: list[Moment] = []
    if layout.pp == 1:
        _Rank(counts, layout, held=(0,), trace=trace).flat()
        return trace
    table = table_of(layout, counts.job)
    _Rank(counts, layout, held=table.held[rank], trace=trace).piped(table, rank)
    return trace


def table_of(layout: Layout, job: Job) -> Table:
    """The schedule of a layout, or a shorter one with the same most alive: past the warm-up only GPipe adds to them."""
    micro_batches = layout.micro_batches(job)
    if layout.schedule != "gpipe" and micro_batches % layout.pp == 0:
        micro_batches = min(micro_batches, 4 * layout.pp)
    return schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=micro_batches)


class _Rank:
    """The step of one rank; ``self.full`` notes the fullest moment so far."""

    def __init__(
        self, counts: Counts, layout: Layout, *, held: Iterable[int], trace: list[Moment] | None = None
    ) -> None:
        self.layout, self.job, self.model = layout, counts.job, counts.model
        self.policy: Policy = policy(layout)
        self.trace = trace
        self.stages = stages_of(counts, layout)
        self.chunks = {stage: self.stages.chunks[stage] for stage in held}
        states = [chunk.states for chunk in self.chunks.values()]
        total = states[0] if len(states) == 1 else sum(states, start=UnitStates())
        self.parameters = (total.whole if self.policy.weights_stay else 0) + total.apart
        self.gradients = total.sums if self.policy.gradients_stay else total.reduced
        self.whole_gradients, self.moments, self.updated = total.sums, total.moments, total.updated
        self.largest, self.widened = total.largest, total.sums // layout.shards
        # Of a tied weight the head's gradient is added to the sums at once, after which the head lets the table go; or
        # it waits for the embedding's, where both are on one rank.
        self.tied = self.model.tied_embeddings and layout.pp == 1
        self.adds = self.tied and self.job.linears == "fanned"
        self.table = counts.states(layout, "embed") if self.adds else UnitStates()
        waiting = self.model.vocab * self.model.width * self.job.precision.gradients_bytes // layout.tp
        self.waiting = waiting if self.tied and not self.adds else 0
        self.stream = counts.local(part_of(layout)).stream_bytes
        self.base = self.parameters + self.moments + inputs_bytes(self.model, self.job, layout=layout)
        self.base += spare_gradients_bytes(self.job, self.chunks.values())
        # Summed by the matmuls themselves, they are one buffer that lives from the start.
        self.lasting = self.job.weight_gradients != "apart" and self.policy.gradients_stay
        self.late = self.job.weight_gradients in ("late", "buckets") and self.policy.gradients_stay
        self.prefetches = "dp" in self.job.overlap and not self.policy.weights_stay
        self.offloads = "activations" in self.job.offload
        self.each = self.job.reduce == "micro_batch" and not self.policy.gradients_stay  # reduced every time
        self.whole = self.sums = self.kept = 0  # gathered weights that come and go; gradients; activations kept
        self.reduced_live = False
        self.full: tuple[int, _Cause] = (0, ("",))

    def flat(self) -> RankMemory:
        """Without a pipeline: micro-batch after micro-batch."""
        micro_batches = self.layout.micro_batches(self.job)
        self.sums = self.gradients if self.lasting else 0
        for index in sorted({0, min(1, micro_batches - 1), micro_batches - 1}):
            born = index == 0 and not self.lasting
            self._micro_batch(self.chunks[0].runs, first=born, last=index == micro_batches - 1)
        return self._found(self._on_device(self.chunks[0]))

    def piped(self, table: Table, rank: int) -> RankMemory:
        """One micro-batch of every chunk, over the most that the table lets live beside it."""
        held = table.held[rank]
        neighbours = 1 if rank in (0, table.pp - 1) else 2
        self.base += (1 + neighbours) * self.stream  # one on its way to each neighbour, one awaited
        kept = [self._on_device(self.chunks[chunk]) for chunk in held]
        weights = kept + [self.chunks[chunk].late for chunk in held]
        alive = max(sum(map(mul, count, weights)) for count in table.highest[rank])
        if self.offloads:  # of the others nothing is on the device
            alive = max(kept)
        # Deferred, they are whole until the last micro-batch.
        self.sums = self.gradients if self.each or self.policy.gradients_stay else self.whole_gradients
        self.reduced_live = self.each
        for chunk, mine in zip(held, kept, strict=True):
            self.kept = 0 if self.offloads else alive - mine
            if self.trace is not None:
                self._micro_batch(self.chunks[chunk].runs, first=False, last=False)
                continue
            above, cause = self._walked(chunk)
            self.full = max(self.full, (self.base + self.sums + self.kept + above, cause), key=itemgetter(0))
        self.kept = 0
        return self._found(alive)

    def _walked(self, chunk: int) -> tuple[int, _Cause]:
        """The fullest moment of one micro-batch through a stage above all else: equal for whoever shares the stages."""
        if chunk not in self.stages.walks:
            alone = copy(self)
            alone.base = alone.sums = alone.kept = 0
            alone.full = (0, ("",))
            alone._micro_batch(self.chunks[chunk].runs, first=False, last=False)
            self.stages.walks[chunk] = alone.full
        return self.stages.walks[chunk]

    def _on_device(self, chunk: Chunk) -> int:
        """What a micro-batch keeps; of offloaded activations the unit that runs and the one that is on its way."""
        if self.offloads:
            return sum(nlargest(2, [unit.later.kept_bytes for unit in chunk.runs for _ in _ends(unit.run)]))
        return chunk.kept

    def _found(self, kept: int) -> RankMemory:
        job, widen = self.job.precision, 0
        if job.summed_bytes != job.updated_bytes:  # gradients are widened for the update
            widen = self.widened * job.updated_bytes // job.summed_bytes
        if self.job.optimizer.kind == "muon":  # the momentum whole, and two products in 16 bits (Newton-Schulz)
            widen += self.largest * (job.moments_bytes[0] + 3 * 2)
        if "gradients" in self.job.joined:
            widen += self.widened
        self.kept = 0
        passes = self.full[0]
        self._note(("optimizer",), widen, gradients=self.sums)
        peak, cause = self.full
        updated = self.updated
        return RankMemory(self.parameters, self.gradients, self.moments, kept, peak, _called(cause), updated, passes)

    def _note(
        self, cause: _Cause, rest: int, *, gradients: int, activations: int = 0, gathers: int = 0, logits: int = 0
    ) -> None:
        """A moment, by what lives: the states, the other micro-batches, and these; ``rest``: all that is none of them,
        ``logits`` among it."""
        live = self.base + self.kept + gradients + activations + gathers + rest
        if self.trace is not None:
            logits = min(logits, rest)
            parts = (gradients, self.base, self.kept + activations, gathers, logits, rest - logits)
            self.trace.append(Moment(_called(cause), live, self.kept, *parts))
        if live > self.full[0]:
            self.full = (live, cause)

    def _micro_batch(self, units: Sequence[Held], *, first: bool, last: bool) -> None:
        """Forward through ``units`` and back; ``first``: gradients are born; ``last``: they are reduced."""
        kept, befores = 0, []
        for unit in units:
            befores.append(kept)
            self._forward(unit, kept, first=first or self.each)
            kept = self._earlier(unit.later.kept_bytes, unit.run.times, kept)
        for unit, before in zip(reversed(units), reversed(befores), strict=True):
            self._backward(unit, before, first=first or self.each, last=last or self.each)
        if self.late:
            self.sums = self.gradients
        self.reduced_live |= last or self.each

    def _earlier(self, each: int, units: int, kept: int) -> int:
        """Bytes on the device of ``units`` that keep ``each``, and of ``kept`` before them; offloaded: of one unit."""
        if self.offloads and units:
            return each
        return kept + units * each

    def _forward(self, unit: Held, kept: int, *, first: bool) -> None:
        run, profile, state = unit.run, unit.first if first else unit.later, unit.state
        ahead = state.travel if self.prefetches and run.name != "head" else 0
        gathered = 0 if self.policy.weights_stay else state.whole
        entering = self.stream if run.name != "embed" else 0
        gathers = self.whole + gathered + ahead
        for before in self._moments(unit):
            earlier = self._earlier(profile.kept_bytes, before, kept)
            if first or gathered:
                self._note(
                    (run, before > 0, "gather"), entering,
                    gradients=self.sums, activations=earlier, gathers=gathers + state.travel,
                )  # fmt: skip
            self._note(
                (run, before > 0, "forward"), profile.forward_peak_bytes,
                gradients=self.sums, activations=earlier, gathers=gathers, logits=unit.logits,
            )  # fmt: skip
        if self._stays(run):
            self.whole += gathered

    def _backward(self, unit: Held, kept: int, *, first: bool, last: bool) -> None:
        run, profile, state = unit.run, unit.first if first else unit.later, unit.state
        regathered = 0 if self.policy.weights_stay or run.name in ("embed", "head") else state.whole
        let_go = 0 if self.policy.weights_stay or not self._stays(run) else state.whole
        ahead = state.travel if self.prefetches and regathered else 0
        reduces = last and not self.policy.gradients_stay
        reduced = 0 if self.reduced_live else state.reduced
        born = state.sums if first else 0
        if self.late:  # of gradients, not of their sums
            born = state.sums * self.job.precision.gradients_bytes // self.job.precision.summed_bytes
        lasting = born + (reduced - state.sums if reduces else 0)
        waiting = self.table.sums if self.adds and first and not self.late else self.waiting
        waits = {"head": waiting, "embed": -waiting}.get(str(run.name), 0)
        if self.adds and not self.policy.weights_stay:
            let_go = {"head": let_go + self.table.whole, "embed": 0}.get(str(run.name), let_go)
        mine, sums = profile.backward_kept_bytes, profile.backward_sums_bytes
        for done in self._moments(unit):
            earlier = self._earlier(profile.kept_bytes, run.times - done - 1, kept)
            gradients, end = self.sums + done * lasting, done == 0
            if regathered:
                self._note(
                    (run, end, "gather"), self.stream, gradients=gradients,
                    activations=earlier + profile.kept_bytes, gathers=self.whole + regathered + state.travel,
                )  # fmt: skip
            self._note(
                (run, end, "backward", profile.backward_cause), profile.backward_peak_bytes - mine - sums,
                gradients=gradients + sums, activations=earlier + mine, gathers=self.whole + regathered + ahead,
                logits=unit.logits,
            )  # fmt: skip
            if reduces:
                self._note(
                    (run, end, "reduce"), self.stream, gradients=gradients + born + waits + reduced,
                    activations=earlier, gathers=self.whole - let_go,
                )  # fmt: skip
        self.sums += run.times * lasting + waits
        self.whole -= let_go

    def _moments(self, unit: Held) -> tuple[int, ...]:
        """Of a run, the units at which something is noted, by position."""
        return _ends(unit.run) if unit.noted or self.trace is not None else ()

    def _stays(self, run: Run) -> bool:
        """Whether a unit's gathered weights stay from its forward to its backward: there is nothing in between, or
        the head needs the same table."""
        return run.name == "head" or (run.name == "embed" and self.tied)


_Cause = tuple[Any, ...]  # a run, whether it is its last unit, a phase and an operation; or one word


def _called(cause: _Cause) -> str:
    if len(cause) == 1:
        return str(cause[0])
    run, last, *words = cause
    return " ".join((run.called(last=last), *words)).strip()


def _ends(run: Run) -> tuple[int, ...]:
    """The first and the last of a run, by position."""
    return (0,) if run.times == 1 else (0, run.times - 1)
