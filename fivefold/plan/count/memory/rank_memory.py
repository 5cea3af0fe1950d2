"""Bytes that live on one rank: states at rest, and the fullest moment of a step with its cause.

    peak = the largest of: every pass through a stage over what lives beside it, the update

What a pass has at its fullest is known of the stage (``peak_moments.py``), what lives beside it of the schedule
(``in_flight.py``): other micro-batches, sums of gradients once they are born, messages on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from fivefold.job import Job
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.plan.count.counts import Counts
from fivefold.plan.count.memory.buffers import inputs_bytes, spare_gradients_bytes
from fivefold.plan.count.memory.in_flight import LivePass, in_order, live_passes
from fivefold.plan.count.memory.peak_moments import PeakFinder, describe
from fivefold.plan.count.memory.stage import Chunk, stages_of
from fivefold.plan.count.memory.states import UnitStates
from fivefold.plan.count.update import scratch_bytes
from fivefold.record import Mistake
from fivefold.sizes import COUNTED_BYTES

SPLIT = ("zb1p", "zb2p", "zbv", "dualpipe", "dualpipev")  # schedules in which weights' gradients are put off
ORDER = {"F": 0, "B": 1, "BW": 1, "W": 2}


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
    return _Ranks(counts, layout).found()


def over_time(counts: Counts, layout: Layout, *, rank: int = 0) -> list[Moment]:
    """What lives on a rank at every moment that could be its fullest, in order.

    Without a pipeline the first micro-batch, the second, which is like all others, and the last; under a pipeline one
    micro-batch through each chunk beside the most that live with it (``price/memory_over_time.py`` has every action).
    """
    return _Ranks(counts, layout).moments(rank)


class PassMoments(NamedTuple):
    """A pass of a micro-batch through a stage, and the activations of all before and after it."""

    kept_before: int
    kept_after: int
    moments: list[Moment]


def passes(counts: Counts, layout: Layout, *, rank: int = 0, micro_batches: int = 1) -> Iterator[PassMoments]:
    """What ``over_time`` says of each pass; under a pipeline of all of them, of so many micro-batches, in order."""
    ranks = _Ranks(counts, layout)
    row: Iterable[LivePass] = ranks.live_passes.rows[0]
    if layout.pp > 1:
        row = in_order(schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=micro_batches), rank)
    return (ranks.pass_moments(live_pass, rank) for live_pass in row)


def table_of(layout: Layout, job: Job) -> Table:
    """The schedule of a layout, or a shorter one with the same most alive."""
    return schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=_enough(layout, job))


def _enough(layout: Layout, job: Job) -> int:
    """Micro-batches after which a step holds nothing new: past the warm-up only GPipe has more of them alive, and a
    loop whose rounds are uneven; as many as ``price/steady_state.py`` plays.
    """
    pp, micro_batches = layout.pp, layout.micro_batches(job)
    if pp == 1:
        return min(3, micro_batches)
    over = micro_batches % pp
    if layout.schedule == "gpipe" or (layout.schedule == "interleaved" and over) or micro_batches <= 4 * pp + over:
        return micro_batches
    return 3 * pp + over


class _Ranks:
    """The step of every rank of a layout."""

    def __init__(self, counts: Counts, layout: Layout) -> None:
        self.layout, self.job, self.model = layout, counts.job, counts.model
        self.stages = stages_of(counts, layout)
        self.finder = PeakFinder(counts, layout, self.stages)
        self.policy, self.stream = self.finder.policy, self.finder.stream
        self.live_passes = live_passes(layout.schedule, layout.pp, layout.v, _enough(layout, self.job))
        self.held = table_of(layout, self.job).rank_stages if layout.pp > 1 else ((0,),)
        self.scratch = [scratch_bytes(counts, layout, chunks=held) for held in self.held]
        self.inputs = inputs_bytes(self.model, self.job, layout=layout)
        self.totals = [self._total(held) for held in self.held]
        self.kept = [self._on_device(chunk) for chunk in self.stages.chunks]
        weights = [self._weights(held) for held in self.held]
        self.weights = np.array(self._counted(weights, times=int(self.live_passes.counts.max(initial=1))))

    def found(self) -> list[RankMemory]:
        """Numbers of all."""
        rows, counts, rank_of, distinct, place = self.live_passes
        passes = [self.finder.fullest(*each) for each in distinct]
        beside = counts * self.weights[rank_of]
        live = beside.sum(axis=1) + np.array(self._counted([[size for size, _ in passes]])[0])[place]
        own = np.array([self._own(kind, stage) for kind, stage, *_ in distinct])
        alive = beside[:, : 2 * len(self.held[0])].sum(axis=1) + counts[:, -2] * self.stream + own[place]
        found, at = [], 0
        for rank, row in enumerate(rows):
            best = int(live[at : at + len(row)].argmax())
            cause = describe(passes[place[at + best]][1], self.stages.chunks[row[best].stage])
            found.append(self._rank(rank, int(live[at + best]), cause, kept=int(alive[at : at + len(row)].max())))
            at += len(row)
        return found

    def moments(self, rank: int) -> list[Moment]:
        """Of each stage the fullest pass of each kind, or without a pipeline all of them in order; and the update."""
        passes: dict[tuple[int, ...], tuple[int, LivePass]] = {}
        for number, live_pass in enumerate(self.live_passes.rows[rank]):
            key = (live_pass.stage, ORDER[live_pass.kind]) if self.layout.pp > 1 else (number,)
            size = self.finder.fullest(*live_pass[:4])[0] + int(np.dot(live_pass.counts, self.weights[rank]))
            passes[key] = max(passes.get(key, (-1, live_pass)), (size, live_pass), key=itemgetter(0))
        found = [moment for key in sorted(passes) for moment in self.along(passes[key][1], rank)]
        total = self.totals[rank]
        gradients, base = self._gradients(total), self._base(rank)
        widened = self._widened(total) + self.scratch[rank]
        if self.finder.lasting:
            base -= gradients
        return [*found, Moment("optimizer", base + gradients + widened, 0, gradients, base, 0, 0, 0, widened)]

    def pass_moments(self, live_pass: LivePass, rank: int) -> PassMoments:
        """A pass with its ends."""
        moments, kept = list(self.along(live_pass, rank)), self.kept[live_pass.stage]
        late = self.finder.late_bytes(live_pass.stage) if live_pass.kind in ("B", "W") else 0
        before = moments[0].kept_bytes + {"F": 0, "W": late}.get(live_pass.kind, kept)
        return PassMoments(before, moments[0].kept_bytes + {"F": kept, "B": late}.get(live_pass.kind, 0), moments)

    def along(self, live_pass: LivePass, rank: int) -> Iterator[Moment]:
        """A pass with what lives beside it."""
        held, beside = len(self.held[rank]), live_pass.counts * self.weights[rank]
        others, sums = int(beside[: 2 * held].sum()), int(beside[2 * held : 5 * held].sum())
        base, messages = self._base(rank), int(beside[-1])
        if self.finder.lasting:
            sums = self._gradients(self.totals[rank])
            base -= sums
        for at in self.finder.moments(*live_pass[:4], all_ends=True):
            logits = min(at.logits, at.rest)
            parts = (
                sums + at.gradients,
                base,
                others + at.activations,
                at.gathers,
                logits,
                at.rest - logits + messages,
            )
            yield Moment(describe(at.cause, self.stages.chunks[live_pass.stage]), sum(parts), others, *parts)

    def _rank(self, rank: int, top: int, cause: str, *, kept: int) -> RankMemory:
        total, base = self.totals[rank], self._base(rank)
        gradients, passes = self._gradients(total), base + top
        peak, update = passes, base + (0 if self.finder.lasting else gradients) + self._widened(total)
        update += self.scratch[rank]
        if update > peak:
            peak, cause = update, "optimizer"
        return RankMemory(self._parameters(total), gradients, total.moments, kept, peak, cause, total.updated, passes)

    def _counted(self, sizes: list[list[int]], *, times: int = 1) -> list[list[int]]:
        """The same, if ``times`` the sum of each row fits the 64-bit integers of an array."""
        if (most := times * max(sum(map(abs, row)) for row in sizes)) > COUNTED_BYTES:
            raise Mistake(
                f"layout {str(self.layout)!r} would hold about {most:.0e} bytes on a rank, and more than "
                f"{COUNTED_BYTES:.0e} are not counted; shorten the sequence, or lower mbs or the model"
            )
        return sizes

    # What lives beside a pass

    def _total(self, held: Sequence[int]) -> UnitStates:
        states = [self.stages.chunks[stage].states for stage in held]
        return states[0] if len(states) == 1 else sum(states, start=UnitStates())

    def _weights(self, held: Sequence[int]) -> list[int]:
        """Bytes of each place of ``LivePass.counts``."""
        finder, chunks = self.finder, [self.stages.chunks[stage] for stage in held]
        kept = [0 if finder.offloads else self.kept[stage] for stage in held]
        split = self.layout.schedule in SPLIT and not finder.offloads
        late = [finder.late_bytes(stage) if split else 0 for stage in held]
        sums = [0 if finder.lasting else self._during(chunk.states) for chunk in chunks]
        made = [0 if finder.lasting or finder.each else chunk.experts for chunk in chunks]
        sums = [whole - experts for whole, experts in zip(sums, made, strict=True)]
        if finder.adds and {0, len(self.stages.chunks) - 1} <= {*held} and len(held) > 1:  # the head brings to life
            table = 0 if finder.lasting else self._during(finder.table)
            sums[0], sums[-1] = sums[0] - table, sums[-1] + table
        gone = [self._gradients(chunk.states) - self._during(chunk.states) + finder.lag_bytes(chunk.runs[0])
                for chunk in chunks]  # fmt: skip
        return [*kept, *late, *sums, *made, *gone, 0, self.stream]

    def _own(self, kind: str, stage: int) -> int:
        """What the micro-batch itself keeps when its pass has ended."""
        return self.kept[stage] if kind == "F" else self.finder.late_bytes(stage) if kind == "B" else 0

    def _on_device(self, chunk: Chunk) -> int:
        """What a micro-batch keeps; of offloaded activations the unit that runs and the one that is on its way."""
        if self.finder.offloads:
            each = [unit.later.kept_bytes for unit in chunk.runs for _ in range(min(2, unit.run.times))]
            return sum(nlargest(2, each))
        return chunk.kept

    def _base(self, rank: int) -> int:
        """What lives all through a step."""
        total, chunks = self.totals[rank], [self.stages.chunks[stage] for stage in self.held[rank]]
        base = self._parameters(total) + total.moments + self.inputs + spare_gradients_bytes(self.job, chunks)
        return base + (self._gradients(total) if self.finder.lasting else 0)

    def _parameters(self, total: UnitStates) -> int:
        return (total.whole if self.policy.weights_stay else 0) + total.apart

    def _gradients(self, total: UnitStates) -> int:
        """As the optimizer sees them."""
        return total.sums if self.policy.gradients_stay else total.reduced

    def _during(self, total: UnitStates) -> int:
        """Between micro-batches."""
        return total.reduced if self.finder.each else total.sums

    def _widened(self, total: UnitStates) -> int:
        """Beside the gradients at the update."""
        job, widen = self.job.precision, 0
        if job.summed_bytes != job.updated_bytes:  # gradients are widened for the update
            widen = total.updated * job.updated_bytes
        return widen + (total.updated * job.summed_bytes if "gradients" in self.job.stack.joined else 0)
