"""Memory of one pipeline rank in bytes: states, and the peak of a step with its cause.

    peak = max over (every pass through a stage + what lives beside it), and over the update

The peak of a pass follows from its stage (``peak_moments.py``); what lives beside it from the schedule
(``in_flight.py``): activations of other micro-batches, allocated gradient sums, messages in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple, TypeVar, cast

import numpy as np

from fivefold.bounded_types import COUNTED_BYTES
from fivefold.job import Job
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.buffers import inputs_bytes, scale_index_bytes, spare_gradients_bytes
from fivefold.planner.counts.memory.in_flight import Heads, LivePass, Rules, alike_passes, in_order, live_passes
from fivefold.planner.counts.memory.peak_moments import PeakFinder
from fivefold.planner.counts.memory.stage import Chunk, describe, head_bytes, held_bytes, stages_of
from fivefold.planner.counts.memory.states import UnitStates, updates_one
from fivefold.planner.counts.update import scratch_bytes
from fivefold.record import Mistake

ORDER = {"F": 0, "B": 1, "BW": 1, "W": 2}

Counted = TypeVar("Counted")


class Moment(NamedTuple):
    """Live bytes at one moment of a step. ``live_bytes`` is the sum of all that follow it but ``kept_bytes``."""

    cause: str
    live_bytes: int
    kept_bytes: int  # activations of the other micro-batches in flight
    gradients_bytes: int  # sums, and this rank's reduced shard of them
    states_bytes: int  # resident weights, optimizer states, inputs
    activations_bytes: int  # kept for a backward, of all micro-batches
    gathers_bytes: int  # gathered weights
    logits_bytes: int
    temporary_bytes: int  # gradients of activations and of single weights, scratch, copies made by the update


class RankMemory(NamedTuple):
    """Bytes of one pipeline rank; the fields are those of ``step.StageMemory``."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    peak_bytes: int
    peak_cause: str
    updated: int  # elements that the optimizer updates here
    passes_bytes: int = 0  # the peak of forwards and backwards, without the update


def memory(counts: Counts, layout: Layout) -> list[RankMemory]:
    """Memory of every pipeline rank, in order; computed once for layouts with equal stages and schedule."""
    ranks, key = stages_of(counts, layout).ranks, (layout.schedule, layout.pp, layout.v)
    if key not in ranks:
        ranks[key] = _Ranks(counts, layout).found()
    return cast(list[RankMemory], ranks[key])


def over_time(counts: Counts, layout: Layout, *, rank: int = 0) -> list[Moment]:
    """Live bytes of a rank at every moment that could be its peak, in order.

    Without a pipeline: the first micro-batch, the second, which is like all others, and the last. With one: one pass of
    each kind through each stage, with the most beside it (``planner/time/memory_over_time.py`` has every action).
    """
    return _Ranks(counts, layout).moments(rank)


class PassMoments(NamedTuple):
    """The moments of a pass, and bytes of all micro-batches' activations before and after it."""

    kept_before: int
    kept_after: int
    moments: list[Moment]


def passes(counts: Counts, layout: Layout, *, rank: int = 0, micro_batches: int = 1) -> Iterator[PassMoments]:
    """The moments of each pass of ``over_time``; with a pipeline of every pass of ``micro_batches``, in time order."""
    ranks = _Ranks(counts, layout)
    row = ranks.live_passes.row(0)
    if layout.pp > 1:
        table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=micro_batches)
        row = in_order(table, rank, ranks.rules)
    return (ranks.pass_moments(live_pass, rank) for live_pass in row)


def table_of(layout: Layout, job: Job) -> Table:
    """The schedule of a layout, shortened where that does not change the most live micro-batches."""
    return schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=_enough(layout, job))


def _enough(layout: Layout, job: Job) -> int:
    """Number of micro-batches that is enough to see the peak: after the warm-up, only GPipe and interleaved schedules
    with uneven rounds hold more; as many as ``planner/time/steady_state.py`` plays.
    """
    pp, micro_batches = layout.pp, layout.micro_batches(job)
    if pp == 1:
        return min(3, micro_batches)
    over = micro_batches % pp
    if layout.pipeline.forwards_first or (layout.pipeline.interleaves and over) or micro_batches <= 4 * pp + over:
        return micro_batches
    return 3 * pp + over


