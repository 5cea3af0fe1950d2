"""The torch process groups of a layout, one per axis of ``layout/mesh.py``. Issues no collectives itself.

Only its members create a group. The groups are pp, dp, cp, tp; shard and replica (ZeRO's sharding and replication over
dp·cp); for a model with experts ep, etp, expert_shard and expert_replica; kv (tp ranks that hold copies of one kv
head), stage (all ranks with one pipeline rank), and world.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from fivefold.layout.mesh import RankGroup, group, list_members
from fivefold.layout.spec import Layout
from fivefold.trainer.parallel.interleave import Interleaver
from fivefold.trainer.parallel.listener import CommObserver

ALWAYS = ("dp", "cp", "tp", "pp", "shard", "replica", "stage")
EXPERTS = ("ep", "etp", "expert_shard", "expert_replica")

# the axis under which a group's traffic is counted: ZeRO's groups count as data parallelism
TRAFFIC_AXIS = {
    "shard": "dp",
    "replica": "dp",
    "expert_shard": "dp",
    "expert_replica": "dp",
    "stage": "dp",
    "kv": "tp",
    "twin": "pp",
}


ProcessGroups = dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]  # by axis and members


@dataclass(frozen=True)
class AxisGroup:
    """The group of this process along one axis of the mesh; ``rank`` is its index among ``ranks``.

    ``interleaver``: runs the other micro-batch before each wait for a message of this group. ``listener``: observes the
    group's messages. ``back``: another group of the same ranks, for point-to-point messages to lower indices; None:
    they use ``group`` too.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]  # global ranks
    group: dist.ProcessGroup | None  # None: an axis of one rank
    interleaver: Interleaver | None = None
    listener: CommObserver = field(default_factory=CommObserver)
    back: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the process groups of the axis' messages; none for an axis of one rank."""
        return tuple(group for group in (self.group, self.back) if group is not None)

    def way(self, source: int, target: int) -> dist.ProcessGroup | None:
        """Return the group of a point-to-point message from the rank at index ``source`` to that at ``target``."""
        return self.group if self.back is None or source < target else self.back


@dataclass(frozen=True)
class Ranks:
    """The ranks and groups of this process along all axes.

    ``interleaver``: set if two micro-batches compute in turn while messages travel. ``streams``: messages overlap with
    compute, as on GPUs. ``listener``: shared by all axes.
    """

    rank: int
    world: int
    device: torch.device
    axes: Mapping[str, AxisGroup]
    interleaver: Interleaver | None = None
    streams: bool = False
    listener: CommObserver = field(default_factory=CommObserver)

    def __getitem__(self, name: str) -> AxisGroup:
        return self.axes[name]

    def axis(self, group_name: str) -> str:
        """Return the axis under which traffic of the process group ``group_name`` is counted.

        "world" if it is none of these.
        """
        for axis in self.axes.values():
            if any(group.group_name == group_name for group in axis.groups):
                return name_traffic_axis(axis.name)
        return "world"


def name_traffic_axis(name: str) -> str:
    """Return the axis under which traffic of the axis ``name`` is counted."""
    return TRAFFIC_AXIS.get(name, name.partition("_")[0])


def create_ranks(
    layout: Layout,
    *,
    kv_heads: int,
    device: torch.device,
    experts: bool = False,
    pairs: bool = False,
    streams: bool | None = None,
    groups: ProcessGroups | None = None,
) -> Ranks:
    """Create the process groups of ``layout`` over the initialized world; every rank must call it.

    A ring of two gets one group per direction on the CPU: gloo has one connection between two ranks of a group, and a
    rank that posts a message there waits while a message of the other direction is read. NCCL starts both at once.

    ``experts``: create the expert axes too; a dense model's axis order may not support them, so there they get one
    rank. ``pairs``: as ``Stack.pairs``. ``streams``: whether messages overlap with compute; ``None``: only on CUDA.
    ``groups``: those of other models, which run at other times; they are reused, and new ones are added.
    """
    groups = {} if groups is None else groups
    rank, world = dist.get_rank(), dist.get_world_size()
    members_by_axis = {name: list_members(layout, name, rank=rank) for name in ALWAYS}
    members_by_axis |= {name: list_members(layout, name, rank=rank) if experts else (rank,) for name in EXPERTS}
    axes = {
        name: _build_axis(name, axis_members, rank=rank, groups=groups)
        for name, axis_members in members_by_axis.items()
    }
    kv = RankGroup(max(1, layout.tp // kv_heads), group(layout, "tp").stride)
    axes["kv"] = _build_axis("kv", kv.members(rank), rank=rank, groups=groups)
    axes["world"] = AxisGroup("world", rank, tuple(range(world)), dist.group.WORLD if world > 1 else None)
    axes |= _build_pipeline_axes(axes["pp"], layout, rank=rank, groups=groups)
    if axes["cp"].size == 2 and layout.uses_ring and device.type != "cuda":
        axes["cp"] = replace(axes["cp"], back=_build_axis("cp_back", axes["cp"].ranks, rank=rank, groups=groups).group)
    interleaver = Interleaver() if pairs else None
    axes |= {name: replace(axes[name], interleaver=interleaver) for name in INTERLEAVED_AXES if name in axes}
    listener = CommObserver()
    axes = {name: replace(axis, listener=listener) for name, axis in axes.items()}
    overlaps = device.type == "cuda" if streams is None else streams
    return Ranks(rank, world, device, axes, interleaver, overlaps, listener)


def _build_axis(name: str, members: tuple[int, ...], *, rank: int, groups: ProcessGroups) -> AxisGroup:
    if len(members) > 1 and (name, members) not in groups:
        groups[name, members] = dist.new_group(list(members), use_local_synchronization=True)
    return AxisGroup(name, members.index(rank), members, groups.get((name, members)))


def _build_pipeline_axes(pp: AxisGroup, layout: Layout, *, rank: int, groups: ProcessGroups) -> dict[str, AxisGroup]:
    """Return the further groups of a pipeline.

    There is one per direction and kind of message, so that no send queues behind another kind; ``pp_tie``: first and
    last rank, for tied embeddings; ``twin``: the two ranks that hold the same stages in DualPipe.
    """
    if pp.size == 1:
        return {}
    axes = {name: _build_axis(name, pp.ranks, rank=rank, groups=groups) for name in P2P_AXES}
    ends = (pp.ranks[0], pp.ranks[-1])
    partner = pp.ranks[pp.size - 1 - pp.rank]
    if layout.pipeline.enters_both_ends:
        axes["twin"] = _build_axis("twin", tuple(sorted((rank, partner))), rank=rank, groups=groups)
    axes["pp_tie"] = _build_axis("pp_tie", ends if rank in ends else (rank,), rank=rank, groups=groups)
    return axes


P2P_AXES = ("pp_onward_down", "pp_onward_up", "pp_back_down", "pp_back_up")

# axes whose messages belong to one micro-batch; ZeRO's carry weights, which both micro-batches share
INTERLEAVED_AXES = ("tp", "cp", "ep", "etp", *P2P_AXES)
