"""What the clock of a calibrated computer counts in a step besides its processor time and messages (``StepOverhead``).

    clock   (1 + share) · processor time: other programs, threads that wait for each other or carry messages
    host    operations · seconds between two of them: the part of the work that is no operation's
    waits   latest of all ranks at the start of the step + Σ over messages: latest of its n ranks · √(work before it)

A message ends when the last of its ranks has arrived, and the others wait for that one. Interruptions delay each rank
at random, so that ranks drift apart as in a random walk: the standard deviation of their arrival grows with the square
root of the work since the last message. The latest of n ranks is the expected largest of n normal deviates behind the
mean. A machine without these measurements has none of the three.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from fivefold.layout.spec import Layout
from fivefold.machine.spec import Calibration, StepOverhead
from fivefold.planner.counts.counts import Counts, get_group_degrees
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.counts.traffic import count_passes, list_messages
from fivefold.planner.time.compute import expect_largest_deviate
from fivefold.planner.time.profiled import count_ranks_per_host
from fivefold.planner.time.units import Units


class HostGaps(NamedTuple):
    """Processor seconds of the host between operations, in forwards and in backwards."""

    forward: float
    backward: float


class Overhead(NamedTuple):
    """The overhead of a rank's step. ``clock_ratio``: seconds of the clock for one of the processor's."""

    clock_ratio: float = 1.0
    gaps: HostGaps = HostGaps(0.0, 0.0)
    waits: float = 0.0  # for the last rank of each message


class WaitDeviations(NamedTuple):
    """The factors of ``start_seconds`` and ``drift_seconds`` in the waits of a step."""

    start: float
    drift: float


def estimate_overhead(units: Units, layout: Layout, chunks: tuple[int, ...], *, work_seconds: float) -> Overhead:
    """Return the overhead of a rank that holds the stages ``chunks``; ``work_seconds``: processor time of its step."""
    overhead = find_overhead(units.machine.calibration, ranks=count_ranks_per_host(layout, units.machine))
    if overhead is None:
        return Overhead()
    forward, backward = count_operations(units.counts, layout, chunks)
    gaps = HostGaps(overhead.forward_gap_seconds * forward, overhead.backward_gap_seconds * backward)
    deviations = sum_deviations(units.counts, layout, chunks, work_seconds=work_seconds)
    waits = overhead.start_seconds * deviations.start + overhead.drift_seconds * deviations.drift
    return Overhead(1 + overhead.host_share, gaps, waits)


def count_operations(counts: Counts, layout: Layout, chunks: tuple[int, ...]) -> tuple[int, int]:
    """Return the operations of a step of a rank that holds the stages ``chunks``: in forwards and in backwards.

    A backward has those of the forward and those that it recomputes. DPO's reference runs another forward.
    """
    part, work, forward, recomputed = get_local_degrees(layout), counts.stage_work(layout), 0, 0
    for run, times in (entry for chunk in chunks for entry in work[chunk]):
        ops = counts.unit(get_group_degrees(part, run), run.name).ops
        forward += times * len(ops)
        recomputed += times * sum(op.recomputed for op in ops)
    passes = count_passes(layout, counts.job)
    return passes * forward * (2 if counts.job.has_reference else 1), passes * (forward + recomputed)


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
