"""Clocks of the ranks: a planted offset is found, to within the error that is stated."""

from __future__ import annotations

import time

import pytest

from fivefold.trainer.measure.clock import HostClock, Offset, StreamClock, measure_offset

AHEAD = 12.5  # seconds


def compare_clocks(planted: float) -> tuple[Offset, float]:
    import torch.distributed as dist

    rank = dist.get_rank()
    began = time.perf_counter()  # one clock for all processes of a host
    result = measure_offset(rank=rank, world=dist.get_world_size(), now=lambda: time.perf_counter() + rank * planted)
    return result, time.perf_counter() - began


def test_a_planted_clock_offset_is_measured(forked) -> None:
    first, *others = forked(3, compare_clocks, AHEAD)
    assert first[0] == Offset(0.0, 0.0)
    for rank, (result, took) in enumerate(others, start=1):
        assert 0 < result.error < took
        assert abs(result.seconds + rank * AHEAD) <= result.error


def test_the_clock_of_a_single_rank_has_no_offset(forked) -> None:
    assert forked(1, compare_clocks, AHEAD)[0][0] == Offset(0.0, 0.0)


def test_marks_of_the_host_clock_are_in_seconds() -> None:
    clock = HostClock()
    before, mark, after = time.perf_counter(), clock.mark(), time.perf_counter()
    assert before - 1e-6 <= clock.seconds([mark])[0] <= after + 1e-6


class Event:
    """As ``torch.cuda.Event`` is documented, on a stream that needs 5 ms for what comes before each event."""

    clock = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.clock += 5.0
        self.at = Event.clock

    def synchronize(self) -> None:
        self.at += 0.0

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


def test_marks_of_a_stream_count_from_the_base_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the documented interface only: there is no GPU here."""
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    clock, before = StreamClock(), time.perf_counter()
    clock.begin()
    after = time.perf_counter()
    seconds = clock.seconds([clock.mark(), clock.mark()])
    assert before + 5e-3 <= seconds[0] <= after + 5e-3
    assert seconds[1] - seconds[0] == pytest.approx(5e-3)
