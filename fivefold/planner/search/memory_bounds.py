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
from fivefold.layout.stages import list_recomputed_layers, list_stage_layers
from fivefold.planner.counts.counts import Counts, UnitGroup
from fivefold.planner.search.columns import CandidateLayouts, Floats, Ints
from fivefold.planner.search.estimates import AllocatedGradients, Estimates
from fivefold.planner.search.shapes import (
    SPLIT,
    SPLITTING,
    build_pipeline_layout,
    count_stage_units,
    make_column_key,
    sum_units,
)
from fivefold.planner.search.space import PipelineShape

EMBED, HEAD, BLOCKS = 0, 1, 2  # index of the embedding, the head, and the first kind of block, among the units
LARGE = 3  # rounds of micro-batches after which more of them change nothing


class LiveUnits(NamedTuple):
    """Numbers of units [4, units] and facts [4] of four ranks of a pipeline; for n candidates [n, 4, units] and [n, 4].

    ``live`` and ``live_later`` are summed over micro-batches: units whose activations are live when the first backward
    of the rank begins, and when one begins after all gradient sums are allocated.
    """

    unit_counts: NDArray[np.float64]
    live: NDArray[np.float64]
    live_later: NDArray[np.float64]
    last_block: Ints  # index of the last block of the stage whose backward is first; HEAD if there is none
    next_block: Ints  # index of the block before it, whose backward follows; HEAD if there is none
    is_first_stage: NDArray[np.bool_]  # that stage is the first of the model
    is_exact: NDArray[np.bool_]  # ``live_later`` is at the backward of that stage
    is_full: NDArray[np.bool_]  # as many micro-batches are live then as at the first backward
    is_reached: NDArray[np.bool_]  # there is such a backward
    backwards_before: Ints  # backwards of each stage before all gradient sums are allocated, where W is separate
    has_one_stage: NDArray[np.bool_]  # the rank has one stage
    schedule: Ints
    pp: Ints
    closing_blocks: (
        Ints  # [4, 2] of the stage whose backward is last: its first block, and first with experts; HEAD if it has none
    )
    units_before: NDArray[np.float64]  # [4, 2, units] of that stage before each of these
    closing_units: NDArray[np.float64]  # [4, units] of that stage
    blocks_before: Ints  # [4, 2] index of the block before each of these; HEAD if there is none


class StageUnits(NamedTuple):
    """The units of the stages of a pipeline, whatever its number of micro-batches."""

    table: Floats  # [stages, units]
    stages: list[tuple[int, ...]]  # of each rank
    unit_counts: Floats  # [ranks, units]
    last: list[int]  # index of the last block of each stage; HEAD if it has none
    following: list[int]  # index of the block before it; HEAD if there is none
    ranks: list[int]  # whose memory is bounded
    closing: list[list[tuple[int, Floats, int]]]  # ``_find_closing_blocks`` of the first stage of each of them


def list_stage_units(
    counts: Counts, shape: PipelineShape, *, recompute_every: int, runs: list[UnitGroup]
) -> StageUnits:
    """Return the units of a pipeline's stages in which one of ``recompute_every`` layers is recomputed."""
    table, _ = count_stage_units(counts, shape, recompute_every=recompute_every, runs=runs)
    stages = [shape.pipeline.stages_of_rank(rank, pp=shape.pp, v=shape.v) for rank in range(shape.pp)]
    unit_counts = np.array([table[list(rank_stages)].sum(axis=0) for rank_stages in stages])
    blocks, following = _find_last_blocks(counts, shape, recompute_every=recompute_every, runs=runs)
    ends = shape.pp // 2 if shape.pipeline.enters_both_ends else shape.pp - 1  # of the last stage
    last_block = next(block for block in reversed(blocks) if block != HEAD)
    ranks = [0, int(unit_counts[:, BLOCKS:].sum(axis=1).argmax()), int(unit_counts[:, last_block].argmax()), ends]
    closing = [
        [*_find_closing_blocks(counts, shape, stages[rank][0], recompute_every=recompute_every, runs=runs)]
        for rank in ranks
    ]
    return StageUnits(table, stages, unit_counts, blocks, following, ranks, closing)


