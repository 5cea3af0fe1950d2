"""Charts of predictions against published runs: predicted over measured with the diagonal, errors over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from fivefold.errors import UserError
from fivefold.rendering.charts import Chart, _finish, _import_altair
from fivefold.rendering.palette import BLUE, PALE_INK
from fivefold.units import GIB

MAX_POINTS = 4000
WORDS = {"time": ("step time", "seconds", 1.0), "peak": ("peak memory", "GiB", float(GIB))}
Point = tuple[str, str, str, int, float, float]  # source, row, quantity, ranks, predicted, measured (s or bytes)


def pictures(points: Iterable[Point]) -> dict[str, Chart]:
    """Return the charts by name: a scatter and the error over ranks, of each quantity that was measured."""
    charts: dict[str, Chart] = {}
    every = list(points)
    for quantity in WORDS:
        if selected := [point for point in every if point[2] == quantity]:
            charts[f"{quantity}-scatter"] = scatter(selected)
            charts[f"{quantity}-over-ranks"] = draw_error_by_ranks(selected)
    if not charts:
        raise UserError("no row has a time or a peak; there is nothing to draw")
    return charts


def scatter(points: Sequence[Point]) -> Chart:
    """Return predicted over measured of one quantity on two logarithmic axes, with the diagonal."""
    alt = _import_altair()
    name, unit, size = WORDS[points[0][2]]
    rows = _rows(points)
    ends = [reach(value / size for point in points for value in point[4:]) for reach in (min, max)]
    scale = alt.Scale(type="log", domain=ends, nice=False, padding=8)
    x = alt.X("measured:Q", title=f"measured {name}, {unit}", scale=scale)
    y = alt.Y("predicted:Q", title=f"predicted, {unit}", scale=scale)
    line = alt.Chart(alt.Data(values=[{"measured": end, "predicted": end} for end in ends]))
    dots = alt.Chart(alt.Data(values=rows)).mark_point(filled=True, size=22, opacity=0.5)
    marks = _encode_sources(alt)
    chart = line.mark_line(strokeDash=[4, 4], color=PALE_INK).encode(x=x, y=y) + dots.encode(
        x=x, y=y, **marks, tooltip=["source:N", "row:N", "ranks:Q", "error:Q"]
    )
    near = fmean(abs(row["error"]) <= 0.1 for row in rows)
    title = f"{near:.0%} of {len(rows):,} runs are predicted within 10 % of their {name}"
    return _finish(chart, title=title, subtitle="dashed: predicted is measured", height=480)


def draw_error_by_ranks(points: Sequence[Point]) -> Chart:
    """Return the signed error of one quantity over the number of ranks, with the mean of each doubling."""
    alt = _import_altair()
    name, _, _ = WORDS[points[0][2]]
    rows = _rows(points)
    x = alt.X("ranks:Q", title="ranks", scale=alt.Scale(type="log", base=2, padding=8), axis=alt.Axis(format=",d"))
    y = alt.Y("error:Q", title=f"error of the {name}", axis=alt.Axis(format="+.0%"))
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y)
    marks = _encode_sources(alt)
    means = _average_doublings(rows)
    line = alt.Chart(alt.Data(values=means)).mark_line(point=True, color=BLUE, strokeWidth=2).encode(x=x, y=y)
    zero = alt.Chart(alt.Data(values=[{"error": 0.0}])).mark_rule(strokeDash=[4, 4], color=PALE_INK).encode(y=y)
    dots = base.mark_point(filled=True, size=22, opacity=0.5).encode(**marks, tooltip=["source:N", "row:N"])
    first, last = means[0], means[-1]
    title = f"Mean error {first['error']:+.0%} on {first['ranks']:,} ranks, {last['error']:+.0%} on {last['ranks']:,}"
    return _finish(zero + dots + line, title=title, subtitle="line: mean of the runs of a doubling", height=380)


def _encode_sources(alt: Any) -> dict[str, Any]:
    """Return a colour and a shape for each source: there are more of them than colours that can be told apart."""
    legend = alt.Legend(orient="right", title=None)
    shapes = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right"]
    return {
        "color": alt.Color("source:N", legend=legend),
        "shape": alt.Shape("source:N", legend=legend, scale=alt.Scale(range=shapes)),
    }


def _rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the points as records of a chart, in the unit of their quantity."""
    size = WORDS[points[0][2]][2]
    return [
        {
            "source": source,
            "row": row,
            "ranks": ranks,
            "predicted": predicted / size,
            "measured": measured / size,
            "error": predicted / measured - 1,
        }
        for source, row, _, ranks, predicted, measured in points[:: -(-len(points) // MAX_POINTS)]
    ]


def _average_doublings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Average the runs whose rank counts lie within one doubling, at the lower end of the doubling."""
    doublings = sorted({row["ranks"].bit_length() - 1 for row in rows})
    return [
        {
            "ranks": 2**doubling,
            "error": fmean(row["error"] for row in rows if row["ranks"].bit_length() - 1 == doubling),
        }
        for doubling in doublings
    ]
