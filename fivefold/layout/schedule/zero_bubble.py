"""Zero bubble with one stage per rank: the weight gradient W runs separately from B and fills idle time.

The bubble of ZB1P (ZB-H1) is (pp-1)(F+B-W), and every rank has as many live micro-batches as rank 0 under 1F1B. That of
ZB2P (ZB-H2) is (pp-1)(F+B-2W) on the longest rank from its first start to its last end (no barrier between steps), with
2·pp-1 live micro-batches. Exact for W ≤ F, W ≤ B and at least pp (ZB2P: 2·pp-1) micro-batches.
Source: Qi et al., arXiv:2401.10241 §2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.layout.schedule.columns import Columns, Passes, merge_passes
from fivefold.layout.schedule.table import Table

if TYPE_CHECKING:
    from fivefold.layout.schedule.columns import Ints


def generate_zb1p(*, pp: int, micro_batches: int) -> Table:
    """Generate ZB1P: 1F1B in which rank r runs each W r backwards after its B."""
    import numpy as np

    rank = np.arange(pp)
    columns = _defer_w(micro_batches, ahead=pp - rank, late=rank)
    return Table("zb1p", pp, columns, (tuple(range(pp)),) * micro_batches)


def generate_zb2p(*, pp: int, micro_batches: int) -> Table:
    """Generate ZB2P: twice the warm-up forwards; rank r runs each W 2·r backwards after its B."""
    import numpy as np

    rank = np.arange(pp)
    columns = _defer_w(micro_batches, ahead=2 * (pp - rank) - 1, late=2 * rank)
    return Table("zb2p", pp, columns, (tuple(range(pp)),) * micro_batches)


def _defer_w(micro_batches: int, *, ahead: Ints, late: Ints) -> Columns:
    """Return the actions of all ranks: warm-up forwards, then B, W and F in turn, then the remaining W.

    ``ahead``: the warm-up forwards of each rank; ``late``: each W runs this many backwards after its B.
    """
    import numpy as np

    i, rank = np.arange(micro_batches), np.arange(len(ahead))[:, None]
    return merge_passes(
        [
            Passes("F", 3 * np.maximum(i - ahead[:, None], -1) + 2, rank, i),
            Passes("B", 3 * i, rank, i),
            Passes("W", 3 * np.minimum(i + late[:, None], micro_batches) + 1, rank, i),
        ],
        pp=len(ahead),
    )
