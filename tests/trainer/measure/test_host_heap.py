"""Memory freed on CPU goes back to the operating system, at most once in ten seconds."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from fivefold.trainer.measure import host_heap
from fivefold.trainer.measure.host_heap import HostHeap

TENSORS, NUMEL = 2000, 2**14  # of 64 KiB each, below the size that glibc maps apart


def resident_bytes() -> int:
    """Return the resident bytes of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_free_memory_between_live_tensors_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = HostHeap()
    if heap._malloc_trim is None:
        pytest.skip("the C library is not glibc")
    monkeypatch.setattr(host_heap, "TRIM_SECONDS", 0.0)
    held = [torch.ones(NUMEL) for _ in range(TENSORS)]
    kept = held[::2]
    del held
    before = resident_bytes()
    assert heap.trim()
    assert before - resident_bytes() > TENSORS // 4 * NUMEL * 4  # at least half of the gaps
    assert all(float(tensor.sum()) == NUMEL for tensor in kept)


def test_the_heap_is_not_trimmed_again_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = HostHeap()
    heap._malloc_trim = lambda pad: 1
    now = heap._last_trim
    monkeypatch.setattr(host_heap.time, "monotonic", lambda: now + 10.5)
    assert heap.trim()
    assert not heap.trim()
