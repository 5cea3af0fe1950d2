"""Bytes that live on one rank: states at rest, and the fullest moment of a step with its cause.

    peak = the largest of: gathers, each unit forward and backward over what the earlier ones keep, the update

The order of events is that of ``train/parallel/zero.py``: gradient sums are born with a unit's first gradient. Of a
run of equal units only the ends can be the fullest, since what lives grows or shrinks evenly along it. Under a
pipeline the schedule's table says how many micro-batches are alive on a rank when one more runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.table import Table
from fivefold.layout.sharding import Policy, policy
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.plan.count.counts import Counts, Run, run_part
from fivefold.plan.count.part import part_of, stream_bytes
from fivefold.plan.count.states import UnitStates
from fivefold.plan.count.tape import Profile


class Moment(NamedTuple):
    """What lives at one moment of a step."""

    cause: str
    live_bytes: int
    kept_bytes: int  # activations, of all micro-batches in flight
    gradients_bytes: int


class RankMemory(NamedTuple):
    """Bytes of one pipeline rank; the fields are those of ``step.StageMemory``."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    peak_bytes: int
    peak_cause: str
    updated: int  # elements that the optimizer updates here


def memory(counts: Counts, layout: Layout) -> list[RankMemory]:
    """Of every pipeline rank."""
    if layout.pp == 1:
        return [_Rank(counts, layout, chunks=(0,)).flat()]
    table = table_of(layout, counts.job)
    return [_Rank(counts, layout, chunks=held).piped(table, rank) for rank, held in enumerate(table.held)]


def over_time(counts: Counts, layout: Layout, *, rank: int = 0) -> list[Moment]:
    """What lives on a rank at every moment that could be its fullest, in order; under a pipeline per action."""
    trace: list[Moment] = []
    if layout.pp == 1:
        _Rank(counts, layout, chunks=(0,), trace=trace).flat()
        return trace
    table = table_of(layout, counts.job)
    _Rank(counts, layout, chunks=table.held[rank], trace=trace).piped(table, rank)
    return trace


def table_of(layout: Layout, job: Job) -> Table:
    """The schedule of a layout."""
    return schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=layout.micro_batches(job))


class _Unit(NamedTuple):
    """A run with its numbers: ``first`` while its gradients are born, ``later`` when they live."""

    run: Run
    first: Profile
    later: Profile
    state: UnitStates


