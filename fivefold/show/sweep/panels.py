"""Pictures of several panels in the common style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fivefold.show.charts import Chart, _altair

PALETTE = ("#4c78a8", "#f58518", "#54a24b", "#c44536", "#72b7b2", "#b279a2", "#9d755d", "#8c8c8c", "#eeca3b", "#ff9da6")


class Panel(NamedTuple):
    """A chart with its heading."""

    name: str
    chart: Chart


def stacked(panels: Sequence[Panel], *, title: str, subtitle: str) -> Chart:
    """Panels below one another."""
    return _joined(panels, title=title, subtitle=subtitle, side_by_side=False)


def beside(panels: Sequence[Panel], *, title: str, subtitle: str) -> Chart:
    """Panels side by side."""
    return _joined(panels, title=title, subtitle=subtitle, side_by_side=True)


def _joined(panels: Sequence[Panel], *, title: str, subtitle: str, side_by_side: bool) -> Chart:
    alt = _altair()
    join = alt.hconcat if side_by_side else alt.vconcat
    heading = {"anchor": "start", "fontSize": 13, "fontWeight": "normal", "color": "#444", "offset": 6}
    charts = [
        panel.chart.properties(title={"text": panel.name, **heading}) if panel.name else panel.chart for panel in panels
    ]
    return styled(join(*charts), title=title, subtitle=subtitle)


def styled(chart: Chart, *, title: str, subtitle: str) -> Chart:
    """The common style of ``show/charts.py``, for charts that have a size of their own."""
    heading = {
        "text": title, **({"subtitle": subtitle} if subtitle else {}), "anchor": "start", "fontSize": 17,
        "subtitleFontSize": 12, "subtitleColor": "#666", "offset": 14, "subtitlePadding": 5,
    }  # fmt: skip
    return (
        chart.properties(title=heading, padding=16, background="white")
        .configure_axis(
            labelFontSize=12, titleFontSize=12, titleFontWeight="normal", titleColor="#555", gridColor="#eee"
        )
        .configure_legend(labelFontSize=12, symbolType="square")
        .configure_view(stroke=None)
        .configure_concat(spacing=18)
    )
