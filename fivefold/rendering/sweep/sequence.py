"""Memory and MFU of a sweep against sequence length, by recomputation.

Memory is that of one layout per model, the one that fits most often. MFU is that of the fastest row that fits, or of
the smallest if none fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fivefold.rendering.charts import COLOURS, Chart, _import_altair, encode_rows
from fivefold.rendering.palette import LIMIT, SERIES
from fivefold.rendering.step_view import MEMORY_PARTS
from fivefold.rendering.sweep.panels import Panel, stack_panels
from fivefold.rendering.sweep.settings import (
    choose_memory_unit,
    get_mfu,
    list_fixed,
    list_values,
    list_varied_axes,
    name_with_size,
)
from fivefold.results.sweep_row import SweepRow

MAX_MODELS = 4
MISSING_LENGTHS = "needs several sequence lengths"


def draw_memory(rows: Sequence[SweepRow]) -> Chart | str:
    """Draw memory by category: a bar per sequence length, a column per recomputation, a panel per model."""
    if "sequence" not in list_varied_axes(rows):
        return MISSING_LENGTHS
    layout_by_model = {
        model: _find_most_common_layout(rows, model)
        for model in list_values([row for row in rows if row.peak_bytes], "model")
    }
    chosen = _choose(row for row in rows if row.peak_bytes and _get_layout_key(row) == layout_by_model[row.model])
    if not chosen:
        return "needs rows with a prediction"
    panels = [
        Panel(
            f"{name_with_size(model_rows[0])}, {' '.join(_get_layout_key(model_rows[0])[-1])}", _draw_bars(model_rows)
        )
        for model_rows in _group_by_model(rows, chosen)
    ]
    fullest = max(chosen, key=lambda row: row.peak_bytes or 0)
    largest = max(MEMORY_PARTS, key=lambda part: getattr(fullest, f"{part}_bytes") or 0)
    share = (getattr(fullest, f"{largest}_bytes") or 0) / (fullest.peak_bytes or 1)
    title = f"{fullest.model}: {largest} take {share:.0%} at {fullest.sequence:,} tokens and ac={fullest.recomputation}"
    return stack_panels(panels, title=title, subtitle=_make_subtitle(rows, "line: what a GPU has for tensors"))


def draw_sequence(rows: Sequence[SweepRow]) -> Chart | str:
    """Draw the best MFU over sequence length; a curve per recomputation, a panel per model; hollow if nothing fits."""
    if "sequence" not in list_varied_axes(rows):
        return MISSING_LENGTHS
    chosen = _choose(rows)
    if not chosen:
        return "needs rows with a prediction"
    kinds = list_values(rows, "recomputation")
    panels = [
        Panel(name_with_size(model_rows[0]), _draw_curves(model_rows, kinds))
        for model_rows in _group_by_model(rows, chosen)
    ]
    fitting = [row for row in chosen if row.status == "fits"]
    title = "No row fits"
    if fitting:
        top = max(fitting, key=lambda row: (row.sequence, get_mfu(row)))
        title = f"{top.model} at {top.sequence:,} tokens: ac={top.recomputation} is best, {get_mfu(top):.0%} MFU"
    return stack_panels(
        panels, title=title, subtitle=_make_subtitle(rows, "MFU with causal attention; hollow: does not fit")
    )


def _get_layout_key(row: SweepRow) -> tuple[Any, ...]:
    """Return the settings that are the same at all sequence lengths and recomputations."""
    words = tuple(word for word in row.layout.split() if not word.startswith("ac="))
    return (row.machine, row.ranks, row.precision, row.stack, words)


def _find_most_common_layout(rows: Sequence[SweepRow], model: str) -> tuple[Any, ...]:
    """Return the layout that fits in most of a model's rows; of several, the fastest."""
    mfus_by_layout: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row.model == model and row.peak_bytes:
            mfus_by_layout.setdefault(_get_layout_key(row), []).append(get_mfu(row) if row.status == "fits" else 0.0)
    return max(mfus_by_layout, key=lambda name: (sum(map(bool, mfus_by_layout[name])), sum(mfus_by_layout[name])))


def _choose(rows: Iterable[SweepRow]) -> list[SweepRow]:
    best_rows: dict[tuple[str, int, str], SweepRow] = {}
    for row in rows:
        if row.peak_bytes is None:
            continue
        key = row.model, row.sequence, row.recomputation
        if key not in best_rows or _rank(row) > _rank(best_rows[key]):
            best_rows[key] = row
    return list(best_rows.values())


