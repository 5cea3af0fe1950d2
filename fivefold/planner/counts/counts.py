"""Caches of everything counted for one model and job, by part and layout: operations, live bytes, states, stages.

Layers of one kind share their operations, profile and states. A stage is a sequence of runs of layers equal in memory
(``stage_runs``), or a number of layers of each kind of work (``stage_work``).
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.sharding import Unit as Sharded
from fivefold.layout.sharding import reduces_each
from fivefold.layout.spec import Layout
from fivefold.layout.stages import recomputed_layers, recomputed_stages, stage_layers
from fivefold.model.spec import Model
from fivefold.model.weights import Weight, block_weights, embedding_weights, head_weights
from fivefold.planner.counts.cache import Cache, Caches
from fivefold.planner.counts.memory.liveness import (
    NO_SUMS,
    NO_WAITS,
    EnteredUnit,
    Profile,
    SplitProfile,
    Sums,
    Waits,
    play,
    play_graph,
    play_split,
)
from fivefold.planner.counts.memory.states import UnitStates, local_units, part_states, sharded
from fivefold.planner.counts.operations.fused_linears import fuse_linears
from fivefold.planner.counts.operations.layer import Kind, kind_of
from fivefold.planner.counts.operations.linear import sums_itself
from fivefold.planner.counts.operations.local_shapes import Local, Part
from fivefold.planner.counts.operations.op import Op, scratch_tensor
from fivefold.planner.counts.operations.recompute import Unit
from fivefold.planner.counts.operations.unit_cache import Built

Name = Kind | str  # a kind of block, or "embed" or "head"


class Run(NamedTuple):
    """``times`` equal units in a row, the first at layer ``first``; ``recomputed``: whether they are recomputed;
    ``further``: of a head, whether blocks of experts predict further tokens in it.
    """

    name: Name
    first: int
    times: int
    recomputed: bool = False
    further: bool = False

    @property
    def routes(self) -> bool:
        """Whether the unit holds experts."""
        return self.name.moe if isinstance(self.name, Kind) else self.further

    def called(self, index: int) -> str:
        """Name for reports of the unit at ``index`` in the run: ``embed``, ``head``, or ``block N``."""
        return self.name if isinstance(self.name, str) else f"block {self.first + index}"


PROFILES = 50_000  # live bytes of units that are remembered: small records, for which a unit's backward is played


class Counts:
    """Caches for one model and job; what they return is shared and must not be changed."""

    def __init__(self, model: Model, job: Job) -> None:
        self.model, self.job = model, job
        self._shapes: Cache[tuple[Part, Name], frozenset[tuple[int, int]]] = Cache()
        self._largest: Cache[tuple[Part, Name], list[int]] = Cache()
        self._logits: Cache[Part, int] = Cache()
        self._profiles: Cache[tuple[Part, Name, Sums], Profile] = Cache(PROFILES)
        self._splits: Cache[tuple[Part, Name, Sums, Waits], SplitProfile] = Cache(PROFILES)
        self._states: dict[tuple[object, ...], tuple[UnitStates, tuple[UnitStates, ...]]] = {}
        self._parts: dict[tuple[object, ...], UnitStates] = {}
        self._local: dict[tuple[object, ...], tuple[Sharded, ...]] = {}
        self._work: dict[tuple[object, ...], tuple[tuple[tuple[Run, int], ...], ...]] = {}
        self._alike: dict[tuple[object, ...], tuple[int, ...]] = {}
        self.caches = Caches()  # of modules that count from what is counted here
        self._runs: dict[tuple[object, ...], tuple[tuple[Run, ...], ...]] = {}
        kinds = [kind_of(model, layer) for layer in range(model.layers)]
        self.kinds = tuple(kinds)
        self.alike = {kind.alike: kind for kind in reversed(kinds)}
        self.example = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}  # its first layer
        self._built = Built(model, job, self.example)

    def local(self, part: Part) -> Local:
        """The model's local sizes on one rank."""
        return self._built.local(part)

    def unit(self, part: Part, name: Name) -> Unit:
        """The operations of a unit."""
        return self._built.unit(part, name)

    def in_order(self, part: Part, name: Name) -> tuple[Op, ...]:
        """As ``unit``, without the tensors' names: equal operations of two units may be the same."""
        return self._built.in_order(part, name)

    def profile(self, part: Part, name: Name, sums: Sums = NO_SUMS) -> Profile:
        """Live bytes of a unit's forward and backward; ``sums`` as in ``liveness.play``."""
        key = part, name, sums
        found = self._profiles.get(key)
        if found is None:
            found = self._profiles[key] = play(self._entered_unit(part, name), sums=sums)
        return found

    def split(self, part: Part, name: Name, sums: Sums = NO_SUMS, *, waits: Waits = NO_WAITS) -> SplitProfile:
        """Live bytes of a unit whose weight gradients (W) are deferred; ``waits`` as in ``liveness.play_split``."""
        key = part, name, sums, waits
        found = self._splits.get(key)
        if found is None:
            unit = self._entered_unit(part, name)
            graph = self.job.stack.deferred == "graph"
            found = play_graph(unit, sums=sums) if graph else play_split(unit, sums=sums, waits=waits)
            self._splits[key] = found
        return found

    def _entered_unit(self, part: Part, name: Name) -> EnteredUnit:
        """Return the operations of a unit as one pass runs them, with what enters it."""
        local, width = self.local(part), self.job.precision.gradients_bytes
        entry, size = ("ids", local.ids_bytes) if name == "embed" else ("x", local.entry_bytes)
        unit = self.unit(part, name)
        unit = fuse_linears(unit, width=width) if self.job.stack.kernel_facts.fuses_linears else unit
        return EnteredUnit(unit, entry=entry, entry_bytes=size, gradient_width=width)

    def shapes(self, part: Part, name: Name) -> frozenset[tuple[int, int]]:
        """(out, in) shapes of a block's weights whose matmul accumulates the gradient itself (fused wgrad)."""
        key = part, name
        if key not in self._shapes:
            ops = () if isinstance(name, str) else self.unit(part, name).ops
            self._shapes[key] = frozenset((op.shape[1], op.shape[2]) for op in ops if sums_itself(op))
        return self._shapes[key]

    def largest(self, part: Part, name: Name) -> list[int]:
        """Bytes of the two largest tensors that one unit makes: activations, weight gradients, scratch."""
        key = part, name
        if key not in self._largest:
            width = self.job.precision.gradients_bytes
            sizes = [
                size
                for op in self.unit(part, name).ops
                for size in (*op.writes.values(), *(width * n for n in op.gradient_widths), scratch_tensor(op))
            ]
            self._largest[key] = sorted(sizes, reverse=True)[:2]
        return self._largest[key]

    def logits(self, part: Part) -> int:
        """Bytes of the logits tensor; 0 where the loss is chunked."""
        if part not in self._logits:
            self._logits[part] = sum(
                size
                for op in self.unit(part, "head").ops
                for name, size in op.writes.items()
                if name.endswith("logits")
            )
        return self._logits[part]

    def states(self, layout: Layout, name: Name) -> UnitStates:
        """Bytes of a unit's states (weights, gradients, optimizer) on one rank."""
        return self._states_of(layout, name)[0]

    def parts(self, layout: Layout, name: Name) -> tuple[UnitStates, ...]:
        """``states`` split as it is gathered and reduced: dense weights, experts."""
        return self._states_of(layout, name)[1]

    def _states_of(self, layout: Layout, name: Name) -> tuple[UnitStates, tuple[UnitStates, ...]]:
        key = name, self.states_key(layout)
        if key not in self._states:
            weights = self.weights(layout, name)
            local = self.local_parts(layout, name)
            parts = tuple(self._part_states(layout, unit, weights, shards=shards) for unit, shards, _ in local)
            self._states[key] = sum(parts, start=UnitStates()), parts
        return self._states[key]

    def local_parts(self, layout: Layout, name: Name) -> tuple[tuple[Sharded, int, int], ...]:
        """Dense and expert weights of a unit on one rank, each with its number of shards and of replicas of them."""
        key = name, self.model.shares_table and apart(layout), layout.tp, layout.tp_inner, layout.ep, layout.etp
        if key not in self._local:
            weights = self.weights(layout, name)
            self._local[key] = local_units(weights, model=self.model, layout=layout, job=self.job)
        return tuple(sharded(unit, layout) for unit in self._local[key])

    def _part_states(self, layout: Layout, unit: Sharded, weights: list[Weight], *, shards: int) -> UnitStates:
        """Those of dense weights once for all ways to cut experts, and of experts for all ways to cut dense weights."""
        key = unit, shards, layout.zero, layout.shards > 1, layout.pp == 1, layout.offload
        found = self._parts.get(key)
        if found is None:
            found = part_states(unit, uncut=weights, shards=shards, layout=layout, job=self.job)
            self._parts[key] = found
        return found

    def adds(self, layout: Layout) -> bool:
        """Whether the head adds its gradient of a shared table directly to the embedding's sums, on the same rank."""
        return self.model.shares_table and not apart(layout) and self.job.stack.kernel_facts.adds_to_table

    def reduces_each(self, layout: Layout, name: Name = "") -> bool:
        """Whether gradients (of the unit ``name``) are reduced after every backward. A tied table between whose two
        gradients other passes lie, as its ends are two stages of one rank, waits for the last.
        """
        waits = name == "embed" and layout.pp > 1 and self.model.shares_table and not apart(layout)
        return reduces_each(layout, self.job) and not waits

    def states_key(self, layout: Layout) -> tuple[object, ...]:
        """The values of a layout on which states depend."""
        return (layout.tp, layout.tp_inner, layout.ep, layout.etp, layout.zero, layout.shards, layout.expert_shards,
                layout.dp * layout.cp, self.model.shares_table and apart(layout),
                self.job.stack.shards == "beside" and layout.pp == 1, layout.offload)  # fmt: skip

    def stage_key(self, layout: Layout) -> tuple[object, ...]:
        """The values of a layout on which the units of its stages depend."""
        again = bool(layout.recomputed) if layout.recompute_ranks == layout.pp else recomputed_stages(layout)
        return layout.pp * layout.v, layout.stages, layout.recompute_every, again

    def weights(self, layout: Layout, name: Name) -> list[Weight]:
        """The unsharded weights of a unit; if embedding and head are on two ranks, a shared table is in both."""
        if name == "embed":
            return list(embedding_weights(self.model))
        if name == "head":
            shared = self.model.shares_table and apart(layout)
            return [*head_weights(self.model), *(list(embedding_weights(self.model))[:1] if shared else ())]
        assert isinstance(name, Kind)
        return list(block_weights(self.model, self.example[name]))

    def stage_runs(self, layout: Layout) -> tuple[tuple[Run, ...], ...]:
        """Units of each of the pp·v stages, in model order, as runs of units equal in memory."""
        key = self.stage_key(layout)
        if key not in self._runs:
            stages, again = stage_layers(self.model.layers, layout), recomputed_layers(self.model.layers, layout)
            self._runs[key] = tuple(
                self._stage(layers, layout, again, first=index == 0, last=index == len(stages) - 1)
                for index, layers in enumerate(stages)
            )
        return self._runs[key]

    def stage_work(self, layout: Layout) -> tuple[tuple[tuple[Run, int], ...], ...]:
        """Distinct units of each stage and their number; layers with and without a window are distinct here."""
        key = self.stage_key(layout)
        if key not in self._work:
            stages, again = stage_layers(self.model.layers, layout), recomputed_layers(self.model.layers, layout)
            found = []
            for index, layers in enumerate(stages):
                tally = Counter((self.kinds[layer], again[layer]) for layer in layers)
                work = [(Run(kind, self.example[kind], 1, each), times) for (kind, each), times in tally.items()]
                ends = [(Run("embed", 0, 1), 1)] if index == 0 else []
                work = [*ends, *work, *([(self.head(layout), 1)] if index == len(stages) - 1 else [])]
                found.append(tuple(work))
            self._work[key] = tuple(found)
        return self._work[key]

    def alike_work(self, layout: Layout) -> tuple[int, ...]:
        """Of each of the pp·v stages the first one with an equal ``stage_work``."""
        key = self.stage_key(layout)
        if key not in self._alike:
            first: dict[object, int] = {}
            self._alike[key] = tuple(
                first.setdefault(work, stage) for stage, work in enumerate(self.stage_work(layout))
            )
        return self._alike[key]

    def _stage(
        self, layers: range, layout: Layout, again: tuple[bool, ...], *, first: bool, last: bool
    ) -> tuple[Run, ...]:
        runs = [Run("embed", 0, 1)] if first else []
        for layer in layers:
            kind = self.alike[self.kinds[layer].alike]
            if runs and runs[-1].name == kind and runs[-1].recomputed == again[layer]:
                runs[-1] = runs[-1]._replace(times=runs[-1].times + 1)
            else:
                runs.append(Run(kind, layer, 1, again[layer]))
        return (*runs, self.head(layout)._replace(first=self.model.layers)) if last else tuple(runs)

    def head(self, layout: Layout) -> Run:
        """The run of the head; its blocks of multi-token prediction are recomputed if its stage is."""
        again = recomputed_stages(layout)[-1] and self.model.mtp is not None
        return Run("head", 0, 1, again, self.routed("head") > 0)

    def routed(self, name: Name) -> int:
        """Number of mixtures of experts in a unit."""
        if name == "head":
            first = self.model.layers  # a pattern may make some modules of multi-token prediction dense
            return sum(map(self.model.is_moe, range(first, first + self.model.predicted)))
        return int(isinstance(name, Kind) and name.moe)


def apart(layout: Layout) -> bool:
    """Whether embedding and head are on two different ranks."""
    return layout.pp > 1 and not layout.pipeline.joins_ends


def run_part(part: Part, run: Run) -> Part:
    """What of ``part`` matters to a run: recomputation if it is recomputed, degrees of experts if it holds any, a
    pipeline if it is the head.
    """
    ep, etp = (part.ep, part.etp) if run.routes else (1, 1)
    recomputed: frozenset[str] = part.recomputed if run.recomputed else frozenset()
    return Part(
        part.sequences, part.cp, part.ulysses, part.tp, part.tp_inner, part.sp, ep, etp, recomputed,
        part.piped and run.name == "head",
    )  # fmt: skip
