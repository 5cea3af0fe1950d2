"""Pipeline schedules as data: ``schedule("1f1b", pp=4, v=1, micro_batches=8)`` is a table of actions per rank.

one_f_one_b · zero_bubble · v_shaped   the generators: GPipe, 1F1B, interleaved; ZB1P, ZB2P; ZB-V, DualPipe, DualPipeV
table · action · columns · csv_file    rank → actions, with ``check``; F, B, W; as arrays; a table from a file
play · order · p2p · live_micro_batches   times and memory; an order of execution; its messages; micro-batches in flight

To add a schedule, write a generator and enter it in ``GENERATORS`` and in ``layout.names.ScheduleName``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType

from fivefold.layout.names import V_SHAPED, ScheduleName
from fivefold.layout.schedule.one_f_one_b import gpipe, interleaved, one_f_one_b
from fivefold.layout.schedule.table import Table
from fivefold.layout.schedule.v_shaped import dualpipe, dualpipev, zbv
from fivefold.layout.schedule.zero_bubble import zb1p, zb2p
from fivefold.record import Mistake

GENERATORS: Mapping[ScheduleName, Callable[..., Table]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "zb1p": zb1p,
        "zb2p": zb2p,
        "zbv": zbv,
        "dualpipe": dualpipe,
        "dualpipev": dualpipev,
    }
)


def schedule(name: ScheduleName, *, pp: int, v: int, micro_batches: int) -> Table:
    """The table for ``pp`` ranks with ``v`` stages each; ``Mistake`` if the schedule does not exist for these numbers.

    Tables are cached: equal arguments return the same object, so its ``order`` is computed once.
    """
    return _generated(name, pp, v, micro_batches)


@lru_cache(maxsize=1024)
def _generated(name: ScheduleName, pp: int, v: int, micro_batches: int) -> Table:
    reason = _reason(name, pp=pp, v=v, micro_batches=micro_batches)
    if reason:
        raise Mistake(f"{name} {reason}")
    several = {"v": v} if name == "interleaved" else {}
    return GENERATORS[name](pp=pp, micro_batches=micro_batches, **several)


def _reason(name: ScheduleName, *, pp: int, v: int, micro_batches: int) -> str:
    """Why the schedule does not exist for these numbers; empty if it does."""
    stages = 2 if name in V_SHAPED else 1
    if min(pp, v, micro_batches) < 1:
        return f"needs one of each or more, not pp={pp} v={v} and {micro_batches} micro-batches"
    if name != "interleaved" and v != stages:
        return f"runs {stages} stages per rank, not v={v}; write v{stages} or interleaved"
    if name == "dualpipe" and (pp % 2 or micro_batches % 2):
        mend = f"pp{pp + pp % 2} and {micro_batches + micro_batches % 2} micro-batches, or dualpipev"
        return f"halves its ranks and micro-batches, but pp={pp} and {micro_batches} are not both even; try {mend}"
    if name.startswith("dualpipe") and micro_batches < 2 * pp:
        return f"needs 2·pp={2 * pp} micro-batches or more, not {micro_batches}; raise gbs or lower dp·mbs"
    return ""
