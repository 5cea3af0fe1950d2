"""Show the uncertainty of a prediction: where comparable published runs lie, and what was never measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.text import Text

from fivefold.results.ratio import SpeedRatio
from fivefold.step import Interval, Step
from fivefold.units import show_bytes, show_seconds


def expectation(step: Step) -> Text:
    """Return lines with the intervals of time and peak, and with what was never measured; "" if nothing is known."""
    return Text("".join(_lines(step)), style="dim", overflow="fold")


def _lines(step: Step) -> Iterator[str]:
    time, peak = step.time.interval, step.memory.interval
    if time is not None:
        yield _line("step", time, show_seconds)
    if peak is not None:
        yield _line("peak", peak, lambda size: show_bytes(round(size)))
    outside = [interval.outside if interval else () for interval in (time, peak)]
    both = [fact for fact in outside[0] if fact in outside[1]]
    one = [
        f"{fact} ({name} alone)"
        for name, facts in zip(("step", "peak"), outside, strict=True)
        for fact in facts
        if fact not in both
    ]
    if both or one:
        yield f"\noutside of what was ever measured: {'; '.join((*both, *one))}"


def _line(name: str, interval: Interval, show: Callable[[float], str]) -> str:
    interval_50 = f"{show(interval.low_50)} to {show(interval.high_50)}"
    interval_90 = f"{show(interval.low_90)} to {show(interval.high_90)}"
    return f"\n{name} of comparable runs: half {interval_50}, nine in ten {interval_90}{_basis(interval)}"


def _basis(interval: Interval) -> str:
    if not interval.runs:
        return " (none of just this class)"
    sources = "1 source" if interval.sources == 1 else f"{interval.sources} sources"
    return f" ({interval.runs:,} of just this class, of {sources})"


def show_speed_interval(speed: SpeedRatio | None) -> str:
    """Write the relative change of speed that nine tenths of comparable published pairs lie within."""
    return "–" if speed is None else f"{speed.low_90 - 1:+.0%} to {speed.high_90 - 1:+.0%}"
