"""Lower bounds on the peak bytes that ``Planner.memory`` returns, for many layouts at once (numpy columns).

    memory ≥ states + Σ over stages of a rank (live micro-batches · what its units keep) + the backward of one unit

at the first backward of a rank, at one after which all its gradient sums are allocated, and at its last one. Computed
for four ranks of each pipeline, of which the maximum is taken. The tests compare with ``Planner.peak_bytes``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.job import Job
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.layout.stages import list_recomputed_layers, list_stage_layers
from fivefold.planner.counts.counts import Counts, UnitGroup
from fivefold.planner.search.columns import CandidateLayouts, Floats, Ints, RecordTable, encode_rows, factorize
from fivefold.planner.search.estimates import AllocatedGradients, Estimates, StateFigure
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
STEADY_ROUNDS = 3  # rounds of micro-batches after which more of them change nothing


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
    blocks = _list_stage_blocks(counts, shape, recompute_every=recompute_every, runs=runs)
    last, following = ([stage[-place] if len(stage) >= place else HEAD for stage in blocks] for place in (1, 2))
    ends = shape.pp // 2 if shape.pipeline.enters_both_ends else shape.pp - 1  # of the last stage
    last_block = next(block for block in reversed(last) if block != HEAD)
    ranks = [0, int(unit_counts[:, BLOCKS:].sum(axis=1).argmax()), int(unit_counts[:, last_block].argmax()), ends]
    closing = [
        [*_find_closing_blocks(counts, blocks[stage], is_first_stage=stage == 0, runs=runs)]
        for stage in (stages[rank][0] for rank in ranks)
    ]
    return StageUnits(table, stages, unit_counts, last, following, ranks, closing)


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


def _list_stage_blocks(
    counts: Counts, shape: PipelineShape, *, recompute_every: int, runs: list[UnitGroup]
) -> list[list[int]]:
    """Return the index into ``runs`` of each block of each stage."""
    layout = build_pipeline_layout(shape, recompute_every=recompute_every)
    is_recomputed = list_recomputed_layers(counts.model, layout)
    block_index = {make_column_key(run): index for index, run in enumerate(runs)}
    return [
        [block_index[counts.kinds[layer], is_recomputed[layer]] for layer in stage]
        for stage in list_stage_layers(counts.model, layout)
    ]


def _find_closing_blocks(
    counts: Counts, blocks: Sequence[int], *, is_first_stage: bool, runs: list[UnitGroup]
) -> Iterator[tuple[int, NDArray[np.float64], int]]:
    """Yield the indices into ``runs`` of the first of the ``blocks`` of a stage and of the first with experts.

    Without experts it is the first again; of a stage without blocks it is HEAD. Each comes with the numbers of units
    before it and the index of the block before it.
    """
    routes = (position for position, block in enumerate(blocks) if counts.count_moe_layers(runs[block].name))
    for position in (0, next(routes, 0)):
        units_before = np.bincount(blocks[:position], minlength=len(runs)).astype(float)
        units_before[EMBED] = is_first_stage
        yield blocks[position] if blocks else HEAD, units_before, blocks[position - 1] if position else HEAD


def _rank_units(
    shape: PipelineShape, rank: int, table: Floats, *, n_micro_batches: int
) -> tuple[Floats, Floats, bool, bool, bool]:
    """Return five fields of ``LiveUnits`` (``live``, …, ``is_reached``) of a rank with the stages in rows of ``table``.

    All gradient sums are allocated together with the most live micro-batches only if further micro-batches follow the
    first backward (or W) of each stage. Otherwise fewer are live with one stage, and at least one with several.
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
        pipeline.is_interleaved and n_micro_batches % pp == 0 and n_micro_batches >= STEADY_ROUNDS * pp
    ):  # after one round of backwards
        return live, live, True, is_full, True
    least_sums = (count if is_full else 1) * table.min(axis=0)
    least_sums[HEAD] = 0
    return live, least_sums, False, is_full, True


