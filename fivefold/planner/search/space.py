"""Every legal layout of a model, a job and a number of ranks, as columns of integers.

    partial   degrees · micro-batch · kind of cp · sp · recomputation          determines the operations of a rank
    candidate partial x (schedule, v) x (ZeRO stage, shard group) x order      a layout

A candidate becomes a ``Layout`` object only on request. Legal layouts are those that ``validity.refuse`` accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import permutations
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.job import Job
from fivefold.layout.names import CONTEXT_PARALLELISMS, CP_KINDS, DEFAULT_ORDER, Axis, MeshAxis
from fivefold.layout.quantized_base import explain_cut_block, explain_cut_experts
from fivefold.layout.schedule import PIPELINE_SCHEDULES, PipelineSchedule
from fivefold.layout.schedule.pipeline_schedule import DEFAULT_SCHEDULE, SCHEDULES, ScheduleName
from fivefold.layout.spec import Layout, list_divisors
from fivefold.layout.stages import find_first_backward_stage, list_virtual_stages
from fivefold.layout.validity.frozen import (
    explain_unsharded_base,
    explain_unsharded_factors,
    explain_unsupported_schedule,
)
from fivefold.layout.validity.mixers import list_unsharded
from fivefold.layout.validity.offload import explain_unsupported_offload
from fivefold.layout.validity.order import are_neighbours
from fivefold.layout.validity.pipeline import can_simulate, count_max_stages
from fivefold.layout.validity.sharding import is_divisible_by_tp
from fivefold.layout.validity.two_dimensional import explain_unsupported_2d
from fivefold.layout.validity.vision import can_shard_tower
from fivefold.layout.where import ANY_LAYOUT, Where
from fivefold.model.spec import Model
from fivefold.planner.search.columns import (
    CandidateLayouts,
    Ints,
    PartialLayouts,
    combine_with_values,
    concatenate,
    map_distinct,
    select_degrees,
    split,
)
from fivefold.stack.spec import SupportedLayouts

RECOMPUTATIONS = ("none", "norm+act", "selective", "mlp", "full/4", "full/2", "full")
# Also of latent attention, whose heads are many times its latents. Source: DeepSeek-V3, arXiv:2412.19437 §3.2.3.
LATENT_ATTENTION = "norm+up+rope+act"


def list_recomputations(model: Model, software: SupportedLayouts, among: Sequence[str] = RECOMPUTATIONS) -> list[str]:
    """Return the recomputations to try for a model: experts instead of MLPs, and what latent attention expands.

    Next to ``norm+act`` come the groups that the ``software`` recomputes together.
    """
    replacements = {"mlp": "moe"} if model.moe else {}
    choices = [replacements.get(ac, ac) for ac in among]
    if "norm+act" in choices:
        cheap = [LATENT_ATTENTION] if model.mla else []
        after = choices.index("norm+act") + 1
        choices[after:after] = [*cheap, *software.list_joint_recomputes()]
    return choices


CP_KEY_BASE = 2**20  # ranks of a sequence are fewer


class PipelineShape(NamedTuple):
    """A pipeline: its schedule, ranks and virtual stages."""

    schedule: ScheduleName
    pp: int
    v: int

    @property
    def pipeline(self) -> PipelineSchedule:
        """Return the facts of its schedule."""
        return PIPELINE_SCHEDULES[self.schedule]


def list_zeros_alone(job: Job) -> tuple[int, ...]:
    """Return the ZeRO stages by which one rank has less on the device if the job offloads (``Policy.runs_alone``)."""
    if "parameters" in job.offload:
        return (3,)
    return (2, 3) if "optimizer" in job.offload and not job.stack.offloads_with_parameters else ()


def _list_unsharded_axes(model: Model, job: Job) -> set[str]:
    """Return the axes over which something in the model or in the job's base cannot be sharded."""
    mixers = [getattr(model, kind) for kind in model.non_attention_mixers]
    has_indexer = model.mla is not None and model.mla.indexer is not None  # not counted
    unsharded = {axis for _, axes in list_unsharded(model) for axis in axes}
    unsharded |= {"cp"} if has_indexer or any(mixer.context_parallel == "none" for mixer in mixers) else set()
    return unsharded | ({"tp"} if explain_unsharded_base(model, job, tp=2, zero=0, shards=1) else set())


