"""Altair charts whose titles state their finding: the memory of steps, predicted against measured; files of pictures.

Altair and vl-convert (the extra ``show``) are imported only when a chart is drawn; nothing is fetched from a network.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from fivefold.atomic_file import replace_file
from fivefold.errors import UserError
from fivefold.rendering.drawing.file import PictureFile, check_suffix
from fivefold.rendering.palette import BLUE, CONFIG, GREEN, RED, break_lines, build_heading, get_colour
from fivefold.rendering.step_view import MEMORY_PARTS, list_memory_parts
from fivefold.results.step_comparison import QuantityComparison
from fivefold.step import StageMemory, Step
from fivefold.units import choose_byte_unit, show_bytes

Chart = Any  # an Altair chart; naming its class would import Altair

WIDTH = 640
COLOURS = tuple(map(get_colour, MEMORY_PARTS))


def draw_memory_bars(steps: Step | Sequence[Step], *, subtitle: str = "") -> Chart:
    """Chart the peak by category: a bar per stage of a single step, or per step a bar for its fullest stage."""
    stages = _name_stages(steps)
    if not stages:
        raise UserError("no step says what each stage holds in memory, so there is nothing to draw")
    fullest = max(stages.values(), key=lambda stage: stage.peak_bytes)
    return draw_stage_bars(
        stages, axis="memory at the peak", title=_describe_memory(fullest), subtitle=subtitle, height=36
    )


def draw_stage_bars(stages: Mapping[str, StageMemory], *, axis: str, title: str, subtitle: str, height: int) -> Chart:
    """Chart the memory of stages by name, by category, with the peak behind each bar."""
    size, unit = choose_byte_unit(max(stage.peak_bytes for stage in stages.values()))
    bars = {name: {part.name: part.size / size for part in list_memory_parts(stage)} for name, stage in stages.items()}
    texts = [show_bytes(stage.peak_bytes) for stage in stages.values()]
    colours = dict(zip(MEMORY_PARTS, COLOURS, strict=True))
    return draw_stacked_bars(
        bars, texts, colours=colours, axis=f"{axis}, {unit}", title=title, subtitle=subtitle, height=height
    )


def draw_stacked_bars(
    bars: Mapping[str, Mapping[str, float]],
    texts: Sequence[str],
    *,
    colours: Mapping[str, str],
    axis: str,
    title: str,
    subtitle: str,
    height: int,
) -> Chart:
    """Chart sizes by part as a bar for each name, with its text behind it; ``height``: pixels of a bar."""
    alt = _import_altair()
    segments = [
        {"bar": name, "part": part, "order": order, "size": size}
        for name, sizes in bars.items()
        for order, (part, size) in enumerate(sizes.items())
    ]
    # The text is set behind the bar, which is longer than the peak if gradients are not yet live there.
    ends = [
        {"bar": name, "size": sum(sizes.values()), "text": text}
        for (name, sizes), text in zip(bars.items(), texts, strict=True)
    ]
    x = alt.X("size:Q", title=axis, stack="zero", axis=alt.Axis(tickCount=6))
    y = alt.Y("bar:N", sort=list(bars), title=None, axis=_style_labels(alt))
    filled = alt.Chart(alt.Data(values=segments)).mark_bar()
    filled = filled.encode(x=x, y=y, color=_encode_colour("part", colours), order="order:Q")
    bar_labels = alt.Chart(alt.Data(values=ends)).mark_text(align="left", dx=6).encode(x="size:Q", y=y, text="text:N")
    return _finish(filled + bar_labels, title=title, subtitle=subtitle, height=height * len(bars))


def compare_bars(rows: Sequence[QuantityComparison]) -> Chart:
    """Chart the relative error of every quantity; equal counts are labelled exact, wrong counts are red."""
    alt = _import_altair()
    if not rows:
        raise UserError("no quantity was compared; there is nothing to draw")
    kinds = {"exact": GREEN, "estimate": BLUE, "wrong count": RED}
    values = [_build_error_bar(row) for row in rows]
    reach = max(0.05, *(abs(value["error"]) for value in values)) * 1.25
    x = alt.X(
        "error:Q",
        title="predicted over measured, relative error",
        axis=alt.Axis(format="+.0%" if reach > 0.1 else "+.1%", tickCount=6),
        scale=alt.Scale(domain=[-reach, reach]),
    )
    y = alt.Y("quantity:N", sort=[row.quantity for row in rows], title=None, axis=_style_labels(alt))
    base = alt.Chart(alt.Data(values=values)).encode(x=x, y=y, color=_encode_colour("kind", kinds))
    right = base.transform_filter("datum.error >= 0").mark_text(align="left", dx=6).encode(text="text:N")
    left = base.transform_filter("datum.error < 0").mark_text(align="right", dx=-6).encode(text="text:N")
    chart = base.mark_bar() + right + left
    return _finish(chart, title=_compare_finding(rows), subtitle="", height=24 * len(rows))


def encode_rows(values: Sequence[Mapping[str, Any]]) -> Chart:
    """Return rows as inline CSV data: as objects Altair would validate each value, a second per thousand."""
    text = StringIO()
    writer = csv.DictWriter(text, fieldnames=list(values[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(values)
    alt = _import_altair()
    kinds = {name: "string" if isinstance(value, str) else "number" for name, value in values[0].items()}
    return alt.Data(values=text.getvalue(), format=alt.CsvDataFormat(type="csv", parse=kinds))


def save(chart: Chart | PictureFile, path: Path) -> None:
    """Write a chart as ``.svg``, ``.png`` (two pixels per point), ``.pdf`` or ``.html`` that needs no network."""
    if isinstance(chart, PictureFile):
        chart.save(path)
        return
    check_suffix(path)
    with replace_file(path, contents="the chart") as file:
        file.write_bytes(_convert_chart(chart, path.suffix))


def save_all(pictures: Mapping[str, Chart | PictureFile], folder: Path, suffixes: Sequence[str]) -> None:
    """Write pictures by name into the folder of ``--charts``, each with every suffix."""
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        for suffix in suffixes:
            save(picture, folder / f"{name}{suffix}")


def check_folder(folder: Path) -> None:
    """Raise ``UserError`` if the folder of ``--charts`` is a file."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--charts {folder} is a file; name a folder")


