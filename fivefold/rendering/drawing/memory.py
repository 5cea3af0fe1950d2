"""Memory over time of one rank: stacked live bytes by part, the peak, the capacity, with values under the mouse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from fivefold.errors import UserError
from fivefold.rendering.drawing.file import PictureFile
from fivefold.rendering.drawing.plot import SIDE, choose_ticks, plot, time_unit
from fivefold.rendering.drawing.svg import build_element, format_percent, join_elements
from fivefold.rendering.elements import Raw
from fivefold.rendering.memory import LOOKS, describe_peak, find_peak, list_parts
from fivefold.rendering.question import count_ranks
from fivefold.results.spans import Level
from fivefold.step import Step
from fivefold.units import choose_byte_unit, show_bytes, show_cause, show_seconds

HEIGHT = 250
MAX_TOOLTIP_INTERVALS = 240  # number of time intervals for which the mouse shows what is live


def draw_memory(
    levels: Sequence[Level], *, rank: int, capacity_bytes: int, labels: Sequence[tuple[float, float, str]] | None = None
) -> Raw:
    """Draw the chart; ``labels``: time intervals with their tips; default: the parts of the fullest level of each."""
    top, last = find_peak(levels), levels[-1].seconds or 1.0
    shows_capacity = capacity_bytes <= 4 * top.live_bytes
    ceiling = max(top.live_bytes * 1.15, capacity_bytes * 1.06 if shows_capacity else 0) or 1
    size, unit = choose_byte_unit(top.live_bytes)
    per_second, time_name = time_unit(last)
    intervals = _list_intervals(levels, last=last) if labels is None else labels
    return plot(
        join_elements((*_draw_areas(levels, last=last, ceiling=ceiling), *_draw_hover_columns(intervals, last=last))),
        label=describe_peak(levels, rank=rank, capacity_bytes=capacity_bytes),
        height=HEIGHT,
        x=[(tick / per_second / last, f"{tick:g}") for tick in choose_ticks(last * per_second, about=6)],
        y=[(1 - tick * size / ceiling, f"{tick:g}") for tick in choose_ticks(ceiling / size)],
        x_title=f"time, {time_name}",
        y_title=f"memory, {unit}",
        over=join_elements(
            _draw_overlay(top, last=last, ceiling=ceiling, capacity_bytes=capacity_bytes if shows_capacity else None)
        ),
    )


def draw_file(levels: Sequence[Level], *, step: Step, rank: int, capacity_bytes: int, drawn: str = "") -> PictureFile:
    """Return the chart of a rank of a step as a file; ``drawn``: which part of the step it shows."""
    if not levels:
        raise UserError("there is nothing to draw: the step has no memory levels over time")
    return PictureFile(
        title=describe_peak(levels, rank=rank, capacity_bytes=capacity_bytes),
        lines=(f"{step.model} on {step.machine}, {count_ranks(step.world)} · {step.layout}", drawn),
        chart=draw_memory(levels, rank=rank, capacity_bytes=capacity_bytes),
        height=HEIGHT,
        looks=[(name, name) for name in list_legend_entries(levels)],
    )


def list_legend_entries(levels: Sequence[Level]) -> list[str]:
    """Return the parts that the picture shows, from the bottom up."""
    return [part for part in LOOKS if any(getattr(level, f"{part}_bytes") for level in levels)]


def _draw_areas(levels: Sequence[Level], *, last: float, ceiling: float) -> Iterator[Raw]:
    xs = [level.seconds / last * SIDE for level in levels]
    stacks = [(0, *accumulate(list_parts(level))) for level in levels]
    for index, part in enumerate(LOOKS):
        if not any(stack[index + 1] > stack[index] for stack in stacks):
            continue
        upper, lower = ([SIDE * (1 - stack[edge] / ceiling) for stack in stacks] for edge in (index + 1, index))
        points = [*zip(xs, upper, strict=True), *reversed(list(zip(xs, lower, strict=True)))]
        yield build_element("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "Z", class_=f"k-{part}")


def _draw_hover_columns(labels: Iterable[tuple[float, float, str]], *, last: float) -> Iterator[Raw]:
    """Yield invisible columns with tips of what is live."""
    for start, end, tip in labels:
        yield build_element(
            "rect",
            x=start / last * SIDE,
            width=(end - start) / last * SIDE,
            y=0,
            height=SIDE,
            class_="hit",
            data_tip=tip,
        )


def _list_intervals(levels: Sequence[Level], *, last: float) -> Iterator[tuple[float, float, str]]:
    """Yield intervals of the time, with the parts of the highest level of each."""
    group_size = -(-len(levels) // MAX_TOOLTIP_INTERVALS)
    groups = [levels[i : i + group_size] for i in range(0, len(levels), group_size)]
    ends = [group[0].seconds for group in groups[1:]] + [last]
    for group, (start, end) in zip(groups, pairwise([groups[0][0].seconds, *ends]), strict=True):
        level = find_peak(group)
        if end <= start:
            continue
        part_lines = [
            f"{part}  {show_bytes(size)}" for part, size in zip(LOOKS, list_parts(level), strict=True) if size
        ]
        total_line = f"{show_bytes(level.live_bytes)} at {show_seconds(level.seconds)}"
        yield (
            start,
            end,
            "\n".join([total_line, *([show_cause(level.cause)] if level.cause else []), *reversed(part_lines)]),
        )


def _draw_overlay(top: Level, *, last: float, ceiling: float, capacity_bytes: int | None) -> Iterator[Raw]:
    """Yield what is drawn over the area: the capacity of the chip, and the peak with its size and cause."""
    if capacity_bytes is not None:
        y_capacity = format_percent(1 - capacity_bytes / ceiling)
        yield from (
            build_element("line", x1=0, x2="100%", y1=y_capacity, y2=y_capacity, class_=look)
            for look in ("limit-ground", "limit")
        )
        yield build_element(
            "text",
            f"chip {show_bytes(capacity_bytes)}",
            x="100%",
            y=y_capacity,
            dy=-5,
            text_anchor="end",
            class_="limit-text",
        )
    x, y = format_percent(top.seconds / last), format_percent(1 - top.live_bytes / ceiling)
    is_left = top.seconds < last / 2
    cause = (
        build_element("tspan", f"\u00a0in {show_cause(top.cause)}", class_="wide") if top.cause else ""
    )  # hidden in narrow windows
    yield build_element("circle", cx=x, cy=y, r=4, class_="peak")
    yield build_element(
        "text",
        show_bytes(top.live_bytes),
        cause,
        x=x,
        y=y,
        dx=8 if is_left else -8,
        dy=-7,
        text_anchor="start" if is_left else "end",
        class_="peak-text",
    )
