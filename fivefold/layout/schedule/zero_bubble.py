"""Zero bubble with one stage per rank: the weight gradient W runs separately from B and fills idle time.

The bubble of ZB1P (ZB-H1) is (pp-1)(F+B-W), and every rank has as many live micro-batches as rank 0 under 1F1B. That of
ZB2P (ZB-H2) is (pp-1)(F+B-2W) on the longest rank from its first start to its last end (no barrier between steps), with
2·pp-1 live micro-batches. Exact for W ≤ F, W ≤ B and at least pp (ZB2P: 2·pp-1) micro-batches.
Source: Qi et al., arXiv:2401.10241 §2.
"""

from __future__ import annotations

from fivefold.layout.schedule.action import Action
from fivefold.layout.schedule.table import Table


def generate_zb1p(*, pp: int, micro_batches: int) -> Table:
    """Generate ZB1P: 1F1B in which rank r runs each W r backwards after its B."""
    rows = (_defer_w(rank, micro_batches, ahead=pp - rank, late=rank) for rank in range(pp))
    return Table("zb1p", tuple(rows), (tuple(range(pp)),) * micro_batches)


def generate_zb2p(*, pp: int, micro_batches: int) -> Table:
    """Generate ZB2P: twice the warm-up forwards; rank r runs each W 2·r backwards after its B."""
    rows = (_defer_w(rank, micro_batches, ahead=2 * (pp - rank) - 1, late=2 * rank) for rank in range(pp))
    return Table("zb2p", tuple(rows), (tuple(range(pp)),) * micro_batches)


def _defer_w(rank: int, micro_batches: int, *, ahead: int, late: int) -> tuple[Action, ...]:
    """Return ``ahead`` warm-up forwards, then B, W and F in turn, each W ``late`` backwards after its B."""
    row = [Action("F", rank, i) for i in range(min(ahead, micro_batches))]
    for i in range(micro_batches):
        row.append(Action("B", rank, i))
        if i >= late:
            row.append(Action("W", rank, i - late))
        if i + ahead < micro_batches:
            row.append(Action("F", rank, i + ahead))
    row += (Action("W", rank, i) for i in range(max(0, micro_batches - late), micro_batches))
    return tuple(row)
