"""Advice on the traces of a run: the largest loss that can be avoided, its evidence, the change, and its largest gain.

    The largest loss is waiting for ranks that arrive late, 18% of a step. Rank 1 is last at 40 of its 52 messages …

Losses are means over ranks and steps, as shares of a step. What a prediction of the same step has too is a property of
the layout: it is named as such, and another layout is the change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fivefold.results.trace_report import Breakdown, TraceReport
from fivefold.step import Step
from fivefold.units import show_seconds

MIN_SHARE = 0.05  # smaller losses are no advice


class Loss(NamedTuple):
    """Seconds of a step that do no work, and what to do about them."""

    name: str
    seconds: float
    evidence: str
    change: str


def advise(report: TraceReport, ranks: Sequence[Breakdown], predicted: Step | None = None) -> str:
    """Return the advice in a few sentences; ``ranks``: one breakdown per rank, the mean of its steps."""
    step_seconds = _mean(ranks, "window_seconds")
    if not step_seconds:
        return ""
    loss = max(_list_losses(report, ranks, predicted), key=lambda loss: loss.seconds)
    share = loss.seconds / step_seconds
    if share < MIN_SHARE:
        compute = _mean(ranks, "compute_seconds") / step_seconds
        return (
            f"No loss takes {MIN_SHARE:.0%} of a step or more: compute fills {compute:.0%}. What is left is less "
            "compute: a lower precision, faster kernels, or less recomputation."
        )
    sentences = [f"The largest loss is {loss.name}, {show_seconds(loss.seconds)} or {share:.0%} of a step."]
    sentences += [loss.evidence] if loss.evidence else []
    speed = 1 / (1 - share) - 1
    sentences += [
        loss.change,
        f"Without it a step would take {share:.0%} less time, {speed:.0%} more tokens per second.",
    ]
    return " ".join(sentences)


def _mean(ranks: Sequence[Breakdown], field: str) -> float:
    """Return the mean of a field over ranks; 0 where it is not known."""
    return sum(getattr(rank, field) or 0.0 for rank in ranks) / len(ranks) if ranks else 0.0


def _list_losses(report: TraceReport, ranks: Sequence[Breakdown], predicted: Step | None) -> Iterator[Loss]:
    """Yield the losses of a step; those of communication without what the prediction has too."""
    waiting = _mean(ranks, "waiting_seconds")
    yield Loss(
        "waiting for ranks that arrive late",
        waiting,
        _name_latest(report),
        "Give all ranks equal work: batches of equal length, balanced pipeline stages and experts; or replace a slow "
        "GPU or host.",
    )
    exposed = max(0.0, _mean(ranks, "exposed_seconds") - waiting)
    expected = sum(predicted.time.exposed_seconds.values()) + predicted.time.bubble_seconds if predicted else 0.0
    if predicted is not None and exposed <= 1.25 * expected:
        yield Loss(
            "exposed communication",
            exposed,
            f"The prediction has {show_seconds(expected)} of it, so it belongs to the layout.",
            "Search another one: `fivefold search`.",
        )
    else:
        beyond = f" The prediction has {show_seconds(expected)} of it." if predicted else ""
        yield Loss(
            "exposed communication",
            exposed - expected,
            _name_longest(report) + beyond,
            "Overlap it with compute (bucketed or asynchronous reductions, prefetched gathers), or send less over slow "
            "links: tensor parallelism within a node, fewer and larger messages.",
        )
    yield Loss(
        "host-bound idle time",
        _mean(ranks, "idle_host_seconds"),
        "The device waits for launches.",
        "Launch less: torch.compile, CUDA graphs, fused optimizers, larger micro-batches; and take .item() and "
        "printing out of the loop.",
    )
    yield Loss(
        "copies that overlap nothing",
        _mean(ranks, "memcpy_alone_seconds"),
        "",
        "Copy from pinned memory with non_blocking=True, and load batches ahead.",
    )
    yield Loss(
        "queued idle time",
        _mean(ranks, "idle_waiting_seconds"),
        "Kernels are launched, but wait for another stream.",
        "Look for synchronization between streams: waits for communication that is not needed yet, or for the loader.",
    )


def _name_latest(report: TraceReport) -> str:
    """Return which rank the others wait for the longest."""
    latest = max(report.arrivals, key=lambda rank: rank.others_waited_seconds, default=None)
    if latest is None or not latest.others_waited_seconds:
        return ""
    return (
        f"Rank {latest.rank} is last at {latest.last} of its {latest.matched} messages; the others wait "
        f"{show_seconds(latest.others_waited_seconds)} for it in all."
    )


def _name_longest(report: TraceReport) -> str:
    """Return the collective that takes the longest, and how fast its link is used."""
    longest = max(report.messages, key=lambda line: line.seconds, default=None)
    if longest is None:
        return ""
    group = f" over {longest.axis}" if longest.axis else f" over {longest.ranks} ranks" if longest.ranks else ""
    used = ""
    if longest.bus_bandwidth and longest.link_bandwidth:
        used = f", at {longest.bus_bandwidth / longest.link_bandwidth:.0%} of the bandwidth of its link"
    return f"The longest is {longest.collective}{group}: {show_seconds(longest.seconds)} a step{used}."
