"""The picture of ``network.py``: a step's seconds over slower and slower links, predicted lines and measured points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivefold.rendering.charts import save
from tests.agree.network_table import BITS, Row

GROUPS = (("data parallelism", ("dp2",)), ("within a layer", ("tp2", "cp2", "ep2")), ("pipelines", ("pp2",)))


def draw(rows: list[Row], path: Path) -> None:
    """Write the picture (.png or .svg): a panel per kind of parallelism, and predicted against measured."""
    import altair as alt

    values = [_value(row) for row in rows if row.case.precision == "fp32"]
    panels = [_panel(alt, [value for value in values if value["group"] == name], name) for name, _ in GROUPS]
    rows_of_panels = alt.hconcat(*panels[:2]), alt.hconcat(panels[2], _draw_measured_against_predicted(alt, rows))
    chart = alt.vconcat(*(item.resolve_scale(color="independent") for item in rows_of_panels))
    save(chart.configure_view(stroke=None).configure_axis(gridColor="#eee"), path)


def _group(layout: str) -> str:
    words = layout.split()
    return next(name for name, axes in GROUPS[::-1] if any(axis in words for axis in axes))


def _value(row: Row) -> dict[str, Any]:
    name = row.case.name.removeprefix("dense fp32 ").replace("sparse fp32", "experts:")
    return {
        "layout": name,
        "link": BITS.get(row.wire, 0.0),
        "measured": row.measured,
        "predicted": row.network,
        "group": _group(row.case.layout),
    }


def _panel(alt: Any, values: list[dict[str, Any]], title: str) -> Any:
    """Seconds over the speed of the link, slower to the right."""
    seen = [value[key] for value in values for key in ("predicted", "measured")]
    ends = [0.9 * min(seen), 1.1 * max(seen)]
    chart = alt.Chart(alt.Data(values=[value for value in values if value["link"]])).encode(
        x=alt.X(
            "link:Q",
            title="bits/s of the link",
            scale=alt.Scale(type="log", reverse=True, domain=[8e7, 1.25e10]),
            axis=alt.Axis(values=list(BITS.values()), format="~s", grid=False),
        ),
        color=alt.Color(
            "layout:N",
            title=None,
            scale=alt.Scale(scheme="tableau10"),
            legend=alt.Legend(orient="bottom", columns=2, labelLimit=200),
        ),
    )
    seconds = alt.Y("predicted:Q", title="seconds of a step", scale=alt.Scale(type="log", domain=ends, nice=False))
    lines = chart.mark_line(strokeWidth=1.5).encode(y=seconds)
    points = chart.mark_point(filled=True, size=45).encode(y="measured:Q")
    return (lines + points).properties(width=330, height=330, title=f"{title}: predicted (lines), measured (points)")


def _draw_measured_against_predicted(alt: Any, rows: list[Row]) -> Any:
    """Predicted against measured of every row, with 6 % around the diagonal."""
    ends = [min(row.measured for row in rows) * 0.9, max(row.measured for row in rows) * 1.1]
    scale, ticks = alt.Scale(type="log", domain=ends, nice=False), alt.Axis(values=[0.2, 0.5, 1, 2, 3])
    band = [{"x": end, "low": end / 1.06, "high": end * 1.06} for end in ends]
    area = alt.Chart(alt.Data(values=band)).mark_area(opacity=0.15, color="#4c78a8", clip=True)
    points = alt.Chart(alt.Data(values=[{"x": row.measured, "y": row.network, "link": row.wire} for row in rows]))
    return (
        area.encode(x=alt.X("x:Q", scale=scale, axis=ticks), y=alt.Y("low:Q", scale=scale, axis=ticks), y2="high:Q")
        + points.mark_point(filled=True, size=30).encode(
            x=alt.X("x:Q", title="measured seconds", scale=scale, axis=ticks),
            y=alt.Y("y:Q", title="predicted seconds", scale=scale, axis=ticks),
            color=alt.Color("link:N", title=None, legend=alt.Legend(orient="bottom", columns=2)),
        )
    ).properties(width=330, height=330, title="all, with 6 % around the diagonal")
