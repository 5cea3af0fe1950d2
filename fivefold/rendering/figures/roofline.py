"""The roofline: operations of a step by FLOPs per byte, under the chip's peak and its memory bandwidth.

FLOP/s = min(peak, intensity · bandwidth)        Williams, Waterman and Patterson, CACM 52 (2009)
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from typing import Any

from fivefold.errors import UserError
from fivefold.machine.spec import Chip
from fivefold.rendering.charts import Chart, _encode_colour, _finish, _import_altair
from fivefold.rendering.palette import BLUE, LIMIT, ORANGE, TEXT
from fivefold.step import Operation, Step
from fivefold.units import Dtype, show_flops, show_rate, show_seconds

# Distance in natural logarithms below which names of two dots overlap; names extend to the right.
LABEL_DISTANCES = {"intensity": 0.9, "rate": 0.15}
MAX_NAMES = 3  # maximum number of names in one label


def draw_chart(step: Step, *, chip: Chip, dtype: Dtype) -> Chart:
    """Draw the forward passes of a predicted step; the title gives the time of operations without FLOPs."""
    alt = _import_altair()
    peak, bandwidth = chip.peak(dtype), chip.memory_bandwidth
    ridge = peak / bandwidth
    values = _merge_labels(
        _build_value(op, ridge=ridge) for op in _merge_equal(step) if op.causal_flops and op.moved_bytes
    )
    if not values:
        raise UserError(f"no operation of {step.model} has FLOPs and bytes; draw a predicted step")
    low = min([ridge / 12, *(dot["intensity"] / 1.5 for dot in values)])
    high = max([ridge * 4, *(dot["intensity"] * 3.4 for dot in values)])
    floor = min(min(dot["rate"] for dot in values) / 2, low * bandwidth)
    roof = [{"intensity": intensity, "rate": min(peak, intensity * bandwidth)} for intensity in (low, ridge, high)]
    x = alt.X(
        "intensity:Q",
        title="FLOPs per byte of memory moved",
        axis=alt.Axis(tickCount=6, format="~s"),
        scale=alt.Scale(type="log", domain=[low, high], nice=False),
    )
    y = alt.Y(
        "rate:Q",
        title="FLOP/s of a GPU, forward",
        axis=alt.Axis(tickCount=6, format="~s"),
        scale=alt.Scale(type="log", domain=[floor, peak * 1.7], nice=False),
    )
    line = alt.Chart(alt.Data(values=roof)).mark_line(color=TEXT, strokeWidth=2).encode(x=x, y=y)
    base = alt.Chart(alt.Data(values=values)).encode(x=x, y=y)
    size = alt.Size("seconds:Q", scale=alt.Scale(range=[30, 420], zero=True), legend=None)
    bounds = {value["bound"] for value in values}
    colours = {name: ink for name, ink in {"matmul-bound": BLUE, "memory-bound": ORANGE}.items() if name in bounds}
    dots = base.mark_point(filled=True, opacity=0.85).encode(
        color=_encode_colour("bound", colours), size=size, tooltip=["name:N", "text:N"]
    )
    one_line, two_lines = (
        base.transform_filter(f"{negation}(indexof(datum.label, '\\n') >= 0)") for negation in ("!", "")
    )
    names = one_line.mark_text(align="left", dx=9, dy=4, fontSize=11).encode(text="label:N")
    names += two_lines.mark_text(align="left", dx=9, dy=-23, fontSize=11, lineBreak="\n").encode(text="label:N")
    notes = [
        {"intensity": ridge * 1.1, "rate": peak * 1.18, "text": f"{chip.name}: {show_flops(peak)}FLOP/s {dtype}"},
        {"intensity": ridge / 2.5, "rate": ridge / 3 * bandwidth, "text": f"{show_rate(bandwidth)} of memory"},
    ]
    note_chart = alt.Chart(alt.Data(values=notes)).mark_text(align="left", fontSize=11, color=LIMIT)
    note_chart = note_chart.encode(x=x, y=y, text="text:N")
    subtitle = f"{step.model} on {step.machine}, {step.layout}; a dot is as large as its time in the step"
    return _finish(
        line + dots + names + note_chart, title=_describe_step(step, values, peak), subtitle=subtitle, height=420
    )


def _merge_equal(step: Step) -> list[Operation]:
    """Return operations that differ in more than their number, with their counts added up."""
    operations: dict[tuple[object, ...], Operation] = {}
    for op in step.operations:
        key = (op.name, op.flops, op.moved_bytes, op.forward_seconds)
        operations[key] = op.replace(times=op.times + operations[key].times) if key in operations else op
    return list(operations.values())


def _build_value(op: Operation, *, ridge: float) -> dict[str, Any]:
    """Return an operation as a point of the roofline, with its text."""
    flops = op.causal_flops  # the FLOPs that a kernel for causal attention computes
    intensity, rate = flops / op.moved_bytes, flops / op.forward_seconds
    seconds = op.times * op.forward_seconds
    text = f"{show_flops(rate)}FLOP/s, {intensity:.0f} FLOPs per byte, {show_seconds(seconds)} a micro-batch"
    return {
        "name": op.name,
        "intensity": intensity,
        "rate": rate,
        "seconds": seconds,
        "text": text,
        "label": op.name,
        "bound": "matmul-bound" if intensity >= ridge else "memory-bound",
    }


def _merge_labels(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the values, largest first, with one label for those that lie together."""
    labelled: list[dict[str, Any]] = []
    for value in sorted(values, key=lambda value: -value["seconds"]):
        near = [earlier for earlier in labelled if earlier["label"] and _are_close(earlier, value)]
        if near:
            near[0]["others"].append(value["name"])
            value["label"] = ""
        labelled.append(value | {"others": []})
    return [value | {"label": _format_label(value)} for value in labelled]


def _format_label(value: dict[str, Any]) -> str:
    """Return the names of the largest operations that lie together, and the number of the others."""
    if not value["label"]:
        return ""
    names = [value["label"], *value["others"]]
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    lines = [", ".join(names[:MAX_NAMES][start : start + 2]) for start in range(0, min(MAX_NAMES, len(names)), 2)]
    return ",\n".join(lines) + rest


def _are_close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(abs(log(one[key] / other[key])) < most for key, most in LABEL_DISTANCES.items())


def _describe_step(step: Step, values: list[dict[str, Any]], peak: float) -> str:
    """Return the share of the peak that matmuls reach, and the share of operations without FLOPs."""
    seconds = sum(value["seconds"] for value in values)
    reached = sum(value["rate"] * value["seconds"] for value in values) / seconds / peak
    forward = sum(op.times * op.forward_seconds for op in step.operations)
    return f"Matmuls reach {reached:.0%} of the peak; moving bytes takes {1 - seconds / forward:.0%} of the forward"
