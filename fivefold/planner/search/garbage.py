"""Fewer garbage collections during a search, which makes millions of records, hardly any of them in cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

ALLOCATIONS_PER_COLLECTION = 200_000  # allocations between collections, which else take a tenth of a search
_searches = list[tuple[int, int, int]]()  # thresholds before each search that runs, on any thread
_lock = Lock()


@contextmanager
def collect_garbage_rarely() -> Iterator[None]:
    """Collect garbage less often until the last of the searches that run on several threads ends."""
    with _lock:
        _searches.append(_searches[0] if _searches else gc.get_threshold())
        before = _searches[0]
        gc.set_threshold(max(ALLOCATIONS_PER_COLLECTION, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        with _lock:
            before = _searches.pop()
            if not _searches:
                gc.set_threshold(*before)