def _convert_chart(chart: Chart, suffix: str) -> bytes:
    """Return a chart as the bytes of an SVG, PNG, PDF or HTML file."""
    _import_altair()
    import vl_convert

    spec = chart.to_dict()
    if suffix == ".svg":
        return vl_convert.vegalite_to_svg(spec).encode()
    if suffix == ".png":
        return vl_convert.vegalite_to_png(spec, scale=2)
    if suffix == ".pdf":
        return vl_convert.vegalite_to_pdf(spec)
    return vl_convert.vegalite_to_html(spec, bundle=True).encode()


def _import_altair() -> Any:
    try:
        import altair
        import vl_convert  # noqa: F401 — a chart that cannot be saved is useless
    except ImportError:
        raise UserError("charts need the extra show: pip install 'fivefold[show]'") from None
    return altair


def _name_stages(steps: Step | Sequence[Step]) -> dict[str, StageMemory]:
    """Return the stages of one step, or the fullest stage of each of several, by the name of its bar."""
    if isinstance(steps, Step):
        stages = steps.memory.stages
        return {f"stage {stage.stage}" if len(stages) > 1 else steps.layout: stage for stage in stages}
    fullest_stages: dict[str, StageMemory] = {}
    for step in steps:
        if step.memory.stages:
            name = f"{step.layout}, {step.kind}"
            while name in fullest_stages:
                name += ", again"
            fullest_stages[name] = max(step.memory.stages, key=lambda stage: stage.peak_bytes)
    return fullest_stages


def _describe_memory(fullest: StageMemory) -> str:
    sizes = {part: getattr(fullest, f"{part}_bytes") for part in MEMORY_PARTS}
    largest = max(sizes, key=lambda part: sizes[part])
    name = {"optimizer": "Optimizer states are", "temporary": "Temporaries are"}.get(
        largest, f"{largest} are".capitalize()
    )
    share = sizes[largest] / fullest.peak_bytes if fullest.peak_bytes else 0.0
    return f"{name} {share:.0%} of the {show_bytes(fullest.peak_bytes)} peak"


def _build_error_bar(row: QuantityComparison) -> dict[str, Any]:
    kind = "wrong count" if row.is_wrong else "exact" if row.exact else "estimate"
    shown = "not measured" if row.error is None else f"{row.error:+.1%}"
    return {
        "quantity": row.quantity,
        "error": row.error or 0.0,
        "kind": kind,
        "text": "exact" if kind == "exact" else shown,
    }


def _compare_finding(rows: Sequence[QuantityComparison]) -> str:
    counts = [row for row in rows if row.exact]
    exact_count = sum(not row.is_wrong for row in counts)
    statements = [f"{exact_count} of {len(counts)} counts are exact"] if counts else []
    errors = [abs(row.error) for row in rows if not row.exact and row.error is not None]
    statements += [f"estimates are within {max(errors):.1%}"] if errors else []
    return ", ".join(statements).capitalize()


def _encode_colour(field: str, colours: Mapping[str, str]) -> Any:
    alt = _import_altair()
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return alt.Color(f"{field}:N", scale=scale, legend=alt.Legend(orient="top", title=None))


def _style_labels(alt: Any) -> Any:
    return alt.Axis(labelLimit=420, ticks=False, domain=False, labelPadding=8)


def _finish(chart: Chart, *, title: str, subtitle: str, height: int) -> Chart:
    """Apply the common style, title and subtitle on top left, with a size."""
    return apply_style(chart.properties(width=WIDTH, height=height), title=title, subtitle=subtitle)


def apply_style(chart: Chart, *, title: str, subtitle: str) -> Chart:
    """Apply the common style to a chart that has a size of its own, with its title in lines as wide as the chart."""
    width = find_width(chart.to_dict()) or WIDTH
    title_lines = break_lines(title, width=width, size=17)
    lines = break_lines(subtitle, width=width, size=12)
    return chart.properties(title=build_heading(title_lines, lines), padding=16, background="white", config=CONFIG)


def find_width(spec: Mapping[str, Any]) -> float:
    """Return the width of a chart, for panels side by side their sum; 0 if the chart does not set it."""
    if "hconcat" in spec:
        gaps = float(CONFIG["concat"]["spacing"]) * (len(spec["hconcat"]) - 1)
        return sum(map(find_width, spec["hconcat"])) + gaps
    if "vconcat" in spec or "layer" in spec:
        return max([*map(find_width, spec.get("vconcat", spec.get("layer", ()))), _find_chart_width(spec)])
    return _find_chart_width(spec)


def _find_chart_width(spec: Mapping[str, Any]) -> float:
    width = spec.get("width")
    return width if isinstance(width, int | float) else 0.0
