"""Returns memory that was freed on CPU to the operating system.

glibc keeps freed memory, and aligned blocks, which torch's tensors are, leave gaps in it that later ones do not fill
(glibc bugs 14581 and 30723): ranks that exchange gradients over gloo grew by 5 MiB a step.
"""

from __future__ import annotations

import ctypes
import sys
import time

TRIM_SECONDS = 10.0  # least time between two calls; one call takes some milliseconds


class HostHeap:
    """The C library's heap of this process. Outside of glibc it is left as it is."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._malloc_trim = getattr(library, "malloc_trim", None)  # glibc's alone
        self._last_trim = time.monotonic()

    def trim(self) -> bool:
        """Return freed memory to the operating system; return whether it was done, at most once in ``TRIM_SECONDS``."""
        if self._malloc_trim is None or time.monotonic() - self._last_trim < TRIM_SECONDS:
            return False
        self._malloc_trim(0)
        self._last_trim = time.monotonic()
        return True
