"""The distinct messages of a run, and their seconds among those that were timed in its steps (without torch)."""

from __future__ import annotations

from collections.abc import Mapping
from math import log

from pydantic import PositiveInt

from fivefold.layout.spec import Layout
from fivefold.machine.spec import Collective
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.peak import make_table
from fivefold.planner.counts.traffic import list_messages
from fivefold.record import Record

SIMILAR_SIZE_RATIO = 1.6  # sizes that differ by a smaller factor count as equal


class MessageOrder(Record):
    """A message to time: a full tensor of ``bytes`` over ``ranks`` ranks.

    ``both_ways``: one hop of a ring, which sends to the next rank and receives from the previous one.
    """

    collective: Collective
    ranks: PositiveInt
    bytes: PositiveInt
    both_ways: bool = False


class Timed(Record):
    """The seconds of one occurrence (median over steps), their ``spread``, and the number of ``times`` in a step.

    The spread is (slowest - fastest) / median. ``clock_seconds``: by the clock, where ``seconds`` are the processor's.
    """

    seconds: float
    spread: float
    times: int = 1
    clock_seconds: float | None = None


def list_distinct_messages(counts: Counts, layout: Layout, *, local_ranks: int) -> tuple[MessageOrder, ...]:
    """Return the distinct messages of a step of ``layout`` whose ranks all fit on this computer.

    ``local_ranks``: the number of ranks that run on this computer.
    """
    rank_stages = make_table(layout, counts.job).rank_stages if layout.pp > 1 else ((0,),)
    orders: dict[MessageOrder, None] = {}
    for message in (message for chunks in rank_stages for message in list_messages(counts, layout, chunks=chunks)):
        is_stage_hop = message.collective == "p2p" and message.axis == "pp"
        ranks = layout.pp if is_stage_hop else message.ranks
        if message.times and 1 < ranks <= local_ranks and local_ranks % ranks == 0 and message.payload >= 1:
            both_ways = message.collective == "p2p" and not is_stage_hop
            fields = {
                "collective": message.collective,
                "ranks": ranks,
                "bytes": message.payload,
                "both_ways": both_ways,
            }
            orders[MessageOrder.model_validate(fields)] = None
    return tuple(orders)


def list_measured_seconds(order: MessageOrder, timed: Mapping[str, Timed]) -> list[float]:
    """Return the seconds of messages of this size that were timed in a step.

    Keys of ``timed`` are names such as ``message all_reduce 2 4096``. If there is none of exactly this size, those
    within a factor of ``SIMILAR_SIZE_RATIO`` are taken: the number of routed tokens is never exactly the expected one.
    """
    start = f"message {order.collective} {order.ranks} "
    if exact := timed.get(f"{start}{order.bytes}"):
        return [exact.seconds]
    sizes = {name: int(name.removeprefix(start)) for name in timed if name.startswith(start)}
    return [
        timed[name].seconds
        for name, size in sizes.items()
        if size and abs(log(size / order.bytes)) < log(SIMILAR_SIZE_RATIO)
    ]
