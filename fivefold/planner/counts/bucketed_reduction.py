"""ZeRO-3 as DeepSpeed had it until 2021: each weight gathered alone, and its gradient reduced alone, as lists.

A list has a tensor per rank, which PyTorch copies one by one to or from what is sent, and the host waits for the device
before each gather. Weights of at most ``fetch_small`` elements stay; after the update all of them are gathered at once
and copied out part by part. What a full recomputation gathers stays for the backward within ``fetch_reuse`` elements.
Sources: samyam/DeepSpeed@7fe8f97:deepspeed/runtime/zero/partition_parameters.py, _allgather_param, _allgather_params,
_reduce_scatter_gradient; pytorch/pytorch@v1.8.0:torch/lib/c10d/ProcessGroupNCCL.cpp, allgather, reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fivefold.layout.sharding import Unit, gathers_again
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts, Name
from fivefold.planner.counts.message import Message
from fivefold.units import ceil_div

JOINED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}  # of stacks with ``joint``


class Listed(NamedTuple):
    """A weight as it is sent: elements with padding, and how often a backward gathers it."""

    numel: int
    again: int
    stays: bool


def by_lists(counts: Counts, layout: Layout) -> bool:
    """Whether weights are gathered, and gradients reduced, one by one as lists."""
    return counts.job.stack.fetch == "lists" and layout.zero == 3 and layout.shards > 1


def list_messages(counts: Counts, layout: Layout, name: Name, unit: Unit, shards: int) -> Iterator[Message]:
    """Gathers and reductions of a part of a unit in a step, but for the gather after the update."""
    recipe, micro_batches = counts.job.precision, layout.micro_batches(counts.job)
    group = "expert_shard" if unit.name == "experts" else "shard"
    reduces = micro_batches if counts.reduces_each(layout, name) else 1
    for weight in listed(counts, layout, name, unit, shards):
        if not weight.stays:
            gathers = micro_batches * (1 + weight.again)
            yield Message("dp", "all_gather", gathers, weight.numel * recipe.wide_bytes, shards, group)
        yield Message("dp", "reduce_scatter", reduces, weight.numel * recipe.summed_bytes, shards, group)


def listed(counts: Counts, layout: Layout, name: Name, unit: Unit, shards: int) -> list[Listed]:
    """The weights of a part of a unit, in the order of the forward, joined as the stack joins them."""
    stack, sizes = counts.job.stack, dict[str, int]()
    for weight in unit.weights:
        module, _, kind = weight.name.rpartition(".")
        outer, _, short = module.rpartition(".")
        short = JOINED.get(short, short) if stack.joint else short
        sizes[f"{outer}.{short}.{kind}"] = sizes.get(f"{outer}.{short}.{kind}", 0) + weight.numel
    again, later, found = gathers_again(name, layout, counts.job), 0, list[Listed]()
    for size in reversed(sizes.values()):
        stays = size <= stack.fetch_small
        released = layout.ac == "full" and 2 * later >= stack.fetch_reuse
        found.append(Listed(shards * ceil_div(size, shards), again * (2 if released else 1), stays))
        later += 0 if stays else size
    return found[::-1]


def staying(counts: Counts, layout: Layout, chunks: Iterable[int]) -> list[tuple[Message, int]]:
    """The gathers after the update, each of all weights that stay, with the number of parts that are copied out."""
    found: dict[tuple[str, int], list[int]] = {}
    for run, times in (each for chunk in chunks for each in counts.stage_work(layout)[chunk]):
        for unit, shards, _ in counts.local_parts(layout, run.name):
            if shards > 1:
                group = "expert_shard" if unit.name == "experts" else "shard"
                sizes = [each.numel for each in listed(counts, layout, run.name, unit, shards) if each.stays]
                found.setdefault((group, shards), []).extend(sizes * times)
    width = counts.job.precision.wide_bytes
    return [
        (Message("dp", "all_gather", 1, sum(sizes) * width, shards, group), shards * len(sizes))
        for (group, shards), sizes in found.items()
        if sizes
    ]
