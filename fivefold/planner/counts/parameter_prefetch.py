"""ZeRO-3 by weights: what DeepSpeed gathers before each module, what it gathers ahead, and what then lives gathered.

    a module's weights are gathered before its forward and its backward, those of the next ones beside it up to
    ``fetch_ahead`` elements; freed after it unless they recur within ``fetch_reuse`` elements; never if they are small

Modules are those of Hugging Face's decoders. Sizes are in elements, padded to equal shards.
Source: deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/partitioned_param_coordinator.py, of a recorded trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

from fivefold.layout.local_weight import padded_vocab
from fivefold.layout.sharding import local_weight, policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.message import Message
from fivefold.stack.spec import Stack
from fivefold.units import ceil_div


class Call(NamedTuple):
    """The forward or backward of a module: its weights, by number, and the unit that it is of."""

    unit: int
    backward: bool
    weights: tuple[int, ...] = ()


class Limits(NamedTuple):
    """DeepSpeed's ``stage3_prefetch_bucket_size``, ``_param_persistence_threshold``, ``_max_reuse_distance`` and
    ``_max_live_parameters``, in elements.
    """

    ahead: int
    small: int
    reuse: int
    live: int


class Fetches(NamedTuple):
    """Elements of each all-gather of a micro-batch, and of the gathered weights that live at most in each unit's
    forward and backward; ``small``: weights that stay, gathered one by one after each update.
    """

    gathers: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    small: tuple[int, ...]


def fetch_messages(counts: Counts, layout: Layout, *, chunks: tuple[int, ...]) -> Iterator[Message]:
    """The all-gathers of a step."""
    wide, ranks, micro_batches = counts.job.precision.wide_bytes, layout.shards, layout.micro_batches(counts.job)
    for chunk in chunks:
        found = fetches(counts, layout, chunk=chunk)
        if found is None:
            continue
        for sizes, times in ((found.gathers, micro_batches), (found.small, 1)):
            for size in sizes:
                yield Message("dp", "all_gather", times, size * wide, ranks)


def fetches(counts: Counts, layout: Layout, *, chunk: int) -> Fetches | None:
    """Those of a stage; None where weights are gathered by units, or stay."""
    if counts.job.stack.fetch == "units" or policy(layout, counts.job).weights_stay:
        return None
    stack, numbers, sizes = counts.job.stack, dict[tuple[int, str], int](), list[int]()
    vocab, number = padded_vocab(counts.model, counts.job, tp=layout.tp), 0
    units: list[list[tuple[str, int]]] = []
    recomputed: list[bool] = []
    for run in counts.stage_runs(layout)[chunk]:
        for _ in range(run.times):
            unit = []
            for weight in counts.weights(layout, run.name):
                local = local_weight(weight, model=counts.model, layout=layout, vocab=vocab)
                numbers[number, weight.name] = len(sizes)
                unit.append((weight.name, len(sizes)))
                sizes.append(local.numel)
            if run.name == "head" and counts.model.tied_embeddings and layout.pp == 1:
                unit.append(("head.out.weight", numbers[0, "embed.tokens.weight"]))
            units.append(unit)
            recomputed.append(run.recomputed)
            number += 1
    calls = tuple(_calls(units, recomputed))
    return _fetches(calls, tuple(sizes), len(units), layout.shards, limits(stack))


def limits(stack: Stack) -> Limits:
    """Those of a stack."""
    return Limits(stack.fetch_ahead, stack.fetch_small, stack.fetch_reuse, stack.fetch_live)


def _calls(units: Sequence[Sequence[tuple[str, int]]], recomputed: Sequence[bool]) -> Iterator[Call]:
    """The calls of a micro-batch in order; the model's own, without weights, among those of its first and last unit."""
    last, whole = len(units) - 1, Call(0, backward=False)
    yield from (whole, whole)
    for place, unit in enumerate(units):
        yield from _unit_calls(unit, place, backward=False)
        yield from [Call(place, backward=False)] * (place == 0)  # rotary embedding
    yield Call(last, backward=True)
    for place in range(last, -1, -1):
        if recomputed[place]:
            yield from (call._replace(backward=True) for call in _unit_calls(units[place], place, backward=False))
        own = list(_unit_calls(units[place], place, backward=True))
        yield from own
        if place == last:
            yield Call(last, backward=True)


