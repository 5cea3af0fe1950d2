"""Pictures of several panels in the common style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fivefold.rendering.charts import Chart, _import_altair, apply_style, find_width
from fivefold.rendering.palette import TEXT, break_lines


class Panel(NamedTuple):
    """A chart with its heading."""

    name: str
    chart: Chart


def stack_panels(panels: Sequence[Panel], *, title: str, subtitle: str) -> Chart:
    """Stack panels below one another."""
    return _join_panels(panels, title=title, subtitle=subtitle, side_by_side=False)


def place_side_by_side(panels: Sequence[Panel], *, title: str, subtitle: str) -> Chart:
    """Put panels side by side."""
    return _join_panels(panels, title=title, subtitle=subtitle, side_by_side=True)


def _join_panels(panels: Sequence[Panel], *, title: str, subtitle: str, side_by_side: bool) -> Chart:
    alt = _import_altair()
    join = alt.hconcat if side_by_side else alt.vconcat
    heading = {"anchor": "start", "fontSize": 13, "fontWeight": "normal", "color": TEXT, "offset": 6}
    charts = [
        panel.chart.properties(title={"text": _wrap_title(panel), **heading}) if panel.name else panel.chart
        for panel in panels
    ]
    return apply_style(join(*charts), title=title, subtitle=subtitle)


def _wrap_title(panel: Panel) -> str | list[str]:
    width = find_width(panel.chart.to_dict())
    return break_lines(panel.name, width=width, size=13) if width else panel.name
