"""Parameter prefetch of ZeRO-3: the weights that DeepSpeed gathers before each module, and those that stay gathered.

    a module's weights are gathered before its forward and its backward, together with those of the next modules up to
    ``prefetch_bucket_size`` elements; freed after it unless they recur within ``max_reuse_distance`` elements; never if
    they are small

Modules are those of Hugging Face's decoders. Sizes are in elements, padded to equal shards. Source:
deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/partitioned_param_coordinator.py, of a recorded trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Literal, NamedTuple, get_args

from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.sharding import get_policy, is_trained, shard_weight
from fivefold.layout.spec import Layout
from fivefold.model.weight import is_quantized
from fivefold.model.weights import Weight
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.message import RepeatedMessage
from fivefold.stack.spec import Stack
from fivefold.units import ceil_div

Phase = Literal["forward", "backward", "recomputation"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class ModuleCall(NamedTuple):
    """The forward or backward of a module: the numbers of its weights, and the unit that it belongs to.

    ``held``: those of its weights that are still used by another module once it has ended; ``ended``: held ones of
    other modules that end with it; ``dropped``: weights that are freed once it has ended, also if they recur soon.
    """

    unit: int
    phase: Phase = "forward"
    weights: tuple[int, ...] = ()
    held: frozenset[int] = frozenset()
    ended: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


class PrefetchLimits(NamedTuple):
    """DeepSpeed's prefetch limits, in elements.

    They are ``stage3_prefetch_bucket_size``, ``_param_persistence_threshold``, ``_max_reuse_distance`` and
    ``_max_live_parameters``.
    """

    ahead: int
    small: int
    reuse: int
    live: int


class PrefetchedGathers(NamedTuple):
    """The all-gathers of a micro-batch, in elements, and the most gathered weights in each unit's forward and backward.

    ``recomputed``: the most while a unit is recomputed, within its backward. ``small`` lists the weights that stay
    gathered; they are gathered one by one after each update. ``loss``: elements that are gathered during the backward
    of the loss, before the head gathers its weights.
    """

    gathers: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    recomputed: tuple[int, ...]
    small: tuple[int, ...]
    loss: int


def list_prefetch_messages(counts: Counts, layout: Layout, *, chunks: tuple[int, ...]) -> Iterator[RepeatedMessage]:
    """Yield the all-gathers of a step."""
    element_bytes = counts.job.precision.high_precision_bytes
    ranks = layout.shards
    if ranks == 1:  # it computes with its shard, or with a copy of it from host memory
        return
    micro_batches = layout.micro_batches(counts.job)
    for chunk in chunks:
        stage_gathers = simulate_prefetch(counts, layout, chunk=chunk)
        if stage_gathers is None:
            continue
        for sizes, times in ((stage_gathers.gathers, micro_batches), (stage_gathers.small, 1)):
            for size in sizes:
                yield RepeatedMessage("dp", "all_gather", times, size * element_bytes, ranks)


def simulate_prefetch(counts: Counts, layout: Layout, *, chunk: int) -> PrefetchedGathers | None:
    """Return the gathers of a stage; None if weights are gathered by units, or stay gathered."""
    if counts.job.stack.zero3_gather == "units" or get_policy(layout, counts.job).weights_stay:
        return None
    stack = counts.job.stack
    weight_numbers = dict[tuple[int, str], int]()
    sizes = list[int]()
    vocab, unit_index = pad_vocab(counts.model, counts.job, tp=layout.tp), 0
    units: list[list[tuple[str, int]]] = []
    recomputed: list[bool] = []
    frozen = set[int]()
    for run in counts.list_stage_groups(layout)[chunk]:
        for _ in range(run.times):
            unit = []
            for weight in counts.weights(layout, run.name):
                local = shard_weight(weight, model=counts.model, layout=layout, vocab=vocab)
                weight_numbers[unit_index, weight.name] = len(sizes)
                unit.append((weight.name, len(sizes)))
                if not is_trained(weight, counts.job):
                    frozen.add(len(sizes))
                sizes.append(_count_elements(weight, local.numel, counts))
            if run.name == "head" and counts.model.tied_embeddings and layout.pp == 1:
                unit.append(("head.out.weight", weight_numbers[0, "embed.tokens.weight"]))
            units.append(unit)
            recomputed.append(run.recomputed)
            unit_index += 1
    starts = _list_starts(counts, units) if chunk == 0 and not any(recomputed) else frozenset()
    calls = tuple(_list_calls(units, recomputed, starts, frozenset(frozen)))
    copies = layout.shards > 1 and "parameters" in layout.list_offloaded(counts.job)
    return _simulate_gathers(calls, tuple(sizes), len(units), layout.shards, get_limits(stack), copies=copies)


def _count_elements(weight: Weight, numel: int, counts: Counts) -> int:
    """Return the elements of a weight in its storage: in 4 bits two to a byte, in elements of the other weights."""
    base = counts.job.base_format
    if base is None or not base.is_four_bit or not is_quantized(weight, base):
        return numel
    return ceil_div(base.count_element_bytes(numel), counts.job.precision.high_precision_bytes)


PARENTS = ("attention", "mixer", "mlp", "moe")  # the modules of a block that have submodules


def get_limits(stack: Stack) -> PrefetchLimits:
    """Return the prefetch limits of a stack."""
    return PrefetchLimits(
        stack.prefetch_bucket_size,
        stack.param_persistence_threshold,
        stack.max_reuse_distance,
        stack.max_live_parameters,
    )


READERS = ("q", "k", "v", "q_down", "kv_down", "gate", "up")  # layers that read the input of attention or an MLP


def _list_starts(counts: Counts, units: Sequence[Sequence[tuple[str, int]]]) -> frozenset[tuple[int, str]]:
    """Return the modules below all adapters, with the numbers of their units: they have no backward.

    They are the embedding, and in the first block what no factor comes before: frozen layers of an adapter too.
    """
    adapter = counts.job.adapter
    if adapter is None or adapter.trains_embedding:
        return frozenset()
    starts, adapted = {(0, name_module(name)) for name, _ in units[0]}, list[str]()
    for weight, _ in units[1]:
        name = name_module(weight)
        parent, _, layer = name.rpartition(".")
        if weight.endswith(".lora_a"):
            adapted.append(parent.rpartition(".")[0])
        elif not any(layer not in READERS or above != parent for above in adapted):
            starts.add((1, name))
    return frozenset(name for name in starts if not name[1].endswith(".lora_b"))


def name_module(weight: str) -> str:
    """Return the module of a weight: peft has one for each factor of an adapter."""
    module, _, leaf = weight.rpartition(".")
    return weight if leaf.startswith("lora_") else module


def _list_calls(
    units: Sequence[Sequence[tuple[str, int]]],
    recomputed: Sequence[bool],
    starts: frozenset[tuple[int, str]],
    frozen: frozenset[int],
) -> Iterator[ModuleCall]:
    """Yield the calls of a micro-batch in order; modules of ``starts`` have no backward.

    ``frozen``: weights without a gradient. The root module's own calls, without weights, belong to the first and last
    unit.
    """
    last, root_call = len(units) - 1, ModuleCall(0)
    yield from (root_call, root_call)
    for unit_index, unit in enumerate(units):
        yield from _list_unit_calls(unit, unit_index)
        yield from [ModuleCall(unit_index)] * (unit_index == 0)  # rotary embedding
    yield ModuleCall(last, "backward")
    for unit_index in range(last, -1, -1):
        without = frozenset(name for index, name in starts if index == unit_index)
        calls = list(_list_unit_calls(units[unit_index], unit_index, "backward", without=without))
        if recomputed[unit_index]:
            forward = _list_unit_calls(units[unit_index], unit_index)
            calls = _recompute_within(calls, tuple(forward), frozen)
        yield from calls
        if unit_index == last:
            yield ModuleCall(last, "backward")


def _recompute_within(
    backward: Sequence[ModuleCall], forward: Sequence[ModuleCall], frozen: frozenset[int]
) -> list[ModuleCall]:
    """Return the calls of a recomputed block: the first module whose backward reads a saved tensor runs it again.

    That module keeps the frozen weights that the second forward gathers until its own backward has ended, and then
    frees them all. What the modules around it hold is neither gathered nor freed in between.
    """
    first = next(place for place, call in enumerate(backward) if call.weights and not call.held)
    before, trigger = backward[:first], backward[first]
    holds = frozenset(number for call in before for number in call.weights) | frozenset(trigger.weights)
    kept = holds | frozen
    again = [
        call._replace(phase="recomputation", held=call.held | kept, ended=tuple(set(call.ended) - kept))
        for call in forward
    ]
    gathered = dict.fromkeys(number for call in again for number in call.weights if number in frozen)
    end = again[-1]
    again[-1] = end._replace(
        ended=(*end.ended, *trigger.weights, *trigger.ended), dropped=tuple(gathered), held=end.held
    )
    return [*before, trigger._replace(held=frozenset(trigger.weights), ended=()), *again, *backward[first + 1 :]]


def _list_unit_calls(
    unit: Sequence[tuple[str, int]],
    place: int,
    phase: Literal["forward", "backward"] = "forward",
    *,
    without: frozenset[str] = frozenset(),
) -> Iterator[ModuleCall]:
    """Yield the calls of a unit's modules but those of ``without``, each module before its submodules."""
    modules = {  # in order
        name: tuple(number for _, number in numbered_weights)
        for name, numbered_weights in groupby(unit, key=lambda weight: name_module(weight[0]))
    }
    calls_by_module: dict[str, list[ModuleCall]] = {}
    for name, numbers in modules.items():
        module, _, submodule = name.partition(".")
        calls = calls_by_module.setdefault(module if submodule and module in PARENTS else name, [])
        if f"{name}.lora_a" in modules:
            factors = modules[f"{name}.lora_a"], modules[f"{name}.lora_b"]
            base = None if name in without else numbers
            adapted = _list_adapted_calls(base, *factors, call=ModuleCall(place, phase))
            calls += reversed(adapted) if phase == "backward" else adapted
        elif not name.endswith((".lora_a", ".lora_b")) and name not in without:
            calls.append(ModuleCall(place, phase, numbers))
        if submodule == "gate" and module != "attention":
            calls.append(ModuleCall(place, phase))  # the activation
    block = any(name in PARENTS for name in calls_by_module)
    if block:
        yield ModuleCall(place, phase)
    for name in reversed(calls_by_module) if phase == "backward" else calls_by_module:
        if name in PARENTS:
            yield ModuleCall(place, phase)
        yield from reversed(calls_by_module[name]) if phase == "backward" else calls_by_module[name]


