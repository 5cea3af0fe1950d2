"""Pictures of any sweep, titled with their finding.

A picture whose axes the sweep does not vary is not drawn: its function then returns the reason, as the end of a
sentence.

  mfu         heat map of the best MFU by ranks and model, its layout in the cell   (Ultra-Scale Playbook, benchmarks)
  throughput  tokens per second and GPU against memory, every row that fits
  scaling     the best throughput per GPU by ranks
  measured    predicted step times against measured ones; on the line they are equal
  memory · sequence   in modules of their own
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fivefold.layout.schedule.pipeline_schedule import DEFAULT_SCHEDULE
from fivefold.rendering.charts import Chart, _import_altair, apply_style, encode_rows
from fivefold.rendering.palette import BLUE, INK, PALE_INK, RULE, SERIES
from fivefold.rendering.sweep.panels import Panel, stack_panels
from fivefold.rendering.sweep.sequence import draw_memory, draw_sequence
from fivefold.rendering.sweep.settings import (
    choose_memory_unit,
    find_best,
    format_setting,
    format_value,
    get_mfu,
    list_fixed,
    list_values,
    list_varied_axes,
    name_with_size,
)
from fivefold.results.sweep_row import SweepRow
from fivefold.units import show_bytes

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


MAX_POINTS = 2000
MAX_PANELS = 4
MAX_CURVES = 10
CELL_WIDTH, CELL_HEIGHT = 104, 62
CONTRAST = 0.7  # share of the smallest MFU that has the palest colour
DEGREES = ("tp", "cp", "pp", "ep")


def draw_heat_map(rows: Sequence[SweepRow]) -> Chart | str:
    """Draw the best MFU (causal) by ranks and model, with its layout; a panel for each setting of the other axes."""
    axes = list_varied_axes(rows)
    if not {"ranks", "model"} <= set(axes):
        return "needs several models and several numbers of ranks"
    other_axes = [axis for axis in axes if axis not in ("ranks", "model")]
    best_rows = find_best(rows, lambda row: (format_setting(row, other_axes), row.model, row.ranks))
    if not best_rows:
        return "needs rows that fit"
    names = list(dict.fromkeys(format_setting(row, other_axes) for row in rows))
    models, ranks = list_values(rows, "model"), list_values(rows, "ranks")
    labels = {row.model: name_with_size(row) for row in best_rows.values()}
    highest = max(best_rows.values(), key=get_mfu)
    lowest = min(best_rows.values(), key=get_mfu)
    high, low = get_mfu(highest), CONTRAST * get_mfu(lowest)
    panels = []
    for name in names[:MAX_PANELS]:
        cells = [
            _build_cell(
                best_rows.get((name, model, count)), label=labels.get(model, model), ranks=count, bottom=low, top=high
            )
            for model in reversed(models)
            for count in ranks
        ]
        panels.append(
            Panel(name, _draw_heat(cells, limits=[low, high], models=[labels.get(m, m) for m in reversed(models)]))
        )
    best_ranks = format_value("ranks", highest.ranks)
    title = f"The best layouts reach {get_mfu(lowest):.0%} to {get_mfu(highest):.0%} MFU, most on {best_ranks}"
    return stack_panels(panels, title=title, subtitle=_make_subtitle(rows, "MFU with causal attention", len(names)))


def _build_cell(row: SweepRow | None, *, label: str, ranks: int, bottom: float, top: float) -> dict[str, Any]:
    """Return a cell of the heat map: the best row of one model and number of ranks, or none."""
    keywords = row.layout.split() if row else []
    degrees = [keyword for keyword in keywords if keyword.startswith(("dp", "tp", "cp", "pp", "ep", "etp"))]
    other_keywords = [keyword for keyword in keywords if keyword not in degrees and keyword != DEFAULT_SCHEDULE]
    return {
        "model": label,
        "ranks": f"{ranks:,}",
        "mfu": get_mfu(row) if row else 0.0,
        "fits": int(row is not None),
        "text": f"{get_mfu(row):.1%}" if row else "none fits",
        "degrees": " ".join(degrees),
        "rest": " ".join(other_keywords),
        "memory": show_bytes(row.measured_peak_bytes or row.peak_bytes or 0) if row else "",
        "ink": "white" if row and get_mfu(row) > bottom + 0.5 * (top - bottom) else INK,
    }


def _draw_heat(cells: list[dict[str, Any]], *, limits: list[float], models: list[str]) -> Chart:
    """Draw the heat map of MFU, with the layout and the memory of each cell."""
    alt = _import_altair()
    ranks = list(dict.fromkeys(cell["ranks"] for cell in cells))
    axis = alt.Axis(grid=False, ticks=False, domain=False, labelAngle=0, labelLimit=260, labelPadding=8)
    x = alt.X("ranks:N", sort=ranks, title="ranks", axis=axis)
    y = alt.Y("model:N", sort=models, title=None, axis=axis)
    base = alt.Chart(encode_rows(cells)).encode(x=x, y=y)
    filled = base.transform_filter("datum.fits == 1").mark_rect(stroke="white", strokeWidth=2)
    filled = filled.encode(fill=alt.Fill("mfu:Q", scale=alt.Scale(scheme="blues", domain=limits), legend=None))
    empty = base.transform_filter("datum.fits == 0").mark_rect(stroke="white", strokeWidth=2, color=RULE)
    lines = (
        ("text", -21, 13, "bold"),
        ("degrees", -4, 9, "normal"),
        ("rest", 8, 9, "normal"),
        ("memory", 21, 9, "normal"),
    )
    texts = [
        base.transform_filter(f"datum.{field} != null")
        .mark_text(dy=dy, fontSize=size, fontWeight=weight)
        .encode(text=f"{field}:N", color=alt.Color("ink:N", scale=None))
        for field, dy, size, weight in lines
    ]
    picture = alt.layer(empty, filled, *texts)
    return picture.properties(width=CELL_WIDTH * len(ranks), height=CELL_HEIGHT * len(models))


def draw_throughput(rows: Sequence[SweepRow]) -> Chart | str:
    """Draw tokens per second and GPU over peak memory per rank: every row that fits, and the front."""
    fitting = [row for row in rows if row.status == "fits"]
    if len({row.layout for row in fitting}) < 2:
        return "needs several layouts that fit"
    label_series = _make_series_label(fitting, besides=())
    groups = list(dict.fromkeys(map(label_series, fitting)))
    size, unit = choose_memory_unit(fitting)
    points = [_build_point(row, label_series(row), size) for row in _thin(fitting)]
    fronts = {name: _select_pareto_front(row for row in fitting if label_series(row) == name) for name in groups}
    front = [_build_point(row, name, size) for name, rows_of_series in fronts.items() for row in rows_of_series]
    alt = _import_altair()
    x = alt.X("memory:Q", title=f"peak memory per rank, {unit}", scale=alt.Scale(zero=False, nice=False, padding=16))
    speeds = [point["tokens"] for point in points]
    scale = alt.Scale(type="log", domain=[min(speeds) / 1.2, max(speeds) * 1.4], nice=False)
    y = alt.Y("tokens:Q", title="tokens/s per GPU", scale=scale, axis=alt.Axis(format="~s", tickCount=6))
    colour = _encode_colour(alt, groups)
    dots = alt.Chart(encode_rows(points)).mark_point(filled=True, size=18, opacity=0.45).encode(x=x, y=y, color=colour)
    line = (
        alt.Chart(encode_rows(front))
        .mark_line(interpolate="step-after", strokeWidth=1.8)
        .encode(x=x, y=y, color=colour)
    )
    ends = list({point["series"]: point for point in front}.values())  # the fastest row of each series
    names = alt.Chart(encode_rows(ends)).mark_text(align="right", dx=-6, dy=-9, fontSize=10)
    picture = alt.layer(dots, line, names.encode(x=x, y=y, text="layout:N", color=colour))
    fastest = max((rows_of_series[-1] for rows_of_series in fronts.values()), key=_get_tokens_per_second)
    title = f"{len(fitting):,} layouts fit: the fastest takes {show_bytes(fastest.peak_bytes or 0)}"
    if len(groups) == 1 and (smallest := front[0]) != (best_of_all := front[-1]):
        memory_saved, slower = (1 - smallest[key] / best_of_all[key] for key in ("memory", "tokens"))
        title = f"{len(fitting):,} layouts fit: {memory_saved:.0%} less memory costs {slower:.0%} of the throughput"
    return apply_style(
        picture.properties(width=640, height=380), title=title, subtitle=_make_subtitle(rows, _describe_cut(fitting))
    )


def draw_scaling(rows: Sequence[SweepRow]) -> Chart | str:
    """Draw the best throughput per GPU by number of ranks.

    It is in tokens for one model, and for several a share of that on the fewest ranks.
    """
    if "ranks" not in list_varied_axes(rows):
        return "needs several numbers of ranks"
    label_series = _make_curve_label(rows)
    best_rows = find_best(rows, lambda row: (label_series(row), row.ranks))
    names = [
        name for name in dict.fromkeys(map(label_series, rows)) if sum(series == name for series, _ in best_rows) > 1
    ]
    if not names:
        return "needs rows that fit on several numbers of ranks"
    relative = len(list_values(rows, "model")) > 1
    points = []
    for name in names:
        series_points = [
            _build_point(best_rows[name, ranks], name)
            for ranks in list_values(rows, "ranks")
            if (name, ranks) in best_rows
        ]
        points += [
            point
            | {
                "first": 1.0 if relative else series_points[0]["tokens"],
                "speed": point["tokens"] / (series_points[0]["tokens"] if relative else 1.0),
            }
            for point in series_points
        ]
    alt = _import_altair()
    x = alt.X("ranks:Q", title="ranks", scale=alt.Scale(type="log", base=2, nice=False, padding=16))
    x.axis = alt.Axis(values=list_values(rows, "ranks"), grid=False, format=",d")
    y_title = "throughput per GPU, of that on the fewest ranks" if relative else "tokens/s per GPU"
    y = alt.Y("speed:Q", title=y_title, scale=alt.Scale(zero=True), axis=alt.Axis(format=".0%" if relative else "~s"))
    base = alt.Chart(encode_rows(points)).encode(x=x, color=_encode_colour(alt, names))
    dashes = base.mark_line(strokeDash=[3, 4], strokeWidth=1, opacity=0.7).encode(y=alt.Y("first:Q", title=y_title))
    picture = alt.layer(dashes, base.mark_line(point=True, strokeWidth=2).encode(y=y))
    tokens = {name: [p["tokens"] for p in points if p["series"] == name] for name in names}
    worst = min(names, key=lambda name: tokens[name][-1] / tokens[name][0])
    last = max(point["ranks"] for point in points if point["series"] == worst)
    title = f"{worst} keeps {tokens[worst][-1] / tokens[worst][0]:.0%} of its throughput per GPU to {last:,} ranks"
    return apply_style(
        picture.properties(width=640, height=360), title=title, subtitle=_make_subtitle(rows, "dashed: perfect scaling")
    )


def _make_curve_label(rows: Sequence[SweepRow]) -> Callable[[SweepRow], str]:
    """Return the label of a row's curve over ranks: all other axes that vary, unless there are too many curves."""
    axes = [axis for axis in list_varied_axes(rows) if axis != "ranks"]
    if axes and len({format_setting(row, axes) for row in rows}) <= MAX_CURVES:
        return lambda row: format_setting(row, axes)
    return _make_series_label(rows, besides=("ranks",))


