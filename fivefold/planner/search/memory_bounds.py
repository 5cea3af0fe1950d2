"""Lower bounds on the peak bytes that ``Planner.memory`` returns, for many layouts at once (numpy columns).

    memory ≥ states + Σ over stages of a rank (live micro-batches · what its units keep) + the backward of one unit

at the first backward of a rank, at one after which all its gradient sums are allocated, and at its last one. Computed
for four ranks of each pipeline, of which the maximum is taken. The tests compare with ``Planner.peak_bytes``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.layout.stages import recomputed_layers, stage_layers
from fivefold.planner.counts.counts import Counts, UnitGroup
from fivefold.planner.search.columns import CandidateLayouts, Floats, Ints
from fivefold.planner.search.estimates import AllocatedGradients, Estimates
from fivefold.planner.search.shapes import SPLIT, SPLITTING, column_key, pipeline_layout, stage_units, sum_units
from fivefold.planner.search.space import PipelineShape

EMBED, HEAD, BLOCKS = 0, 1, 2  # index of the embedding, the head, and the first kind of block, among the units
LARGE = 3  # rounds of micro-batches after which more of them change nothing


class LiveUnits(NamedTuple):
    """Numbers of units [4, units] and facts [4] of four ranks of a pipeline; for n candidates [n, 4, units] and [n, 4].

    ``live`` and ``later`` are summed over micro-batches: units whose activations are live when the first backward of
    the rank begins, and when one begins after all gradient sums are allocated.
    """

    held: NDArray[np.float64]
    live: NDArray[np.float64]
    later: NDArray[np.float64]
    block: Ints  # index of the last block of the stage whose backward is first
    next: Ints  # index of the block before it, whose backward follows; HEAD if there is none
    front: NDArray[np.bool_]  # that stage is the first of the model
    known: NDArray[np.bool_]  # ``later`` is at the backward of that stage
    deep: NDArray[np.bool_]  # as many micro-batches are live then as at the first backward
    made: NDArray[np.bool_]  # there is such a backward
    done: Ints  # backwards of each stage before all gradient sums are allocated, where W is separate
    one: NDArray[np.bool_]  # the rank has one stage
    schedule: Ints
    pp: Ints
    closing: Ints  # [4, 2] indices of the first block, and the first with experts, of the stage whose backward is last
    pending: NDArray[np.float64]  # [4, 2, units] of that stage before each of these
    lead: NDArray[np.float64]  # [4, units] of that stage
    before: Ints  # [4, 2] index of the block before each of these; HEAD if there is none


def live_units(
    counts: Counts, shape: PipelineShape, *, micro_batches: int, every: int, runs: list[UnitGroup]
) -> LiveUnits:
    """Return the live units of a pipeline of n micro-batches in which one of ``every`` layers is recomputed."""
    table, _ = stage_units(counts, shape, every=every, runs=runs)
    stages = [shape.pipeline.stages_of_rank(rank, pp=shape.pp, v=shape.v) for rank in range(shape.pp)]
    held = np.array([table[list(mine)].sum(axis=0) for mine in stages])
    blocks, following = _last_blocks(counts, shape, every=every, runs=runs)
    ends = shape.pp // 2 if shape.pipeline.enters_both_ends else shape.pp - 1  # of the last stage
    ranks = [0, int(held[:, BLOCKS:].sum(axis=1).argmax()), int(held[:, blocks[-1]].argmax()), ends]
    rows = [_rank_units(shape, rank, table[list(stages[rank])], m=micro_batches) for rank in ranks]
    live, later, known, deep, made = zip(*rows, strict=True)
    closing = [[*_closing_blocks(counts, shape, stages[rank][0], every=every, runs=runs)] for rank in ranks]
    return LiveUnits(
        held=held[ranks],
        live=np.array(live),
        later=np.array(later),
        block=np.array([blocks[stages[rank][-1]] for rank in ranks]),
        made=np.array(made),
        next=np.array([following[stages[rank][-1]] for rank in ranks]),
        front=np.array([stages[rank][-1] == 0 for rank in ranks]),
        known=np.array(known),
        deep=np.array(deep),
        one=np.full(4, len(stages[0]) == 1),
        schedule=np.full(4, SCHEDULES.index(shape.schedule)),
        pp=np.full(4, shape.pp),
        closing=np.array([[at for at, _, _ in rank] for rank in closing]),
        done=np.array([1 + shape.pipeline.weight_lag * rank for rank in ranks]),
        lead=table[[stages[rank][0] for rank in ranks]],
        pending=np.array([[units for _, units, _ in rank] for rank in closing]),
        before=np.array([[block for _, _, block in rank] for rank in closing]),
    )


def _last_blocks(
    counts: Counts, shape: PipelineShape, *, every: int, runs: list[UnitGroup]
) -> tuple[list[int], list[int]]:
    """Return the index into ``runs`` of the last block of each stage, and of the one before it (HEAD if none)."""
    layers, layout = counts.model.layers, pipeline_layout(shape, every=every)
    again, place = recomputed_layers(layers, layout), {column_key(run): at for at, run in enumerate(runs)}
    places = [[place[counts.kinds[layer], again[layer]] for layer in stage] for stage in stage_layers(layers, layout)]
    return [stage[-1] for stage in places], [stage[-2] if len(stage) > 1 else HEAD for stage in places]


def _closing_blocks(
    counts: Counts, shape: PipelineShape, stage: int, *, every: int, runs: list[UnitGroup]
) -> Iterator[tuple[int, NDArray[np.float64], int]]:
    """Yield the indices into ``runs`` of the first block of a stage and of the first with experts.

    Without experts it is the first again. Each comes with the numbers of units before it and the index of the block
    before it.
    """
    layers, layout = counts.model.layers, pipeline_layout(shape, every=every)
    again, place = recomputed_layers(layers, layout), {column_key(run): at for at, run in enumerate(runs)}
    mine = stage_layers(layers, layout)[stage]
    blocks = [place[counts.kinds[layer], again[layer]] for layer in mine]
    routed = next((at for at, layer in enumerate(mine) if counts.count_moe_layers(counts.kinds[layer])), 0)
    for at in (0, routed):
        units = np.bincount(blocks[:at], minlength=len(runs)).astype(float)
        units[EMBED] = stage == 0
        yield blocks[at], units, blocks[at - 1] if at else HEAD


def _rank_units(shape: PipelineShape, rank: int, table: Floats, *, m: int) -> tuple[Floats, Floats, bool, bool, bool]:
    """Return ``live``, ``later``, ``known``, ``deep`` and ``made`` of one rank, whose stages are the rows of ``table``.

    A rank has all gradient sums and the most live micro-batches at once only if more micro-batches follow the first
    backward of each stage, or the first W; else fewer with one stage, and at least one with several.
    """
    pipeline, pp = shape.pipeline, shape.pp
    number = np.array(pipeline.live_stages(m, pp=pp, v=shape.v, rank=rank) if pp > 1 else [1])
    live, count, split = number @ table, int(number.sum()), pipeline.splits_backward
    if len(table) == 1:
        done = 1 + pipeline.weight_lag * rank if split else 1  # backwards before all sums are there
        deep, made = pp == 1 or m - done >= count, m > done or not split
        return live, (count if deep else max(int(made), min(m - done, count))) * table[0], True, deep, made
    deep = pipeline.pairs_passes or m > 2 * pp
    if pipeline.is_interleaved:  # as many forwards follow as backwards come until the last stage has its sums
        group = -(-m // max(1, m // pp))
        deep = shape.v * m - (shape.v - 1) * group - 1 >= count
    if pipeline.is_interleaved and m % pp == 0 and m >= LARGE * pp:  # after one round of backwards
        return live, live, True, deep, True
    least = (count if deep else 1) * table.min(axis=0)
    least[HEAD] = 0
    return live, least, False, deep, True


class MemoryBounds:
    """Lower bounds on the memory of layouts of one job; the live units of each pipeline are made once."""

    def __init__(self, counts: Counts, shapes: list[PipelineShape]) -> None:
        self.counts, self.shapes = counts, shapes
        stack, recipe = counts.job.stack, counts.job.precision
        apart = stack.wgrad_accumulation in ("separate", "ddp_buckets")
        self._lasting = not apart  # gradients that stay live from the start
        self._become = recipe.gradients_bytes == recipe.summed_bytes and apart and not stack.kernel_facts.allocates_sums
        self._known: dict[tuple[int, int, int], LiveUnits] = {}

    def peak(
        self,
        candidates: CandidateLayouts,
        estimates: Estimates,
        *,
        micro_batches: Ints,
        every: Ints,
        states: Floats | None = None,
        limit: bool = False,
        bare: bool = False,
    ) -> Floats:
        """Return the highest peak of all ranks, in bytes [n], which do not depend on the mesh order.

        ``micro_batches`` and ``every``: of each candidate. ``states``: instead of those of the candidates' ZeRO stage;
        ``limit`` and ``bare`` as in ``Estimates``.
        """
        pipe, m = self._units(candidates, micro_batches, every, runs=estimates.runs), micro_batches[:, None]
        kept, above = np.moveaxis(estimates.profiles(candidates, limit=limit, bare=bare), 1, 0)
        state_bytes = estimates.states(candidates) if states is None else states
        rest, during, ends, gathered, _, ahead, fresh, _ = np.moveaxis(state_bytes, 1, 0)
        split = np.flatnonzero(np.isin(pipe.schedule[:, 0], SPLIT))
        deferred = np.zeros_like(kept)
        if len(split):  # what a B needs grows with the micro-batch by fits and starts
            above = above.copy()
            needed, deferred[split] = np.moveaxis(
                estimates.splits(candidates.take(split), limit=limit, bare=bare), 1, 0
            )
            above[split] = 0 if limit else np.maximum(0.0, needed)
        base, last, alone = sum_units(pipe.held, rest), sum_units(pipe.held, ends), pipe.pp == 1
        if "activations" in self.counts.job.offload:  # on the host, but for those of the unit that runs
            body = later = own = np.zeros(alone.shape)
        else:
            body, later = sum_units(pipe.live, kept), sum_units(pipe.later, kept)
            own = pipe.held[:, :, HEAD] * kept[:, None, HEAD]
        peak, splitting = above + gathered, np.isin(pipe.schedule, SPLITTING)
        first, least = np.take_along_axis(peak, pipe.block, axis=1), _min_over_blocks(pipe.held, peak)
        first = first + np.take_along_axis(ahead, pipe.next, axis=1)
        stays = ((candidates.zero < 2) | (candidates.shards == 1))[:, None]
        opening = peak
        if states is None and not limit:
            opening = self._first_backward_bytes(candidates, estimates, m[:, 0], peak=peak, above=gathered - kept)
        begins = np.take_along_axis(opening, pipe.block, axis=1) + np.take_along_axis(ahead, pipe.next, axis=1)
        of_head = np.where(m > 1, during, ends)[:, None, HEAD] * (pipe.held[:, :, HEAD] > 0)
        begins = np.where(splitting, first, begins + of_head)
        if self.counts.job.stack.deferred_wgrad == "graph":  # the backward of the first stage waits for its W
            waits = pipe.front & np.isin(pipe.schedule, SPLIT)
            first, least, begins = (np.where(waits, 0.0, bound) for bound in (first, least, begins))
        there, coming = pipe.held[:, :, HEAD] > 0, np.take_along_axis(ahead, pipe.block, axis=1)
        coming = coming * (self.counts.job.stack.comm_buffers != "retained")  # else after the loss
        loss = np.where(there, peak[:, None, HEAD] + coming, 0.0)
        opens = np.where(there & ~splitting, opening[:, None, HEAD] + coming, loss)
        # In the last of two micro-batches the head's gradients are reduced before the blocks' backward.
        gone = np.where(alone & (m == 2), np.maximum(0.0, during - ends)[:, None, HEAD], 0.0)
        # No gradient is reduced before all sums are allocated, except where a rank has several stages.
        sure = alone | pipe.deep | ((stays | pipe.one) & pipe.made & (m > 2))
        sums_bytes = np.where(sure & ~(alone & (m == 1)), sum_units(pipe.held, during), 0.0)
        # As its gradients are reduced, the activations of the block whose backward ends are gone.
        reducing = np.take_along_axis(fresh - kept, pipe.block, axis=1)
        reducing = np.where(sure & ~splitting, reducing, 0.0)
        blocks = np.where(pipe.known, np.maximum(first, reducing) - own, least) - gone
        late = np.where(pipe.deep | pipe.one, np.maximum(blocks, loss), blocks) + sums_bytes + later
        full = base + np.maximum(late, np.maximum(begins - own, opens) + body)
        if len(split) and self.counts.job.stack.deferred_wgrad != "graph":  # all units but one wait for W as a B ends
            block = pipe.closing[:, :, 0]
            waits = sum_units(pipe.lead, deferred) - np.take_along_axis(deferred, block, axis=1)
            waits += np.take_along_axis(kept + peak, block, axis=1) + np.where(
                sure,
                sum_units(pipe.held, during),
                np.where(m > pipe.done, sum_units(pipe.held, np.minimum(during, ends)), 0.0),
            )
            full = np.where(np.isin(pipe.schedule, SPLIT), np.maximum(full, base + waits), full)
        if not self.counts.job.stack.reduce_bucket:
            own = kept + above
            if states is None and not limit:
                own = self._backward_bytes(candidates, estimates, own, micro_batches)
            allocated = (m > 1) | (stays & self._lasting & (states is None))
            closing = self._last_backward_bytes(pipe, states=state_bytes, own=own + gathered, allocated=allocated)
            last = np.maximum(last, closing)
        return np.asarray(np.maximum(full, base + last).max(axis=1))

    def _first_backward_bytes(
        self, candidates: CandidateLayouts, estimates: Estimates, m: Ints, *, peak: Floats, above: Floats
    ) -> Floats:
        """Return bytes [n, units] of the first backward of a unit above what it keeps.

        They include the gradients that it allocates; ``peak``: without them; ``above``: bytes [n, units] added to those
        of the unit.
        """
        stack, stays = self.counts.job.stack, (candidates.zero < 2) | (candidates.shards == 1)
        if stack.reduce_bucket:
            return peak
        born = ~(stays & self._lasting)
        reduces = ~stays & ((m == 1) | estimates.reduces_often(candidates))  # in the first backward
        held = born & (self._become | (reduces & (stack.comm_buffers == "retained")))
        opening = peak.copy()
        for birth, rows in ((AllocatedGradients.HELD, held), (AllocatedGradients.ALL, born & ~held)):
            at = np.flatnonzero(rows)
            if len(at):
                opening[at] = estimates.births(candidates.take(at), birth) + above[at]
        return opening

    def _last_backward_bytes(
        self, pipe: LiveUnits, *, states: Floats, own: Floats, allocated: NDArray[np.bool_]
    ) -> Floats:
        """Return bytes [n, ranks] of gradients, and of the backward of a block, in the last backward of each rank.

        0 of schedules that split backwards. ``own``: of a block's backward; ``allocated``: whether gradient sums are
        allocated before the last backward begins, [n, 1].
        """
        during, ends, ahead, fresh, made = (states[:, at] for at in (1, 2, 5, 6, 7))
        reduced = np.where(allocated & (np.arange(made.shape[1]) != EMBED), fresh, made)
        split = np.isin(pipe.schedule, SPLITTING)
        most = sum_units(pipe.held, ends) + pipe.held[:, :, EMBED] * (reduced - ends)[:, None, EMBED]
        for at in range(pipe.closing.shape[2]):
            block, pending = pipe.closing[:, :, at], pipe.pending[:, :, at]
            mine = sum_units(pending, during) + np.take_along_axis(during, block, axis=1)
            done = sum_units(pipe.held - pending, ends) - np.take_along_axis(ends, block, axis=1)
            needs = np.take_along_axis(own, block, axis=1) + np.take_along_axis(ahead, pipe.before[:, :, at], axis=1)
            needs = np.maximum(needs, np.take_along_axis(reduced, block, axis=1))
            most = np.maximum(most, done + np.where(allocated, mine, 0.0) + needs)
        return np.where(split, 0.0, most)

    def _backward_bytes(
        self, candidates: CandidateLayouts, estimates: Estimates, activation_bytes: Floats, m: Ints
    ) -> Floats:
        """Return bytes [n, units] of a block's last backward with the gradients that it allocates.

        They differ from ``activation_bytes``, those of the other backwards.
        """
        job, stays = self.counts.job, (candidates.zero < 2) | (candidates.shards == 1)
        holds = ~stays & (job.stack.comm_buffers == "retained")
        births = np.full(len(m), AllocatedGradients.NONE)
        births[estimates.reduces_often(candidates)] = AllocatedGradients.DENSE
        births[(m == 1) & ~(stays & self._lasting)] = AllocatedGradients.ALL
        births[(births == AllocatedGradients.ALL) & self._become] = AllocatedGradients.HELD
        births[(births != AllocatedGradients.NONE) & holds] = AllocatedGradients.HELD
        total = activation_bytes
        for birth in (AllocatedGradients.DENSE, AllocatedGradients.ALL, AllocatedGradients.HELD):
            rows = np.flatnonzero(births == birth)
            if len(rows):
                total = total.copy() if total is activation_bytes else total
                total[rows] = estimates.births(candidates.take(rows), birth)
        return total

    def _units(
        self, candidates: CandidateLayouts, micro_batches: Ints, every: Ints, *, runs: list[UnitGroup]
    ) -> LiveUnits:
        """Return the live units of each candidate's pipeline."""
        pp = np.array([shape.pp for shape in self.shapes])[candidates.shape]
        loops = np.array([shape.pipeline.is_interleaved for shape in self.shapes])[candidates.shape]
        forwards_first = np.array([shape.pipeline.forwards_first for shape in self.shapes])[candidates.shape]
        keeps_all = forwards_first | (loops & (micro_batches % pp > 0))
        m = np.where(keeps_all, micro_batches, np.minimum(micro_batches, LARGE * pp))
        code = (candidates.shape * 1000 + every) << 32 | m
        _, index, inverse = np.unique(code, return_index=True, return_inverse=True)
        rows = []
        for at in index:
            key = int(candidates.shape[at]), int(every[at]), int(m[at])
            if key not in self._known:
                shape = self.shapes[key[0]]
                self._known[key] = live_units(self.counts, shape, micro_batches=key[2], every=key[1], runs=runs)
            rows.append(self._known[key])
        return LiveUnits(*(np.stack(column)[inverse] for column in zip(*rows, strict=True)))


def _min_over_blocks(held: Floats, unit_bytes: Floats) -> Floats:
    """Return the least of ``each`` [n, units] among the blocks of each rank, [n, ranks]; 0 on a rank without any."""
    smallest = np.where(held[:, :, BLOCKS:] > 0, unit_bytes[:, None, BLOCKS:], np.inf).min(axis=2)
    return np.asarray(np.where(np.isfinite(smallest), smallest, 0.0))
