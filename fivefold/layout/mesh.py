"""Where the ranks lie: the order of the mesh axes, and so who speaks with whom and how far away.

Nearest to outermost: tp, cp, dp, pp (``order=`` in the layout changes it). Tensor parallelism speaks most and sits
nearest. ZeRO shards over dp·cp; experts lie inside dp·cp·tp, their tensor parts (etp) nearest.
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


def group(layout: Layout, axis: str) -> Group:
    """The ranks of one group of ``axis``.

    Beside the axes of the mesh: ``world``, ``stage`` (all of one pipeline rank; in a line, but where pp lies among
    them), ``shard`` and ``replica`` (ZeRO's two, over dp·cp), ``ep``, ``etp``, and
    ``expert_shard`` and ``expert_replica`` (ZeRO's two for experts, over what ep and etp leave of dp·cp·tp).
    """
    if axis == "world":
        return Group(layout.world, 1)
    strides, reach = {}, 1
    for name in layout.order:
        strides[name] = reach
        reach *= int(getattr(layout, name))
    if axis in strides:
        return Group(int(getattr(layout, axis)), strides[axis])
    if axis == "stage":
        return Group(layout.world // layout.pp, layout.pp if strides["pp"] == 1 else 1)
    replicas = layout.dp * layout.cp
    near = min(strides[name] for name in ("dp", "cp") if getattr(layout, name) > 1 or replicas == 1)
    if axis == "shard":
        return Group(layout.shards, near)
    if axis == "replica":
        return Group(replicas // layout.shards, near * layout.shards)
    inner = min(near, strides["tp"]) if layout.etp < layout.tp else near  # without etp, experts spread over tp too
    if axis == "etp":
        return Group(layout.etp, strides["tp"])
    if axis == "ep":
        return Group(layout.ep, inner * layout.etp if layout.etp < layout.tp else inner)
    if axis in ("expert_shard", "expert_replica"):
        spread = inner * layout.ep * (layout.etp if layout.etp < layout.tp else 1)
        shards = layout.expert_shards
        if axis == "expert_shard":
            return Group(shards, spread)
        return Group(layout.expert_replicas // shards, spread * shards)
    raise KeyError(axis)
