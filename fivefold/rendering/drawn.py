"""Pictures of records, for notebooks and reports: the front of a search, the rows of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from fivefold.rendering.drawing.plot import time_unit
from fivefold.rendering.drawing.scatter import HEIGHT, Point, picture
from fivefold.rendering.drawing.svg import image, titled
from fivefold.rendering.elements import Raw, heading
from fivefold.units import byte_unit, show_bytes, show_seconds

if TYPE_CHECKING:
    from fivefold.results.search_result import SearchResult
    from fivefold.results.sweep_row import Row

Page = Literal["report", "notebook"]
MOST_POINTS = 1500
MEMORY = "memory of the fullest rank"


def front(found: SearchResult, *, within: Page) -> list[str]:
    """Memory against time of a search that was asked for several memory limits; nothing of one that was not."""
    if len(found.front) < 2:
        return []
    size, unit = byte_unit(max(each.memory_bytes for each in found.front))
    per_second, time = time_unit(max(each.step_seconds for each in found.front))
    dots = [
        Point(each.memory_bytes / size, each.step_seconds * per_second,
              f"{each.layout}: {show_seconds(each.step_seconds)}, {show_bytes(each.memory_bytes)}")
        for each in found.front
    ]  # fmt: skip
    label = "memory against time"
    drawn = picture(dots, label=label, stairs=True, y_title=time, x_title=f"{MEMORY}, {unit}")
    said = "no layout is both smaller and faster than one of these"
    return [heading("Memory against time", said), _placed(drawn, label, within)]


def cloud(rows: Sequence[Row], *, within: Page, level: int = 3) -> list[str]:
    """Throughput against memory of the rows that fit; nothing of fewer than two."""
    fitting = [row for row in rows if row.status == "fits" and row.peak_bytes and row.tokens_per_second_per_gpu]
    if len(fitting) < 2:
        return []
    size, unit = byte_unit(max(row.peak_bytes or 0 for row in fitting))
    dots = [
        Point((row.peak_bytes or 0) / size, row.tokens_per_second_per_gpu or 0.0,
              f"{row.model} on {row.ranks} {row.machine}, {row.layout}")
        for row in fitting[:: -(-len(fitting) // MOST_POINTS)]
    ]  # fmt: skip
    label = "throughput against memory"
    drawn = picture(dots, label=label, x_title=f"{MEMORY}, {unit}", y_title="tokens/s")
    said = heading("Throughput against memory", "tokens per second and GPU", level=level)
    return [said, _placed(drawn, label, within)]


def _placed(drawn: Raw, label: str, within: Page) -> Raw:
    return titled(drawn) if within == "report" else image(drawn, height=HEIGHT, label=label)
