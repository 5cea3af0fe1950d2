"""The next batch is read while a step runs: by a thread, for a GPU into memory that it copies from by itself.

    main      step n: forward, backward, update     take(n + 1): it is there
    thread            read n + 1, pin it                      read n + 2 …

A batch is a function of its position alone, so that a wrong guess of what comes next costs time and changes nothing.
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
    """``read`` gives the batch at a position; ``pinned``: copied from page-locked memory, beside what the GPU does."""

    def __init__(self, read: Callable[[int], NDArray[np.int64]], *, pinned: bool) -> None:
        self.read, self.pinned = read, pinned
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._coming: tuple[int, Future[Tensor]] | None = None

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._coming = None
        self._thread.shutdown(cancel_futures=True)

    def take(self, position: int, *, following: int) -> Tensor:
        """The batch at ``position``; the one at ``following`` is read from now on. Whatever ``read`` raises."""
        guess, self._coming = self._coming, None
        if guess is not None and guess[0] == position:
            batch = guess[1].result()
        else:
            if guess is not None:
                guess[1].cancel()
            batch = self._tensor(position)
        self._coming = following, self._thread.submit(self._tensor, following)
        return batch

    def _tensor(self, position: int) -> Tensor:
        batch = torch.from_numpy(self.read(position))
        return batch.pin_memory() if self.pinned else batch
