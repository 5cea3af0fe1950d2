"""Where the ranks lie: the order of the mesh axes, and so who speaks with whom and how far away.

Nearest to outermost: tp, cp, dp, pp (``order=`` in the layout changes it). Tensor parallelism speaks most and sits
nearest. ZeRO shards over dp·cp; experts lie inside dp·cp·tp, their tensor parts (etp) nearest. An axis of one rank
lies nowhere: where ``order=`` puts it changes no group.
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.layout.spec import Layout

AXES = ("pp", "dp", "cp", "tp")  # outermost first, as in torch's DeviceMesh


class Group(NamedTuple):
    """``ranks`` that speak together, ``stride`` apart in the order of ranks."""

    ranks: int
    stride: int

    def place(self, rank: int) -> int:
        """Of a rank of the world among those of its group."""
        return rank // self.stride % self.ranks

    def members(self, rank: int) -> tuple[int, ...]:
        """All of the group of ``rank``, nearest first."""
        first = rank - self.place(rank) * self.stride
        return tuple(first + place * self.stride for place in range(self.ranks))


def group(layout: Layout, axis: str) -> Group:
    """The ranks of one group of ``axis``, as far as ``layout.legal`` lets them lie one stride apart.

    Beside the axes of the mesh: ``world``, ``stage`` (all of one pipeline rank; in a line, but where pp lies among
    them: ``members`` knows who they are), ``shard`` and ``replica`` (ZeRO's two, over dp·cp), ``ep``, ``etp``, and
    ``expert_shard`` and ``expert_replica`` (ZeRO's two for experts, over what ep and etp leave of dp·cp·tp).
    """
    if axis == "world":
        return Group(layout.world, 1)
    strides, reach = dict[str, int](), 1
    for name in layout.order:
        strides[name] = reach
        reach *= int(getattr(layout, name))
    if axis in strides:
        return Group(int(getattr(layout, axis)), strides[axis])
    if axis == "stage":
        return Group(layout.world // layout.pp, layout.pp if strides["pp"] == 1 else 1)

    def nearest(*axes: str) -> int:
        return min((strides[name] for name in axes if getattr(layout, name) > 1), default=1)

    replicas, near = layout.dp * layout.cp, nearest("dp", "cp")
    if axis == "shard":
        return Group(layout.shards, near)
    if axis == "replica":
        return Group(replicas // layout.shards, near * layout.shards)
    if axis == "etp":
        return Group(layout.etp, strides["tp"])
    # without etp, or cut over a part of tp alone, experts spread over tp too
    inner = nearest("tp", "dp", "cp") * layout.etp if layout.etp < layout.tp else near
    if axis == "ep":
        return Group(layout.ep, inner)
    if axis in ("expert_shard", "expert_replica"):
        spread, shards = inner * layout.ep, layout.expert_shards
        if axis == "expert_shard":
            return Group(shards, spread)
        return Group(layout.expert_replicas // shards, spread * shards)
    raise KeyError(axis)


def members(layout: Layout, axis: str, *, rank: int) -> tuple[int, ...]:
    """The ranks of the group of ``axis`` in which ``rank`` speaks, in the order of their places."""
    if axis == "stage":  # pp may lie among them
        pp = group(layout, "pp")
        return tuple(other for other in range(layout.world) if pp.place(other) == pp.place(rank))
    return group(layout, axis).members(rank)
