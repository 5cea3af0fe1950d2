"""The roofline: operations of a step by FLOPs per byte, under the chip's peak and its memory bandwidth.

FLOP/s = min(peak, intensity · bandwidth)        Williams, Waterman and Patterson, CACM 52 (2009)
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from typing import Any

from fivefold.machine.spec import Chip
from fivefold.record import Mistake
from fivefold.rendering.charts import Chart, _altair, _colour, _finish
from fivefold.rendering.palette import BLUE, LIMIT, ORANGE, TEXT
from fivefold.step import Operation, Step
from fivefold.units import Dtype, show_count, show_seconds

# Two dots whose names would overlap, in natural logarithms: names run to the right, so they need more room there.
NEAR = {"intensity": 0.9, "rate": 0.15}
MOST_NAMES = 3  # of one label


def chart(step: Step, *, chip: Chip, dtype: Dtype) -> Chart:
    """Forward passes of a predicted step; of operations without FLOPs the title says what they take."""
    alt = _altair()
    peak, bandwidth = chip.peak(dtype), chip.memory_bandwidth
    ridge = peak / bandwidth
    values = _named(_value(op, ridge=ridge) for op in _distinct(step) if op.causal_flops and op.moved_bytes)
    if not values:
        raise Mistake(f"no operation of {step.model} has FLOPs and bytes; draw a predicted step")
    low = min([ridge / 12, *(v["intensity"] / 1.5 for v in values)])
    high = max([ridge * 4, *(v["intensity"] * 3.4 for v in values)])
    floor = min(min(v["rate"] for v in values) / 2, low * bandwidth)
    roof = [{"intensity": at, "rate": min(peak, at * bandwidth)} for at in (low, ridge, high)]
    x = alt.X("intensity:Q", title="FLOPs per byte of memory moved", axis=alt.Axis(tickCount=6, format="~s"),
              scale=alt.Scale(type="log", domain=[low, high], nice=False))  # fmt: skip
    y = alt.Y("rate:Q", title="FLOP/s of a GPU, forward", axis=alt.Axis(tickCount=6, format="~s"),
              scale=alt.Scale(type="log", domain=[floor, peak * 1.7], nice=False))  # fmt: skip
    line = alt.Chart(alt.Data(values=roof)).mark_line(color=TEXT, strokeWidth=2).encode(x=x, y=y)
    base = alt.Chart(alt.Data(values=values)).encode(x=x, y=y)
    size = alt.Size("seconds:Q", scale=alt.Scale(range=[30, 420], zero=True), legend=None)
    bounds = {value["bound"] for value in values}
    colours = {name: ink for name, ink in {"matmul-bound": BLUE, "memory-bound": ORANGE}.items() if name in bounds}
    dots = base.mark_point(filled=True, opacity=0.85).encode(color=_colour("bound", colours), size=size,
                                                             tooltip=["name:N", "text:N"])  # fmt: skip
    one, two = (base.transform_filter(f"{no}(indexof(datum.label, '\\n') >= 0)") for no in ("!", ""))
    names = one.mark_text(align="left", dx=9, dy=4, fontSize=11).encode(text="label:N")
    names += two.mark_text(align="left", dx=9, dy=-23, fontSize=11, lineBreak="\n").encode(text="label:N")
    notes = [
        {"intensity": ridge * 1.1, "rate": peak * 1.18, "text": f"{chip.name}: {show_count(peak)}FLOP/s {dtype}"},
        {"intensity": ridge / 2.5, "rate": ridge / 3 * bandwidth, "text": f"{show_count(bandwidth)}B/s of memory"},
    ]
    said = alt.Chart(alt.Data(values=notes)).mark_text(align="left", fontSize=11, color=LIMIT)
    said = said.encode(x=x, y=y, text="text:N")
    about = f"{step.model} on {step.machine}, {step.layout}; a dot is as large as its time in the step"
    return _finish(line + dots + names + said, title=_finding(step, values, peak), subtitle=about, height=420)


def _distinct(step: Step) -> list[Operation]:
    """Operations that differ in more than how often they occur, with their times added up."""
    found: dict[tuple[object, ...], Operation] = {}
    for op in step.operations:
        key = (op.name, op.flops, op.moved_bytes, op.forward_seconds)
        found[key] = op.replace(times=op.times + found[key].times) if key in found else op
    return list(found.values())


def _value(op: Operation, *, ridge: float) -> dict[str, Any]:
    flops = op.causal_flops  # what a kernel of causal attention computes
    intensity, rate = flops / op.moved_bytes, flops / op.forward_seconds
    seconds = op.times * op.forward_seconds
    text = f"{show_count(rate)}FLOP/s, {intensity:.0f} FLOPs per byte, {show_seconds(seconds)} a micro-batch"
    return {"name": op.name, "intensity": intensity, "rate": rate, "seconds": seconds, "text": text,
            "label": op.name, "bound": "matmul-bound" if intensity >= ridge else "memory-bound"}  # fmt: skip


def _named(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The values, largest first; one label for those that lie together."""
    found: list[dict[str, Any]] = []
    for value in sorted(values, key=lambda each: -each["seconds"]):
        near = [each for each in found if each["label"] and _near(each, value)]
        if near:
            near[0]["others"].append(value["name"])
            value["label"] = ""
        found.append(value | {"others": []})
    return [each | {"label": _label(each)} for each in found]


def _label(value: dict[str, Any]) -> str:
    """The largest operations of those that lie together, and how many more there are."""
    if not value["label"]:
        return ""
    names = [value["label"], *value["others"]]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    lines = [", ".join(names[:MOST_NAMES][at : at + 2]) for at in range(0, min(MOST_NAMES, len(names)), 2)]
    return ",\n".join(lines) + more


def _near(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(abs(log(one[key] / other[key])) < most for key, most in NEAR.items())


def _finding(step: Step, values: list[dict[str, Any]], peak: float) -> str:
    """What matmuls reach of the peak, and what the operations without FLOPs take."""
    seconds = sum(value["seconds"] for value in values)
    reached = sum(value["rate"] * value["seconds"] for value in values) / seconds / peak
    whole = sum(op.times * op.forward_seconds for op in step.operations)
    return f"Matmuls reach {reached:.0%} of the peak; moving bytes takes {1 - seconds / whole:.0%} of the forward"
