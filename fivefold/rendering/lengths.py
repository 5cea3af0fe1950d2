"""Show memory and MFU against the length of sequences, by recomputation and cp: a page and a picture."""

from __future__ import annotations

from rich.text import Text

from fivefold.rendering.charts import Chart, _import_altair
from fivefold.rendering.grid import Grid, make_grid
from fivefold.rendering.palette import SERIES
from fivefold.rendering.search import ANSWERS
from fivefold.rendering.sections import AnswerSection
from fivefold.rendering.sweep.panels import Panel, stack_panels
from fivefold.results.search_result import LengthCurve, Lengths, QuestionAnswer
from fivefold.units import choose_byte_unit

KIB = 1024
LABEL = f"datum.value < {KIB**2} ? datum.value / {KIB} + ' k' : datum.value / {KIB**2} + ' M'"


def list_answers(lengths: Lengths) -> list[QuestionAnswer]:
    """Return the rows of the first table: any layout, one with tensors in host memory if that is longer, this one."""
    answers = (lengths.longest, lengths.offloaded, lengths.answer)
    return [answer for answer in answers if answer is not None]


def list_sections(lengths: Lengths) -> list[AnswerSection]:
    """Return the longest sequences, a row for each cp and recomputation, and the changes needed for more."""
    rows = tuple(_format_row(lengths, curve) for curve in lengths.curves)
    sizes = [_format_tokens(point) for point in _choose_sizes(lengths)]
    kind = "Ulysses" if any("cp=ulysses" in curve.layout for curve in lengths.curves) else "ring attention"
    return [
        AnswerSection(
            (
                make_grid(ANSWERS, list_answers(lengths)),
                *(Text(remark, overflow="fold") for remark in lengths.longest.remarks),
            )
        ),
        AnswerSection(
            (Grid(("cp", "ac", "longest", *sizes), rows, words=("ac",)),),
            f"{lengths.answer.layout}, with other context parallelism ({kind}) and recomputation",
            f"{_choose_unit(lengths)[1]} of the rank with the highest peak, and MFU; same batch; –: does not fit",
        ),
        AnswerSection(
            tuple(Text(f"· {line}", overflow="fold") for line in lengths.changes),
            f"What has to change for sequences of {lengths.target:,} tokens",
        ),
    ]


def draw_chart(lengths: Lengths) -> Chart:
    """Draw memory above and MFU below, over the length; one colour per cp, one dash pattern per recomputation."""
    alt, (unit, name) = _import_altair(), _choose_unit(lengths)
    values = [
        {
            "tokens": point.tokens,
            "memory": point.peak_bytes / unit,
            "mfu": point.mfu,
            "cp": f"cp{curve.cp}",
            "ac": f"ac={curve.ac}",
            "fits": point.fits,
        }
        for curve in lengths.curves
        for point in curve.points
    ]
    cps = list(dict.fromkeys(value["cp"] for value in values))
    scale = alt.Scale(domain=cps, range=list(SERIES[: len(cps)]))
    x = alt.X(
        "tokens:Q", title="tokens per sequence", scale=alt.Scale(type="log", base=2), axis=alt.Axis(labelExpr=LABEL)
    )
    colour = alt.Color("cp:N", scale=scale, legend=alt.Legend(orient="right", title=None))
    dash = alt.StrokeDash(
        "ac:N", sort=list(dict.fromkeys(value["ac"] for value in values)), legend=alt.Legend(orient="right", title=None)
    )

    def draw_panel(field: str, title: str, form: str, *, log: bool) -> Chart:
        y = alt.Y(
            f"{field}:Q", title=title, axis=alt.Axis(format=form), scale=alt.Scale(type="log" if log else "linear")
        )
        base = alt.Chart(alt.Data(values=values)).encode(x=x, y=y, color=colour)
        dots = base.mark_point(size=40).encode(opacity=alt.condition("datum.fits", alt.value(1), alt.value(0.15)))
        return (base.mark_line(strokeWidth=1.6).encode(strokeDash=dash) + dots).properties(width=560, height=220)

    longest = max(lengths.curves, key=lambda curve: curve.longest)
    title = f"{lengths.model}: cp{longest.cp} with ac={longest.ac} reaches {longest.longest:,} tokens"
    panels = [
        Panel(f"{name} of the rank with the highest peak", draw_panel("memory", name, "~s", log=True)),
        Panel("MFU, causal", draw_panel("mfu", "MFU", ".0%", log=False)),
    ]
    return stack_panels(
        panels, title=title, subtitle=f"{lengths.answer.layout} on {lengths.machine}; faint: does not fit"
    )


def _choose_unit(lengths: Lengths) -> tuple[int, str]:
    """Return the unit in which memory is shown, by the largest that fits, or by all if none does."""
    points = [point for curve in lengths.curves for point in curve.points]
    fitting = [point for point in points if point.fits] or points
    return choose_byte_unit(max((point.peak_bytes for point in fitting), default=0))


def _choose_sizes(lengths: Lengths) -> list[int]:
    """Return every other length and the longest; more columns do not fit a terminal."""
    sizes = sorted({point.tokens for curve in lengths.curves for point in curve.points})
    return sorted({*sizes[1::2], *sizes[-1:]})


def _format_tokens(size: int) -> str:
    return f"{size // KIB} k" if size < KIB**2 else f"{size // KIB**2} M"


def _format_row(lengths: Lengths, curve: LengthCurve) -> tuple[str, ...]:
    """Return a row of the table: memory and MFU at each length with one kind of recomputation."""
    points = {point.tokens: point for point in curve.points}
    cells = []
    for size in _choose_sizes(lengths):
        point = points.get(size)
        fits = point is not None and point.fits
        cells.append(
            f"{point.peak_bytes / _choose_unit(lengths)[0]:.0f} {point.mfu:.0%}" if fits and point is not None else "–"
        )
    return (str(curve.cp), curve.ac, f"{curve.longest:,}", *cells)
