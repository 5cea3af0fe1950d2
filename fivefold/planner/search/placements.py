"""Sizes and strides of the process groups of many layouts at once, as ``layout/mesh.py`` returns them for one.

columns of degrees and the mesh order → stride of each axis → ranks and stride of each group
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fivefold.layout.names import DEFAULT_ORDER, MeshAxis
from fivefold.layout.spec import find_divisor_below
from fivefold.planner.search.columns import CandidateLayouts, Ints, PartialLayouts, encode_rows, factorize

NO_STRIDE = np.iinfo(np.int64).max  # of an axis with one rank


def list_groups(
    partials: PartialLayouts,
    candidates: CandidateLayouts,
    axes: Sequence[str],
    *,
    orders: Sequence[tuple[MeshAxis, ...]],
) -> Iterator[tuple[Ints, Ints]]:
    """Yield ranks and stride of the groups of each of ``axes``: those of ``mesh.group`` except for parts of tp.

    ``partials`` and ``candidates`` have one row per layout; ``orders`` is what the orders of ``candidates`` index.
    """
    degrees = dict(zip(DEFAULT_ORDER, partials.select(" ".join(DEFAULT_ORDER)), strict=True))
    strides = dict(zip(DEFAULT_ORDER, _list_strides([*degrees.values()], candidates.order, orders), strict=True))

    def find_stride(*names: MeshAxis) -> Ints:
        """Return the smallest stride of those of the axes that have more than one rank."""
        smallest = np.min([np.where(degrees[name] > 1, strides[name], NO_STRIDE) for name in names], axis=0)
        return np.where(smallest == NO_STRIDE, 1, smallest)

    for axis in axes:
        if axis in DEFAULT_ORDER:
            yield degrees[axis], strides[axis]
        elif axis == "shard":
            yield candidates.shards, find_stride("dp", "cp")
        elif axis == "replica":
            replicas = partials.dp * partials.cp // candidates.shards
            yield replicas, find_stride("dp", "cp") * candidates.shards
        elif axis == "etp":
            yield partials.etp, strides["tp"]
        else:
            shares_tp = partials.etp < partials.tp
            stride = np.where(shares_tp, find_stride("tp", "dp", "cp") * partials.etp, find_stride("dp", "cp"))
            if axis == "ep":
                yield partials.ep, stride
                continue
            shards = count_expert_shards(partials, candidates.shards)
            if axis == "expert_shard":
                yield shards, stride * partials.ep
            elif axis == "expert_replica":
                yield count_expert_replicas(partials) // shards, stride * partials.ep * shards
            else:
                raise KeyError(axis)


def _list_strides(degrees: Sequence[Ints], order: Ints, orders: Sequence[tuple[MeshAxis, ...]]) -> Iterator[Ints]:
    """Yield the stride of each axis of ``DEFAULT_ORDER``: the product of the degrees of those that are nearer."""
    places = np.array([[mesh_order.index(axis) for axis in DEFAULT_ORDER] for mesh_order in orders])[order]
    for axis in range(len(DEFAULT_ORDER)):
        stride = np.ones_like(order)
        for other, degree in enumerate(degrees):
            stride *= np.where(places[:, other] < places[:, axis], degree, 1)
        yield stride


def count_expert_replicas(partials: PartialLayouts) -> Ints:
    """Return ``Layout.expert_replicas`` of each row."""
    return np.asarray(partials.dp * partials.cp * partials.tp // (partials.ep * partials.etp))


def count_expert_shards(partials: PartialLayouts, shards: Ints) -> Ints:
    """Return ``Layout.expert_shards`` of each row."""
    replicas = count_expert_replicas(partials)
    limits = np.maximum(1, replicas * shards // (partials.dp * partials.cp))
    _, first_rows, inverse = factorize(encode_rows([replicas, limits]))
    pairs = zip(replicas[first_rows].tolist(), limits[first_rows].tolist(), strict=True)
    return np.array([find_divisor_below(count, limit) for count, limit in pairs], np.int64)[inverse]