def count_live_units(shape: PipelineShape, units: StageUnits, *, micro_batches: int) -> LiveUnits:
    """Return the live units of a pipeline of n micro-batches."""
    table, stages, ranks, blocks = units.table, units.stages, units.ranks, units.last
    rows = [_rank_units(shape, rank, table[list(stages[rank])], n_micro_batches=micro_batches) for rank in ranks]
    live, live_later, is_exact, is_full, is_reached = zip(*rows, strict=True)
    return LiveUnits(
        unit_counts=units.unit_counts[ranks],
        live=np.array(live),
        live_later=np.array(live_later),
        last_block=np.array([blocks[stages[rank][-1]] for rank in ranks]),
        is_reached=np.array(is_reached),
        next_block=np.array([units.following[stages[rank][-1]] for rank in ranks]),
        is_first_stage=np.array([stages[rank][-1] == 0 for rank in ranks]),
        is_exact=np.array(is_exact),
        is_full=np.array(is_full),
        has_one_stage=np.full(4, len(stages[0]) == 1),
        schedule=np.full(4, SCHEDULES.index(shape.schedule)),
        pp=np.full(4, shape.pp),
        closing_blocks=np.array([[block for block, _, _ in rank] for rank in units.closing]),
        backwards_before=np.array([1 + shape.pipeline.weight_lag * rank for rank in ranks]),
        closing_units=table[[stages[rank][0] for rank in ranks]],
        units_before=np.array([[units_before for _, units_before, _ in rank] for rank in units.closing]),
        blocks_before=np.array([[block for _, _, block in rank] for rank in units.closing]),
    )


def _find_last_blocks(
    counts: Counts, shape: PipelineShape, *, recompute_every: int, runs: list[UnitGroup]
) -> tuple[list[int], list[int]]:
    """Return the index into ``runs`` of the last block of each stage, and of the one before it; HEAD if none."""
    layers = counts.model.layers
    layout = build_pipeline_layout(shape, recompute_every=recompute_every)
    is_recomputed = list_recomputed_layers(layers, layout)
    block_index = {make_column_key(run): index for index, run in enumerate(runs)}
    stage_blocks = [
        [block_index[counts.kinds[layer], is_recomputed[layer]] for layer in stage]
        for stage in list_stage_layers(layers, layout)
    ]
    last, following = (
        [stage[-position] if len(stage) >= position else HEAD for stage in stage_blocks] for position in (1, 2)
    )
    return last, following


def _find_closing_blocks(
    counts: Counts, shape: PipelineShape, stage: int, *, recompute_every: int, runs: list[UnitGroup]
) -> Iterator[tuple[int, NDArray[np.float64], int]]:
    """Yield the indices into ``runs`` of the first block of a stage and of the first with experts.

    Without experts it is the first again; of a stage without blocks it is HEAD. Each comes with the numbers of units
    before it and the index of the block before it.
    """
    layers = counts.model.layers
    layout = build_pipeline_layout(shape, recompute_every=recompute_every)
    is_recomputed = list_recomputed_layers(layers, layout)
    block_index = {make_column_key(run): position for position, run in enumerate(runs)}
    own_layers = list_stage_layers(layers, layout)[stage]
    blocks = [block_index[counts.kinds[layer], is_recomputed[layer]] for layer in own_layers]
    first_moe = next(
        (position for position, layer in enumerate(own_layers) if counts.count_moe_layers(counts.kinds[layer])), 0
    )
    for position in (0, first_moe):
        units_before = np.bincount(blocks[:position], minlength=len(runs)).astype(float)
        units_before[EMBED] = stage == 0
        yield blocks[position] if blocks else HEAD, units_before, blocks[position - 1] if position else HEAD


