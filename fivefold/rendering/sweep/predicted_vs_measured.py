"""Predicted step times of a sweep against measured ones, on equal axes; on the line they are equal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fivefold.rendering.charts import Chart, _import_altair, apply_style, encode_rows
from fivefold.rendering.palette import BLUE, PALE_INK, RULE, SERIES
from fivefold.rendering.sweep.settings import format_setting, list_fixed, list_varied_axes
from fivefold.results.sweep_row import SweepRow

MAX_NAMED_POINTS = 24
BAND = 0.08  # relative error that is shaded
MARGIN = 1.25


def draw_measured(rows: Sequence[SweepRow]) -> Chart | str:
    """Draw a point per measured row: measured seconds over predicted seconds."""
    pairs = [(row, row.step_seconds, row.measured_step_seconds) for row in rows]
    measured_rows = [(row, predicted, actual) for row, predicted, actual in pairs if predicted and actual]
    if not measured_rows:
        return "needs measured rows (--measure)"
    axes = list_varied_axes([row for row, _, _ in measured_rows])
    unit, scale = ("s", 1.0) if max(actual for _, _, actual in measured_rows) >= 2 else ("ms", 1e3)
    points = [
        {
            "predicted": predicted * scale,
            "measured": actual * scale,
            "series": format_setting(row, axes[:2]) or row.model,
            "text": row.layout if len(measured_rows) <= MAX_NAMED_POINTS else "",
        }
        for row, predicted, actual in measured_rows
    ]
    alt = _import_altair()
    all_seconds = [seconds * scale for _, predicted, actual in measured_rows for seconds in (predicted, actual)]
    ends = [min(all_seconds) / MARGIN, max(all_seconds) * MARGIN]
    limits = alt.Scale(type="log", domain=ends, nice=False)
    x = alt.X("predicted:Q", title=f"predicted step, {unit}", scale=limits, axis=alt.Axis(format="~s", tickCount=6))
    y = alt.Y("measured:Q", title=f"measured step, {unit}", scale=limits, axis=alt.Axis(format="~s", tickCount=6))
    line = [{"predicted": end, "measured": end, "low": end * (1 - BAND), "high": end * (1 + BAND)} for end in ends]
    names = list(dict.fromkeys(str(point["series"]) for point in points))
    colours = list(SERIES[: len(names)]) if 1 < len(names) <= len(SERIES) else [BLUE]
    legend = alt.Legend(orient="top", title=None, columns=4, labelLimit=240) if len(colours) > 1 else None
    colour = alt.Color("series:N", scale=alt.Scale(domain=names, range=colours), legend=legend)
    band = (
        alt.Chart(encode_rows(line))
        .mark_area(color=RULE, clip=True)
        .encode(x=x, y=alt.Y("low:Q", scale=limits), y2="high:Q")
    )
    equal = alt.Chart(encode_rows(line)).mark_line(color=PALE_INK, strokeDash=[4, 3]).encode(x=x, y=y)
    base = alt.Chart(encode_rows(points)).encode(x=x, y=y, color=colour)
    texts = base.mark_text(align="left", dx=7, fontSize=10).encode(text="text:N")
    picture = alt.layer(band, equal, base.mark_point(filled=True, size=60, opacity=0.9), texts)
    errors = [abs(predicted / actual - 1) for _, predicted, actual in measured_rows]
    median, worst = statistics.median(errors), max(errors)
    title = f"{len(measured_rows)} steps: predicted within {median:.1%} of measured (median), {worst:.0%} at worst"
    subtitle = " · ".join(filter(None, (list_fixed([row for row, _, _ in measured_rows]), f"band: within {BAND:.0%}")))
    return apply_style(picture.properties(width=460, height=460), title=title, subtitle=subtitle)