class UnitBytes(NamedTuple):
    """Bytes [n, units] of one unit of each kind: activations, states (``Estimates.states``), and what waits for W."""

    kept: Floats  # activations, until the backward
    above_kept: Floats  # peak of the backward above them; of split backwards that of B
    deferred: Floats  # kept from B to W
    resident: Floats
    during: Floats  # gradients between micro-batches
    at_end: Floats  # gradients at the update
    gathered: Floats
    prefetched: Floats
    reduced_gradients: Floats  # reduced in each backward
    first_gradients: Floats  # at the end of the first backward

    @property
    def peak(self) -> Floats:
        """Return the peak of a backward above the activations that the unit keeps, with its gathered weights."""
        return np.asarray(self.above_kept + self.gathered)


def _read_unit_bytes(
    candidates: CandidateLayouts,
    estimates: Estimates,
    *,
    states: Floats,
    is_split: NDArray[np.bool_],
    scaled: bool,
    any_recomputation: bool,
) -> UnitBytes:
    """Return the bytes of units; ``is_split`` [n]: the schedule runs B and W apart."""
    kept, above_kept = np.moveaxis(
        estimates.profiles(candidates, scaled=scaled, any_recomputation=any_recomputation), 1, 0
    )
    deferred = np.zeros_like(kept)
    if is_split.any():  # what a B needs grows with the micro-batch by fits and starts
        above_kept = above_kept.copy()
        needed, deferred[is_split] = np.moveaxis(
            estimates.splits(
                candidates.take(np.flatnonzero(is_split)), scaled=scaled, any_recomputation=any_recomputation
            ),
            1,
            0,
        )
        above_kept[is_split] = 0 if scaled else np.maximum(0.0, needed)
    return UnitBytes(
        kept,
        above_kept,
        deferred,
        resident=states[:, StateFigure.RESIDENT],
        during=states[:, StateFigure.BETWEEN],
        at_end=states[:, StateFigure.AT_UPDATE],
        gathered=states[:, StateFigure.GATHERED],
        prefetched=states[:, StateFigure.PREFETCHED],
        reduced_gradients=states[:, StateFigure.REDUCED],
        first_gradients=states[:, StateFigure.FIRST_BACKWARD],
    )


