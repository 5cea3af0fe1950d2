"""Shows what to expect of a prediction: where comparable published runs lie, and what of it was never measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.text import Text

from fivefold.step import Interval, Step
from fivefold.units import show_bytes, show_seconds


def expectation(step: Step) -> Text:
    """Return lines with the intervals of time and peak, and with what lies outside; empty where nothing is known."""
    return Text("".join(_lines(step)), style="dim", overflow="fold")


def _lines(step: Step) -> Iterator[str]:
    time, peak = step.time.interval, step.memory.interval
    if time is not None:
        yield _line("step", time, show_seconds)
    if peak is not None:
        yield _line("peak", peak, lambda size: show_bytes(round(size)))
    lacks = [interval.outside if interval else () for interval in (time, peak)]
    both = [each for each in lacks[0] if each in lacks[1]]
    alone = [f"{each} ({name} alone)" for name, its in zip(("step", "peak"), lacks, strict=True) for each in its
             if each not in both]  # fmt: skip
    if both or alone:
        yield f"\noutside of what was ever measured: {'; '.join((*both, *alone))}"


def _line(name: str, interval: Interval, show: Callable[[float], str]) -> str:
    half = f"{show(interval.low_50)} to {show(interval.high_50)}"
    most = f"{show(interval.low_90)} to {show(interval.high_90)}"
    return f"\n{name} of comparable runs: half {half}, nine in ten {most}{_basis(interval)}"


def _basis(interval: Interval) -> str:
    if not interval.runs:
        return " (none of just this class)"
    sources = "1 source" if interval.sources == 1 else f"{interval.sources} sources"
    return f" ({interval.runs:,} of just this class, of {sources})"
