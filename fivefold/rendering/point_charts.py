"""Pictures of records, for notebooks and reports: the front of a search, the rows of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from fivefold.errors import UserError
from fivefold.rendering.drawing.file import PictureFile
from fivefold.rendering.drawing.plot import time_unit
from fivefold.rendering.drawing.scatter import HEIGHT, ScatterPoint, draw_scatter
from fivefold.rendering.drawing.svg import add_titles, embed_image
from fivefold.rendering.elements import Raw, build_heading
from fivefold.units import choose_byte_unit, show_bytes, show_seconds

if TYPE_CHECKING:
    from fivefold.results.search_result import SearchResult
    from fivefold.results.sweep_row import SweepRow

Page = Literal["report", "notebook"]
MAX_POINTS = 1500
MAX_NAMES = 8  # maximum number of points with names in a file
MEMORY = "peak memory per rank"


def render_front(result: SearchResult, *, within: Page) -> list[str]:
    """Draw memory against time for a search with several memory limits; return nothing for other searches."""
    if len(result.front) < 2:
        return []
    remark = "no layout is both smaller and faster than one of these"
    picture_svg = draw_front(list_front(result))
    return [build_heading("Memory against time", remark), _place_picture(picture_svg, "memory against time", within)]


def list_front(result: SearchResult, *, named: bool = False) -> list[ScatterPoint]:
    """Return the points of the front, in bytes and seconds; ``named``: name their layouts, if there are few."""
    shows_names = named and len(result.front) <= MAX_NAMES
    return [
        ScatterPoint(
            point.memory_bytes,
            point.step_seconds,
            f"{point.layout}: {show_seconds(point.step_seconds)}, {show_bytes(point.memory_bytes)}",
            text=point.layout if shows_names else "",
        )
        for point in result.front
    ]


def draw_front(points: Sequence[ScatterPoint]) -> Raw:
    """Draw memory against time of points in bytes and seconds, with a line through those of the front."""
    size, unit = choose_byte_unit(max(point.x for point in points))
    units_per_second, time_name = time_unit(max(point.y for point in points))
    scaled = [point._replace(x=point.x / size, y=point.y * units_per_second) for point in points]
    label = "memory against time of the layouts that are the fastest for their memory"
    return draw_scatter(
        scaled, label=label, stairs=True, x_title=f"{MEMORY}, {unit}", y_title=f"step time, {time_name}"
    )


def draw_front_file(result: SearchResult, *, subtitle: str = "") -> PictureFile:
    """Return the front as a file; its title says what less memory costs."""
    if not result.front:
        raise UserError("no layout fits; there is no front to draw")
    points = sorted(result.front, key=lambda point: point.memory_bytes)
    small, fast = points[0], points[-1]
    slower = small.step_seconds / fast.step_seconds - 1
    memory_saved = 1 - small.memory_bytes / fast.memory_bytes
    title = f"{memory_saved:.0%} less memory costs {slower:.0%} more time"
    if len(points) == 1:
        title = f"{fast.layout} is both the fastest and the smallest"
    return PictureFile(title, (subtitle,), draw_front(list_front(result, named=True)), HEIGHT, ())


def draw_cloud(rows: Sequence[SweepRow], *, within: Page, level: int = 3) -> list[str]:
    """Draw throughput against memory of the rows that fit; return nothing for fewer than two."""
    fitting = [row for row in rows if row.status == "fits" and row.peak_bytes and row.tokens_per_second_per_gpu]
    if len(fitting) < 2:
        return []
    dots = [
        ScatterPoint(
            row.peak_bytes or 0,
            row.tokens_per_second_per_gpu or 0.0,
            f"{row.model} on {row.ranks} {row.machine}, {row.layout}",
        )
        for row in fitting[:: -(-len(fitting) // MAX_POINTS)]
    ]
    label = "throughput against memory"
    picture_svg = draw_rows(dots, label=label)
    title = build_heading("Throughput against memory", "tokens per second and GPU", level=level)
    return [title, _place_picture(picture_svg, label, within)]


def draw_rows(points: Sequence[ScatterPoint], *, label: str, zero: bool = False) -> Raw:
    """Draw throughput against memory of points in tokens per second and bytes."""
    size, unit = choose_byte_unit(round(max(point.x for point in points)))
    scaled = [point._replace(x=point.x / size) for point in points]
    return draw_scatter(scaled, label=label, x_title=f"{MEMORY}, {unit}", y_title="tokens/s per GPU", zero=zero)


def _place_picture(drawn: Raw, label: str, within: Page) -> Raw:
    return add_titles(drawn) if within == "report" else embed_image(drawn, height=HEIGHT, label=label)