@dataclass(frozen=True)
class _RankBounds:
    """Lower bounds [n, 4] of four ranks of each pipeline, above their resident bytes."""

    job: Job
    units: LiveUnits
    bytes: UnitBytes
    n_micro_batches: Ints  # [n, 1]
    keeps_unsharded: NDArray[np.bool_]  # [n, 1]: gradients are not sharded

    def sum_over_units(self, unit_bytes: Floats) -> Floats:
        """Return the sum over all units of each rank."""
        return sum_units(self.units.unit_counts, unit_bytes)

    @cached_property
    def is_split(self) -> NDArray[np.bool_]:
        """Return whether the schedule splits the backward into B and W."""
        return SPLIT[self.units.schedule]

    @cached_property
    def splits_backward(self) -> NDArray[np.bool_]:
        """Return whether some backwards are split."""
        return SPLITTING[self.units.schedule]

    @cached_property
    def has_all_sums(self) -> NDArray[np.bool_]:
        """Return whether all gradient sums are allocated at a backward of the rank.

        No gradient is reduced before that, except where a rank has several stages.
        """
        keeps_order = self.keeps_unsharded | self.units.has_one_stage
        return np.asarray(
            (self.units.pp == 1)
            | self.units.is_full
            | (keeps_order & self.units.is_reached & (self.n_micro_batches > 2))
        )

    @cached_property
    def kept_on_device(self) -> Floats:
        """Return what live units [n, units] keep; offloaded: nothing, but for the unit that runs."""
        return np.zeros_like(self.bytes.kept) if "activations" in self.job.offload else self.bytes.kept

    @cached_property
    def head_kept(self) -> Floats:
        """Return what the head keeps, which is gone when the backward of a block begins."""
        return np.asarray(self.units.unit_counts[:, :, HEAD] * self.kept_on_device[:, None, HEAD])

    @cached_property
    def loss(self) -> Floats:
        """Return the peak of the head's forward and backward, where the rank has it, without its gradients."""
        return np.where(self.has_head, self.bytes.peak[:, None, HEAD] + self.head_prefetched, 0.0)

    @cached_property
    def has_head(self) -> NDArray[np.bool_]:
        """Return whether the rank holds the head."""
        return np.asarray(self.units.unit_counts[:, :, HEAD] > 0)

    @cached_property
    def head_prefetched(self) -> Floats:
        """Return the weights of the last block, gathered during the head; retained outputs: after the loss."""
        prefetched = np.take_along_axis(self.bytes.prefetched, self.units.last_block, axis=1)
        return np.asarray(prefetched * (self.job.stack.comm_buffers != "retained"))

    @cached_property
    def begins_with_block(self) -> NDArray[np.bool_]:
        """Return whether the stage whose backward is first has a block."""
        return np.asarray(self.units.last_block != HEAD)

    def bound_first_backward(self, unit_peak: Floats) -> Floats:
        """Return the bytes at the first backward.

        ``unit_peak`` [n, units]: bytes of the backward of a unit with its gradients.
        """
        units, unit_bytes = self.units, self.bytes
        first_block = self._bound_last_block(unit_peak)
        head_gradients = np.where(self.n_micro_batches > 1, unit_bytes.during, unit_bytes.at_end)[:, None, HEAD]
        block = np.where(
            self.splits_backward,
            self._bound_last_block(unit_bytes.peak),
            np.where(self._runs_block, first_block + head_gradients * self.has_head, 0.0),
        )
        own_head = self.has_head & ~self.splits_backward
        head = np.where(own_head, unit_peak[:, None, HEAD] + self.head_prefetched, self.loss)
        return np.asarray(np.maximum(block - self.head_kept, head) + sum_units(units.live, self.kept_on_device))

    @cached_property
    def _runs_block(self) -> NDArray[np.bool_]:
        """Return whether a B or BW runs a block: that of a first stage may wait for its W."""
        if self.job.stack.deferred_wgrad != "graph":
            return self.begins_with_block
        return self.begins_with_block & ~(self.units.is_first_stage & self.is_split)

    def _bound_last_block(self, unit_peak: Floats) -> Floats:
        """Return the backward of the last block of the stage whose backward is first; 0 if none runs."""
        block = np.take_along_axis(unit_peak, self.units.last_block, axis=1) + np.take_along_axis(
            self.bytes.prefetched, self.units.next_block, axis=1
        )
        return np.where(self._runs_block, block, 0.0)

    def bound_later_backward(self) -> Floats:
        """Return the bytes at a backward after which all gradient sums are allocated."""
        units, unit_bytes = self.units, self.bytes
        is_unpipelined = units.pp == 1
        ends_with_block = units.closing_blocks[:, :, 0] != HEAD
        least_block = np.where(
            self._runs_block & ends_with_block, _take_min_over_blocks(units.unit_counts, unit_bytes.peak), 0.0
        )
        # As its gradients are reduced, the activations of the block whose backward ends are gone.
        reducing = np.take_along_axis(unit_bytes.reduced_gradients - unit_bytes.kept, units.last_block, axis=1)
        reducing = np.where(self.has_all_sums & ~self.splits_backward & self.begins_with_block, reducing, 0.0)
        last_block = np.maximum(self._bound_last_block(unit_bytes.peak), reducing) - self.head_kept
        # In the last of two micro-batches the head's gradients are reduced before the blocks' backward.
        head_reduced = np.where(
            is_unpipelined & (self.n_micro_batches == 2),
            np.maximum(0.0, unit_bytes.during - unit_bytes.at_end)[:, None, HEAD],
            0.0,
        )
        blocks = np.where(units.is_exact, last_block, least_block) - head_reduced
        has_sums = self.has_all_sums & ~(is_unpipelined & (self.n_micro_batches == 1))
        sums_bytes = np.where(has_sums, self.sum_over_units(unit_bytes.during), 0.0)
        highest = np.where(units.is_full | units.has_one_stage, np.maximum(blocks, self.loss), blocks)
        return np.asarray(highest + sums_bytes + sum_units(units.live_later, self.kept_on_device))

    def bound_waiting_units(self) -> Floats:
        """Return the bytes as a B ends and all units but one wait for W; 0 if backwards are not split."""
        units, unit_bytes = self.units, self.bytes
        if not self.is_split.any() or self.job.stack.deferred_wgrad == "graph":
            return np.zeros(units.pp.shape)
        block = units.closing_blocks[:, :, 0]
        least_sums = np.where(
            self.n_micro_batches > units.backwards_before,
            self.sum_over_units(np.minimum(unit_bytes.during, unit_bytes.at_end)),
            0.0,
        )
        waiting = sum_units(units.closing_units, unit_bytes.deferred) - np.take_along_axis(
            unit_bytes.deferred, block, axis=1
        )
        waiting += np.take_along_axis(unit_bytes.kept + unit_bytes.peak, block, axis=1)
        waiting += np.where(self.has_all_sums, self.sum_over_units(unit_bytes.during), least_sums)
        return np.where(self.is_split & (block != HEAD), waiting, 0.0)


