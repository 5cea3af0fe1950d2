"""Zero bubble on a line of ranks: the weight gradient W is apart and fills what would be idle.

ZB1P (ZB-H1): bubble (pp-1)(F+B-W), as many micro-batches alive as 1F1B, on every rank. ZB2P (ZB-H2): (pp-1)(F+B-2W)
of the longest rank from its first start to its last end (the ranks do not wait for one another between steps),
and 2·pp-1 alive. Exact for W ≤ F, W ≤ B and micro-batches from pp, 2·pp-1 on.
Source: Qi et al., arXiv:2401.10241 §2.
"""

from __future__ import annotations

from fivefold.layout.schedule.action import Action
from fivefold.layout.schedule.table import Table


def zb1p(*, pp: int, micro_batches: int) -> Table:
    """1F1B in which rank r runs each W r backwards late."""
    rows = (_late(rank, micro_batches, ahead=pp - rank, late=rank) for rank in range(pp))
    return Table("zb1p", tuple(rows), (tuple(range(pp)),) * micro_batches)


def zb2p(*, pp: int, micro_batches: int) -> Table:
    """Twice the warm-up fills the wait for the first backward; rank r runs each W 2·r backwards late."""
    rows = (_late(rank, micro_batches, ahead=2 * (pp - rank) - 1, late=2 * rank) for rank in range(pp))
    return Table("zb2p", tuple(rows), (tuple(range(pp)),) * micro_batches)


def _late(rank: int, micro_batches: int, *, ahead: int, late: int) -> tuple[Action, ...]:
    """``ahead`` forwards, then B, W and F in turn, W ``late`` backwards after its B."""
    row = [Action("F", rank, i) for i in range(min(ahead, micro_batches))]
    for i in range(micro_batches):
        row.append(Action("B", rank, i))
        if i >= late:
            row.append(Action("W", rank, i - late))
        if i + ahead < micro_batches:
            row.append(Action("F", rank, i + ahead))
    row += (Action("W", rank, i) for i in range(max(0, micro_batches - late), micro_batches))
    return tuple(row)
