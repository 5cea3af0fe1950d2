"""Show up to which degree each mesh axis pays: machine balance (FLOPs per byte), a row per message, expert sizes.

tp  output  output projection  tp4  tp8 has 1,170 FLOPs per byte, NVLink 4 needs 2,198
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.grid import Grid
from fivefold.results.balance import Axis, Ratios, Sizing
from fivefold.units import show_flops

LETTERS = (
    "msl: tokens of a micro-batch on a rank · P: weights of a layer · T: tokens of a sequence · D, F: widths · N, K: "
    "query and KV heads · H: head dimension · L: layers · k: experts per token · m: micro-batches · n: ranks of the "
    "degree · x, y: of tp x times y · w, g: bytes that one weight or activation, and its gradient, has in a message "
    "(ep: in combine, and in dispatch) · r: g, or 2·g without ZeRO · s: g+w, or 2·g without ZeRO"
)


def render_page(ratios: Ratios) -> RenderableType:
    """Return the page: headline, one row per message of an axis, and the sizes of experts if there are any."""
    rows = tuple(
        (axis.axis, axis.sends, axis.overlapped_with, _format_limit(axis), axis.reason) for axis in ratios.axes
    )
    words = ("axis", "sends", "overlapped with", "overlapped up to", "because")
    parts: list[RenderableType] = [_build_headline(ratios), Grid(words, rows, words=words)]
    if ratios.sizing:
        parts += [
            Text("\nExpert sizes at which compute overlaps the two all-to-alls", style="bold"),
            _build_sizing_table(ratios.sizing),
        ]
    return Group(*parts)


def render_degrees(ratios: Ratios) -> RenderableType:
    """Return a table per message: for every degree, the FLOPs per byte that it offers and that the link needs."""
    parts: list[RenderableType] = []
    for axis in ratios.axes:
        rows = tuple(
            (d.token, f"{d.flops_per_byte:,.0f}", f"{d.balance:,.0f}", d.link, "yes" if d.overlaps else "no")
            for d in axis.degrees
        )
        title = Text.assemble(
            (f"\n{axis.axis}", "bold"),
            f"  {axis.sends} during {axis.overlapped_with}",
            (f"  {axis.formula}", "dim"),
            overflow="fold",
        )
        headings = ("degree", "FLOPs/byte", "needed", "link", "overlaps")
        parts += [title, Grid(headings, rows, words=("degree", "link", "overlaps")) if rows else Text(axis.reason)]
    return Group(*parts, Text(f"\n{LETTERS}", style="dim", overflow="fold"))


def _build_headline(ratios: Ratios) -> Text:
    balances = ", ".join(f"{balance:,.0f} ({link})" for link, balance in ratios.balances.items())
    return Text.assemble(
        (f"{ratios.layout}, one axis varied at a time\n\n", "bold"),
        f"{show_flops(ratios.peak_flops)}FLOP/s at peak. FLOPs that the GPU does while it sends one byte: {balances}\n",
        overflow="fold",
    )


def _format_limit(axis: Axis) -> Text:
    if axis.largest == 1:
        return Text("none" if axis.degrees else "–", style="red" if axis.degrees else "dim")
    return Text(next(degree.token for degree in axis.degrees if degree.degree == axis.largest), style="green")


def _build_sizing_table(sizes: Sequence[Sizing]) -> Grid:
    """Return the table of expert widths that hide the messages of experts, for each link."""
    headings = (
        "link",
        "expert width",
        "needed, expert only",
        "with its layer",
        "top-k",
        "top-k at most, with its layer",
    )
    rows = tuple(
        (
            size.link,
            f"{size.ffn:,}",
            f"{size.ffn_alone:,}",
            f"{size.ffn_layer:,}",
            str(size.topk),
            "any" if size.topk_layer is None else str(size.topk_layer),
        )
        for size in sizes
    )
    return Grid(headings, rows, words=("link",))