class LiveUnitCounter:
    """Returns the live units of a pipeline by its shape, ``recompute_every`` and number of micro-batches."""

    def __init__(self, counts: Counts, runs: list[UnitGroup]) -> None:
        self.counts, self.runs = counts, runs
        self._stages: dict[tuple[PipelineShape, int], StageUnits] = {}

    def __call__(self, key: tuple[PipelineShape, int, int]) -> LiveUnits:
        """Return the live units; the stages of a pipeline are listed once for all numbers of micro-batches."""
        shape, recompute_every, micro_batches = key
        stages = self._stages.get((shape, recompute_every))
        if stages is None:
            stages = list_stage_units(self.counts, shape, recompute_every=recompute_every, runs=self.runs)
            self._stages[shape, recompute_every] = stages
        return count_live_units(shape, stages, micro_batches=micro_batches)


class MemoryBounds:
    """Lower bounds on the memory of layouts of one job; the live units of each pipeline are made once."""

    def __init__(
        self, counts: Counts, shapes: list[PipelineShape], runs: list[UnitGroup], *, like: MemoryBounds | None = None
    ) -> None:
        """Initialize the bounds; ``like``: bounds of the same model under the same layouts, to reuse live units."""
        self.counts, self.shapes = counts, shapes
        stack, recipe = counts.job.stack, counts.job.precision
        are_separate = stack.wgrad_accumulation in ("separate", "ddp_buckets")
        self._are_persistent = not are_separate  # gradients that stay live from the start
        self._become_sums = (
            recipe.gradients_bytes == recipe.summed_bytes and are_separate and not stack.kernel_facts.allocates_sums
        )
        pipelines = [shape.pipeline for shape in shapes]
        self._facts = (
            np.array([shape.pp for shape in shapes]),
            np.array([pipeline.is_interleaved for pipeline in pipelines], bool),
            np.array([pipeline.forwards_first for pipeline in pipelines], bool),
        )
        self._live_units: RecordTable[tuple[PipelineShape, int, int], LiveUnits] = (
            like._live_units if like else RecordTable(LiveUnitCounter(counts, runs))
        )

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
        rank_units = self._count_live_units(candidates, micro_batches, recompute_every)
        is_exact = states is None and not scaled  # of the candidates' own ZeRO stage, not of any
        unit_bytes = _read_unit_bytes(
            candidates,
            estimates,
            states=estimates.states(candidates) if states is None else states,
            is_split=SPLIT[rank_units.schedule[:, 0]],
            scaled=scaled,
            any_recomputation=any_recomputation,
        )
        keeps_unsharded = candidates.keeps_unsharded
        ranks = _RankBounds(self.counts.job, rank_units, unit_bytes, micro_batches[:, None], keeps_unsharded[:, None])
        first_backward_peak = unit_bytes.peak
        if is_exact:
            first_backward_peak = self._bound_first_backward(
                candidates,
                estimates,
                micro_batches,
                unit_peak=unit_bytes.peak,
                added_bytes=unit_bytes.gathered - unit_bytes.kept,
            )
        highest = np.maximum(ranks.bound_later_backward(), ranks.bound_first_backward(first_backward_peak))
        highest = np.maximum(highest, ranks.bound_waiting_units())
        at_end = ranks.sum_over_units(unit_bytes.at_end)
        if not self.counts.job.stack.reduce_bucket:
            block_backward = unit_bytes.kept + unit_bytes.above_kept
            if is_exact:
                block_backward = self._backward_bytes(candidates, estimates, block_backward, micro_batches)
            allocated = (micro_batches > 1) | (keeps_unsharded & self._are_persistent & (states is None))
            closing = _bound_last_backward(
                rank_units,
                unit_bytes,
                block_backward=block_backward + unit_bytes.gathered,
                allocated=allocated[:, None],
            )
            at_end = np.maximum(at_end, closing)
        return np.asarray((ranks.sum_over_units(unit_bytes.resident) + np.maximum(highest, at_end)).max(axis=1))

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
        keeps_unsharded = candidates.keeps_unsharded
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

    def _backward_bytes(
        self, candidates: CandidateLayouts, estimates: Estimates, activation_bytes: Floats, n_micro_batches: Ints
    ) -> Floats:
        """Return bytes [n, units] of a block's last backward with the gradients that it allocates.

        They differ from ``activation_bytes``, those of the other backwards.
        """
        job = self.counts.job
        keeps_unsharded = candidates.keeps_unsharded
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

    def _count_live_units(self, candidates: CandidateLayouts, micro_batches: Ints, recompute_every: Ints) -> LiveUnits:
        """Return the live units of each candidate's pipeline."""
        pp, is_interleaved, forwards_first = (facts[candidates.shape] for facts in self._facts)
        keeps_all = forwards_first | (is_interleaved & (micro_batches % pp > 0))
        n_micro_batches = np.where(keeps_all, micro_batches, np.minimum(micro_batches, STEADY_ROUNDS * pp))
        columns = [candidates.shape, recompute_every, n_micro_batches]
        _, first, inverse = factorize(encode_rows(columns))
        keys = zip(*(column[first].tolist() for column in columns), strict=True)
        return self._live_units.take([(self.shapes[shape], *key) for shape, *key in keys], inverse)


