"""Number formats: their bits, their range, and the spacing of their values.

value = (-1)^sign · 2^(exponent - bias) · 1.mantissa
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import NamedTuple

from fivefold.rendering.charts import Chart, _encode_colour, _import_altair
from fivefold.rendering.palette import BLUE, GREY, ORANGE, SKY
from fivefold.rendering.sweep.panels import Panel, stack_panels
from fivefold.spelling import make_unknown_name_error


class FloatFormat(NamedTuple):
    """A floating-point format. ``top``: its largest value if codes at the end are used for values (e4m3, e2m1)."""

    name: str
    exponent: int
    mantissa: int
    top: float | None = None
    sign: int = 1

    @property
    def bias(self) -> int:
        """Return the bias of the exponent."""
        return int(2 ** (self.exponent - 1) - 1)

    @property
    def max_value(self) -> float:
        """Return the largest finite value."""
        if self.top is not None:
            return self.top
        return float((2 - 2.0**-self.mantissa) * 2.0**self.bias)

    @property
    def smallest_normal(self) -> float:
        """Return the smallest normal number."""
        return float(2.0 ** (1 - self.bias)) if self.mantissa else float(2.0**-self.bias)

    @property
    def min_value(self) -> float:
        """Return the smallest value above zero."""
        return float(self.smallest_normal * 2.0**-self.mantissa)

    @property
    def spacing(self) -> float:
        """Return the distance from 1 to the next value."""
        return float(2.0**-self.mantissa)


# IEEE 754; bf16: arXiv:1905.12322; tf32: NVIDIA A100 whitepaper; fp8: arXiv:2209.05433; fp4 and scales: OCP MX 1.0.
FORMATS = {
    fmt.name: fmt
    for fmt in (
        FloatFormat("fp32", 8, 23),
        FloatFormat("tf32", 8, 10),
        FloatFormat("bf16", 8, 7),
        FloatFormat("fp16", 5, 10),
        FloatFormat("fp8 e4m3", 4, 3, top=448.0),
        FloatFormat("fp8 e5m2", 5, 2),
        FloatFormat("fp4 e2m1", 2, 1, top=6.0),
        FloatFormat("fp64", 11, 52),
        FloatFormat("e8m0", 8, 0, top=2.0**127, sign=0),
    )
}
DEFAULT_FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8 e4m3", "fp8 e5m2", "fp4 e2m1")


def find_formats(names: Sequence[str]) -> list[FloatFormat]:
    """Return the formats; raise ``UserError`` for one that is not known."""
    for name in names:
        if name not in FORMATS:
            raise make_unknown_name_error(name, list(FORMATS), kind="format")
    return [FORMATS[name] for name in names or DEFAULT_FORMATS]


def draw_chart(names: Sequence[str] = ()) -> Chart:
    """Draw the bits of each format, its range on a logarithmic axis, and its values between 1 and 2."""
    formats = find_formats(names)
    widest = max(formats, key=lambda fmt: fmt.max_value)
    finest = min(formats, key=lambda fmt: fmt.spacing)
    title = (
        f"{widest.name} reaches furthest, to {widest.max_value:.1e}; {finest.name} is finest, {finest.spacing:.1e} at 1"
    )
    panels = [
        Panel("bits", _draw_bits(formats)),
        Panel("from the smallest to the largest value (darker: normal numbers)", _draw_range(formats)),
        Panel("values from 1 to 2", _draw_values(formats)),
    ]
    return stack_panels(panels, title=title, subtitle="sign · exponent · mantissa")


def _draw_bits(formats: Sequence[FloatFormat]) -> Chart:
    """Draw the sign, exponent and mantissa bits of each number format."""
    alt = _import_altair()
    parts = (("sign", 0), ("exponent", 1), ("mantissa", 2))
    cells = [
        {"format": fmt.name, "part": name, "bit": bit + 0.5}
        for fmt in formats
        for bit, (name, _) in enumerate(
            part for part in parts for _ in range((fmt.sign, fmt.exponent, fmt.mantissa)[part[1]])
        )
    ]
    bit_count = max(fmt.sign + fmt.exponent + fmt.mantissa for fmt in formats)
    x = alt.X("bit:Q", title=None, axis=None, scale=alt.Scale(domain=[0, bit_count], nice=False))
    y = _encode_y(formats)
    colour = _encode_colour("part", {"sign": GREY, "exponent": ORANGE, "mantissa": BLUE})
    size = min(22, 600 // bit_count - 1)
    marks = alt.Chart(alt.Data(values=cells)).mark_square(size=size * size, opacity=1).encode(x=x, y=y, color=colour)
    return marks.properties(width=620, height=26 * len(formats))


def _draw_range(formats: Sequence[FloatFormat]) -> Chart:
    """Draw the range of each number format, and the part of it that is normal."""
    alt = _import_altair()
    rows = [
        {
            "format": fmt.name,
            "low": log10(fmt.min_value),
            "normal": log10(fmt.smallest_normal),
            "high": log10(fmt.max_value),
            "text": f"{fmt.min_value:.0e} … {fmt.max_value:.3g}",
        }
        for fmt in formats
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(y=_encode_y(formats))
    axis = alt.Axis(tickCount=8, labelExpr="'1e' + datum.value", title=None)
    full_range = base.mark_bar(height=12, color=SKY).encode(x=alt.X("low:Q", axis=axis), x2="high:Q")
    normal_range = base.mark_bar(height=12, color=BLUE).encode(x=alt.X("normal:Q", axis=axis), x2="high:Q")
    range_text = base.mark_text(align="left", dx=6, fontSize=11).encode(x="high:Q", text="text:N")
    return alt.layer(full_range, normal_range, range_text).properties(width=620, height=26 * len(formats))


def _draw_values(formats: Sequence[FloatFormat]) -> Chart:
    """Draw a tick for each value, or a bar if they lie closer than a pixel."""
    alt = _import_altair()
    ticks = [
        {"format": fmt.name, "at": 1 + index * fmt.spacing}
        for fmt in formats
        if fmt.mantissa <= 7
        for index in range(2**fmt.mantissa + 1)
    ]
    dense = [{"format": fmt.name, "from": 1.0, "to": 2.0} for fmt in formats if fmt.mantissa > 7]
    spacings = [{"format": fmt.name, "at": 2.0, "text": f"{fmt.spacing:.2g} apart"} for fmt in formats]
    x = alt.X("at:Q", title=None, scale=alt.Scale(domain=[1, 2], nice=False), axis=alt.Axis(grid=False, tickCount=5))
    layers = [
        alt.Chart(alt.Data(values=ticks))
        .mark_tick(thickness=1.4, height=14, color=BLUE)
        .encode(x=x, y=_encode_y(formats))
    ]
    if dense:
        bar = alt.Chart(alt.Data(values=dense)).mark_bar(height=14, color=BLUE)
        layers.append(bar.encode(x=alt.X("from:Q", scale=alt.Scale(domain=[1, 2])), x2="to:Q", y=_encode_y(formats)))
    spacing_text = alt.Chart(alt.Data(values=spacings)).mark_text(align="left", dx=8, fontSize=11)
    return alt.layer(*layers, spacing_text.encode(x=x, y=_encode_y(formats), text="text:N")).properties(
        width=620, height=24 * len(formats)
    )


def _encode_y(formats: Sequence[FloatFormat]) -> Chart:
    alt = _import_altair()
    axis = alt.Axis(ticks=False, domain=False, labelPadding=8, grid=False)
    return alt.Y("format:N", sort=[fmt.name for fmt in formats], title=None, axis=axis)
