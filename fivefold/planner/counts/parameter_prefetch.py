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
from typing import NamedTuple

from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.sharding import get_policy, shard_weight
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.message import RepeatedMessage
from fivefold.stack.spec import Stack
from fivefold.units import ceil_div


class ModuleCall(NamedTuple):
    """The forward or backward of a module: the numbers of its weights, and the unit that it belongs to."""

    unit: int
    backward: bool
    weights: tuple[int, ...] = ()


class Limits(NamedTuple):
    """DeepSpeed's prefetch limits, in elements.

    They are ``stage3_prefetch_bucket_size``, ``_param_persistence_threshold``, ``_max_reuse_distance`` and
    ``_max_live_parameters``.
    """

    ahead: int
    small: int
    reuse: int
    live: int


class Fetches(NamedTuple):
    """The all-gathers of a micro-batch, in elements, and the most gathered weights in each unit's forward and backward.

    ``small`` lists the weights that stay gathered; they are gathered one by one after each update.
    """

    gathers: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    small: tuple[int, ...]


def fetch_messages(counts: Counts, layout: Layout, *, chunks: tuple[int, ...]) -> Iterator[RepeatedMessage]:
    """Yield the all-gathers of a step."""
    element_bytes = counts.job.precision.high_precision_bytes
    ranks = layout.shards
    micro_batches = layout.micro_batches(counts.job)
    for chunk in chunks:
        stage_gathers = list_fetches(counts, layout, chunk=chunk)
        if stage_gathers is None:
            continue
        for sizes, times in ((stage_gathers.gathers, micro_batches), (stage_gathers.small, 1)):
            for size in sizes:
                yield RepeatedMessage("dp", "all_gather", times, size * element_bytes, ranks)


def list_fetches(counts: Counts, layout: Layout, *, chunk: int) -> Fetches | None:
    """Return the gathers of a stage; None if weights are gathered by units, or stay gathered."""
    if counts.job.stack.zero3_gather == "units" or get_policy(layout, counts.job).weights_stay:
        return None
    stack = counts.job.stack
    weight_numbers = dict[tuple[int, str], int]()
    sizes = list[int]()
    vocab, unit_index = pad_vocab(counts.model, counts.job, tp=layout.tp), 0
    units: list[list[tuple[str, int]]] = []
    recomputed: list[bool] = []
    for run in counts.list_stage_groups(layout)[chunk]:
        for _ in range(run.times):
            unit = []
            for weight in counts.weights(layout, run.name):
                local = shard_weight(weight, model=counts.model, layout=layout, vocab=vocab)
                weight_numbers[unit_index, weight.name] = len(sizes)
                unit.append((weight.name, len(sizes)))
                sizes.append(local.numel)
            if run.name == "head" and counts.model.tied_embeddings and layout.pp == 1:
                unit.append(("head.out.weight", weight_numbers[0, "embed.tokens.weight"]))
            units.append(unit)
            recomputed.append(run.recomputed)
            unit_index += 1
    starts = _list_starts(counts, units) if chunk == 0 and not any(recomputed) else frozenset()
    calls = tuple(_list_calls(units, recomputed, starts))
    return _simulate_fetches(calls, tuple(sizes), len(units), layout.shards, get_limits(stack))


PARENTS = ("attention", "mixer", "mlp", "moe")  # the modules of a block that have submodules


def get_limits(stack: Stack) -> Limits:
    """Return the prefetch limits of a stack."""
    return Limits(
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
    units: Sequence[Sequence[tuple[str, int]]], recomputed: Sequence[bool], starts: frozenset[tuple[int, str]]
) -> Iterator[ModuleCall]:
    """Yield the calls of a micro-batch in order; modules of ``starts`` have no backward.

    The root module's own calls, without weights, belong to the first and last unit.
    """
    last, root_call = len(units) - 1, ModuleCall(0, backward=False)
    yield from (root_call, root_call)
    for unit_index, unit in enumerate(units):
        yield from _list_unit_calls(unit, unit_index, backward=False)
        yield from [ModuleCall(unit_index, backward=False)] * (unit_index == 0)  # rotary embedding
    yield ModuleCall(last, backward=True)
    for unit_index in range(last, -1, -1):
        if recomputed[unit_index]:
            yield from (
                call._replace(backward=True) for call in _list_unit_calls(units[unit_index], unit_index, backward=False)
            )
        without = frozenset(name for index, name in starts if index == unit_index)
        yield from _list_unit_calls(units[unit_index], unit_index, backward=True, without=without)
        if unit_index == last:
            yield ModuleCall(last, backward=True)