class _Rank:
    """The step of one rank; ``self.full`` notes the fullest moment so far."""

    def __init__(
        self, counts: Counts, layout: Layout, *, chunks: Iterable[int], trace: list[Moment] | None = None
    ) -> None:
        self.layout, self.job, self.model = layout, counts.job, counts.model
        self.policy: Policy = policy(layout)
        self.trace = trace
        part, runs = part_of(layout), counts.stage_runs(layout)
        self.chunks = {chunk: [self._unit(counts, run) for run in runs[chunk]] for chunk in chunks}
        units = [(unit.run.times, unit.state) for chunk in self.chunks.values() for unit in chunk]
        self.parameters = sum(n * ((s.whole if self.policy.weights_stay else 0) + s.apart) for n, s in units)
        self.gradients = sum(n * (s.sums if self.policy.gradients_stay else s.reduced) for n, s in units)
        self.whole_gradients = sum(n * s.sums for n, s in units)
        self.moments = sum(n * s.moments for n, s in units)
        self.updated = sum(n * s.updated for n, s in units)
        self.largest = max((s.largest for _, s in units), default=0)
        self.widened = sum(n * (s.sums // layout.shards) for n, s in units)
        # The head's gradient of a tied weight waits for the embedding's, where both are on one rank.
        self.tied = self.model.tied_embeddings and layout.pp == 1
        waiting = self.model.vocab * self.model.width * self.job.precision.gradients_bytes // layout.tp
        self.waiting = waiting if self.tied else 0
        self.stream = stream_bytes(self.model, self.job, part)
        self.base = self.parameters + self.moments + _inputs_bytes(self.model, self.job, layout=layout)
        self.prefetches = "dp" in self.job.overlap and not self.policy.weights_stay
        self.each = self.job.reduce == "micro_batch" and not self.policy.gradients_stay  # reduced every time
        self.whole = self.sums = self.kept = 0  # gathered weights that come and go; gradients; activations kept
        self.reduced_live = False
        self.full = (0, "")

    def _unit(self, counts: Counts, run: Run) -> _Unit:
        mine, state = run_part(part_of(self.layout), run), counts.states(self.layout, run.name)
        return _Unit(run, counts.profile(mine, run.name, state.sums), counts.profile(mine, run.name), state)

    def flat(self) -> RankMemory:
        """Without a pipeline: micro-batch after micro-batch."""
        micro_batches = self.layout.micro_batches(self.job)
        for index in sorted({0, min(1, micro_batches - 1), micro_batches - 1}):
            self._micro_batch(self.chunks[0], first=index == 0, last=index == micro_batches - 1)
        kept = sum(unit.run.times * unit.later.kept_bytes for unit in self.chunks[0])
        return self._found(kept)

    def piped(self, table: Table, rank: int) -> RankMemory:
        """One micro-batch of every chunk, over the most that the table lets live beside it."""
        held = table.held[rank]
        kept = [sum(unit.run.times * unit.later.kept_bytes for unit in self.chunks[chunk]) for chunk in held]
        late = [sum(unit.run.times * unit.later.weight_bytes for unit in self.chunks[chunk]) for chunk in held]
        weights = kept + [min(*pair) for pair in zip(late, kept, strict=True)]
        alive = max(
            (sum(n * weight for n, weight in zip(count, weights, strict=True)), count) for count in table.highest[rank]
        )[0]
        # Deferred, they are whole until the last micro-batch.
        self.sums = self.gradients if self.each or self.policy.gradients_stay else self.whole_gradients
        self.reduced_live = self.each
        for chunk, mine in zip(held, kept, strict=True):
            self.kept = alive - mine
            self._micro_batch(self.chunks[chunk], first=False, last=False)
        self.kept = 0
        return self._found(alive)

    def _found(self, kept: int) -> RankMemory:
        job, widen = self.job.precision, 0
        if job.summed_bytes != job.updated_bytes:  # gradients are widened for the update
            widen = self.widened * job.updated_bytes // job.summed_bytes
        if self.job.optimizer.kind == "muon":  # the momentum whole, and two products in 16 bits (Newton-Schulz)
            widen += self.largest * (job.moments_bytes[0] + 3 * 2)
        self.kept = 0
        self._note(self.base + self.sums + widen, "optimizer")
        return RankMemory(self.parameters, self.gradients, self.moments, kept, self.full[0], self.full[1], self.updated)

    def _note(self, live: int, cause: str) -> None:
        live += self.kept
        if self.trace is not None:
            self.trace.append(Moment(cause, live, self.kept, self.sums))
        if live > self.full[0]:
            self.full = (live, cause)

    def _micro_batch(self, units: list[_Unit], *, first: bool, last: bool) -> None:
        """Forward through ``units`` and back; ``first``: gradients are born; ``last``: they are reduced."""
        kept = 0
        for unit in units:
            kept = self._forward(unit, kept, first=first or self.each)
        for unit in reversed(units):
            kept = self._backward(unit, kept, first=first or self.each, last=last or self.each)
        self.reduced_live = True

    def _forward(self, unit: _Unit, kept: int, *, first: bool) -> int:
        run, profile, state = unit.run, unit.first if first else unit.later, unit.state
        ahead = state.travel if self.prefetches and run.name != "head" else 0
        gathered = 0 if self.policy.weights_stay else state.whole
        for before in _ends(run):
            name = run.called(last=before > 0)
            live = self.base + self.sums + self.whole + gathered + ahead + kept + before * profile.kept_bytes
            if first or gathered:
                self._note(live + (self.stream if run.name != "embed" else 0) + state.travel, f"{name} gather")
            self._note(live + profile.forward_peak_bytes, f"{name} forward")
        if self._stays(run):
            self.whole += gathered
        return kept + run.times * profile.kept_bytes

    def _backward(self, unit: _Unit, kept: int, *, first: bool, last: bool) -> int:
        run, profile, state = unit.run, unit.first if first else unit.later, unit.state
        regathered = 0 if self.policy.weights_stay or run.name in ("embed", "head") else state.whole
        let_go = 0 if self.policy.weights_stay or not self._stays(run) else state.whole
        ahead = state.travel if self.prefetches and regathered else 0
        reduces = last and not self.policy.gradients_stay
        reduced = 0 if self.reduced_live else state.reduced
        born = state.sums if first else 0
        lasting = born + (reduced - state.sums if reduces else 0)
        waits = {"head": self.waiting, "embed": -self.waiting}.get(str(run.name), 0)
        for before in _ends(run):
            name = run.called(last=before == 0)
            rest = kept - (before + 1) * profile.kept_bytes
            live = self.base + self.sums + before * lasting + self.whole + rest
            if regathered:
                gather = regathered + profile.kept_bytes + self.stream + state.travel
                self._note(live + gather, f"{name} gather")
            backward = f"{name} backward {profile.backward_cause}".strip()
            self._note(live + regathered + ahead + profile.backward_peak_bytes, backward)
            if reduces:
                self._note(live - let_go + born + waits + self.stream + reduced, f"{name} reduce")
        self.sums += run.times * lasting + waits
        self.whole -= let_go
        return kept - run.times * profile.kept_bytes

    def _stays(self, run: Run) -> bool:
        """Whether a unit's gathered weights stay from its forward to its backward: there is nothing in between, or
        the head needs the same table."""
        return run.name == "head" or (run.name == "embed" and self.tied)


def _ends(run: Run) -> tuple[int, ...]:
    """The first and the last of a run, by position."""
    return (0,) if run.times == 1 else (0, run.times - 1)


def _inputs_bytes(model: Model, job: Job, *, layout: Layout) -> int:
    """Token ids of a micro-batch with their targets, and the rotary tables."""
    tables = 0
    tokens = job.sequence // layout.cp
    if model.position == "rope":
        tables = 2 * model.rope_dim * tokens * (4 if job.precision.compute in ("fp32", "tf32") else 2)
    return 8 * layout.mbs * (tokens + 1) + tables
