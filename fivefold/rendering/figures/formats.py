"""Number formats: what their bits are, how far they reach, and how far apart their values lie.

value = (-1)^sign · 2^(exponent - bias) · 1.mantissa
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import NamedTuple

from fivefold.record import nearest
from fivefold.rendering.charts import Chart, _altair, _colour
from fivefold.rendering.palette import BLUE, GREY, ORANGE, SKY
from fivefold.rendering.sweep.panels import Panel, stacked


class Format(NamedTuple):
    """A floating-point format. ``top``: its largest value where codes at the end stand for it (e4m3, e2m1)."""

    name: str
    exponent: int
    mantissa: int
    top: float | None = None
    sign: int = 1

    @property
    def bias(self) -> int:
        """What is taken from the exponent."""
        return int(2 ** (self.exponent - 1) - 1)

    @property
    def largest(self) -> float:
        """The largest finite value."""
        if self.top is not None:
            return self.top
        return float((2 - 2.0**-self.mantissa) * 2.0**self.bias)

    @property
    def smallest_normal(self) -> float:
        """The smallest value with all of its digits."""
        return float(2.0 ** (1 - self.bias)) if self.mantissa else float(2.0**-self.bias)

    @property
    def smallest(self) -> float:
        """The smallest value above zero."""
        return float(self.smallest_normal * 2.0**-self.mantissa)

    @property
    def spacing(self) -> float:
        """From 1 to the next value."""
        return float(2.0**-self.mantissa)


# IEEE 754; bf16: arXiv:1905.12322; tf32: NVIDIA A100 whitepaper; fp8: arXiv:2209.05433; fp4 and scales: OCP MX 1.0.
FORMATS = {
    each.name: each
    for each in (
        Format("fp32", 8, 23), Format("tf32", 8, 10), Format("bf16", 8, 7), Format("fp16", 5, 10),
        Format("fp8 e4m3", 4, 3, top=448.0), Format("fp8 e5m2", 5, 2), Format("fp4 e2m1", 2, 1, top=6.0),
        Format("fp64", 11, 52), Format("e8m0", 8, 0, top=2.0**127, sign=0),
    )
}  # fmt: skip
SHOWN = ("fp32", "tf32", "bf16", "fp16", "fp8 e4m3", "fp8 e5m2", "fp4 e2m1")


def named(names: Sequence[str]) -> list[Format]:
    """The formats; a ``Mistake`` for one that is not known."""
    for name in names:
        if name not in FORMATS:
            raise nearest(name, list(FORMATS), kind="format")
    return [FORMATS[name] for name in names or SHOWN]


def chart(names: Sequence[str] = ()) -> Chart:
    """Bits, range on a logarithmic axis, and the values between 1 and 2 of each."""
    found = named(names)
    widest, finest = max(found, key=lambda each: each.largest), min(found, key=lambda each: each.spacing)
    title = (
        f"{widest.name} reaches furthest, to {widest.largest:.1e}; {finest.name} is finest, {finest.spacing:.1e} at 1"
    )
    panels = [Panel("bits", _bits(found)), Panel("from the smallest to the largest value (darker: with all digits)",
              _range(found)), Panel("values from 1 to 2", _values(found))]  # fmt: skip
    return stacked(panels, title=title, subtitle="sign · exponent · mantissa")


def _bits(found: Sequence[Format]) -> Chart:
    alt = _altair()
    parts = (("sign", 0), ("exponent", 1), ("mantissa", 2))
    cells = [
        {"format": each.name, "part": name, "bit": place + 0.5}
        for each in found
        for place, (name, _) in enumerate(part for part in parts for _ in range((each.sign, each.exponent,
                                                                               each.mantissa)[part[1]]))
    ]  # fmt: skip
    most = max(each.sign + each.exponent + each.mantissa for each in found)
    x = alt.X("bit:Q", title=None, axis=None, scale=alt.Scale(domain=[0, most], nice=False))
    y = _y(found)
    colour = _colour("part", {"sign": GREY, "exponent": ORANGE, "mantissa": BLUE})
    size = min(22, 600 // most - 1)
    marks = alt.Chart(alt.Data(values=cells)).mark_square(size=size * size, opacity=1).encode(x=x, y=y, color=colour)
    return marks.properties(width=620, height=26 * len(found))


def _range(found: Sequence[Format]) -> Chart:
    alt = _altair()
    rows = [
        {"format": each.name, "low": log10(each.smallest), "normal": log10(each.smallest_normal),
         "high": log10(each.largest), "text": f"{each.smallest:.0e} … {each.largest:.3g}"}
        for each in found
    ]  # fmt: skip
    base = alt.Chart(alt.Data(values=rows)).encode(y=_y(found))
    axis = alt.Axis(tickCount=8, labelExpr="'1e' + datum.value", title=None)
    all_of = base.mark_bar(height=12, color=SKY).encode(x=alt.X("low:Q", axis=axis), x2="high:Q")
    whole = base.mark_bar(height=12, color=BLUE).encode(x=alt.X("normal:Q", axis=axis), x2="high:Q")
    words = base.mark_text(align="left", dx=6, fontSize=11).encode(x="high:Q", text="text:N")
    return alt.layer(all_of, whole, words).properties(width=620, height=26 * len(found))


def _values(found: Sequence[Format]) -> Chart:
    """A tick for each value; where they lie closer than a pixel, a bar."""
    alt = _altair()
    ticks = [{"format": each.name, "at": 1 + place * each.spacing} for each in found if each.mantissa <= 7
             for place in range(2**each.mantissa + 1)]  # fmt: skip
    dense = [{"format": each.name, "from": 1.0, "to": 2.0} for each in found if each.mantissa > 7]
    spaces = [{"format": each.name, "at": 2.0, "text": f"{each.spacing:.2g} apart"} for each in found]
    x = alt.X("at:Q", title=None, scale=alt.Scale(domain=[1, 2], nice=False), axis=alt.Axis(grid=False, tickCount=5))
    layers = [
        alt.Chart(alt.Data(values=ticks)).mark_tick(thickness=1.4, height=14, color=BLUE).encode(x=x, y=_y(found))
    ]
    if dense:
        bar = alt.Chart(alt.Data(values=dense)).mark_bar(height=14, color=BLUE)
        layers.append(bar.encode(x=alt.X("from:Q", scale=alt.Scale(domain=[1, 2])), x2="to:Q", y=_y(found)))
    words = alt.Chart(alt.Data(values=spaces)).mark_text(align="left", dx=8, fontSize=11)
    return alt.layer(*layers, words.encode(x=x, y=_y(found), text="text:N")).properties(
        width=620, height=24 * len(found)
    )


def _y(found: Sequence[Format]) -> Chart:
    alt = _altair()
    axis = alt.Axis(ticks=False, domain=False, labelPadding=8, grid=False)
    return alt.Y("format:N", sort=[each.name for each in found], title=None, axis=axis)
