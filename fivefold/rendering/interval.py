"""Show the uncertainty of a prediction: where comparable published runs lie, and what was never measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rich.text import Text

from fivefold.results.comparison import SpeedRatio
from fivefold.step import Interval, Memory, Step
from fivefold.units import show_bytes, show_seconds

MAX_DIGITS = 3  # after the point, of the ends of a narrow interval


def render_intervals(step: Step) -> Text:
    """Return lines with the intervals of time and peak, and with what was never measured; "" if nothing is known."""
    return Text("".join(_format_lines(step)), style="dim", overflow="fold")


def _format_lines(step: Step) -> Iterator[str]:
    """Yield the lines of the intervals of a step, and what lies outside of the runs that taught them."""
    time, peak = step.time.interval, step.memory.interval
    if time is not None:
        yield _format_line("step time", step.time.step_seconds, time, show_seconds)
    if peak is not None:
        yield _format_line("peak memory", step.memory.peak_bytes, peak, _show_size)
    if held := format_held_intervals(step.memory):
        yield f"\n{held}"
    if outside := format_outside(step):
        yield f"\n{outside}"


def format_outside(step: Step) -> str:
    """Return the line that lists what no published run covers, each fact once; empty if there is no such fact."""
    outside = [interval.outside if interval else () for interval in (step.time.interval, step.memory.interval)]
    both = [fact for fact in outside[0] if fact in outside[1]]
    one = [
        f"{fact} (for {name})"
        for name, facts in zip(("step time", "peak memory"), outside, strict=True)
        for fact in facts
        if fact not in both
    ]
    return describe_outside((*both, *one)) if both or one else ""


def format_held_intervals(memory: Memory) -> str:
    """Return the 90 % intervals of the memory that the allocator and the driver hold; "" if they are not known."""
    held = (
        ("reserved", memory.reserved_bytes, memory.reserved_interval),
        ("with the driver", memory.driver_bytes, memory.driver_interval),
    )
    intervals = [
        f"{_show_size(size)} {name}, {show_range(_show_size(interval.low_90), _show_size(interval.high_90))}"
        for name, size, interval in held
        if size is not None and interval is not None
    ]
    return f"expected {'; '.join(intervals)} (90 % intervals)" if intervals else ""


def _show_size(size: float) -> str:
    return show_bytes(round(size))


def describe_outside(facts: Iterable[str]) -> str:
    """Return the line that lists in what a run is outside the range of all published runs."""
    return f"not covered by any published run: {'; '.join(facts)}"


def _format_line(name: str, predicted: float, interval: Interval, show: Callable[[float], str]) -> str:
    interval_50 = show_range(show(interval.low_50), show(interval.high_50))
    interval_90 = show_range(show(interval.low_90), show(interval.high_90))
    basis = describe_basis(interval)
    return f"\nexpected {name} {show(predicted)}; 50 % interval {interval_50}, 90 % interval {interval_90} ({basis})"


def show_range(low: str, high: str) -> str:
    """Join the ends of an interval, with their unit once if it is the same: ``6.40–7.45 s``."""
    if low == high:
        return high
    first, _, unit = low.partition(" ")
    return f"{first}–{high}" if unit == high.partition(" ")[2] and " " not in unit else f"{low}–{high}"


def describe_basis(interval: Interval) -> str:
    """Return how many published runs of the same kind an interval is based on."""
    if not interval.runs:
        return "no published run of exactly this kind"
    runs = "1 published run" if interval.runs == 1 else f"{interval.runs:,} published runs"
    return f"{runs} of this kind, from {interval.sources} source{'s' if interval.sources != 1 else ''}"


def show_speed_interval(speed: SpeedRatio | None) -> str:
    """Write the relative change of speed that nine tenths of comparable published pairs lie within."""
    return "–" if speed is None else show_change_range(speed.low_90 - 1, speed.high_90 - 1)


def show_change_range(low: float, high: float) -> str:
    """Write two relative changes as a range, ``+2% to +7%``, with the digits that make its ends differ."""
    for digits in range(MAX_DIGITS + 1):
        if round(100 * low, digits) != round(100 * high, digits):
            return f"{low:+.{digits}%} to {high:+.{digits}%}"
    return f"{low:+.0%}"