def _unit_calls(unit: Sequence[tuple[str, int]], place: int, *, backward: bool) -> Iterator[Call]:
    """A unit's modules, each before those within it."""
    modules = {  # in order
        name: tuple(number for _, number in each)
        for name, each in groupby(unit, key=lambda weight: weight[0].rpartition(".")[0])
    }
    inner: dict[str, list[Call]] = {}
    for name, numbers in modules.items():
        outer, _, short = name.partition(".")
        within = inner.setdefault(outer if short and outer in ("attention", "mlp", "moe") else name, [])
        within.append(Call(place, backward, numbers))
        if short == "gate":
            within.append(Call(place, backward))  # the activation
    block = any(name in ("attention", "mlp", "moe") for name in inner)
    if block:
        yield Call(place, backward)
    for name in reversed(inner) if backward else inner:
        if name in ("attention", "mlp", "moe"):
            yield Call(place, backward)
        yield from reversed(inner[name]) if backward else inner[name]


@lru_cache(maxsize=256)
def _fetches(calls: tuple[Call, ...], sizes: tuple[int, ...], units: int, shards: int, limits: Limits) -> Fetches:
    """Run the calls as the coordinator does, once it knows their order."""
    played = _Player(calls, sizes, shards, limits)
    most: dict[bool, list[int]] = {False: [0] * units, True: [0] * units}
    for step, call in enumerate(calls):
        here = most[call.backward]
        here[call.unit] = max(here[call.unit], played.call(step))
    padded = tuple(shards * ceil_div(size, shards) for size in sizes)
    small = tuple(padded[number] for number, size in enumerate(sizes) if size <= limits.small)
    return Fetches(tuple(played.gathers), tuple(most[False]), tuple(most[True]), small)


class _Player:
    """The state of the coordinator."""

    def __init__(self, calls: Sequence[Call], sizes: Sequence[int], shards: int, limits: Limits) -> None:
        self.calls, self.sizes, self.limits = calls, sizes, limits
        self.padded = [shards * ceil_div(size, shards) for size in sizes]
        self.here = {number for number, size in enumerate(sizes) if size <= limits.small}  # gathered
        self.small = frozenset(self.here)
        self.live = sum(self.padded[number] for number in self.here)
        self.counted = 0  # elements that it takes for gathered
        self.gathers: list[int] = []
        self.until = [-1] * len(sizes)  # the last step for which a weight was fetched
        self.queue = [(number, step) for step, call in enumerate(calls) for number in call.weights]
        self.at = 0  # of the queue
        self.before = [0, *accumulate(sum(sizes[number] for number in call.weights) for call in calls)]
        self.steps: dict[int, list[int]] = {}
        for number, step in self.queue:
            self.steps.setdefault(number, []).append(step)

    def call(self, step: int) -> int:
        """Gather what a call needs, then ahead, then free; returns the elements that are gathered while it runs."""
        weights = self.calls[step].weights
        self._gather(weights)
        waiting = {number for number in weights if self.until[number] < step}
        for number, last in self.queue[self.at : self.at + len(waiting)]:
            self.until[number] = last
        self.at += len(waiting)
        self._gather_ahead()
        live = self.live
        for number in weights:
            if number not in self.small and self.until[number] <= step + 1 and not self._recurs(number, step + 1):
                self.here.discard(number)
                self.live -= self.padded[number]
                self.counted -= self.sizes[number]
        return live

    def _gather(self, weights: Iterable[int]) -> None:
        missing = [number for number in weights if number not in self.here]
        if missing:
            self.gathers.append(sum(self.padded[number] for number in missing))
            self.live += self.gathers[-1]
            self.here.update(missing)
            self.counted += sum(self.sizes[number] for number in missing)

    def _gather_ahead(self) -> None:
        most, found, total = min(self.limits.live - self.counted, self.limits.ahead), set[int](), 0
        while self.at < len(self.queue) and total < most:
            number, step = self.queue[self.at]
            self.at += 1
            self.until[number] = max(self.until[number], step)
            if number not in self.here and number not in found:
                found.add(number)
                total += self.sizes[number]
        self._gather(sorted(found))

    def _recurs(self, number: int, step: int) -> bool:
        """Whether a weight is used again, from ``step`` on, before as many elements as ``reuse`` have been."""
        following = next((each for each in self.steps[number] if each >= step), None)
        return following is not None and self.before[following] - self.before[step] < self.limits.reuse