class Space:
    """The layouts of ``world`` ranks that the job's stack can run; the arguments narrow what is varied."""

    def __init__(
        self,
        model: Model,
        job: Job,
        *,
        world: int,
        axes: Sequence[Axis] = ("tp", "cp", "pp", "ep"),
        schedules: Sequence[ScheduleName] = SCHEDULES,
        recomputations: Sequence[str] = RECOMPUTATIONS,
        placements: bool = True,
        shard_groups: bool = True,
        where: Where = ANY_LAYOUT,
        reduces_often: bool = False,
        two_dimensional: bool = False,
    ) -> None:
        """Initialize the layouts of ``world`` ranks.

        ``reduces_often``: only layouts that may reduce gradients more than once a step: ZeRO-2 and -3 with several
        micro-batches.
        """
        self._choices: dict[str, Any] = {
            "axes": axes,
            "schedules": schedules,
            "recomputations": recomputations,
            "placements": placements,
            "shard_groups": shard_groups,
            "reduces_often": reduces_often,
            "two_dimensional": two_dimensional,
        }
        stack = job.stack.runs
        self.model, self.job, self.world, self.stack = model, job, world, stack
        self.two_dimensional = two_dimensional  # also tp = x·y
        self.schedules = tuple(
            name for name in schedules if name in stack.schedules and explain_unsupported_schedule(name, job) is None
        )
        mixers = [getattr(model, kind) for kind in model.non_attention_mixers]
        self.mixer_units = [units for mixer in mixers if (units := mixer.get_sharded_units(model.width))]
        unsharded, config_axes = _list_unsharded_axes(model, job), stack.config_axes or stack.axes
        self.axes = tuple(axis for axis in axes if axis in stack.axes and axis in config_axes and axis not in unsharded)
        self.where = where
        all_recomputations = dict.fromkeys(
            (*list_recomputations(model, stack, recomputations), *where.list_values("ac"))
        )
        expressible_recomputations = [
            ac for ac in all_recomputations if stack.can_express(ac, experts=model.moe is not None)
        ]
        self.recomputations = tuple(ac for ac in expressible_recomputations if where.is_allowed("ac", ac))
        self.shard_groups = shard_groups and stack.shard_groups
        self.reduces_often = reduces_often
        self.usual_order = where.is_allowed("order", "default")
        self.placements = placements and stack.orders is not False and where.is_allowed("order", "other")
        orders = permutations(DEFAULT_ORDER) if self.placements else [DEFAULT_ORDER]
        self.orders: list[tuple[MeshAxis, ...]] = [order for order in orders if stack.supports_order(order)]
        self._legal_orders: dict[tuple[tuple[bool, ...], bool, bool], list[int]] = {}
        self._zeros: dict[int, list[tuple[int, int]]] = {}
        # bounds of a stage without layers that trains nothing are not known
        self.most_stages = len(model.stage_parts) if job.freezes_text else count_max_stages(model, job)
        shapes = [shape for pp in range(1, self.most_stages + 1) if world % pp == 0 for shape in self._list_shapes(pp)]
        if job.freezes_text and not job.stack.has_frozen_stages:
            layouts = [Layout(schedule=schedule, pp=pp, v=v) for schedule, pp, v in shapes]
            firsts = [find_first_backward_stage(model, layout, job) for layout in layouts]
            shapes = [shape for shape, first in zip(shapes, firsts, strict=True) if first == 0]
        self.shapes = [s for s in shapes if where.is_allowed("schedule", s.schedule) and where.is_allowed("v", s.v)]
        self.pairs = any(s.pipeline.pairs_passes for s in self.shapes)
        self.shape_pp = np.array([shape.pp for shape in self.shapes])

    def restrict_to_smallest(self) -> Space:
        """Return the space of the layouts that most likely need the least memory: mbs and recomputation are fixed."""
        smallest = Where.parse(f"mbs<={self.job.min_micro_batch} ac=full")
        where = Where((*self.where.terms, *smallest.terms))
        return Space(self.model, self.job, world=self.world, where=where, **self._choices)

    @cached_property
    def partials(self) -> PartialLayouts:
        """Return every legal partial layout, ordered by recomputation, micro-batch, the kinds, and degrees."""
        partials = self.expand_recomputations(concatenate(self.blocks))
        return partials.take(
            np.lexsort(
                (
                    partials.tp,
                    partials.cp,
                    partials.pp,
                    partials.etp,
                    partials.ep,
                    partials.kind,
                    -partials.sp,
                    partials.mbs,
                    partials.inner,
                    partials.ac,
                )
            )
        )

    def expand_recomputations(self, partials: PartialLayouts) -> PartialLayouts:
        """Return each of ``partials`` with every recomputation."""
        n_recomputations = len(self.recomputations)
        expanded = partials.take(np.repeat(np.arange(len(partials.dp)), n_recomputations))
        return expanded._replace(ac=np.tile(np.arange(n_recomputations), len(partials.dp)))

    @cached_property
    def blocks(self) -> list[PartialLayouts]:
        """Return every legal partial layout except for its recomputation, in one block per degree of tp."""
        sizes = list_divisors(self.world) if "tp" in self.axes else [1]
        return [
            partials
            for tp in sizes
            if is_divisible_by_tp(self.model, tp) and can_shard_tower(self.model, self.job, tp)
            if explain_unsharded_factors(self.model, self.job, tp=tp) is None
            if explain_cut_block(self.model, self.job, tp=tp) is None
            if len((partials := self._list_partials(tp)).dp)
        ]

    def _list_partials(self, tp: int) -> PartialLayouts:
        """Return all partial layouts with this degree of tensor parallelism, as rows of integers."""
        model, job, world = self.model, self.job, self.world
        moe = model.moe
        sizes = list_divisors(world)
        rows = np.array([[world, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1]])
        rows = split(rows, 1, [tp])
        rows = split(rows, 2, [cp for cp in sizes if cp == 1 or ("cp" in self.axes and job.sequence % cp == 0)])
        rows = split(rows, 3, [pp for pp in sizes if pp == 1 or ("pp" in self.axes and pp <= self.most_stages)])
        rows = rows[job.even_batch % rows[:, 0] == 0]
        if moe and "ep" in self.axes:
            cuts = list_divisors(moe.ffn) if self.stack.expert_tensor else [1]
            cuts = [
                etp
                for etp in cuts
                if explain_cut_experts(model, job, etp=etp) is None
                if explain_unsharded_factors(model, job, tp=tp, etp=etp) is None
            ]
            groups = list_divisors(moe.experts)
            groups = [ep for ep in groups if explain_unsharded_factors(model, job, tp=tp, ep=ep) is None]
            rows = combine_with_values(rows, 5, cuts, lambda r: r[:, 1] % r[:, 5] == 0)
            rows = combine_with_values(rows, 4, groups, lambda r: r[:, :3].prod(axis=1) // r[:, 5] % r[:, 4] == 0)
        if moe and self.stack.experts_as_mlp:
            rows = rows[rows[:, 5] == np.where(rows[:, 4] == 1, rows[:, 1], 1)]
        rows = combine_with_values(rows, 7, (0, 1), self._mask_context_parallel)
        rows = combine_with_values(
            rows, 8, (1,) if moe or not self.stack.no_sp else (1, 0), lambda r: (r[:, 1] > 1) | (r[:, 8] == 1)
        )
        rows = rows[self._mask_allowed(rows, mbs=False)]
        micro_batches = [mbs for mbs in list_divisors(job.even_batch) if mbs % job.min_micro_batch == 0]
        rows = combine_with_values(rows, 6, micro_batches, lambda r: job.even_batch % (r[:, 0] * r[:, 6]) == 0)
        rows = rows[(rows[:, 8] == 0) | (rows[:, 6] * job.sequence // rows[:, 2] % rows[:, 1] == 0)]
        if self.reduces_often:
            rows = rows[(rows[:, 0] * rows[:, 2] > 1) & (rows[:, 0] * rows[:, 6] < job.global_batch)]
        if self.two_dimensional:
            rows = combine_with_values(rows, 10, list_divisors(tp), self._mask_2d)
        rows = rows[self._mask_allowed(rows, mbs=True)]
        return PartialLayouts(*(np.ascontiguousarray(column) for column in rows.T))

    def _mask_allowed(self, rows: Ints, *, mbs: bool) -> NDArray[np.bool_]:
        """Return a mask of the rows that meet the constraints on the micro-batch, or on degrees, kind of cp, and sp."""
        if mbs:
            return map_distinct(rows[:, 6], partial(self.where.is_allowed, "mbs")).astype(bool)
        admitted = np.ones(len(rows), bool)
        for column, field in enumerate(("dp", "tp", "cp", "pp", "ep", "etp")):
            admitted &= map_distinct(rows[:, column], partial(self.where.is_allowed, field)).astype(bool)
        admitted &= map_distinct(rows[:, 7], lambda kind: self.where.is_allowed("kind", CP_KINDS[kind])).astype(bool)
        admitted &= map_distinct(rows[:, 8], lambda sp: self.where.is_allowed("sp", "yes" if sp else "no")).astype(bool)
        return np.asarray(admitted)

    def _mask_context_parallel(self, rows: Ints) -> NDArray[np.bool_]:
        """Return whether cp of each row is legal: a ring needs T divisible by 2·cp, Ulysses heads per rank by cp.

        Token mixers other than attention need Ulysses.
        """
        tp, cp, kinds = rows[:, 1], rows[:, 2], list(CONTEXT_PARALLELISMS.items())
        exchanges_heads = np.array([facts.exchanges_heads for _, facts in kinds])[rows[:, 7]]
        parts = np.array([facts.parts_per_rank for _, facts in kinds])[rows[:, 7]]
        runs = np.array(
            [name in self.stack.cp_kinds and (facts.exchanges_heads or not self.mixer_units) for name, facts in kinds]
        )[rows[:, 7]]
        divides_tokens = (cp == 1) | ((self.job.sequence % (parts * cp) == 0) & runs)
        heads = gcd(
            *(shape.heads for shape in self.model.attention_shapes), *(units.number for units in self.mixer_units)
        )
        divides_heads = (cp > 1) & (heads // tp % cp == 0) & runs
        return np.asarray(np.where(exchanges_heads, divides_heads, divides_tokens))

    def _mask_2d(self, rows: Ints) -> NDArray[np.bool_]:
        """Return whether the planner supports tp = x·y of each row: x and y above 1, or y = 1."""
        tp, sp, tp_inner = rows[:, 1], rows[:, 8], rows[:, 10]

        def is_supported(key: int) -> int:
            outer, inner, sp_bit = key >> 32, key >> 1 & 0x7FFFFFFF, key & 1
            if inner == 1:
                return 1
            layout = Layout(tp=outer, tp_inner=inner, sp=bool(sp_bit)) if outer % inner == 0 and inner < outer else None
            return layout is not None and explain_unsupported_2d(layout, model=self.model, job=self.job) is None

        return np.asarray(map_distinct(tp << 32 | tp_inner << 1 | sp, is_supported) == 1)

    def micro_batches(self, partials: PartialLayouts) -> Ints:
        """Return the micro-batches per pipeline of each partial layout, in the first step."""
        return np.asarray(self.job.batch(0) // (partials.dp * partials.mbs))

    def _list_shapes(self, pp: int) -> list[PipelineShape]:
        """Return the schedules of ``pp`` ranks with each v of ``list_virtual_stages``."""
        if pp == 1:
            return [PipelineShape(DEFAULT_SCHEDULE, 1, 1)]
        stage_counts = list_virtual_stages(self.model, pp=pp, most=self.most_stages)
        shapes = []
        for name in self.schedules:
            pipeline = PIPELINE_SCHEDULES[name]
            candidates_of_v = stage_counts if pipeline.stages_per_rank is None else [pipeline.stages_per_rank]
            if pp % 2 == 0 or not pipeline.enters_both_ends:
                shapes += [PipelineShape(name, pp, v) for v in candidates_of_v if pp * v <= self.most_stages]
        return shapes

    def can_run(self, shape: PipelineShape, micro_batches: Ints) -> NDArray[np.bool_]:
        """Return whether a schedule can run this number of micro-batches."""
        can_run = micro_batches >= shape.pipeline.min_rounds * shape.pp
        if shape.pp > 1:
            can_run &= can_simulate(shape.schedule, pp=shape.pp, v=shape.v, micro_batches=micro_batches)
        return can_run & (micro_batches % 2 == 0) if shape.pipeline.enters_both_ends else can_run

    def list_zeros(self, replicas: int, *, pp: int, cp: int) -> list[tuple[int, int]]:
        """Return pairs (ZeRO stage, shards) for dp·cp = ``replicas`` and ``pp`` stages.

        ``cp`` ranks share sequences.
        """
        if replicas == 1:
            pairs = [(zero, 1) for zero in (0, *list_zeros_alone(self.job)) if zero in (0, *self.stack.zero_with(pp))]
        else:
            sizes = list_divisors(replicas)[1:] if self.shard_groups else [replicas]
            sizes = [size for size in sizes if self.stack.can_express_shards(size, cp)]
            stages = [zero for zero in self.stack.expressible_zero(pp, cp) if zero >= 2 or not self.reduces_often]
            pairs = [(zero, size) for zero in stages for size in (sizes if zero else [1])]
        return [
            (zero, size)
            for zero, size in pairs
            if self.where.is_allowed("zero", zero)
            and self.where.is_allowed("shards", size)
            and explain_unsharded_base(self.model, self.job, tp=1, zero=zero, shards=size) is None
            and explain_unsupported_offload(self.job.offload, zero=zero, job=self.job) is None
        ]

    def _encode_zeros(self, partials: PartialLayouts) -> Ints:
        """Return the values on which ``zeros`` depends, as one number per partial layout."""
        cp = partials.cp if self.stack.cp_shards else np.ones_like(partials.cp)
        return np.asarray((partials.dp * partials.cp * CP_KEY_BASE + cp) * 2 + (partials.pp > 1))

    def _decode_zeros(self, key: int) -> list[tuple[int, int]]:
        if key not in self._zeros:
            replicas, cp = divmod(key // 2, CP_KEY_BASE)
            self._zeros[key] = self.list_zeros(replicas, pp=1 + key % 2, cp=cp)
        return self._zeros[key]

    def list_legal_orders(self, active: tuple[bool, ...], *, spread: bool = False, partly: bool = False) -> list[int]:
        """Return an index into ``orders`` for each legal order of the ``active`` axes; flags as in ``validity``."""
        key = active, spread, partly
        if key not in self._legal_orders:
            self._legal_orders[key] = self._find_legal_orders(*key)
        return self._legal_orders[key]

    def _find_legal_orders(self, active: tuple[bool, ...], spread: bool, partly: bool) -> list[int]:
        index_by_order: dict[tuple[str, ...], int] = {}
        active_axes = {axis for axis, is_active in zip(DEFAULT_ORDER, active, strict=True) if is_active}
        for index, order in enumerate(self.orders):
            active_order = tuple(axis for axis in order if axis in active_axes)
            is_default = active_order == tuple(axis for axis in DEFAULT_ORDER if axis in active_axes)
            if are_neighbours(active_order, spread=spread, partly=partly) and (self.usual_order or not is_default):
                index_by_order.setdefault(active_order, index)
        return list(index_by_order.values())

    def expand(self, partials: PartialLayouts, index: Ints) -> CandidateLayouts:
        """Return the partial layouts at ``index`` with every schedule; ZeRO and order stay 0."""
        chosen = partials.take(index)
        micro_batches = self.micro_batches(chosen)
        members = [
            np.flatnonzero((chosen.pp == shape.pp) & self.can_run(shape, micro_batches)) for shape in self.shapes
        ]
        partial = np.concatenate([index[rows] for rows in members])
        shape = np.repeat(np.arange(len(members)), [len(rows) for rows in members])
        zeros, ones = np.zeros_like(partial), np.ones_like(partial)
        return CandidateLayouts(partial, shape, zero=zeros, shards=ones, order=zeros, equal=ones)

    def shard(self, partials: PartialLayouts, candidates: CandidateLayouts) -> CandidateLayouts:
        """Return each candidate with every ZeRO stage and shard group."""
        keys = self._encode_zeros(partials)[candidates.partial]
        pieces = []
        for key in np.unique(keys):
            members = np.flatnonzero(keys == key)
            list_zeros = np.array(self._decode_zeros(int(key)), np.int64).reshape(-1, 2)
            zero, shards = np.tile(list_zeros, (len(members), 1)).T
            pieces.append(candidates.take(np.repeat(members, len(list_zeros)))._replace(zero=zero, shards=shards))
        return (
            CandidateLayouts(*(np.concatenate(columns) for columns in zip(*pieces, strict=True)))
            if pieces
            else candidates
        )

    def place(self, partials: PartialLayouts, candidates: CandidateLayouts) -> CandidateLayouts:
        """Return each candidate in every order."""
        return self.expand_orders(partials, candidates)[0]

    def expand_orders(self, partials: PartialLayouts, candidates: CandidateLayouts) -> tuple[CandidateLayouts, Ints]:
        """Return each candidate in every order, and the row of ``candidates`` that it was."""
        patterns = self._encode_patterns(partials.take(candidates.partial))
        rows, order_columns = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for pattern in np.unique(patterns):
            members = np.flatnonzero(patterns == pattern)
            orders = np.array(self._list_orders(int(pattern)))
            rows.append(np.repeat(members, len(orders)))
            order_columns.append(np.tile(orders, len(members)))
        index = np.concatenate(rows)
        return candidates.take(index)._replace(order=np.concatenate(order_columns)), index

    def place_first(self, partials: PartialLayouts, candidates: CandidateLayouts) -> CandidateLayouts:
        """Return each candidate in the first of its orders."""
        patterns = self._encode_patterns(partials.take(candidates.partial))
        return candidates._replace(order=map_distinct(patterns, lambda pattern: self._list_orders(pattern)[0]))

    def count_orders(self, partials: PartialLayouts) -> Ints:
        """Return the number of orders of each partial layout."""
        return map_distinct(self._encode_patterns(partials), lambda pattern: len(self._list_orders(pattern)))

    def _encode_patterns(self, partials: PartialLayouts) -> Ints:
        """Return the values on which legal orders depend, as bits: axes with more than one rank, and etp against tp."""
        bits = np.zeros(len(partials.dp), np.int64)
        for bit, axis in enumerate(DEFAULT_ORDER):
            bits |= (getattr(partials, axis) > 1).astype(np.int64) << bit
        separates_experts = (partials.etp < partials.tp) & (self.model.moe is not None)
        return (
            bits
            | separates_experts.astype(np.int64) << 4
            | (separates_experts & (partials.etp > 1)).astype(np.int64) << 5
        )

    def _list_orders(self, pattern: int) -> list[int]:
        active = tuple(bool(pattern >> bit & 1) for bit in range(len(DEFAULT_ORDER)))
        return self.list_legal_orders(active, spread=bool(pattern >> 4 & 1), partly=bool(pattern >> 5 & 1))

    @cached_property
    def layouts(self) -> int:
        """Return the number of layouts."""
        n_candidates = sum(int(self.count_candidates(partials).sum()) for partials in self.blocks) if self.shapes else 0
        return n_candidates * len(self.recomputations)

    def count_candidates(self, partials: PartialLayouts) -> Ints:
        """Return the number of candidates of each partial layout."""
        return self.count_shapes(partials) * self.count_zeros(partials) * self.count_orders(partials)

    def count_shapes(self, partials: PartialLayouts) -> Ints:
        """Return the number of schedules of each partial layout."""
        micro_batches = self.micro_batches(partials)
        counts = np.zeros(len(partials.dp), np.int64)
        for shape in self.shapes:
            counts += (partials.pp == shape.pp) & self.can_run(shape, micro_batches)
        return counts

    def count_zeros(self, partials: PartialLayouts) -> Ints:
        """Return the number of pairs of ZeRO stage and shard group of each partial layout."""
        return map_distinct(self._encode_zeros(partials), lambda key: len(self._decode_zeros(key)))

    def pick_layout(self, partials: PartialLayouts, partial: int) -> Layout:
        """Return one candidate of a partial layout: the first schedule that runs, the highest ZeRO stage."""
        partial_layout = partials.take(np.array([partial]))
        shape = next(
            index
            for index, candidate in enumerate(self.shapes)
            if candidate.pp == partial_layout.pp[0] and self.can_run(candidate, self.micro_batches(partial_layout))[0]
        )
        zero, shards = self._decode_zeros(int(self._encode_zeros(partial_layout)[0]))[-1]
        row = CandidateLayouts(*(np.array([value]) for value in (partial, shape, zero, shards, 0, 1)))
        return self.layout(partials, row, 0)

    def find_rows(self, partials: PartialLayouts, layout: Layout) -> Ints:
        """Return indices of the partial layouts with the degrees, micro-batch and recomputation of ``layout``."""
        matches = np.array([layout.ac == ac for ac in self.recomputations])[partials.ac]
        return np.flatnonzero(matches & select_degrees(partials, layout) & (partials.mbs == layout.mbs))

    def find(self, layout: Layout) -> Layout | None:
        """Return the layout of this space that equals ``layout`` but for axes of one rank in its order; None if none.

        Stages of unequal work, and recomputation on few pipeline ranks, are in no space.
        """
        shape = PipelineShape(layout.schedule, layout.pp, layout.v)
        if layout.ac not in self.recomputations or layout.stages or shape not in self.shapes:
            return None
        for block in self.blocks:
            is_equal = select_degrees(block, layout) & (block.mbs == layout.mbs) & (block.inner == layout.tp_inner)
            is_equal &= (block.kind == CP_KINDS.index(layout.cp_kind)) & (block.sp == layout.sp)
            if len(rows := np.flatnonzero(is_equal)):
                return self._find_candidate(self.expand_recomputations(block.take(rows[:1])), layout)
        return None

    def _find_candidate(self, partials: PartialLayouts, layout: Layout) -> Layout | None:
        """Return ``find`` for a layout whose partial layout, with every recomputation, is ``partials``."""
        shape = PipelineShape(layout.schedule, layout.pp, layout.v)
        zero = (layout.zero, layout.shards)
        can_run = self.can_run(shape, self.micro_batches(partials))[0]
        if not can_run or zero not in self._decode_zeros(int(self._encode_zeros(partials)[0])):
            return None
        place = self.recomputations.index(layout.ac), self.shapes.index(shape), *zero, 0, 1
        candidates = self.place(partials, CandidateLayouts(*(np.array([value]) for value in place)))
        layouts = (self.layout(partials, candidates, row) for row in range(len(candidates.order)))
        return next((known for known in layouts if _get_active_order(known) == _get_active_order(layout)), None)

    def layout(self, partials: PartialLayouts, candidates: CandidateLayouts, row: int) -> Layout:
        """Return the candidate in row ``row`` as a ``Layout``."""
        partial = candidates.partial[row]
        dp, tp, cp, pp, ep, etp, mbs, kind, sp, ac, inner = [int(column[partial]) for column in partials]
        shape = self.shapes[candidates.shape[row]]
        zero = int(candidates.zero[row])
        shards = int(candidates.shards[row])
        return Layout.construct_legal(
            dp=dp,
            tp=tp,
            tp_inner=inner,
            cp=cp,
            pp=pp,
            ep=ep,
            etp=etp,
            mbs=mbs,
            v=shape.v,
            schedule=shape.schedule,
            zero=zero,
            shard_group=None if zero == 0 or shards == dp * cp else shards,
            cp_kind=CP_KINDS[kind],
            sp=bool(sp),
            ac=self.recomputations[ac],
            order=self.orders[int(candidates.order[row])],
        )


def _get_active_order(layout: Layout) -> tuple[MeshAxis, ...]:
    """Return the order of the axes that have more than one rank."""
    return tuple(axis for axis in layout.order if getattr(layout, axis) > 1)
