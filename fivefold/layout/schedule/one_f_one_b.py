"""GPipe, 1F1B and interleaved 1F1B, with full backwards (BW); rank r holds stages r, r + pp, r + 2·pp, ...

The bubble is (pp-1)(F+B)/v for equal stages, with B the full backward. Live micro-batches on rank r: GPipe m, 1F1B
min(m, pp-r), interleaved min(v·m, (v-1)·pp + 2(pp-r) - 1) stages of 1/v.
Sources: GPipe, arXiv:1811.06965; PipeDream-Flush and interleaving, Narayanan et al., arXiv:2104.04473 §2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.layout.schedule.columns import Columns, Passes, merge_passes
from fivefold.layout.schedule.table import Table

if TYPE_CHECKING:
    from fivefold.layout.schedule.columns import Ints


def generate_gpipe(*, pp: int, micro_batches: int) -> Table:
    """Generate GPipe: all forwards, then all backwards (AFAB)."""
    import numpy as np

    columns = _alternate_passes([(0, i) for i in range(micro_batches)], pp=pp, v=1, ahead=np.full(pp, micro_batches))
    return Table("gpipe", pp, columns, (tuple(range(pp)),) * micro_batches)


def generate_1f1b(*, pp: int, micro_batches: int) -> Table:
    """Generate 1F1B: pp - rank - 1 warm-up forwards, then one forward and one backward in turn."""
    import numpy as np

    visits = [(0, i) for i in range(micro_batches)]
    columns = _alternate_passes(visits, pp=pp, v=1, ahead=np.arange(pp)[::-1])
    return Table("1f1b", pp, columns, (tuple(range(pp)),) * micro_batches)


def generate_interleaved(*, pp: int, v: int, micro_batches: int) -> Table:
    """Generate interleaved 1F1B: v stages per rank, in groups of pp micro-batches, or more if pp is no divisor."""
    import numpy as np

    groups = max(1, micro_batches // pp)
    sizes = [micro_batches // groups + (group < micro_batches % groups) for group in range(groups)]
    visits = [
        (chunk, i)
        for group, size in enumerate(sizes)
        for chunk in range(v)
        for i in range(sum(sizes[:group]), sum(sizes[:group]) + size)
    ]
    columns = _alternate_passes(visits, pp=pp, v=v, ahead=(v - 1) * sizes[0] + 2 * np.arange(pp)[::-1])
    return Table("interleaved", pp, columns, (tuple(range(pp)) * v,) * micro_batches)


def _alternate_passes(visits: list[tuple[int, int]], *, pp: int, v: int, ahead: Ints) -> Columns:
    """Return the actions of all ranks: warm-up forwards, then forward and backward in turn, then remaining backwards.

    ``visits``: (chunk, micro-batch) in the order of the forwards, where a chunk is one of the v stages of a rank;
    backwards take the chunks in reverse. ``ahead``: the warm-up forwards of each rank.
    """
    import numpy as np

    chunk, micro_batch = np.array(visits).T
    turn, rank = np.arange(len(visits)), np.arange(pp)[:, None]
    return merge_passes(
        [
            Passes("F", 2 * np.maximum(turn - ahead[:, None], -1), chunk * pp + rank, micro_batch),
            Passes("BW", 2 * turn + 1, (v - 1 - chunk) * pp + rank, micro_batch),
        ],
        pp=pp,
    )
