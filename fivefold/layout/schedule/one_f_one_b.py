"""GPipe, 1F1B and interleaved 1F1B, with full backwards (BW); rank r holds stages r, r + pp, r + 2·pp, ...

The bubble is (pp-1)(F+B)/v for equal stages, with B the full backward. Live micro-batches on rank r: GPipe m, 1F1B
min(m, pp-r), interleaved min(v·m, (v-1)·pp + 2(pp-r) - 1) stages of 1/v.
Sources: GPipe, arXiv:1811.06965; PipeDream-Flush and interleaving, Narayanan et al., arXiv:2104.04473 §2.2.
"""

from __future__ import annotations

from fivefold.layout.schedule.action import Action
from fivefold.layout.schedule.table import Table


def generate_gpipe(*, pp: int, micro_batches: int) -> Table:
    """Generate GPipe: all forwards, then all backwards (AFAB)."""
    micro_batch_range = range(micro_batches)
    rows = (
        (*(Action("F", rank, i) for i in micro_batch_range), *(Action("BW", rank, i) for i in micro_batch_range))
        for rank in range(pp)
    )
    return Table("gpipe", tuple(rows), (tuple(range(pp)),) * micro_batches)


def generate_1f1b(*, pp: int, micro_batches: int) -> Table:
    """Generate 1F1B: pp - rank - 1 warm-up forwards, then one forward and one backward in turn."""
    visits = [(0, i) for i in range(micro_batches)]
    rows = (_alternate_actions(visits, rank=rank, pp=pp, v=1, ahead=pp - rank - 1) for rank in range(pp))
    return Table("1f1b", tuple(rows), (tuple(range(pp)),) * micro_batches)


def generate_interleaved(*, pp: int, v: int, micro_batches: int) -> Table:
    """Generate interleaved 1F1B: v stages per rank, in groups of pp micro-batches, or more if pp is no divisor."""
    groups = max(1, micro_batches // pp)
    sizes = [micro_batches // groups + (group < micro_batches % groups) for group in range(groups)]
    visits = [
        (chunk, i)
        for group, size in enumerate(sizes)
        for chunk in range(v)
        for i in range(sum(sizes[:group]), sum(sizes[:group]) + size)
    ]
    rows = (
        _alternate_actions(visits, rank=rank, pp=pp, v=v, ahead=(v - 1) * sizes[0] + 2 * (pp - rank - 1))
        for rank in range(pp)
    )
    return Table("interleaved", tuple(rows), (tuple(range(pp)) * v,) * micro_batches)


def _alternate_actions(visits: list[tuple[int, int]], *, rank: int, pp: int, v: int, ahead: int) -> tuple[Action, ...]:
    """Return ``ahead`` warm-up forwards, then forward and backward in turn, then the remaining backwards.

    ``visits``: (chunk, micro-batch) in the order of the forwards, where a chunk is one of the v stages of the rank;
    backwards take the chunks in reverse.
    """
    forwards = [Action("F", chunk * pp + rank, i) for chunk, i in visits]
    backwards = [Action("BW", (v - 1 - chunk) * pp + rank, i) for chunk, i in visits]
    ahead = min(ahead, len(visits))
    pairs = (action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair)
    return (*forwards[:ahead], *pairs, *backwards[len(visits) - ahead :])
