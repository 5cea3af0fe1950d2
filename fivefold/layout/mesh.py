"""The mesh of ranks: the order of its axes determines the ranks of every process group.

Nearest to outermost: tp, cp, dp, pp (``order=`` in the layout changes it). Tensor parallelism communicates most and is
nearest. ZeRO shards over dp·cp; experts are sharded inside dp·cp·tp, with etp nearest. The position of an axis with
one rank in ``order=`` changes no group.
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.layout.spec import Layout

AXES = ("pp", "dp", "cp", "tp")  # outermost first, as in torch's DeviceMesh


class RankGroup(NamedTuple):
    """A process group's size, and the ``stride`` between its consecutive global ranks."""

    ranks: int
    stride: int

    def place(self, rank: int) -> int:
        """Return the index of a global rank within its group."""
        return rank // self.stride % self.ranks

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the global ranks of the group that contains ``rank``, ascending."""
        first = rank - self.place(rank) * self.stride
        return tuple(first + place * self.stride for place in range(self.ranks))


def group(layout: Layout, axis: str) -> RankGroup:
    """Return size and stride of the groups of ``axis``; ``layout.validity`` ensures that one stride describes them.

    In addition to the axes of the mesh: ``world``, ``stage`` (all ranks with one pipeline rank; no single stride if pp
    is a middle axis: use ``list_members``), ``shard`` and ``replica`` (ZeRO's groups over dp·cp), ``ep``, ``etp``,
    ``tp_inner`` and ``tp_outer`` (of 2D tensor parallelism), ``expert_shard`` and ``expert_replica`` (ZeRO's groups for
    experts, over the rest of dp·cp·tp after ep and etp).
    """
    if axis == "world":
        return RankGroup(layout.world, 1)
    strides = layout.strides
    if axis in strides:
        return RankGroup(int(getattr(layout, axis)), strides[axis])
    if axis in ("tp_inner", "tp_outer"):  # y and x of tp = x·y
        tp_inner = layout.tp_inner
        return (
            RankGroup(tp_inner, strides["tp"])
            if axis == "tp_inner"
            else RankGroup(layout.tp // tp_inner, strides["tp"] * tp_inner)
        )
    if axis == "stage":
        return RankGroup(layout.world // layout.pp, layout.pp if strides["pp"] == 1 else 1)

    def find_stride(*axes: str) -> int:
        return min((strides[name] for name in axes if getattr(layout, name) > 1), default=1)

    replicas, replica_stride = layout.dp * layout.cp, find_stride("dp", "cp")
    if axis == "shard":
        return RankGroup(layout.shards, replica_stride)
    if axis == "replica":
        return RankGroup(replicas // layout.shards, replica_stride * layout.shards)
    if axis == "etp":
        return RankGroup(layout.etp, strides["tp"])
    # experts are sharded over tp too, unless etp covers all of it
    expert_stride = find_stride("tp", "dp", "cp") * layout.etp if layout.etp < layout.tp else replica_stride
    if axis == "ep":
        return RankGroup(layout.ep, expert_stride)
    if axis in ("expert_shard", "expert_replica"):
        expert_replica_stride = expert_stride * layout.ep
        shards = layout.expert_shards
        if axis == "expert_shard":
            return RankGroup(shards, expert_replica_stride)
        return RankGroup(layout.expert_replicas // shards, expert_replica_stride * shards)
    raise KeyError(axis)


def list_members(layout: Layout, axis: str, *, rank: int) -> tuple[int, ...]:
    """Return the global ranks of the group of ``axis`` that contains ``rank``, ascending."""
    if axis == "stage":  # pp may be a middle axis
        pp = group(layout, "pp")
        return tuple(member for member in range(layout.world) if pp.place(member) == pp.place(rank))
    return group(layout, axis).members(rank)


def make_group(layout: Layout, name: str, ranks: int) -> RankGroup:
    """Return the group ``name`` with ``ranks`` ranks, at the same stride."""
    default = group(layout, name)
    return default if default.ranks == ranks else RankGroup(ranks, default.stride)
