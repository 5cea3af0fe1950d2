"""The torch process groups of a layout, one per axis of ``layout/mesh.py``. Issues no collectives itself.

Only its members create a group: pp, dp, cp, tp; shard and replica (ZeRO's sharding and replication over dp·cp); for a
model with experts ep, etp, expert_shard and expert_replica; kv (tp ranks that hold copies of one kv head), stage (all
ranks with one pipeline rank), and world.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from fivefold.layout.mesh import Group, group, members
from fivefold.layout.spec import Layout
from fivefold.trainer.parallel.interleave import Interleaver
from fivefold.trainer.parallel.listener import Listener

ALWAYS = ("dp", "cp", "tp", "pp", "shard", "replica", "stage")
EXPERTS = ("ep", "etp", "expert_shard", "expert_replica")

# the axis to which a group's traffic is counted: ZeRO's groups count as data parallelism
TRAFFIC_AXIS = {"shard": "dp", "replica": "dp", "expert_shard": "dp", "expert_replica": "dp", "stage": "dp", "kv": "tp",
          "twin": "pp"}  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """This process's group along one axis of the mesh; ``rank`` is its own index among ``ranks``.

    ``interleaver``: yields to the other micro-batch before each wait for a message of this group. ``listener``: is told
    of the group's messages. ``back``: another group of the same ranks, for point-to-point messages to lower places;
    None: ``group`` has them too.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]  # global ranks
    group: dist.ProcessGroup | None  # None: this rank alone
    interleaver: Interleaver | None = None
    listener: Listener = field(default_factory=Listener)
    back: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups of its messages; none of a rank alone."""
        return tuple(group for group in (self.group, self.back) if group is not None)

    def way(self, source: int, target: int) -> dist.ProcessGroup | None:
        """The group of a point-to-point message from the rank at place ``source`` to that at ``target``."""
        return self.group if self.back is None or source < target else self.back


@dataclass(frozen=True)
class Ranks:
    """This process's ranks and groups along all axes. ``interleaver``: set if two micro-batches compute in turn while
    messages travel.

    ``streams``: messages overlap with compute, as on GPUs. ``listener``: that of all axes.
    """

    rank: int
    world: int
    device: torch.device
    axes: Mapping[str, Axis]
    interleaver: Interleaver | None = None
    streams: bool = False
    listener: Listener = field(default_factory=Listener)

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    def axis(self, group_name: str) -> str:
        """The axis to which traffic of the process group ``group_name`` is counted; "world" if it is none of these."""
        for axis in self.axes.values():
            if any(group.group_name == group_name for group in axis.groups):
                return traffic_axis(axis.name)
        return "world"


def traffic_axis(name: str) -> str:
    """The axis to which traffic of the axis ``name`` is counted."""
    return TRAFFIC_AXIS.get(name, name.partition("_")[0])


def ranks(
    layout: Layout, *, kv_heads: int, device: torch.device, experts: bool = False, pairs: bool = False,
    streams: bool | None = None,
) -> Ranks:  # fmt: skip
    """Create the process groups of ``layout`` over the initialised world; every rank must call it.

    A ring of two gets a group for each way on the CPU: gloo has one connection between two ranks of a group, and who
    posts a message there waits while one of the other way is read. NCCL starts both as one.

    ``experts``: create the expert axes too; a dense model's order of axes need not allow them, so they get one rank.
    ``pairs``: as ``Stack.pairs``. ``streams``: whether messages overlap with compute; ``None``: only on CUDA.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    spoken = {name: members(layout, name, rank=rank) for name in ALWAYS}
    spoken |= {name: members(layout, name, rank=rank) if experts else (rank,) for name in EXPERTS}
    axes = {name: _axis(name, found, rank=rank) for name, found in spoken.items()}
    kv = Group(max(1, layout.tp // kv_heads), group(layout, "tp").stride)
    axes["kv"] = _axis("kv", kv.members(rank), rank=rank)
    axes["world"] = Axis("world", rank, tuple(range(world)), dist.group.WORLD if world > 1 else None)
    axes |= _pipeline_axes(axes["pp"], layout, rank=rank)
    if axes["cp"].size == 2 and layout.cp_kind == "ring" and device.type != "cuda":
        axes["cp"] = replace(axes["cp"], back=_axis("cp", axes["cp"].ranks, rank=rank).group)
    interleaver = Interleaver() if pairs else None
    axes |= {name: replace(axes[name], interleaver=interleaver) for name in INTERLEAVED_AXES if name in axes}
    listener = Listener()
    axes = {name: replace(axis, listener=listener) for name, axis in axes.items()}
    beside = device.type == "cuda" if streams is None else streams
    return Ranks(rank, world, device, axes, interleaver, beside, listener)


def _axis(name: str, members: tuple[int, ...], *, rank: int) -> Axis:
    made = None
    if len(members) > 1:
        made = dist.new_group(list(members), use_local_synchronization=True)
    return Axis(name, members.index(rank), members, made)


def _pipeline_axes(pp: Axis, layout: Layout, *, rank: int) -> dict[str, Axis]:
    """Further groups of a pipeline: one per direction and kind of message, so that no send queues behind another kind;
    ``pp_tie``: first and last rank, for tied embeddings; ``twin``: the two ranks that hold the same stages in DualPipe.
    """
    if pp.size == 1:
        return {}
    found = {name: _axis(name, pp.ranks, rank=rank) for name in P2P_AXES}
    ends = (pp.ranks[0], pp.ranks[-1])
    partner = pp.ranks[pp.size - 1 - pp.rank]
    if layout.pipeline.enters_both_ends:
        found["twin"] = _axis("twin", tuple(sorted((rank, partner))), rank=rank)
    found["pp_tie"] = _axis("pp_tie", ends, rank=rank) if rank in ends else Axis("pp_tie", 0, (rank,), None)
    return found


P2P_AXES = ("pp_onward_down", "pp_onward_up", "pp_back_down", "pp_back_up")

# axes whose messages belong to one micro-batch; ZeRO's carry weights, which both micro-batches share
INTERLEAVED_AXES = ("tp", "cp", "ep", "etp", *P2P_AXES)
