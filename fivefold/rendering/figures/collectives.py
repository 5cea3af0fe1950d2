"""The collectives: what each rank holds before and after, and what it sends on a ring.

A buffer has a chunk for each rank: ``B2`` is the third chunk of the second rank, ``Σ2`` the sum of all third chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from fivefold.errors import UserError
from fivefold.rendering.charts import Chart, _import_altair
from fivefold.rendering.palette import PALE_INK, RULE, SERIES, TEXT, choose_ink
from fivefold.rendering.sweep.panels import Panel, place_side_by_side, stack_panels
from fivefold.step import count_sent_bytes

Buffers = list[list[str]]  # for each rank its chunks; "" where it holds none
NAMES = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")
MAX_RANKS = 8  # maximum number of ranks that remain readable


def list_buffers_before(name: str, ranks: int) -> Buffers:
    """Return the chunks that each rank holds before a collective."""
    full_buffers = [[f"{ascii_uppercase[rank]}{chunk}" for chunk in range(ranks)] for rank in range(ranks)]
    if name == "broadcast":
        return [full_buffers[0], *([""] * ranks for _ in range(ranks - 1))]
    if name == "all_gather":
        return [
            [f"{ascii_uppercase[rank]}{rank}" if chunk == rank else "" for chunk in range(ranks)]
            for rank in range(ranks)
        ]
    return full_buffers


def list_buffers_after(name: str, ranks: int) -> Buffers:
    """Return the chunks that each rank holds after a collective."""
    initial = list_buffers_before(name, ranks)
    sums = [f"Σ{chunk}" for chunk in range(ranks)]
    if name == "broadcast":
        return [initial[0]] * ranks
    if name == "reduce":
        return [sums, *([""] * ranks for _ in range(ranks - 1))]
    if name == "all_gather":
        return [[initial[chunk][chunk] for chunk in range(ranks)]] * ranks
    if name == "reduce_scatter":
        return [[sums[rank] if chunk == rank else "" for chunk in range(ranks)] for rank in range(ranks)]
    if name == "all_reduce":
        return [sums] * ranks
    return [[initial[other][rank] for other in range(ranks)] for rank in range(ranks)]


def draw_chart(ranks: int = 4) -> Chart:
    """Draw each collective in a panel: ranks as columns, before on the left, after on the right."""
    if not 2 <= ranks <= MAX_RANKS:
        raise UserError(f"collectives of {ranks} ranks cannot be drawn; use 2 to {MAX_RANKS}")
    panels = [
        Panel(
            f"{name}: each rank sends {_share(name, ranks)}",
            draw_before_and_after(list_buffers_before(name, ranks), list_buffers_after(name, ranks)),
        )
        for name in NAMES
    ]
    rows = [Panel("", join(panels[start : start + 2])) for start in range(0, len(panels), 2)]
    title = f"An all_reduce is a reduce_scatter and an all_gather: {_share('all_reduce', ranks)} over {ranks} ranks"
    return stack_panels(rows, title=title, subtitle="columns are ranks, rows are chunks; Σ is the sum over all ranks")


def _share(name: str, ranks: int) -> str:
    """Return the share of a full buffer that one rank sends on a ring."""
    share = count_sent_bytes(name, payload=10**6, ranks=ranks) / 1e6
    return "a full buffer" if share == 1 else f"{share:.2f} buffers"


def join(panels: Sequence[Panel]) -> Chart:
    """Join panels side by side, without style and title."""
    joined = place_side_by_side(panels, title="", subtitle="").to_dict()
    alt = _import_altair()
    for name in ("config", "padding", "background", "title", "$schema"):
        joined.pop(name, None)
    return alt.HConcatChart.from_dict(joined)


def draw_before_and_after(first: Buffers, last: Buffers) -> Chart:
    """Draw two sets of buffers with an arrow between them."""
    alt = _import_altair()
    ranks = len(first)
    cells = [*_list_cells(first, shift=0.0), *_list_cells(last, shift=ranks + 1.0)]
    x = alt.X("left:Q", axis=None, scale=alt.Scale(domain=[0, 2 * ranks + 1], nice=False))
    x2 = "right:Q"
    y = alt.Y("top:Q", axis=None, scale=alt.Scale(domain=[ranks, 0], nice=False))
    y2 = "bottom:Q"
    base = alt.Chart(alt.Data(values=cells))
    boxes = base.mark_rect(stroke="white", strokeWidth=1.5).encode(
        x=x, x2=x2, y=y, y2=y2, color=alt.Color("fill:N", scale=None)
    )
    texts = base.mark_text(fontSize=11, fontWeight="bold").encode(
        x=alt.X("middle:Q", axis=None),
        y=alt.Y("centre:Q", axis=None),
        text="text:N",
        color=alt.Color("ink:N", scale=None),
    )
    arrow = alt.Chart(alt.Data(values=[{"middle": ranks + 0.5, "centre": ranks / 2, "text": "→"}]))
    picture = (
        boxes + texts + arrow.mark_text(fontSize=20, color=PALE_INK).encode(x="middle:Q", y="centre:Q", text="text:N")
    )
    return picture.properties(width=26 * (2 * ranks + 1), height=24 * ranks)


def _list_cells(buffers: Buffers, *, shift: float) -> list[dict[str, Any]]:
    """Return a cell for each chunk that a rank holds, with its colours."""
    return [
        {
            "left": shift + rank,
            "right": shift + rank + 1,
            "top": chunk,
            "bottom": chunk + 1,
            "text": text,
            "middle": shift + rank + 0.5,
            "centre": chunk + 0.5,
            "fill": _fill(text),
            "ink": choose_ink(_fill(text)),
        }
        for rank, held in enumerate(buffers)
        for chunk, text in enumerate(held)
    ]


def _fill(text: str) -> str:
    """Return the colour of a chunk: pale if empty, dark for a sum, else the colour of its rank."""
    return RULE if not text else TEXT if text[0] == "Σ" else SERIES[ascii_uppercase.index(text[0])]
