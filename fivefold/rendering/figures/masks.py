"""Show which rank of a ring computes which scores of a causal mask, with tokens divided in order or in zig-zag.

In zig-zag a rank of n holds the i-th chunk from the front and the i-th from the end of 2n, so that all ranks have equal
work.
"""

from __future__ import annotations

from typing import Any

from fivefold.errors import UserError
from fivefold.rendering.charts import Chart, _import_altair
from fivefold.rendering.palette import RULE, SERIES, choose_ink
from fivefold.rendering.sweep.panels import Panel, place_side_by_side

MAX_COLORS = 10  # maximum number of ranks with distinct colours


def find_owner(chunk: int, *, ranks: int, zigzag: bool) -> int:
    """Return the rank that holds a chunk of the 2n of a sequence."""
    return min(chunk, 2 * ranks - 1 - chunk) if zigzag else chunk // 2


def work(*, ranks: int, zigzag: bool) -> list[float]:
    """Return the share of all visible scores that each rank computes for a long sequence."""
    scores = [0.0] * ranks
    for query in range(2 * ranks):
        scores[find_owner(query, ranks=ranks, zigzag=zigzag)] += query + 0.5  # full chunks before it, half of its own
    return [score / sum(scores) for score in scores]


def draw_chart(ranks: int = 4) -> Chart:
    """Draw queries down and keys across, in the colour of the query's rank."""
    if not 2 <= ranks <= MAX_COLORS:
        raise UserError(f"the masks of {ranks} ranks cannot be drawn; use 2 to {MAX_COLORS} ranks")
    plain, zigzag = (work(ranks=ranks, zigzag=is_zigzag) for is_zigzag in (False, True))
    panels = [
        Panel(f"{name}: rank {shares.index(max(shares))} computes {max(shares):.0%}", _mask(ranks, in_zigzag))
        for name, in_zigzag, shares in (("in order", False, plain), ("zig-zag", True, zigzag))
    ]
    title = f"Cut in order, one rank of {ranks} computes {max(plain):.0%} of the scores; in zig-zag {max(zigzag):.0%}"
    return place_side_by_side(panels, title=title, subtitle="a causal mask over cp ranks: queries down, keys across")


def _mask(ranks: int, zigzag: bool) -> Chart:
    """Draw which scores of a causal mask each rank computes, cut in order or in zig-zag."""
    alt = _import_altair()
    chunks = 2 * ranks
    cells: list[dict[str, Any]] = []
    for query in range(chunks):
        rank = find_owner(query, ranks=ranks, zigzag=zigzag)
        for key in range(chunks):
            fill = SERIES[rank] if key <= query else RULE
            cells.append(
                {
                    "x": key,
                    "x2": key + 1,
                    "y": query,
                    "y2": query + 1,
                    "fill": fill,
                    "opacity": 0.55 if key == query else 1.0,
                    "mx": key + 0.5,
                    "my": query + 0.5,
                    "text": str(rank) if key <= query else "",
                    "ink": choose_ink(fill),
                }
            )
    base = alt.Chart(alt.Data(values=cells))
    boxes = base.mark_rect(stroke="white", strokeWidth=1).encode(
        x=alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, chunks], nice=False)),
        x2="x2:Q",
        y=alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[chunks, 0], nice=False)),
        y2="y2:Q",
        color=alt.Color("fill:N", scale=None),
        opacity=alt.Opacity("opacity:Q", scale=None),
    )
    texts = base.mark_text(fontSize=11).encode(
        x=alt.X("mx:Q", axis=None), y=alt.Y("my:Q", axis=None), text="text:N", color=alt.Color("ink:N", scale=None)
    )
    return (boxes + texts).properties(width=300, height=300)