def _list_adapted_calls(
    base: tuple[int, ...] | None, down: tuple[int, ...], up: tuple[int, ...], *, call: ModuleCall
) -> list[ModuleCall]:
    """Return the calls of a layer with an adapter: peft's module, its base, the dropout, and both factors.

    peft's module reads the dtype of A, which is gathered with it and held until it has ended. ``base`` is None for a
    layer below all adapters in a backward.
    """
    held = frozenset(down)
    module = low = call._replace(weights=down, held=held)
    inner = [] if base is None else [call._replace(weights=base), call]
    calls = [*inner, low, call._replace(weights=up)]
    if call.phase == "backward":
        calls.reverse()
    calls[-1] = calls[-1]._replace(ended=down, held=frozenset())
    return [module, *calls]


@lru_cache(maxsize=256)
def _simulate_gathers(
    calls: tuple[ModuleCall, ...],
    sizes: tuple[int, ...],
    units: int,
    shards: int,
    limits: PrefetchLimits,
    *,
    copies: bool,
) -> PrefetchedGathers:
    """Simulate the calls as the coordinator handles them once it knows their order.

    ``copies``: this rank's shards are in host memory. Their copies on the device are counted with what a unit gathers;
    but not those of the head, which are freed before its logits are made, or the gradient of its weights.
    """
    coordinator = _Coordinator(calls, sizes, shards, limits)
    max_live: dict[Phase, list[int]] = {phase: [0] * units for phase in PHASES}
    loss = 0
    for step, call in enumerate(calls):
        pass_live = max_live[call.phase]
        live = coordinator.run_call(step)
        if call.phase == "backward" and not pass_live[call.unit] and call.unit == units - 1:  # the root's
            loss = live
        if copies and call.unit < units - 1:
            live = max(live, coordinator.copied_live)
        pass_live[call.unit] = max(pass_live[call.unit], live)
    forward, backward, recomputed = (tuple(max_live[phase]) for phase in PHASES)
    padded = tuple(shards * ceil_div(size, shards) for size in sizes)
    small = tuple(padded[number] for number, size in enumerate(sizes) if size <= limits.small)
    return PrefetchedGathers(tuple(coordinator.gathers), forward, backward, recomputed, small, loss)


