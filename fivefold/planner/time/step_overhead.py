"""Seconds that the clock of a calibrated computer counts in a step, besides work and messages (``StepOverhead``).

    host    share of the work: other programs, threads that wait for each other, threads that carry messages
    waits   latest of all ranks at the start of the step + Σ over messages: latest of its n ranks · √(work before it)

A message ends when the last of its ranks has arrived, and the others wait for that one. Interruptions delay each rank
at random, so that ranks drift apart as in a random walk: the standard deviation of their arrival grows with the square
root of the work since the last message. The latest of n ranks is the expected largest of n normal deviates behind the
mean. A machine without these measurements has neither part.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from fivefold.layout.spec import Layout
from fivefold.machine.spec import Calibration, StepOverhead
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.traffic import list_messages
from fivefold.planner.time.compute import expect_largest_deviate
from fivefold.planner.time.profiled import count_ranks_per_host
from fivefold.planner.time.units import Units


class OverheadSeconds(NamedTuple):
    """Seconds of a rank's step besides work and messages; ``waits``: for the last rank of each message."""

    host: float
    waits: float


class WaitDeviations(NamedTuple):
    """The factors of ``start_seconds`` and ``drift_seconds`` in the waits of a step."""

    start: float
    drift: float


def estimate_overhead(units: Units, layout: Layout, chunks: tuple[int, ...], *, work_seconds: float) -> OverheadSeconds:
    """Return the overhead of a rank that holds the stages ``chunks`` and works for ``work_seconds`` in a step."""
    overhead = find_overhead(units.machine.calibration, ranks=count_ranks_per_host(layout, units.machine))
    if overhead is None:
        return OverheadSeconds(0.0, 0.0)
    deviations = sum_deviations(units.counts, layout, chunks, work_seconds=work_seconds)
    waits = overhead.start_seconds * deviations.start + overhead.drift_seconds * deviations.drift
    return OverheadSeconds(overhead.host_share * work_seconds, waits)


def find_overhead(calibration: Calibration | None, *, ranks: int) -> StepOverhead | None:
    """Return the overhead of ``ranks`` concurrent processes, or of the nearest larger number that was measured.

    Of more processes than were measured, it is that of the largest number; None if the calibration has none.
    """
    overheads = sorted(calibration.overheads if calibration is not None else (), key=lambda overhead: overhead.ranks)
    return next((overhead for overhead in overheads if overhead.ranks >= ranks), overheads[-1] if overheads else None)


def sum_deviations(counts: Counts, layout: Layout, chunks: tuple[int, ...], *, work_seconds: float) -> WaitDeviations:
    """Return the waits of a rank that holds the stages ``chunks``, in standard deviations.

    Messages are taken to be evenly spaced over its ``work_seconds``.
    """
    if layout.world == 1:
        return WaitDeviations(0.0, 0.0)
    messages = [message for message in list_messages(counts, layout, chunks=chunks) if message.ranks > 1]
    n_messages = sum(message.times for message in messages)
    latest = sum(message.times * expect_largest_deviate(message.ranks) for message in messages)
    drift = latest * sqrt(work_seconds / n_messages) if n_messages else 0.0
    return WaitDeviations(expect_largest_deviate(layout.world), drift)
