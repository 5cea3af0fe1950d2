"""Predicted step times of a sweep against measured ones, both axes alike; on the line they are equal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fivefold.rendering.charts import Chart, _altair, data, styled
from fivefold.rendering.palette import BLUE, PALE_INK, RULE, SERIES
from fivefold.rendering.sweep.settings import fixed, setting, varied
from fivefold.results.sweep_row import Row

MOST_NAMED = 24
BAND = 0.08  # relative error that is shaded
MARGIN = 1.25


def measured(rows: Sequence[Row]) -> Chart | str:
    """A point per measured row: seconds as measured over seconds as predicted."""
    pairs = [(row, row.step_seconds, row.measured_step_seconds) for row in rows]
    found = [(row, ours, theirs) for row, ours, theirs in pairs if ours and theirs]
    if not found:
        return "needs measured rows (--measure)"
    axes = varied([row for row, _, _ in found])
    unit, scale = ("s", 1.0) if max(theirs for _, _, theirs in found) >= 2 else ("ms", 1e3)
    points = [
        {"predicted": ours * scale, "measured": theirs * scale, "series": setting(row, axes[:2]) or row.model,
         "text": row.layout if len(found) <= MOST_NAMED else ""}
        for row, ours, theirs in found
    ]  # fmt: skip
    alt = _altair()
    both = [seconds * scale for _, ours, theirs in found for seconds in (ours, theirs)]
    ends = [min(both) / MARGIN, max(both) * MARGIN]
    limits = alt.Scale(type="log", domain=ends, nice=False)
    x = alt.X("predicted:Q", title=f"predicted step, {unit}", scale=limits, axis=alt.Axis(format="~s", tickCount=6))
    y = alt.Y("measured:Q", title=f"measured step, {unit}", scale=limits, axis=alt.Axis(format="~s", tickCount=6))
    line = [{"predicted": end, "measured": end, "low": end * (1 - BAND), "high": end * (1 + BAND)} for end in ends]
    names = list(dict.fromkeys(str(point["series"]) for point in points))
    colours = list(SERIES[: len(names)]) if 1 < len(names) <= len(SERIES) else [BLUE]
    legend = alt.Legend(orient="top", title=None, columns=4, labelLimit=240) if len(colours) > 1 else None
    colour = alt.Color("series:N", scale=alt.Scale(domain=names, range=colours), legend=legend)
    band = (
        alt.Chart(data(line)).mark_area(color=RULE, clip=True).encode(x=x, y=alt.Y("low:Q", scale=limits), y2="high:Q")
    )
    equal = alt.Chart(data(line)).mark_line(color=PALE_INK, strokeDash=[4, 3]).encode(x=x, y=y)
    base = alt.Chart(data(points)).encode(x=x, y=y, color=colour)
    texts = base.mark_text(align="left", dx=7, fontSize=10).encode(text="text:N")
    picture = alt.layer(band, equal, base.mark_point(filled=True, size=60, opacity=0.9), texts)
    errors = [abs(ours / theirs - 1) for _, ours, theirs in found]
    median, worst = statistics.median(errors), max(errors)
    title = f"{len(found)} steps: predicted within {median:.1%} of measured (median), {worst:.0%} at worst"
    subtitle = " · ".join(filter(None, (fixed([row for row, _, _ in found]), f"band: within {BAND:.0%}")))
    return styled(picture.properties(width=460, height=460), title=title, subtitle=subtitle)