def _make_series_label(rows: Sequence[SweepRow], *, besides: Sequence[str]) -> Callable[[SweepRow], str]:
    """Return the label of a row's curve: the model, else all other axes that vary, else the axes of its layout."""
    axes = [axis for axis in list_varied_axes(rows) if axis not in besides]
    if "model" in axes:
        return lambda row: row.model
    if axes:
        return lambda row: format_setting(row, axes)
    return lambda row: "·".join(["dp", *(axis for axis in DEGREES if (getattr(row, axis) or 1) > 1)])


def _get_tokens_per_second(row: SweepRow) -> float:
    return row.measured_tokens_per_second_per_gpu or row.tokens_per_second_per_gpu or 0.0


def _build_point(row: SweepRow, series: str, size: int = 1) -> dict[str, Any]:
    return {
        "memory": (row.peak_bytes or 0) / size,
        "tokens": _get_tokens_per_second(row),
        "series": series,
        "layout": row.layout,
        "ranks": row.ranks,
    }


def _select_pareto_front(rows: Iterable[SweepRow]) -> list[SweepRow]:
    """Return the rows that no other row surpasses in both memory and throughput, from the smallest to the fastest."""
    front_rows: list[SweepRow] = []
    for row in sorted(rows, key=lambda row: (row.peak_bytes or 0, -_get_tokens_per_second(row))):
        if not front_rows or _get_tokens_per_second(row) > _get_tokens_per_second(front_rows[-1]):
            front_rows.append(row)
    return front_rows