def _rank(row: SweepRow) -> tuple[bool, float]:
    return (True, get_mfu(row)) if row.status == "fits" else (False, -float(row.peak_bytes or 0))


def _group_by_model(rows: Sequence[SweepRow], chosen: list[SweepRow]) -> list[list[SweepRow]]:
    models = [name for name in list_values(rows, "model") if any(row.model == name for row in chosen)]
    return [[row for row in chosen if row.model == name] for name in models[:MAX_MODELS]]


def _draw_bars(rows: list[SweepRow]) -> Chart:
    """Draw the parts of peak memory as bars over the sequence length, a panel for each recomputation."""
    alt, (unit, name) = _import_altair(), choose_memory_unit(rows)
    cells = [
        {
            "sequence": f"{row.sequence:,}",
            "recomputation": f"ac={row.recomputation}",
            "part": part,
            "order": order,
            "size": (getattr(row, f"{part}_bytes") or 0) / unit,
        }
        for row in sorted(rows, key=lambda row: row.sequence)
        for order, part in enumerate(MEMORY_PARTS)
    ]
    names = list(dict.fromkeys(str(cell["sequence"]) for cell in cells))
    kinds = [f"ac={name}" for name in list_values(rows, "recomputation")]
    limit = [{"limit": max((row.capacity_bytes or 0) for row in rows) / unit}]
    axis = alt.Axis(labelAngle=-45 if max(len(name) for name in names) > 5 else 0, ticks=False, grid=False)
    bars = alt.Chart(encode_rows(cells)).mark_bar()
    bars = bars.encode(
        x=alt.X("sequence:N", sort=names, title="tokens per sequence", axis=axis),
        y=alt.Y("size:Q", title=f"peak memory per rank, {name}", stack="zero"),
        color=alt.Color(
            "part:N",
            scale=alt.Scale(domain=list(MEMORY_PARTS), range=list(COLOURS)),
            legend=alt.Legend(orient="top", title=None),
        ),
        order="order:Q",
    )
    line = alt.Chart(encode_rows(limit)).mark_rule(color=LIMIT, strokeDash=[4, 3]).encode(y="limit:Q")
    width = max(120, 30 * len(names))
    panels: list[Chart] = []
    for kind in kinds:
        bars_of_kind = bars.transform_filter(alt.datum.recomputation == kind)
        if panels:
            bars_of_kind.encoding.y.title = None
        panels.append((bars_of_kind + line).properties(width=width, height=200, title={"text": kind, "fontSize": 12}))
    return alt.hconcat(*panels).resolve_scale(y="shared")


def _draw_curves(rows: list[SweepRow], kinds: list[Any]) -> Chart:
    """Draw MFU over the sequence length, a curve for each recomputation; hollow points do not fit."""
    alt = _import_altair()
    points = [
        {
            "sequence": row.sequence,
            "mfu": get_mfu(row),
            "recomputation": f"ac={row.recomputation}",
            "fits": int(row.status == "fits"),
        }
        for row in sorted(rows, key=lambda row: row.sequence)
    ]
    names = [f"ac={kind}" for kind in kinds]
    lengths = sorted({row.sequence for row in rows})
    x = alt.X("sequence:Q", title="tokens per sequence", scale=alt.Scale(type="log", base=2, nice=False, padding=16))
    x.axis = alt.Axis(values=lengths, grid=False, format=",d")
    y = alt.Y("mfu:Q", title="MFU", axis=alt.Axis(format=".0%", tickCount=5))
    colour = alt.Color(
        "recomputation:N",
        scale=alt.Scale(domain=names, range=list(SERIES[: len(names)])),
        legend=alt.Legend(orient="top", title=None),
    )
    base = alt.Chart(encode_rows(points)).encode(x=x, y=y, color=colour)
    line = base.mark_line(strokeWidth=2)
    full = base.transform_filter("datum.fits == 1").mark_point(filled=True, size=45, opacity=1)
    hollow = base.transform_filter("datum.fits == 0").mark_point(filled=False, size=45, fill="white", strokeWidth=1.8)
    return alt.layer(line, full, hollow).properties(width=560, height=220)


def _make_subtitle(rows: Sequence[SweepRow], more: str) -> str:
    models = len(list_values(rows, "model"))
    left_out = f"the {MAX_MODELS} smallest of {models} models" if models > MAX_MODELS else ""
    return " · ".join(filter(None, (list_fixed(rows), more, left_out)))
