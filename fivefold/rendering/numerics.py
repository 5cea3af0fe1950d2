"""Show a precision recipe's errors against fp32, as a page of text and as a heat map of tensors over layers.

                        error  in layer  underflow  overflow
attention.core          0.4 %         3     0.01 %         –
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering import charts
from fivefold.rendering.grid import Grid
from fivefold.rendering.table import build_heading
from fivefold.results.numerics import KINDS, Compared, Numerics

LOST = 0.01  # share of underflow above which the headline counts a tensor


def render_page(numerics: Numerics) -> RenderableType:
    """Return the page: a table per kind of tensor, with the worst layer of each name."""
    parts: list[RenderableType] = [
        Text(describe_numerics(numerics), style="bold"),
        Text(_describe_run(numerics), style="dim"),
    ]
    for kind, words in KINDS.items():
        rows = [row for row in numerics.rows if row.kind == kind]
        if rows:
            parts += [build_heading(words.capitalize(), "of each name the worst layer"), _build_grid(rows)]
    return Group(*parts)


def describe_numerics(numerics: Numerics) -> str:
    """Return the finding in one line."""
    overflows = [row for row in numerics.rows if row.overflow]
    if overflows:
        places = f"{len(overflows)} of {len(numerics.rows)} places"
        return f"{numerics.recipe} overflows in {places}, first in {_place(overflows[0])}"
    gradients = [row for row in numerics.rows if row.kind == "weight"]
    worst = max(gradients, key=lambda row: row.error)
    lost = [row for row in numerics.rows if row.kind != "operand" and row.underflow > LOST]
    note = f"; {len(lost)} of {len(numerics.rows)} places lose more than {LOST:.0%} to underflow" if lost else ""
    within = f"within {_share(worst.error)} of fp32's, worst {_place(worst)}"
    return f"{numerics.recipe}: gradients of weights are {within}{note}"


def _describe_run(numerics: Numerics) -> str:
    """Return a line on the run: its model and tokens, and its loss next to that in fp32."""
    loss = "not finite" if numerics.loss is None else f"{numerics.loss:.5f}"
    words = [
        f"{numerics.model}, {numerics.tokens:,} tokens, weights {numerics.weights}",
        f"loss {loss}, in fp32 {numerics.reference_loss:.5f}",
    ]
    if numerics.loss_scale != 1:
        words.append(f"loss scaled by {numerics.loss_scale:g}")
    if numerics.rerouted is not None:
        words.append(f"{_share(numerics.rerouted)} of the choices of experts would be others")
    return " · ".join(words)


def _build_grid(rows: Iterable[Compared]) -> Grid:
    """Return the table of errors, each name with its worst layer."""
    by_name: dict[str, list[Compared]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    cells = []
    for name, rows_of_name in by_name.items():
        worst = max(rows_of_name, key=lambda row: row.error)
        cells.append(
            (
                name,
                _share(worst.error),
                "–" if worst.layer is None else str(worst.layer),
                f"{min(row.cosine for row in rows_of_name):.6f}",
                _share(max(row.underflow for row in rows_of_name)),
                _share(max(row.overflow for row in rows_of_name)),
                f"{max(row.largest for row in rows_of_name):.3g}",
            )
        )
    return Grid(
        headings=("", "error", "layer", "cosine", "underflow", "overflow", "largest"), rows=tuple(cells), words=("",)
    )


def _share(value: float) -> str:
    return "–" if value == 0 else f"{value:.2%}" if value >= 1e-4 else f"{value:.1e}"


def _place(row: Compared) -> str:
    return row.name if row.layer is None else f"{row.name} of layer {row.layer}"


def draw_error_map(numerics: Numerics) -> charts.Chart:
    """Return a heat map of relative errors: layers across, names down, one panel per kind of tensor."""
    alt = charts._import_altair()
    panels = []
    for kind, words in KINDS.items():
        rows = [row for row in numerics.rows if row.kind == kind]
        if not rows:
            continue
        values: list[dict[str, Any]] = [
            {
                "name": row.name,
                "layer": "–" if row.layer is None else row.layer,
                "error": max(row.error, 1e-9),
                "underflow": row.underflow,
                "overflow": row.overflow,
            }
            for row in rows
        ]
        names = list(dict.fromkeys(row.name for row in rows))
        colour = alt.Color(
            "error:Q", title="error", scale=alt.Scale(type="log", scheme="viridis"), legend=alt.Legend(format=".0e")
        )
        panels.append(
            alt.Chart(alt.Data(values=values), title=words)
            .mark_rect()
            .encode(
                x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0)),
                y=alt.Y("name:N", sort=names, title=None, axis=alt.Axis(labelLimit=300)),
                color=colour,
                tooltip=["name:N", "layer:O", "error:Q", "underflow:Q", "overflow:Q"],
            )
            .properties(height=16 * len(names), width=charts.WIDTH)
        )
    return alt.vconcat(
        *panels, title=alt.TitleParams(describe_numerics(numerics), subtitle=_describe_run(numerics), anchor="start")
    )