def _take_min_over_blocks(unit_counts: Floats, unit_bytes: Floats) -> Floats:
    """Return the fewest bytes of a transformer block among those that each rank holds [candidates, ranks].

    0 for a rank without blocks. ``unit_counts`` [candidates, ranks, units]: how many units of each kind a rank holds
    (embedding, head, then the kinds of blocks). ``unit_bytes`` [candidates, units]: bytes of one unit of each kind.
    """
    smallest = np.where(unit_counts[:, :, BLOCKS:] > 0, unit_bytes[:, None, BLOCKS:], np.inf).min(axis=2)
    return np.asarray(np.where(np.isfinite(smallest), smallest, 0.0))


def _bound_last_backward(
    rank_units: LiveUnits, unit_bytes: UnitBytes, *, block_backward: Floats, allocated: NDArray[np.bool_]
) -> Floats:
    """Return bytes [n, ranks] of gradients, and of the backward of a block, in the last backward of each rank.

    They are 0 for schedules that split backwards. ``block_backward``: bytes of a block's backward; ``allocated``
    [n, 1]: whether gradient sums are allocated before the last backward begins.
    """
    during, at_end, prefetched = unit_bytes.during, unit_bytes.at_end, unit_bytes.prefetched
    first_gradients = unit_bytes.first_gradients
    is_later = allocated & (np.arange(first_gradients.shape[1]) != EMBED)
    reduced = np.where(is_later, unit_bytes.reduced_gradients, first_gradients)
    split = SPLITTING[rank_units.schedule]
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
