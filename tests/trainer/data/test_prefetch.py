"""Batches that are read ahead are those that are asked for, whoever guessed what."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fivefold.trainer.data.prefetch import Prefetcher


def rows(position: int) -> NDArray[np.int64]:
    return np.arange(position, position + 6).reshape(1, 2, 3)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_prefetch_returns_the_requested_batches(asked: list[tuple[int, int]]) -> None:
    """Steps in order, a rollback, another batch size: positions and guesses are any."""
    with Prefetcher(rows, pinned=False) as ahead:
        for position, following in asked:
            batch = ahead.take(position, following=following)
            assert batch.tolist() == rows(position).tolist()
            assert not batch.is_pinned()


def test_the_next_batch_is_read_once_in_the_background() -> None:
    seen: list[tuple[int, bool]] = []
    read = threading.Event()

    def read_watched(position: int) -> NDArray[np.int64]:
        seen.append((position, threading.current_thread() is threading.main_thread()))
        if position == 8:
            read.set()
        return rows(position)

    with Prefetcher(read_watched, pinned=False) as ahead:
        ahead.take(0, following=8)
        assert read.wait(timeout=10)  # without being asked
        ahead.take(8, following=16)
    assert seen[:2] == [(0, True), (8, False)]
    assert [position for position, _ in seen].count(8) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


def test_an_error_comes_with_the_batch_that_has_it() -> None:
    def read_broken(position: int) -> NDArray[np.int64]:
        if position == 8:
            raise OSError("shard 3 is gone")
        return rows(position)

    with Prefetcher(read_broken, pinned=False) as ahead:
        assert ahead.take(0, following=8)[0, 0, 0] == 0
        with pytest.raises(OSError, match="shard 3 is gone"):
            ahead.take(8, following=16)
        assert ahead.take(16, following=24)[0, 0, 0] == 16  # passed over
