"""Clocks of the ranks: a planted offset is found, to within the error that is stated."""

from __future__ import annotations

import time

from fivefold.train.measure.clock import HostClock, Offset, offset

AHEAD = 12.5  # seconds


def compared(planted: float) -> tuple[Offset, float]:
    import torch.distributed as dist

    rank = dist.get_rank()
    began = time.perf_counter()  # one clock for all processes of a host
    found = offset(rank=rank, world=dist.get_world_size(), now=lambda: time.perf_counter() + rank * planted)
    return found, time.perf_counter() - began


def test_a_planted_offset_is_found(forked) -> None:
    first, *others = forked(3, compared, AHEAD)
    assert first[0] == Offset(0.0, 0.0)
    for rank, (found, took) in enumerate(others, start=1):
        assert 0 < found.error < took
        assert abs(found.seconds + rank * AHEAD) <= found.error


def test_one_rank_asks_nobody(forked) -> None:
    assert forked(1, compared, AHEAD)[0][0] == Offset(0.0, 0.0)


def test_marks_of_the_host_are_its_seconds() -> None:
    clock = HostClock()
    before, mark, after = time.perf_counter(), clock.mark(), time.perf_counter()
    assert before - 1e-6 <= clock.seconds([mark])[0] <= after + 1e-6
