"""Seconds of one unit's messages of data parallelism: the gather of its weights and the reduction of its gradients."""

from __future__ import annotations

from typing import NamedTuple

from fivefold.layout.mesh import Group, group, group_of
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts, Name, apart
from fivefold.planner.counts.traffic import copy_messages, unit_messages
from fivefold.planner.time.network import Network

GatherReduceKey = tuple[object, ...]


class GatherReduceTime(NamedTuple):
    """Seconds to gather a unit's weights, to reduce its gradients, and to all-reduce those of replicated weights, and
    over replicas where that is done less often than the reduction.

    ``gather_busy``, ``reduce_busy``: of them those in which they keep the core busy (``Network.busy``). ``again``: to
    gather them for a backward, if that is not as often as for a forward.
    """

    gather: float
    reduce: float
    copies: float
    gather_busy: float = 0.0
    reduce_busy: float = 0.0
    again: float | None = None


def gather_reduce_key(counts: Counts, layout: Layout) -> GatherReduceKey:
    """Return the values of a layout on which ``gather_reduce_seconds`` depends."""
    return (layout.tp, layout.tp_inner, layout.sp, layout.ep, layout.etp, layout.zero, layout.shards, layout.dp,
            layout.cp, layout.pp, layout.order, layout.pipeline.enters_both_ends, apart(layout),
            counts.job.stack.copies == "weight" and layout.mbs)  # fmt: skip


def gather_reduce_seconds(counts: Counts, network: Network, layout: Layout, name: Name) -> GatherReduceTime:
    """Return the seconds of one unit's messages, each sent once."""
    each = counts.reduces_each(layout, name)
    gather = reduce = copies = gather_busy = reduce_busy = 0.0
    for message in unit_messages(counts, layout, name):
        asked = message.collective, message.payload, group_of(layout, message.group, message.ranks)
        seconds, busy = network.seconds(*asked), network.busy(*asked)
        if message.collective == "all_gather":
            gather, gather_busy = gather + seconds, gather_busy + busy
        elif message.group.endswith("replica") and each:
            copies += seconds
        else:
            reduce, reduce_busy = reduce + seconds, reduce_busy + busy
    for message in copy_messages(counts, layout, name):
        pair = message.axis == "pp"
        place = _dualpipe_replicas(layout) if pair else group_of(layout, message.group, message.ranks)
        copies += message.times * network.seconds(message.collective, message.payload, place)
    return GatherReduceTime(gather, reduce, copies, gather_busy, reduce_busy)


def _dualpipe_replicas(layout: Layout) -> Group:
    """Return the two ranks that hold the same stages under DualPipe: the first and last of the pipeline, the worst
    case.
    """
    pp = group(layout, "pp")
    return Group(2, (pp.ranks - 1) * pp.stride)
