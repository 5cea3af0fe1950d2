"""Caches of everything counted for one model and job: operations, live bytes, states and stages of each layout.

Layers of one kind share their operations, profile and states. A stage is a sequence of groups of consecutive layers
that are equal in memory (``list_stage_groups``), or a number of layers of each kind of work (``stage_work``).
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from fivefold.adapter import HEAD
from fivefold.job import Job
from fivefold.layout.sharding import FsdpUnit as Sharded
from fivefold.layout.sharding import reduces_every_micro_batch
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_recomputed_layers, list_recomputed_stages, list_stage_layers
from fivefold.model.spec import Model
from fivefold.model.vision_weights import list_vision_weights
from fivefold.model.weights import (
    Weight,
    list_block_weights,
    list_embedding_factors,
    list_embedding_weights,
    list_head_factors,
    list_head_weights,
    mark_frozen,
    resolve_freeze,
    with_adapters,
)
from fivefold.planner.counts.cache import Cache, Caches
from fivefold.planner.counts.memory.liveness import (
    NO_SUMS,
    NO_WAITING,
    GradientSums,
    SimulatedUnit,
    SplitUnitProfile,
    UnitProfile,
    WaitingGradients,
    simulate_graph_backward,
    simulate_split_backward,
    simulate_unit,
)
from fivefold.planner.counts.memory.states import UnitStates, count_part_states, list_local_units, shard_unit
from fivefold.planner.counts.operations.fused_adapters import fuse_adapted_linears
from fivefold.planner.counts.operations.fused_linears import fuse_linears
from fivefold.planner.counts.operations.layer import Kind, list_kinds, merge_windows
from fivefold.planner.counts.operations.linear import has_fused_wgrad_accumulation
from fivefold.planner.counts.operations.local_shapes import Local, LocalDegrees
from fivefold.planner.counts.operations.op import Op, count_largest_scratch
from fivefold.planner.counts.operations.recompute import UnitOperations
from fivefold.planner.counts.operations.unit_cache import UnitCache

Name = Kind | str  # a kind of block, or "embed" or "head"


class UnitGroup(NamedTuple):
    """Consecutive equal units of a stage, counted once and multiplied: ``times`` of them, the first at layer ``first``.

    ``recomputed`` says that they are recomputed; ``has_moe_mtp`` that a head holds MTP modules with experts.
    """

    name: Name
    first: int
    times: int
    recomputed: bool = False
    has_moe_mtp: bool = False

    @property
    def routes(self) -> bool:
        """Return True if the unit holds routed experts."""
        return self.name.moe if isinstance(self.name, Kind) else self.has_moe_mtp

    def name_unit(self, index: int) -> str:
        """Return the name for reports of the unit at ``index`` in the group: ``embed``, ``head``, or ``block N``."""
        return self.name if isinstance(self.name, str) else f"block {self.first + index}"


PROFILES = 50_000  # cached profiles of live bytes: small records, but each takes a simulated backward


class Counts:
    """The counts of one model and job, cached; the returned values are shared and must not be changed."""

    def __init__(self, model: Model, job: Job) -> None:
        self.model, self.job = model, job
        self._shapes: Cache[tuple[LocalDegrees, Name], frozenset[tuple[int, int]]] = Cache()
        self._largest: Cache[tuple[LocalDegrees, Name], list[int]] = Cache()
        self._logits: Cache[LocalDegrees, int] = Cache()
        self._profiles: Cache[tuple[LocalDegrees, Name, GradientSums], UnitProfile] = Cache(PROFILES)
        self._simulated: Cache[tuple[LocalDegrees, Name], SimulatedUnit] = Cache()
        self._splits: Cache[tuple[LocalDegrees, Name, GradientSums, WaitingGradients], SplitUnitProfile] = Cache(
            PROFILES
        )
        self._states: dict[tuple[object, ...], tuple[UnitStates, tuple[UnitStates, ...]]] = {}
        self._parts: dict[tuple[object, ...], UnitStates] = {}
        self._local: dict[tuple[object, ...], tuple[Sharded, ...]] = {}
        self._weights: dict[tuple[Name, bool], list[Weight]] = {}
        self._work: dict[tuple[object, ...], tuple[tuple[tuple[UnitGroup, int], ...], ...]] = {}
        self._first_equal_stages: dict[tuple[object, ...], tuple[int, ...]] = {}
        self.caches = Caches()  # of the modules that count from these counts
        self._groups: dict[tuple[object, ...], tuple[tuple[UnitGroup, ...], ...]] = {}
        self.frozen, kinds = resolve_freeze(model, job.freeze), list_kinds(model, job)
        self.kinds = tuple(kinds)
        representatives = dict[Kind, Kind]()
        self.representatives = {  # of kinds that keep equally many bytes, the first
            kind: representatives.setdefault(merge_windows(model, layer, kind), kind)
            for layer, kind in enumerate(kinds)
        }
        self.example = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}  # first layer of each kind
        self._units = UnitCache(model, job, self.example)

    @property
    def trains_table(self) -> bool:
        """Tell whether the embedding's table is trained."""
        if self.job.adapter is not None:
            return "embed_tokens" in self.job.adapter.modules_to_save
        return "embed_tokens" not in self.frozen.ends

    def get_local(self, part: LocalDegrees) -> Local:
        """Return the model's local sizes on one rank."""
        return self._units.get_local(part)

    def unit(self, part: LocalDegrees, name: Name) -> UnitOperations:
        """Return the operations of a unit."""
        return self._units.unit(part, name)

    def list_ops(self, part: LocalDegrees, name: Name) -> tuple[Op, ...]:
        """Return the operations of a unit without its own tensor names.

        Equal operations of two units may be one object.
        """
        return self._units.list_ops(part, name)

    def profile(self, part: LocalDegrees, name: Name, sums: GradientSums = NO_SUMS) -> UnitProfile:
        """Return the live bytes of a unit's forward and backward; ``sums`` as in ``liveness.simulate_unit``."""
        key = part, name, sums
        profile = self._profiles.get(key)
        if profile is None:
            profile = self._profiles[key] = simulate_unit(self._get_simulated_unit(part, name), sums=sums)
        return profile

    def profile_deferred_wgrad(
        self, part: LocalDegrees, name: Name, sums: GradientSums = NO_SUMS, *, waiting: WaitingGradients = NO_WAITING
    ) -> SplitUnitProfile:
        """Return the live bytes of a unit whose weight gradients (W) are deferred.

        ``waiting`` as in ``liveness.simulate_split_backward``.
        """
        key = part, name, sums, waiting
        split_profile = self._splits.get(key)
        if split_profile is None:
            unit = self._get_simulated_unit(part, name)
            graph = self.job.stack.deferred_wgrad == "graph"
            split_profile = (
                simulate_graph_backward(unit, sums=sums)
                if graph
                else simulate_split_backward(unit, sums=sums, waiting=waiting)
            )
            self._splits[key] = split_profile
        return split_profile

    def keeps_input(self, part: LocalDegrees, name: Name) -> bool:
        """Tell whether an operation of a block keeps the block's input for its backward."""
        simulated = self._get_simulated_unit(part, name)
        return simulated.input_name in simulated.forward.keeper_counts.keys() - simulated.unit.dropped

    def _get_simulated_unit(self, part: LocalDegrees, name: Name) -> SimulatedUnit:
        """Return the operations of a unit as one pass runs them, with what enters it."""
        key = part, name
        simulated = self._simulated.get(key)
        if simulated is None:
            simulated = self._simulated[key] = self._make_simulated_unit(part, name)
        return simulated

    def _make_simulated_unit(self, part: LocalDegrees, name: Name) -> SimulatedUnit:
        """Return a unit with the linear layers that the trainer runs as one operation, if it is the trainer's."""
        local, width = self.get_local(part), self._get_gradient_width(name)
        input_name, input_bytes = ("ids", local.ids_bytes) if name == "embed" else ("x", local.entry_bytes)
        unit = self.unit(part, name)
        adapter = self.job.adapter
        is_plain = adapter is None or (name == "head" and not adapter.has_target(HEAD))
        if self.job.stack.kernel_facts.fuses_linears:
            inputs = {input_name: input_bytes}
            unit = (
                fuse_linears(unit, width=width) if is_plain else fuse_adapted_linears(unit, width=width, inputs=inputs)
            )
        return SimulatedUnit(unit, input_name, input_bytes, width, borrower=self._get_borrower(part, name))

    def _get_borrower(self, part: LocalDegrees, name: Name) -> SimulatedUnit | None:
        """Return the next block if it adds the output of the experts of this one."""
        if not isinstance(name, Kind) or not self.model.lends_experts(self.example[name]):
            return None
        return self._get_simulated_unit(part, self.kinds[self.example[name] + 1])

    def _get_gradient_width(self, name: Name) -> int:
        """Return the bytes of an element of the weight gradients that a unit makes; its ends have modules to save."""
        saved = () if self.job.adapter is None else self.job.adapter.modules_to_save
        is_saved = ("embed_tokens" in saved and name == "embed") or ("lm_head" in saved and name == "head")
        return (self.job.saved_precision if is_saved else self.job.precision).gradients_bytes

    def fused_wgrad_shapes(self, part: LocalDegrees, name: Name) -> frozenset[tuple[int, int]]:
        """Return the (out, in) shapes of a block's weights whose matmul fuses the gradient's accumulation."""
        key = part, name
        if key not in self._shapes:
            ops = () if isinstance(name, str) else self.unit(part, name).ops
            trained = [op for op in ops if op.wgrad_numels or not self.job.freezes_text]
            self._shapes[key] = frozenset(
                (op.shape[1], op.shape[2]) for op in trained if has_fused_wgrad_accumulation(op)
            )
        return self._shapes[key]

    def largest_tensors(self, part: LocalDegrees, name: Name) -> list[int]:
        """Return the bytes of the two largest tensors that one unit makes: activations, weight gradients, scratch."""
        key = part, name
        if key not in self._largest:
            width = self._get_gradient_width(name)
            sizes = [
                size
                for op in self.unit(part, name).ops
                for size in (*op.writes.values(), *(width * n for n in op.wgrad_numels), count_largest_scratch(op))
            ]
            self._largest[key] = sorted(sizes, reverse=True)[:2]
        return self._largest[key]

    def logits(self, part: LocalDegrees) -> int:
        """Return the bytes of the logits tensor; 0 if the loss is chunked."""
        if part not in self._logits:
            self._logits[part] = sum(
                size
                for op in self.unit(part, "head").ops
                for name, size in op.writes.items()
                if name.endswith("logits")
            )
        return self._logits[part]

    def states(self, layout: Layout, name: Name) -> UnitStates:
        """Return the bytes of a unit's states (weights, gradients, optimizer) on one rank."""
        return self.states_with_parts(layout, name)[0]

    def parts(self, layout: Layout, name: Name) -> tuple[UnitStates, ...]:
        """Return ``states`` split as it is gathered and reduced: dense weights, experts."""
        return self.states_with_parts(layout, name)[1]

    def states_with_parts(self, layout: Layout, name: Name) -> tuple[UnitStates, tuple[UnitStates, ...]]:
        """Return ``states`` and ``parts``."""
        key = name, self.states_key(layout)
        if key not in self._states:
            weights = self.weights(layout, name)
            local = self.list_local_parts(layout, name)
            # a tied head without a norm has no weights
            parts = tuple(self._count_part_states(layout, unit, weights, shards=shards) for unit, shards, _ in local)
            parts = parts or (UnitStates(),)
            self._states[key] = sum(parts, start=UnitStates()), parts
        return self._states[key]

    def count_kind_states(self, layout: Layout, name: Name, *, experts: bool) -> UnitStates:
        """Return the states of a unit's experts, or of its other weights."""
        weights = self.weights(layout, name)
        parts = (
            self._count_part_states(layout, unit, weights, shards=shards)
            for unit, shards, _ in self.list_local_parts(layout, name)
            if (unit.name == "experts") == experts
        )
        return sum(parts, start=UnitStates())

    def count_table_states(self, layout: Layout) -> UnitStates:
        """Return the states of the embedding's tables, without those of a vision tower next to them."""
        return self.parts(layout, "embed")[-1]

    def list_local_parts(self, layout: Layout, name: Name) -> tuple[tuple[Sharded, int, int], ...]:
        """Return a unit's dense and expert weights on one rank, each with its numbers of shards and replicas."""
        key = (
            name,
            self.model.shares_table and ends_on_different_ranks(layout),
            layout.tp,
            layout.tp_inner,
            layout.ep,
            layout.etp,
        )
        if key not in self._local:
            weights = self.weights(layout, name)
            self._local[key] = list_local_units(weights, model=self.model, layout=layout, job=self.job)
        return tuple(shard_unit(unit, layout) for unit in self._local[key])

    def _count_part_states(self, layout: Layout, unit: Sharded, weights: list[Weight], *, shards: int) -> UnitStates:
        """Return the states of dense weights or of experts.

        Dense weights are counted once for all expert degrees, and experts once for all degrees of the dense weights.
        """
        key = (
            unit,
            shards,
            layout.zero,
            layout.shards > 1,
            layout.pp == 1,
            layout.offload,
            *self._make_offload_key(layout),
        )
        part_states_bytes = self._parts.get(key)
        if part_states_bytes is None:
            part_states_bytes = count_part_states(unit, unsharded=weights, shards=shards, layout=layout, job=self.job)
            self._parts[key] = part_states_bytes
        return part_states_bytes

    def _make_offload_key(self, layout: Layout) -> tuple[bool, bool]:
        """Return the values of a layout that decide what remains on the device where something is offloaded."""
        is_alone = layout.dp * layout.cp == 1
        return is_alone, bool(layout.offload or self.job.offload) and layout.micro_batches(self.job) == 1

    def adds_table_gradient(self, layout: Layout) -> bool:
        """Return True if the head adds its gradient of a tied table directly to the embedding's, on the same rank."""
        return (
            self.model.shares_table
            and not ends_on_different_ranks(layout)
            and self.job.stack.kernel_facts.adds_to_table
        )

    def reduces_every_micro_batch(self, layout: Layout, name: Name = "") -> bool:
        """Return True if the gradients of the unit ``name`` are reduced after every backward.

        A tied table whose ends are two stages of one rank has other passes between its two gradients, and is reduced
        after the last.
        """
        waits = name == "embed" and layout.pp > 1 and self.model.shares_table and not ends_on_different_ranks(layout)
        return reduces_every_micro_batch(layout, self.job) and not waits

    def states_key(self, layout: Layout) -> tuple[object, ...]:
        """Return the values of a layout that states depend on."""
        return (
            layout.tp,
            layout.tp_inner,
            layout.ep,
            layout.etp,
            layout.zero,
            layout.shards,
            layout.expert_shards,
            layout.dp * layout.cp,
            self.model.shares_table and ends_on_different_ranks(layout),
            self.job.stack.zero2_shards == "separate" and layout.pp == 1,
            layout.offload,
            *self._make_offload_key(layout),
        )

    def make_stage_key(self, layout: Layout) -> tuple[object, ...]:
        """Return the values of a layout that the units of its stages depend on."""
        recomputed = (
            bool(layout.recomputed_operations)
            if layout.recompute_ranks == layout.pp
            else list_recomputed_stages(layout)
        )
        return layout.pp * layout.v, layout.stages, layout.recompute_every, recomputed

    def weights(self, layout: Layout, name: Name) -> list[Weight]:
        """Return a unit's unsharded weights; a tied table is in both ends if embedding and head are on two ranks."""
        has_table = name == "head" and self.model.shares_table and ends_on_different_ranks(layout)
        key = name, has_table
        if key not in self._weights:
            self._weights[key] = self._list_weights(name, has_table=has_table)
        return self._weights[key]

    def _list_weights(self, name: Name, *, has_table: bool) -> list[Weight]:
        """Return ``weights``; ``has_table``: the head has a copy of the embedding's table."""
        if name == "embed":
            tower = list_vision_weights(self.model.vision) if self.job.images and self.model.vision else ()
            embedding = mark_frozen(list_embedding_weights(self.model), self.frozen.ends)
            return [*tower, *embedding, *list_embedding_factors(self.model, self.job.adapter)]
        if name == "head":
            table = list(list_embedding_weights(self.model))[:1] if has_table else ()
            factors = list_head_factors(self.model, self.job.adapter)
            return list(mark_frozen((*list_head_weights(self.model), *factors, *table), self.frozen.ends))
        assert isinstance(name, Kind)
        block = mark_frozen(list_block_weights(self.model, self.example[name]), name.frozen)
        adapter, merged = self.job.adapter, self.job.stack.merges_adapters
        return list(block if adapter is None else with_adapters(self.model, block, adapter, merged=merged))

    def has_backward(self, name: Name) -> bool:
        """Tell whether a unit has a backward, as it or a unit below it is trained; that of an embedding makes no dx."""
        return not (isinstance(name, Kind) and name.is_below)

    def list_stage_groups(self, layout: Layout) -> tuple[tuple[UnitGroup, ...], ...]:
        """Return the units of each of the pp·v stages, in model order, as groups of units equal in memory."""
        key = self.make_stage_key(layout)
        if key not in self._groups:
            stages = list_stage_layers(self.model, layout)
            recomputed_flags = list_recomputed_layers(self.model, layout)
            self._groups[key] = tuple(
                self._stage(layers, layout, recomputed_flags, first=index == 0, last=index == len(stages) - 1)
                for index, layers in enumerate(stages)
            )
        return self._groups[key]

    def stage_work(self, layout: Layout) -> tuple[tuple[tuple[UnitGroup, int], ...], ...]:
        """Return the distinct units of each stage and their number; layers with and without a window are distinct."""
        key = self.make_stage_key(layout)
        if key not in self._work:
            stages = list_stage_layers(self.model, layout)
            recomputed_flags = list_recomputed_layers(self.model, layout)
            stage_units = []
            for index, layers in enumerate(stages):
                tally = Counter((self.kinds[layer], recomputed_flags[layer]) for layer in layers)
                work = [
                    (UnitGroup(kind, self.example[kind], 1, is_recomputed), times)
                    for (kind, is_recomputed), times in tally.items()
                ]
                ends = [(UnitGroup("embed", 0, 1), 1)] if index == 0 else []
                work = [*ends, *work, *([(self.head(layout), 1)] if index == len(stages) - 1 else [])]
                stage_units.append(tuple(work))
            self._work[key] = tuple(stage_units)
        return self._work[key]

    def tally_units(self, layout: Layout) -> Counter[UnitGroup]:
        """Return the distinct units of all stages and their number."""
        tally: Counter[UnitGroup] = Counter()
        for stage in self.stage_work(layout):
            for unit, times in stage:
                tally[unit] += times
        return tally

    def equal_stages(self, layout: Layout) -> tuple[int, ...]:
        """Return, for each of the pp·v stages, the first stage with an equal ``stage_work``."""
        key = self.make_stage_key(layout)
        if key not in self._first_equal_stages:
            first: dict[object, int] = {}
            self._first_equal_stages[key] = tuple(
                first.setdefault(work, stage) for stage, work in enumerate(self.stage_work(layout))
            )
        return self._first_equal_stages[key]

    def _stage(
        self, layers: range, layout: Layout, is_recomputed: tuple[bool, ...], *, first: bool, last: bool
    ) -> tuple[UnitGroup, ...]:
        """Return the groups of equal units of one stage; ``first`` adds the embedding, ``last`` the head."""
        groups = [UnitGroup("embed", 0, 1)] if first else []
        for layer in layers:
            kind = self.representatives[self.kinds[layer]]
            if groups and groups[-1].name == kind and groups[-1].recomputed == is_recomputed[layer]:
                groups[-1] = groups[-1]._replace(times=groups[-1].times + 1)
            else:
                groups.append(UnitGroup(kind, layer, 1, is_recomputed[layer]))
        return (*groups, self.head(layout)._replace(first=self.model.layers)) if last else tuple(groups)

    def head(self, layout: Layout) -> UnitGroup:
        """Return the head as a group of one unit; its multi-token prediction blocks are recomputed if its stage is."""
        is_recomputed = list_recomputed_stages(layout)[-1] and self.model.mtp is not None
        return UnitGroup("head", 0, 1, is_recomputed, self.count_moe_layers("head") > 0)

    def count_moe_layers(self, name: Name) -> int:
        """Return the number of mixture-of-experts layers in a unit."""
        if name == "head":
            first = self.model.layers  # a pattern may make some multi-token prediction modules dense
            return sum(map(self.model.is_moe, range(first, first + self.model.mtp_depth)))
        return int(isinstance(name, Kind) and name.moe)


def ends_on_different_ranks(layout: Layout) -> bool:
    """Return True if embedding and head are on two different ranks."""
    return layout.pp > 1 and not layout.pipeline.joins_ends


def get_group_degrees(degrees: LocalDegrees, group: UnitGroup) -> LocalDegrees:
    """Return the degrees that matter to a group of units.

    Recomputation counts only if the group is recomputed, expert degrees only if it holds experts, a pipeline only for
    the head.
    """
    ep, etp = (degrees.ep, degrees.etp) if group.routes else (1, 1)
    recomputed_groups: frozenset[str] = degrees.recomputed if group.recomputed else frozenset()
    return LocalDegrees(
        degrees.sequences,
        degrees.cp,
        degrees.ulysses,
        degrees.tp,
        degrees.tp_inner,
        degrees.sp,
        ep,
        etp,
        recomputed_groups,
        degrees.piped and group.name == "head",
    )
