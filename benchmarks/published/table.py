"""Tables of predictions against published runs, one line per source and quantity, for a terminal and the README.

source  of    cases   bias  median  mean  worst     τ  regret
vtrain  time    938  +3.1%    6.0%  7.9%   +41%  0.81    1.2%
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import PositiveInt
from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.record import Record
from fivefold.rendering.grid import Grid
from fivefold.units import show_bytes, show_seconds

HEADINGS = ("source", "of", "cases", "bias", "median", "mean", "worst", "left out", "50 %", "90 %", "τ", "regret")


class KindSummary(Record):
    """The errors of ratios of one kind of difference, averaged over its sources.

    error = ln(predicted ratio / measured ratio). ``right_sign``: share of the pairs whose measured difference exceeds
    3 % that are predicted in the measured order. ``left_out``: ``mean`` by constants set without the source. ``half``,
    ``most``: share of the pairs inside the intervals of 50 and of 90 % that the other sources teach.
    """

    kind: str
    pairs: PositiveInt
    sources: PositiveInt
    bias: float
    mean: float
    left_out: float
    right_sign: float | None
    half: float | None
    most: float | None


class SourceErrors(Record):
    """The errors of the ratios of one kind of difference in one source, by constants set without it.

    ``share``: of the kind's mean error, in which sources have equal weights. ``worst``: the pair with the largest
    error, as its two rows, and that error.
    """

    kind: str
    source: str
    pairs: PositiveInt
    bias: float
    mean: float
    share: float
    worst: tuple[str, str]
    worst_error: float


class Summary(Record):
    """Relative errors of one source and quantity; ``bias`` and ``worst`` are signed, ``median`` and ``mean`` absolute.

    ``left_out``: mean absolute error by constants set without the source; ``half``, ``most``: share of its cases in the
    intervals of 50 and of 90 % that all others teach. ``tau`` (Kendall's), ``regret``: means over ``groups`` of rivals.
    """

    source: str
    quantity: str
    cases: PositiveInt
    bias: float
    median: float
    mean: float
    worst: float
    left_out: float | None = None
    half: float | None = None
    most: float | None = None
    groups: int = 0
    tau: float | None = None
    regret: float | None = None


def table(
    summaries: Iterable[Summary], *, excluded: Iterable[tuple[str, str]] = (), first: str = "source"
) -> RenderableType:
    """Return the table of errors, then the number of rows left out by source; ``excluded``: (source, rule) per row."""
    page: list[RenderableType] = [Grid((first, *HEADINGS[1:]), tuple(_cells(summaries)), words=(first, "of"))]
    counts = Counter(excluded)
    if counts:
        rows = tuple((source, str(count), rule) for (source, rule), count in counts.items())
        page += [Text(), Grid(("left out", "rows", "rule"), rows, words=("left out", "rule"))]
    return Group(*page)


def markdown(summaries: Iterable[Summary], *, first: str = "source") -> str:
    """Return the errors as a Markdown table."""
    return _write_markdown((first, *HEADINGS[1:]), _cells(summaries), words=(first, "of"))


def _write_markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[str]) -> str:
    """Return a table as Markdown, its columns aligned right except those in ``words``."""
    rule = tuple("---" if heading in words else "---:" for heading in headings)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headings, rule, *rows))


def _cells(summaries: Iterable[Summary]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table of sources."""
    for row in summaries:
        yield (
            row.source,
            row.quantity,
            str(row.cases),
            f"{row.bias:+.1%}",
            f"{row.median:.1%}",
            f"{row.mean:.1%}",
            f"{row.worst:+.0%}",
            "–" if row.left_out is None else f"{row.left_out:.1%}",
            "–" if row.half is None else f"{row.half:.0%}",
            "–" if row.most is None else f"{row.most:.0%}",
            "–" if row.tau is None else f"{row.tau:.2f}",
            "–" if row.regret is None else f"{row.regret:.1%}",
        )


RATIO_HEADINGS = ("difference", "pairs", "sources", "bias", "mean", "left out", "right sign", "50 %", "90 %")


def ratios(kinds: Iterable[KindSummary]) -> RenderableType:
    """Return the table of errors of ratios, a row for each kind of difference."""
    return Grid(RATIO_HEADINGS, tuple(_ratio_cells(kinds)), words=("difference",))


def ratios_markdown(kinds: Iterable[KindSummary]) -> str:
    """Return the errors of ratios as a Markdown table."""
    return _write_markdown(RATIO_HEADINGS, _ratio_cells(kinds), words=("difference",))


def _ratio_cells(kinds: Iterable[KindSummary]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table of ratios."""
    for row in kinds:
        yield (
            row.kind,
            str(row.pairs),
            str(row.sources),
            f"{row.bias:+.3f}",
            f"{row.mean:.3f}",
            f"{row.left_out:.3f}",
            "–" if row.right_sign is None else f"{row.right_sign:.0%}",
            "–" if row.half is None else f"{row.half:.0%}",
            "–" if row.most is None else f"{row.most:.0%}",
        )


SOURCE_HEADINGS = ("difference", "source", "pairs", "bias", "mean", "share", "worst", "worst pair")
SOURCE_WORDS = ("difference", "source", "worst pair")


def ratios_by_source(errors: Iterable[SourceErrors]) -> RenderableType:
    """Return the errors of ratios, a row for each kind of difference and source."""
    return Grid(SOURCE_HEADINGS, tuple(_source_cells(errors)), words=SOURCE_WORDS)


def ratios_by_source_markdown(errors: Iterable[SourceErrors]) -> str:
    """Return the errors of ratios by kind and source as a Markdown table, without the pairs."""
    return _write_markdown(SOURCE_HEADINGS[:-2], (cells[:-2] for cells in _source_cells(errors)), words=SOURCE_WORDS)


def _source_cells(errors: Iterable[SourceErrors]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table of ratios by source."""
    for row in errors:
        yield (
            row.kind,
            row.source,
            str(row.pairs),
            f"{row.bias:+.3f}",
            f"{row.mean:.3f}",
            f"{row.share:.0%}",
            f"{row.worst_error:+.3f}",
            " to ".join(name.removeprefix(f"{row.source}-") for name in row.worst),
        )


def runs(scores: Iterable[tuple[str, str, str, str, float, float]]) -> RenderableType:
    """Return a table of all runs; ``scores``: (source, row, layout, quantity, predicted, measured), in s or bytes."""
    rows = tuple(
        (
            row,
            quantity,
            *(_amount(quantity, number) for number in (predicted, measured)),
            f"{predicted / measured - 1:+.1%}",
            layout,
        )
        for _, row, layout, quantity, predicted, measured in scores
    )
    headings = ("row", "of", "predicted", "measured", "error", "layout")  # a row's name begins with that of its source
    return Grid(headings, rows, words=("row", "of", "layout"))


def _amount(quantity: str, number: float) -> str:
    return show_seconds(number) if quantity in ("time", "message") else show_bytes(number)


def halves(results: Iterable[Mapping[str, Any]]) -> RenderableType:
    """Return a table of errors on one half of a machine's runs, before and after calibrating on the other half."""
    rows = tuple(
        (
            row["chip"],
            str(row["runs"]),
            f"{row['stock']:.1%}",
            f"{row['tuned']:.1%}",
            ", ".join(f"{name} x{factor:.2f}" for name, factor in row["factors"].items() if factor != 1) or "none",
        )
        for row in results
    )
    return Grid(("chip", "runs", "stock", "calibrated", "factors"), rows, words=("chip", "factors"))