def _thin(rows: Sequence[SweepRow]) -> Sequence[SweepRow]:
    return rows[:: -(-len(rows) // MAX_POINTS)]


def _describe_cut(rows: Sequence[SweepRow]) -> str:
    shown = len(_thin(rows))
    return "" if shown == len(rows) else f"{shown:,} of {len(rows):,} are drawn"


def _encode_colour(alt: Any, names: list[str]) -> Any:
    colours = [SERIES[place % len(SERIES)] for place in range(len(names))] if len(names) > 1 else [BLUE]
    legend = alt.Legend(orient="top", title=None, columns=4, labelLimit=240) if len(names) > 1 else None
    return alt.Color("series:N", scale=alt.Scale(domain=names, range=colours), legend=legend)


def _make_subtitle(rows: Sequence[SweepRow], more: str, panels: int = 0) -> str:
    left_out = f"the first {MAX_PANELS} of {panels} settings" if panels > MAX_PANELS else ""
    return " · ".join(filter(None, (list_fixed(rows), more, left_out)))


PICTURES: dict[str, Callable[[Sequence[SweepRow]], Chart | str]] = {
    "mfu": draw_heat_map,
    "throughput": draw_throughput,
    "scaling": draw_scaling,
    "memory": draw_memory,
    "sequence": draw_sequence,
    "measured": draw_measured,
}
