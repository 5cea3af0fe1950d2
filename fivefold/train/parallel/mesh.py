"""The process groups of a layout. Collectives issued here: none, but each group knows its axis.

One group per axis of ``layout/mesh.py``, made only by those who speak in it: pp, dp, cp, tp, shard and replica (ZeRO's
two, over dp·cp), of a model with experts ep, etp, expert_shard and expert_replica, kv (tensor ranks with copies of one
kv head), stage (those of one pipeline rank), and world.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from fivefold.layout.mesh import Group, group, members
from fivefold.layout.spec import Layout
from fivefold.train.parallel.interleave import Interleaver

ALWAYS = ("dp", "cp", "tp", "pp", "shard", "replica", "stage")
EXPERTS = ("ep", "etp", "expert_shard", "expert_replica")

# as traffic is counted: ZeRO's groups speak for data parallelism
TRAFFIC_AXIS = {"shard": "dp", "replica": "dp", "expert_shard": "dp", "expert_replica": "dp", "stage": "dp", "kv": "tp",
          "twin": "pp"}  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """The ranks that this process speaks with along one axis; ``rank`` is its own place among them.

    ``interleaver``: what is told before anything said here is waited for.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]  # of the world
    group: dist.ProcessGroup | None  # None: alone
    interleaver: Interleaver | None = None

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)


@dataclass(frozen=True)
class Ranks:
    """This process among the others. ``interleaver``: by which two micro-batches compute in turn while messages travel,
    if any.

    ``streams``: messages travel beside what is computed, as on GPUs.
    """

    rank: int
    world: int
    device: torch.device
    axes: Mapping[str, Axis]
    interleaver: Interleaver | None = None
    streams: bool = False

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    def axis(self, group_name: str) -> str:
        """The axis over which the group of that name speaks, as traffic is counted."""
        for axis in self.axes.values():
            if axis.group is not None and axis.group.group_name == group_name:
                return TRAFFIC_AXIS.get(axis.name, axis.name.partition("_")[0])
        return "world"


def ranks(
    layout: Layout, *, kv_heads: int, device: torch.device, experts: bool = False, pairs: bool = False,
    streams: bool | None = None,
) -> Ranks:  # fmt: skip
    """Process groups of ``layout`` over the initialised world; every rank must call it.

    ``experts``: those of experts too, which the order of axes need not allow a dense model; each rank is alone in them.
    ``pairs``: as ``Stack.pairs``. ``streams``: whether messages have streams of their own; ``None``: as on ``device``.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    spoken = {name: members(layout, name, rank=rank) for name in ALWAYS}
    spoken |= {name: members(layout, name, rank=rank) if experts else (rank,) for name in EXPERTS}
    axes = {name: _axis(name, found, rank=rank) for name, found in spoken.items()}
    kv = Group(max(1, layout.tp // kv_heads), group(layout, "tp").stride)
    axes["kv"] = _axis("kv", kv.members(rank), rank=rank)
    axes["world"] = Axis("world", rank, tuple(range(world)), dist.group.WORLD if world > 1 else None)
    axes |= _pipeline_axes(axes["pp"], layout, rank=rank)
    interleaver = Interleaver() if pairs else None
    axes |= {name: replace(axes[name], interleaver=interleaver) for name in INTERLEAVED_AXES if name in axes}
    return Ranks(rank, world, device, axes, interleaver, device.type == "cuda" if streams is None else streams)


def _axis(name: str, members: tuple[int, ...], *, rank: int) -> Axis:
    made = None
    if len(members) > 1:
        made = dist.new_group(list(members), use_local_synchronization=True)
    return Axis(name, members.index(rank), members, made)


def _pipeline_axes(pp: Axis, layout: Layout, *, rank: int) -> dict[str, Axis]:
    """What pipelines need besides: a group per direction and kind of what is sent, so that no send waits for another
    kind's; ``tie`` of the two ends for a tied table, ``twin`` of the two ranks that hold the same stages.
    """
    if pp.size == 1:
        return {}
    found = {name: _axis(name, pp.ranks, rank=rank) for name in P2P_AXES}
    ends = (pp.ranks[0], pp.ranks[-1])
    partner = pp.ranks[pp.size - 1 - pp.rank]
    if layout.schedule == "dualpipe":
        found["twin"] = _axis("twin", tuple(sorted((rank, partner))), rank=rank)
    found["pp_tie"] = _axis("pp_tie", ends, rank=rank) if rank in ends else Axis("pp_tie", 0, (rank,), None)
    return found


P2P_AXES = ("pp_onward_down", "pp_onward_up", "pp_back_down", "pp_back_up")

# what a stage says while it computes; ZeRO's messages are of weights, which two micro-batches may share
INTERLEAVED_AXES = ("tp", "cp", "ep", "etp", *P2P_AXES)