class _Coordinator:
    """The state of DeepSpeed's coordinator."""

    def __init__(self, calls: Sequence[ModuleCall], sizes: Sequence[int], shards: int, limits: PrefetchLimits) -> None:
        self.calls, self.sizes, self.limits, self.shards = calls, sizes, limits, shards
        self.padded = [shards * ceil_div(size, shards) for size in sizes]
        self.gathered = {number for number, size in enumerate(sizes) if size <= limits.small}  # gathered
        self.persistent = frozenset(self.gathered)
        self.live_padded = sum(self.padded[number] for number in self.gathered)
        self.live_unpadded = 0  # gathered elements as the coordinator counts them, without padding
        self.gathers: list[int] = []
        self.copied_live = 0  # the most gathered elements within a call, with a copy of this rank's shard of a gather
        self.last_needed_step = [-1] * len(sizes)  # the last step that a weight was gathered for
        self.next_uses = [(number, step) for step, call in enumerate(calls) for number in call.weights]
        self.next_use_index = 0  # of the first one that is not prefetched yet
        self.elements_before_step = [0, *accumulate(sum(sizes[number] for number in call.weights) for call in calls)]
        self.steps: dict[int, list[int]] = {}
        for number, step in self.next_uses:
            self.steps.setdefault(number, []).append(step)

    def run_call(self, step: int) -> int:
        """Gather the weights of call ``step``, prefetch those of later calls, then free those not needed soon.

        Returns the elements that are gathered while the call runs.
        """
        weights = self.calls[step].weights
        self.copied_live = 0
        self._gather(weights)
        advanced = sum(self.last_needed_step[number] < step for number in set(weights))
        for number, last in self.next_uses[self.next_use_index : self.next_use_index + advanced]:
            self.last_needed_step[number] = last
        self.next_use_index += advanced
        self._gather_ahead()
        live, call = self.live_padded, self.calls[step]
        ending = dict.fromkeys((*(number for number in weights if number not in call.held), *call.ended))
        for number in ending:
            if (
                number not in call.dropped
                and self.last_needed_step[number] <= step + 1
                and not self._is_reused(number, step + 1)
            ):
                self._free(number)
        for number in call.dropped:
            self._free(number)
        return live

    def _free(self, number: int) -> None:
        if number in self.persistent or number not in self.gathered:
            return
        self.gathered.discard(number)
        self.live_padded -= self.padded[number]
        self.live_unpadded -= self.sizes[number]

    def _gather(self, weights: Iterable[int]) -> None:
        missing = [number for number in weights if number not in self.gathered]
        if missing:
            self.gathers.append(sum(self.padded[number] for number in missing))
            self.live_padded += self.gathers[-1]
            self.copied_live = max(self.copied_live, self.live_padded + self.gathers[-1] // self.shards)
            self.gathered.update(missing)
            self.live_unpadded += sum(self.sizes[number] for number in missing)

    def _gather_ahead(self) -> None:
        """Gather the weights of the next uses, up to the limits on prefetched and on live elements."""
        max_elements = min(self.limits.live - self.live_unpadded, self.limits.ahead)
        ahead = set[int]()
        total = 0
        while self.next_use_index < len(self.next_uses) and total < max_elements:
            number, step = self.next_uses[self.next_use_index]
            self.next_use_index += 1
            self.last_needed_step[number] = max(self.last_needed_step[number], step)
            if number not in self.gathered and number not in ahead:
                ahead.add(number)
                total += self.sizes[number]
        self._gather(sorted(ahead))

    def _is_reused(self, number: int, step: int) -> bool:
        """Return True if a weight is used again, from ``step`` on, before ``reuse`` elements have been used."""
        following = next((following_step for following_step in self.steps[number] if following_step >= step), None)
        return (
            following is not None
            and self.elements_before_step[following] - self.elements_before_step[step] < self.limits.reuse
        )
