"""ZeRO-3 as DeepSpeed had it until 2021: each weight gathered alone, and its gradient reduced alone, as lists.

A list has a tensor per rank, which PyTorch copies one by one to or from what is sent, and the host waits for the device
before each gather. Weights of at most ``param_persistence_threshold`` elements stay gathered; after the update all of
them are gathered at once and copied out part by part. What a full recomputation gathers stays for the backward within
``max_reuse_distance`` elements. Only rows of ``megatron2021`` ran so, without a pipeline.
Sources: samyam/DeepSpeed@7fe8f97:deepspeed/runtime/zero/partition_parameters.py, _allgather_param, _allgather_params,
_reduce_scatter_gradient; pytorch/pytorch@v1.8.0:torch/lib/c10d/ProcessGroupNCCL.cpp, allgather, reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fivefold.layout.mesh import make_group
from fivefold.layout.sharding import FsdpUnit, needs_backward_gather
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts, Name
from fivefold.planner.counts.memory.peak import RankMemory
from fivefold.planner.counts.message import RepeatedMessage
from fivefold.planner.time import timeline
from fivefold.planner.time.gather_reduce import GatherReduceTime
from fivefold.planner.time.units import Units
from fivefold.units import ceil_div

JOINED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}  # of stacks with ``joint``
# The host, per rank of a list: a view in Python and the launch of a copy. A view takes 1.6 µs on one core of today
# (``narrow`` in a loop, torch 2.13), a launch 7, the lower end of ``launch_seconds``; 6 to 15 µs are plausible.
LIST_PART_SECONDS = 9e-6


class ListedWeight(NamedTuple):
    """A weight as it is sent: elements with padding, and how often a backward gathers it."""

    numel: int
    backward_gathers: int
    stays: bool


class ListedUnits(Units):
    """Seconds of units whose weights are gathered, and whose gradients are reduced, one by one as lists."""

    def gather_reduce(self, layout: Layout, name: Name) -> GatherReduceTime:
        """Return the seconds of one unit's messages, while which the host launches the copies of their parts."""
        gather = reduce = again = gather_busy = reduce_busy = 0.0
        for message in list_messages(self.counts, layout, name):
            asked = message.collective, message.payload, make_group(layout, message.group, message.ranks)
            seconds = max(self.network.seconds(*asked), message.ranks * LIST_PART_SECONDS)
            if message.collective == "all_gather":
                gather = gather + seconds
                gather_busy = gather_busy + self.network.busy_seconds(*asked)
                again += seconds * (message.times // layout.micro_batches(self.job) - 1)
            else:
                reduce = reduce + seconds
                reduce_busy = reduce_busy + self.network.busy_seconds(*asked)
        return GatherReduceTime(gather, reduce, 0.0, gather_busy, reduce_busy, again)


def step_seconds(units: Units, layout: Layout, memory: Sequence[RankMemory]) -> float:
    """Return the seconds of a step; of listed weights with the gather after the update."""
    seconds = timeline.step_seconds(units, layout, memory).seconds
    return seconds + (_staying_seconds(units, layout) if isinstance(units, ListedUnits) else 0.0)


def _staying_seconds(units: Units, layout: Layout) -> float:
    """Return the seconds to gather the weights that stay after an update, and to copy them out part by part."""
    return sum(
        units.network.seconds(message.collective, message.payload, make_group(layout, message.group, message.ranks))
        + parts * LIST_PART_SECONDS
        for message, parts in list_staying(units.counts, layout)
    )


def list_messages(counts: Counts, layout: Layout, name: Name) -> Iterator[RepeatedMessage]:
    """Yield gathers and reductions of a unit in a step, but for the gather after the update."""
    recipe = counts.job.precision
    micro_batches = layout.micro_batches(counts.job)
    reduces = micro_batches if counts.reduces_every_micro_batch(layout, name) else 1
    for unit, shards, _ in counts.list_local_parts(layout, name):
        group = "expert_shard" if unit.name == "experts" else "shard"
        for weight in list_weights(counts, layout, name, unit, shards):
            if not weight.stays:
                gathers = micro_batches * (1 + weight.backward_gathers)
                yield RepeatedMessage(
                    "dp", "all_gather", gathers, weight.numel * recipe.high_precision_bytes, shards, group
                )
            yield RepeatedMessage("dp", "reduce_scatter", reduces, weight.numel * recipe.summed_bytes, shards, group)


def list_weights(counts: Counts, layout: Layout, name: Name, unit: FsdpUnit, shards: int) -> list[ListedWeight]:
    """Return the weights of a part of a unit, in the order of the forward, joined as the stack joins them."""
    stack, sizes = counts.job.stack, dict[str, int]()
    for weight in unit.weights:
        module, _, kind = weight.name.rpartition(".")
        outer, _, short = module.rpartition(".")
        short = JOINED.get(short, short) if stack.merged_projections else short
        sizes[f"{outer}.{short}.{kind}"] = sizes.get(f"{outer}.{short}.{kind}", 0) + weight.numel
    again = needs_backward_gather(name, layout, counts.job)
    later = 0
    listed = list[ListedWeight]()
    for size in reversed(sizes.values()):
        stays = size <= stack.param_persistence_threshold
        released = layout.ac == "full" and 2 * later >= stack.max_reuse_distance
        listed.append(ListedWeight(shards * ceil_div(size, shards), again * (2 if released else 1), stays))
        later += 0 if stays else size
    return listed[::-1]


def list_staying(counts: Counts, layout: Layout) -> list[tuple[RepeatedMessage, int]]:
    """Return the gathers after the update, each of all weights that stay, with the number of parts copied out."""
    sizes: dict[tuple[str, int], list[int]] = {}
    for run, times in counts.stage_work(layout)[0]:
        for unit, shards, _ in counts.list_local_parts(layout, run.name):
            group = "expert_shard" if unit.name == "experts" else "shard"
            weights = list_weights(counts, layout, run.name, unit, shards)
            sizes.setdefault((group, shards), []).extend([weight.numel for weight in weights if weight.stays] * times)
    width = counts.job.precision.high_precision_bytes
    return [
        (RepeatedMessage("dp", "all_gather", 1, sum(numels) * width, shards, group), shards * len(numels))
        for (group, shards), numels in sizes.items()
        if numels
    ]