def _rank_units(
    shape: PipelineShape, rank: int, table: Floats, *, n_micro_batches: int
) -> tuple[Floats, Floats, bool, bool, bool]:
    """Return five fields of ``LiveUnits`` (``live``, …, ``is_reached``) of a rank with the stages in rows of ``table``.

    A rank has all gradient sums and the most live micro-batches at once only if more micro-batches follow the first
    backward of each stage, or the first W; else fewer with one stage, and at least one with several.
    """
    pipeline, pp = shape.pipeline, shape.pp
    stage_counts = np.array(pipeline.live_stages(n_micro_batches, pp=pp, v=shape.v, rank=rank) if pp > 1 else [1])
    live = stage_counts @ table
    count = int(stage_counts.sum())
    splits_backward = pipeline.splits_backward
    if len(table) == 1:
        backwards_before = (
            1 + pipeline.weight_lag * rank if splits_backward else 1
        )  # backwards before all sums are there
        is_full = pp == 1 or n_micro_batches - backwards_before >= count
        is_reached = n_micro_batches > backwards_before or not splits_backward
        return (
            live,
            (count if is_full else max(int(is_reached), min(n_micro_batches - backwards_before, count))) * table[0],
            True,
            is_full,
            is_reached,
        )
    is_full = pipeline.pairs_passes or n_micro_batches > 2 * pp
    if pipeline.is_interleaved:  # as many forwards follow as backwards come until the last stage has its sums
        group = -(-n_micro_batches // max(1, n_micro_batches // pp))
        is_full = shape.v * n_micro_batches - (shape.v - 1) * group - 1 >= count
    if (
        pipeline.is_interleaved and n_micro_batches % pp == 0 and n_micro_batches >= LARGE * pp
    ):  # after one round of backwards
        return live, live, True, is_full, True
    least_sums = (count if is_full else 1) * table.min(axis=0)
    least_sums[HEAD] = 0
    return live, least_sums, False, is_full, True


class MemoryBounds:
    """Lower bounds on the memory of layouts of one job; the live units of each pipeline are made once."""

    def __init__(self, counts: Counts, shapes: list[PipelineShape]) -> None:
        self.counts, self.shapes = counts, shapes
        stack, recipe = counts.job.stack, counts.job.precision
        are_separate = stack.wgrad_accumulation in ("separate", "ddp_buckets")
        self._are_persistent = not are_separate  # gradients that stay live from the start
        self._become_sums = (
            recipe.gradients_bytes == recipe.summed_bytes and are_separate and not stack.kernel_facts.allocates_sums
        )
        self._known: dict[tuple[int, int, int], LiveUnits] = {}
        self._stages: dict[tuple[int, int], StageUnits] = {}

    def peak(
        self,
        candidates: CandidateLayouts,
        estimates: Estimates,
        *,
        micro_batches: Ints,
        recompute_every: Ints,
        states: Floats | None = None,
        scaled: bool = False,
        any_recomputation: bool = False,
    ) -> Floats:
        """Return the highest peak of all ranks, in bytes [n], which do not depend on the mesh order.

        ``micro_batches`` and ``recompute_every`` have one value per candidate. ``states`` replaces the states of the
        candidates' ZeRO stage; ``scaled`` and ``any_recomputation`` as in ``Estimates``.
        """
        rank_units = self._count_live_units(candidates, micro_batches, recompute_every, runs=estimates.runs)
        n_micro_batches = micro_batches[:, None]
        kept, above_kept = np.moveaxis(
            estimates.profiles(candidates, scaled=scaled, any_recomputation=any_recomputation), 1, 0
        )
        state_bytes = estimates.states(candidates) if states is None else states
        resident, during, at_end, gathered, _, prefetched, new_gradients, _ = np.moveaxis(state_bytes, 1, 0)
        split_rows = np.flatnonzero(np.isin(rank_units.schedule[:, 0], SPLIT))
        deferred = np.zeros_like(kept)
        if len(split_rows):  # what a B needs grows with the micro-batch by fits and starts
            above_kept = above_kept.copy()
            needed, deferred[split_rows] = np.moveaxis(
                estimates.splits(candidates.take(split_rows), scaled=scaled, any_recomputation=any_recomputation), 1, 0
            )
            above_kept[split_rows] = 0 if scaled else np.maximum(0.0, needed)
        resident_bytes = sum_units(rank_units.unit_counts, resident)
        last_bytes = sum_units(rank_units.unit_counts, at_end)
        is_unpipelined = rank_units.pp == 1
        if "activations" in self.counts.job.offload:  # on the host, but for those of the unit that runs
            live_bytes = live_later_bytes = head_kept = np.zeros(is_unpipelined.shape)
        else:
            live_bytes = sum_units(rank_units.live, kept)
            live_later_bytes = sum_units(rank_units.live_later, kept)
            head_kept = rank_units.unit_counts[:, :, HEAD] * kept[:, None, HEAD]
        unit_peak = above_kept + gathered
        splits_backward = np.isin(rank_units.schedule, SPLITTING)
        last_block = np.take_along_axis(unit_peak, rank_units.last_block, axis=1)
        least_block = _take_min_over_blocks(rank_units.unit_counts, unit_peak)
        last_block = last_block + np.take_along_axis(prefetched, rank_units.next_block, axis=1)
        keeps_unsharded = ((candidates.zero < 2) | (candidates.shards == 1))[:, None]
        first_backward_peak = unit_peak
        if states is None and not scaled:
            first_backward_peak = self._bound_first_backward(
                candidates, estimates, n_micro_batches[:, 0], unit_peak=unit_peak, added_bytes=gathered - kept
            )
        first_backward = np.take_along_axis(first_backward_peak, rank_units.last_block, axis=1) + np.take_along_axis(
            prefetched, rank_units.next_block, axis=1
        )
        head_gradients = np.where(n_micro_batches > 1, during, at_end)[:, None, HEAD] * (
            rank_units.unit_counts[:, :, HEAD] > 0
        )
        first_backward = np.where(splits_backward, last_block, first_backward + head_gradients)
        begins_with_block = rank_units.last_block != HEAD
        ends_with_block = rank_units.closing_blocks[:, :, 0] != HEAD
        last_block, first_backward = (np.where(begins_with_block, bound, 0.0) for bound in (last_block, first_backward))
        least_block = np.where(begins_with_block & ends_with_block, least_block, 0.0)
        if self.counts.job.stack.deferred_wgrad == "graph":  # the backward of the first stage waits for its W
            waits_for_wgrad = rank_units.is_first_stage & np.isin(rank_units.schedule, SPLIT)
            last_block, least_block, first_backward = (
                np.where(waits_for_wgrad, 0.0, bound) for bound in (last_block, least_block, first_backward)
            )
        has_head = rank_units.unit_counts[:, :, HEAD] > 0
        head_prefetched = np.take_along_axis(prefetched, rank_units.last_block, axis=1)
        head_prefetched = head_prefetched * (self.counts.job.stack.comm_buffers != "retained")  # else after the loss
        loss = np.where(has_head, unit_peak[:, None, HEAD] + head_prefetched, 0.0)
        head_backward = np.where(
            has_head & ~splits_backward, first_backward_peak[:, None, HEAD] + head_prefetched, loss
        )
        # In the last of two micro-batches the head's gradients are reduced before the blocks' backward.
        head_reduced = np.where(
            is_unpipelined & (n_micro_batches == 2), np.maximum(0.0, during - at_end)[:, None, HEAD], 0.0
        )
        # No gradient is reduced before all sums are allocated, except where a rank has several stages.
        all_allocated = (
            is_unpipelined
            | rank_units.is_full
            | ((keeps_unsharded | rank_units.has_one_stage) & rank_units.is_reached & (n_micro_batches > 2))
        )
        sums_bytes = np.where(
            all_allocated & ~(is_unpipelined & (n_micro_batches == 1)), sum_units(rank_units.unit_counts, during), 0.0
        )
        # As its gradients are reduced, the activations of the block whose backward ends are gone.
        reducing = np.take_along_axis(new_gradients - kept, rank_units.last_block, axis=1)
        reducing = np.where(all_allocated & ~splits_backward & begins_with_block, reducing, 0.0)
        blocks = np.where(rank_units.is_exact, np.maximum(last_block, reducing) - head_kept, least_block) - head_reduced
        later_backward = (
            np.where(rank_units.is_full | rank_units.has_one_stage, np.maximum(blocks, loss), blocks)
            + sums_bytes
            + live_later_bytes
        )
        highest = resident_bytes + np.maximum(
            later_backward, np.maximum(first_backward - head_kept, head_backward) + live_bytes
        )
        if (
            len(split_rows) and self.counts.job.stack.deferred_wgrad != "graph"
        ):  # all units but one wait for W as a B ends
            block = rank_units.closing_blocks[:, :, 0]
            waiting_bytes = sum_units(rank_units.closing_units, deferred) - np.take_along_axis(deferred, block, axis=1)
            waiting_bytes += np.take_along_axis(kept + unit_peak, block, axis=1) + np.where(
                all_allocated,
                sum_units(rank_units.unit_counts, during),
                np.where(
                    n_micro_batches > rank_units.backwards_before,
                    sum_units(rank_units.unit_counts, np.minimum(during, at_end)),
                    0.0,
                ),
            )
            highest = np.where(
                np.isin(rank_units.schedule, SPLIT) & ends_with_block,
                np.maximum(highest, resident_bytes + waiting_bytes),
                highest,
            )
        if not self.counts.job.stack.reduce_bucket:
            block_backward = kept + above_kept
            if states is None and not scaled:
                block_backward = self._backward_bytes(candidates, estimates, block_backward, micro_batches)
            allocated = (n_micro_batches > 1) | (keeps_unsharded & self._are_persistent & (states is None))
            closing = self._bound_last_backward(
                rank_units, states=state_bytes, block_backward=block_backward + gathered, allocated=allocated
            )
            last_bytes = np.maximum(last_bytes, closing)
        return np.asarray(np.maximum(highest, resident_bytes + last_bytes).max(axis=1))

    def _bound_first_backward(
        self,
        candidates: CandidateLayouts,
        estimates: Estimates,
        n_micro_batches: Ints,
        *,
        unit_peak: Floats,
        added_bytes: Floats,
    ) -> Floats:
        """Return bytes [n, units] of the first backward of a unit above what it keeps.

        They include the gradients that it allocates, which ``unit_peak`` does not; ``added_bytes`` [n, units] are added
        to the bytes of the unit.
        """
        stack = self.counts.job.stack
        keeps_unsharded = (candidates.zero < 2) | (candidates.shards == 1)
        if stack.reduce_bucket:
            return unit_peak
        allocates = ~(keeps_unsharded & self._are_persistent)
        reduces = ~keeps_unsharded & (
            (n_micro_batches == 1) | estimates.reduces_often(candidates)
        )  # in the first backward
        holds_gradients = allocates & (self._become_sums | (reduces & (stack.comm_buffers == "retained")))
        first_backward_peak = unit_peak.copy()
        for allocation, rows in (
            (AllocatedGradients.HELD, holds_gradients),
            (AllocatedGradients.ALL, allocates & ~holds_gradients),
        ):
            index = np.flatnonzero(rows)
            if len(index):
                first_backward_peak[index] = (
                    estimates.backward_with_gradients(candidates.take(index), allocation) + added_bytes[index]
                )
        return first_backward_peak

    def _bound_last_backward(
        self, rank_units: LiveUnits, *, states: Floats, block_backward: Floats, allocated: NDArray[np.bool_]
    ) -> Floats:
        """Return bytes [n, ranks] of gradients, and of the backward of a block, in the last backward of each rank.

        They are 0 for schedules that split backwards. ``block_backward``: bytes of a block's backward; ``allocated``
        [n, 1]: whether gradient sums are allocated before the last backward begins.
        """
        during, at_end, prefetched, new_gradients, with_gradients = (states[:, index] for index in (1, 2, 5, 6, 7))
        reduced = np.where(allocated & (np.arange(with_gradients.shape[1]) != EMBED), new_gradients, with_gradients)
        split = np.isin(rank_units.schedule, SPLITTING)
        highest = (
            sum_units(rank_units.unit_counts, at_end)
            + rank_units.unit_counts[:, :, EMBED] * (reduced - at_end)[:, None, EMBED]
        )
        for index in range(rank_units.closing_blocks.shape[2]):
            block = rank_units.closing_blocks[:, :, index]
            units_before = rank_units.units_before[:, :, index]
            own_allocated = sum_units(units_before, during) + np.take_along_axis(during, block, axis=1)
            others_reduced = sum_units(rank_units.unit_counts - units_before, at_end) - np.take_along_axis(
                at_end, block, axis=1
            )
            own_backward = np.take_along_axis(block_backward, block, axis=1) + np.take_along_axis(
                prefetched, rank_units.blocks_before[:, :, index], axis=1
            )
            own_backward = np.maximum(own_backward, np.take_along_axis(reduced, block, axis=1))
            in_block = others_reduced + np.where(allocated, own_allocated, 0.0) + own_backward
            highest = np.where(block == HEAD, highest, np.maximum(highest, in_block))
        return np.where(split, 0.0, highest)

    def _backward_bytes(
        self, candidates: CandidateLayouts, estimates: Estimates, activation_bytes: Floats, n_micro_batches: Ints
    ) -> Floats:
        """Return bytes [n, units] of a block's last backward with the gradients that it allocates.

        They differ from ``activation_bytes``, those of the other backwards.
        """
        job = self.counts.job
        keeps_unsharded = (candidates.zero < 2) | (candidates.shards == 1)
        holds_gradients = ~keeps_unsharded & (job.stack.comm_buffers == "retained")
        allocations = np.full(len(n_micro_batches), AllocatedGradients.NONE)
        allocations[estimates.reduces_often(candidates)] = AllocatedGradients.DENSE
        allocations[(n_micro_batches == 1) & ~(keeps_unsharded & self._are_persistent)] = AllocatedGradients.ALL
        allocations[(allocations == AllocatedGradients.ALL) & self._become_sums] = AllocatedGradients.HELD
        allocations[(allocations != AllocatedGradients.NONE) & holds_gradients] = AllocatedGradients.HELD
        total = activation_bytes
        for allocation in (AllocatedGradients.DENSE, AllocatedGradients.ALL, AllocatedGradients.HELD):
            rows = np.flatnonzero(allocations == allocation)
            if len(rows):
                total = total.copy() if total is activation_bytes else total
                total[rows] = estimates.backward_with_gradients(candidates.take(rows), allocation)
        return total

    def _count_live_units(
        self, candidates: CandidateLayouts, micro_batches: Ints, recompute_every: Ints, *, runs: list[UnitGroup]
    ) -> LiveUnits:
        """Return the live units of each candidate's pipeline."""
        pp = np.array([shape.pp for shape in self.shapes])[candidates.shape]
        is_interleaved = np.array([shape.pipeline.is_interleaved for shape in self.shapes])[candidates.shape]
        forwards_first = np.array([shape.pipeline.forwards_first for shape in self.shapes])[candidates.shape]
        keeps_all = forwards_first | (is_interleaved & (micro_batches % pp > 0))
        n_micro_batches = np.where(keeps_all, micro_batches, np.minimum(micro_batches, LARGE * pp))
        code = (candidates.shape * 1000 + recompute_every) << 32 | n_micro_batches
        _, index, inverse = np.unique(code, return_index=True, return_inverse=True)
        rows = []
        for row in index:
            key = int(candidates.shape[row]), int(recompute_every[row]), int(n_micro_batches[row])
            if key not in self._known:
                shape, stages = self.shapes[key[0]], self._stages.get(key[:2])
                if stages is None:
                    stages = self._stages[key[:2]] = list_stage_units(
                        self.counts, shape, recompute_every=key[1], runs=runs
                    )
                self._known[key] = count_live_units(shape, stages, micro_batches=key[2])
            rows.append(self._known[key])
        return LiveUnits(*(np.stack(column)[inverse] for column in zip(*rows, strict=True)))


def _take_min_over_blocks(unit_counts: Floats, unit_bytes: Floats) -> Floats:
    """Return the fewest bytes of a transformer block among those that each rank holds [candidates, ranks].

    0 for a rank without blocks. ``unit_counts`` [candidates, ranks, units]: how many units of each kind a rank holds
    (embedding, head, then the kinds of blocks). ``unit_bytes`` [candidates, units]: bytes of one unit of each kind.
    """
    smallest = np.where(unit_counts[:, :, BLOCKS:] > 0, unit_bytes[:, None, BLOCKS:], np.inf).min(axis=2)
    return np.asarray(np.where(np.isfinite(smallest), smallest, 0.0))
