"""Prefetcher: a thread reads the next batch during a step, for a GPU into pinned memory for an asynchronous copy.

    main      step n: forward, backward, update     take(n + 1): ready
    thread            read n + 1, pin it                      read n + 2 …

A batch depends only on its position, so a wrong guess of the next position only costs time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Prefetcher:
    """A reader of batches that reads the next one ahead.

    ``read``: returns the batch at a position, in samples; ``pinned``: copy the batch into page-locked memory.
    """

    def __init__(self, read: Callable[[int], NDArray[np.int64]], *, pinned: bool) -> None:
        self.read, self.pinned = read, pinned
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._coming: tuple[int, Future[Tensor]] | None = None

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._coming = None
        self._thread.shutdown(cancel_futures=True)

    def take(self, position: int, *, following: int) -> Tensor:
        """Return the batch at ``position`` and start to read the one at ``following``. Raises errors of ``read``."""
        guess, self._coming = self._coming, None
        if guess is not None and guess[0] == position:
            batch = guess[1].result()
        else:
            if guess is not None:
                guess[1].cancel()
            batch = self._load_tensor(position)
        self._coming = following, self._thread.submit(self._load_tensor, following)
        return batch

    def _load_tensor(self, position: int) -> Tensor:
        batch = torch.from_numpy(self.read(position))
        return batch.pin_memory() if self.pinned else batch