def _list_unit_calls(
    unit: Sequence[tuple[str, int]], place: int, *, backward: bool, without: frozenset[str] = frozenset()
) -> Iterator[ModuleCall]:
    """Yield the calls of a unit's modules but those of ``without``, each module before its submodules.

    A layer with an adapter calls its base, the dropout, and the factors.
    """
    modules = {  # in order
        name: tuple(number for _, number in numbered_weights)
        for name, numbered_weights in groupby(unit, key=lambda weight: name_module(weight[0]))
    }
    calls_by_module: dict[str, list[ModuleCall]] = {}
    for name, numbers in modules.items():
        module, _, submodule = name.partition(".")
        calls = calls_by_module.setdefault(module if submodule and module in PARENTS else name, [])
        is_adapted = f"{name}.lora_a" in modules
        calls += [ModuleCall(place, backward)] * is_adapted
        if name not in without:
            calls.append(ModuleCall(place, backward, numbers))
            calls += [ModuleCall(place, backward)] * is_adapted  # dropout
        if submodule == "gate" and module != "attention":
            calls.append(ModuleCall(place, backward))  # the activation
    block = any(name in PARENTS for name in calls_by_module)
    if block:
        yield ModuleCall(place, backward)
    for name in reversed(calls_by_module) if backward else calls_by_module:
        if name in PARENTS:
            yield ModuleCall(place, backward)
        yield from reversed(calls_by_module[name]) if backward else calls_by_module[name]


@lru_cache(maxsize=256)
def _simulate_fetches(
    calls: tuple[ModuleCall, ...], sizes: tuple[int, ...], units: int, shards: int, limits: Limits
) -> Fetches:
    """Simulate the calls as the coordinator handles them once it knows their order."""
    coordinator = _Coordinator(calls, sizes, shards, limits)
    max_live: dict[bool, list[int]] = {False: [0] * units, True: [0] * units}
    for step, call in enumerate(calls):
        pass_live = max_live[call.backward]
        pass_live[call.unit] = max(pass_live[call.unit], coordinator.run_call(step))
    padded = tuple(shards * ceil_div(size, shards) for size in sizes)
    small = tuple(padded[number] for number, size in enumerate(sizes) if size <= limits.small)
    return Fetches(tuple(coordinator.gathers), tuple(max_live[False]), tuple(max_live[True]), small)


class _Coordinator:
    """The state of DeepSpeed's coordinator."""

    def __init__(self, calls: Sequence[ModuleCall], sizes: Sequence[int], shards: int, limits: Limits) -> None:
        self.calls, self.sizes, self.limits = calls, sizes, limits
        self.padded = [shards * ceil_div(size, shards) for size in sizes]
        self.gathered = {number for number, size in enumerate(sizes) if size <= limits.small}  # gathered
        self.persistent = frozenset(self.gathered)
        self.live_padded = sum(self.padded[number] for number in self.gathered)
        self.live_unpadded = 0  # gathered elements as the coordinator counts them, without padding
        self.gathers: list[int] = []
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
        self._gather(weights)
        advanced = sum(self.last_needed_step[number] < step for number in set(weights))
        for number, last in self.next_uses[self.next_use_index : self.next_use_index + advanced]:
            self.last_needed_step[number] = last
        self.next_use_index += advanced
        self._gather_ahead()
        live = self.live_padded
        for number in weights:
            if (
                number not in self.persistent
                and self.last_needed_step[number] <= step + 1
                and not self._is_reused(number, step + 1)
            ):
                self.gathered.discard(number)
                self.live_padded -= self.padded[number]
                self.live_unpadded -= self.sizes[number]
        return live

    def _gather(self, weights: Iterable[int]) -> None:
        missing = [number for number in weights if number not in self.gathered]
        if missing:
            self.gathers.append(sum(self.padded[number] for number in missing))
            self.live_padded += self.gathers[-1]
            self.gathered.update(missing)
            self.live_unpadded += sum(self.sizes[number] for number in missing)

    def _gather_ahead(self) -> None:
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