class _Ranks:
    """Memory of the pipeline ranks of one layout."""

    def __init__(self, counts: Counts, layout: Layout) -> None:
        self.layout, self.job, self.model = layout, counts.job, counts.model
        self.stages = stages_of(counts, layout)
        self.finder = PeakFinder(counts, layout, self.stages)
        self.policy, self.stream = self.finder.policy, self.finder.stream
        self.reductions = self.finder.reductions
        tied = self.reductions.adds and self.reductions.is_tied
        self.heads: Heads = "" if self.policy.weights_stay else "tied" if tied else "own"
        self.buffers = self.finder.buffers.received
        self.rules = Rules(self.reductions.when, self.finder.keeps, self.buffers, self.heads)
        self.schedule = layout.schedule, layout.pp, layout.v, _enough(layout, self.job), self.rules
        self.live_passes = live_passes(*self.schedule)
        self.held = table_of(layout, self.job).rank_stages if layout.pp > 1 else ((0,),)
        self.inputs = inputs_bytes(self.model, self.job, layout=layout)
        kinds = [tuple(self.finder.kinds[stage] for stage in held) for held in self.held]
        self.like = [kinds.index(each) for each in kinds]  # the first rank with equal stages
        self.scratch = self._of_each(lambda held: scratch_bytes(counts, layout, chunks=held))
        self.scale_index = self._of_each(lambda held: scale_index_bytes(counts, layout, stages=held))
        self.totals = self._of_each(self._total)
        self.kept = [
            self._on_device(self.stages.chunks[kind])
            - self.stream * (self.buffers and kind > 0 and not self.finder.offloads)
            + self.finder.buffers.output(kind)
            for kind in self.finder.kinds
        ]
        weights = self._of_each(self._weights)
        self.weights = np.array(self._counted(weights, times=int(self.live_passes.counts.max(initial=1))))

    def found(self) -> list[RankMemory]:
        """The memory of every rank, for which all passes are compared as arrays."""
        counts, rank_of, distinct, _ = self.live_passes
        some, place = alike_passes(*self.schedule, self.finder.kinds)
        passes = [self.finder.fullest(*distinct[at]) for at in some]
        beside = counts * self.weights[rank_of]
        live = beside.sum(axis=1) + np.array(self._counted([[size for size, _ in passes]])[0])[place]
        own = np.array([self._own(distinct[at].kind, distinct[at].stage) for at in some])
        alive = beside[:, : 2 * len(self.held[0])].sum(axis=1) + counts[:, -2] * self.stream + own[place]
        starts = np.searchsorted(rank_of, np.arange(len(self.held) + 1))
        kept, tops = (np.maximum.reduceat(each, starts[:-1]).tolist() for each in (alive, live))
        found = []
        for rank, (start, end) in enumerate(pairwise(starts.tolist())):
            best = start + int(live[start:end].argmax())
            stage = distinct[self.live_passes.place[best]].stage
            cause = describe(passes[place[best]][1], self.stages.chunks[stage])
            found.append(self._rank(rank, tops[rank], cause, kept=kept[rank]))
        return found

    def moments(self, rank: int) -> list[Moment]:
        """Moments of the fullest pass of each stage and kind, or without a pipeline of all passes; and the update."""
        passes: dict[tuple[int, ...], tuple[int, LivePass]] = {}
        for number, live_pass in enumerate(self.live_passes.row(rank)):
            key = (live_pass.own.stage, ORDER[live_pass.own.kind]) if self.layout.pp > 1 else (number,)
            size = self.finder.fullest(*live_pass.own)[0] + int(np.dot(live_pass.counts, self.weights[rank]))
            passes[key] = max(passes.get(key, (-1, live_pass)), (size, live_pass), key=itemgetter(0))
        found = [moment for key in sorted(passes) for moment in self.along(passes[key][1], rank)]
        total = self.totals[rank]
        gradients, base = self._gradients(total), self._base(rank)
        widened = self._widened(total) + self.scratch[rank] + self._received(rank)
        if self.reductions.lasting:
            base -= gradients
        return [*found, Moment("optimizer", base + gradients + widened, 0, gradients, base, 0, 0, 0, widened)]

    def pass_moments(self, live_pass: LivePass, rank: int) -> PassMoments:
        """The moments of a pass, with activations before and after it."""
        moments, own = list(self.along(live_pass, rank)), live_pass.own
        others, kept = moments[0].kept_bytes, self.kept[own.stage]
        late = self.finder.late_bytes(own.stage) if own.kind in ("B", "W") else 0
        before, after = {"F": (0, kept), "B": (kept, late), "BW": (kept, 0), "W": (late, 0)}[own.kind]
        return PassMoments(others + before, others + after, moments)

    def along(self, live_pass: LivePass, rank: int) -> Iterator[Moment]:
        """The moments of a pass, including what lives beside it."""
        held, beside = len(self.held[rank]), live_pass.counts * self.weights[rank]
        others, sums = int(beside[: 2 * held].sum()), int(beside[2 * held : 5 * held].sum())
        base, gathered = self._base(rank), int(beside[5 * held : 6 * held].sum())
        messages = int(beside[-1]) + self._received(rank)
        if self.reductions.lasting:
            gradients = self._gradients(self.totals[rank])
            sums, base = sums + gradients, base - gradients
        for at in self.finder.moments(*live_pass.own, all_ends=True):
            logits = min(at.logits, at.rest)
            parts = (
                sums + at.gradients,
                base,
                others + at.activations,
                gathered + at.gathers,
                logits,
                at.rest - logits + messages,
            )
            yield Moment(describe(at.cause, self.stages.chunks[live_pass.own.stage]), sum(parts), others, *parts)

    def _of_each(self, count: Callable[[Sequence[int]], Counted]) -> list[Counted]:
        """What follows from the stages of a rank, of each rank."""
        found = {rank: count(self.held[rank]) for rank in set(self.like)}
        return [found[rank] for rank in self.like]

    def _rank(self, rank: int, top: int, cause: str, *, kept: int) -> RankMemory:
        total, base = self.totals[rank], self._base(rank) + self._received(rank)
        gradients, passes = self._gradients(total), base + top
        peak, update = passes, base + (0 if self.reductions.lasting else gradients) + self._widened(total)
        update += self.scratch[rank]
        if update > peak:
            peak, cause = update, "optimizer"
        return RankMemory(self._parameters(total), gradients, total.moments, kept, peak, cause, total.updated, passes)

    def _counted(self, sizes: list[list[int]], *, times: int = 1) -> list[list[int]]:
        """``sizes``, if ``times`` the sum of each row fits 64-bit integers; else a ``Mistake``."""
        if (most := times * max(sum(map(abs, row)) for row in sizes)) > COUNTED_BYTES:
            raise Mistake(
                f"layout {str(self.layout)!r} would hold about {most:.0e} bytes on a rank, and more than "
                f"{COUNTED_BYTES:.0e} are not counted; shorten the sequence, or lower mbs or the model"
            )
        return sizes

    # What lives beside a pass

    def _total(self, held: Sequence[int]) -> UnitStates:
        states = [self.stages.chunks[stage].states for stage in held]
        total = states[0] if len(states) == 1 else sum(states, start=UnitStates())
        return total._replace(moments=total.moments + 4) if updates_one(self.layout, self.job) else total

    def _weights(self, held: Sequence[int]) -> list[int]:
        """Bytes for each element of ``LivePass.counts``, on a rank that holds these stages."""
        finder, reductions, chunks = self.finder, self.reductions, [self.stages.chunks[stage] for stage in held]
        kept = [0 if finder.offloads else self.kept[stage] for stage in held]
        split = self.layout.pipeline.splits_backward and not finder.offloads
        late = [finder.late_bytes(stage) if split else 0 for stage in held]
        sums = [0 if reductions.lasting else self._during(chunk.states) for chunk in chunks]
        if reductions.stays:  # whose bucket lives to the end of the step
            sums = [size + reductions.bucket * (chunk.runs[-1].run.name == "head")
                    for size, chunk in zip(sums, chunks, strict=True)]  # fmt: skip
        lasting = reductions.lasting or reductions.bucketed
        made = [0 if lasting else reductions.experts_by_w(chunk.runs) for chunk in chunks]
        if reductions.each and not reductions.bucketed:
            made = [finder.made_by_w(stage) if split else 0 for stage in held]
        elif finder.graph and split and not reductions.lasting:
            made = sums
        sums = [whole - by_w for whole, by_w in zip(sums, made, strict=True)]
        gone = [self._gradients(chunk.states) - self._during(chunk.states) for chunk in chunks]
        if (
            reductions.adds and {0, len(self.stages.chunks) - 1} <= {*held} and len(held) > 1
        ):  # the head allocates the table's
            table, whole = reductions.table, 0 if reductions.lasting else reductions.table.sums
            sums[0] -= self._during(table) if whole else 0
            by_w = split and reductions.each and self.job.stack.loss != "chunked" and not self.model.predicted
            (made if by_w else sums)[-1] += whole  # with its first gradient
            gone[0] += self._during(table) - whole if whole else 0
        shared = reductions.table.whole if reductions.tied else 0
        heads = [head_bytes(chunk.runs, table=shared) if self.heads else 0 for chunk in chunks]
        gathered = [held_bytes(chunk.runs) for chunk in chunks] if finder.keeps else heads
        return [*kept, *late, *sums, *made, *gone, *gathered, 0, self.stream]

    def _own(self, kind: str, stage: int) -> int:
        """Bytes that the micro-batch itself keeps after its pass."""
        return self.kept[stage] if kind == "F" else self.finder.late_bytes(stage) if kind == "B" else 0

    def _on_device(self, chunk: Chunk) -> int:
        """Activations of a micro-batch on the device; offloaded: those of two units, one running, one in transfer."""
        if self.finder.offloads:
            each = [unit.later.kept_bytes for unit in chunk.runs for _ in range(min(2, unit.run.times))]
            return sum(nlargest(2, each))
        return chunk.kept

    def _base(self, rank: int) -> int:
        """Bytes that live all through a step."""
        total, chunks = self.totals[rank], [self.stages.chunks[stage] for stage in self.held[rank]]
        base = (
            self._parameters(total)
            + total.moments
            + self.inputs
            + self.scale_index[rank]
            + spare_gradients_bytes(self.job, chunks, layout=self.layout)
        )
        return base + (self._gradients(total) if self.reductions.lasting else 0)

    def _received(self, rank: int) -> int:
        """Bytes of the buffers of every micro-batch of a step, and of what the backwards leave that are not played."""
        if not self.buffers:
            return 0
        micro_batches, last = self.layout.micro_batches(self.job), len(self.stages.chunks) - 1
        unplayed = micro_batches - _enough(self.layout, self.job)
        inputs, outputs = (sum(stage != end for stage in self.held[rank]) for end in (0, last))
        left = inputs + outputs * (self.layout.v > 1)
        return self.stream * (micro_batches * (inputs + outputs) + unplayed * left)

    def _parameters(self, total: UnitStates) -> int:
        return (total.whole if self.policy.weights_stay else 0) + total.apart

    def _gradients(self, total: UnitStates) -> int:
        """Bytes of the gradients that the optimizer reads."""
        return total.sums if self.policy.gradients_stay else total.reduced

    def _during(self, total: UnitStates) -> int:
        """Bytes of gradients between micro-batches."""
        return total.reduced if self.reductions.each or self.reductions.bucketed else total.sums

    def _widened(self, total: UnitStates) -> int:
        """Bytes of copies of the gradients during the update."""
        job, widen = self.job.precision, 0
        if job.summed_bytes != job.updated_bytes:  # a copy in the update's dtype
            widen = total.updated * job.updated_bytes
        return widen + (total.updated * job.summed_bytes if "gradients" in self.job.stack.joined else 0)
