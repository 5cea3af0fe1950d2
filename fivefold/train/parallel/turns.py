"""Two pieces of work that run in turn, changing whenever one would wait for a message: each computes while the other's
messages travel.

    forward    compute  start  ·······  wait  compute  start  ·······
    backward                   compute  start  ·······  wait  compute

Only one runs at a time and they change at nothing but waits, so every rank starts its messages in the same order: the
two need no groups of their own. For DualPipe's F+BW (DeepSeek-V3, arXiv:2412.19437 §3.2.1). Issued: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from threading import Semaphore, Thread

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class Turns:
    """Whoever waits for a message calls ``swap`` before; outside of ``both`` it does nothing."""

    def __init__(self) -> None:
        self._gates = (Semaphore(0), Semaphore(0))
        self._running = 0  # 0: the first, in the thread that called ``both``; 1: the second
        self._alone = True

    def swap(self) -> None:
        """Let the other run until it swaps back or ends."""
        if self._alone:
            return
        mine, self._running = self._running, 1 - self._running
        self._gates[1 - mine].release()
        self._gates[mine].acquire()

    def both(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both to their ends; raises what the first raises, or else the second."""
        self._gates, self._running, self._alone = (Semaphore(0), Semaphore(0)), 0, False
        raised: list[BaseException] = []
        modes = _get_current_dispatch_mode_stack()  # torch keeps modes, device and stream by thread
        device, stream = None, None
        if torch.cuda.is_available():
            device, stream = torch.cuda.current_device(), torch.cuda.current_stream()

        def run() -> None:
            self._gates[1].acquire()
            try:
                with ExitStack() as stack:
                    if device is not None and stream is not None:
                        torch.cuda.set_device(device)
                        stack.enter_context(torch.cuda.stream(stream))
                    for mode in modes:
                        stack.enter_context(mode)
                    second()
            except BaseException as error:
                raised.append(error)
            if not self._alone:
                self._end(1)

        thread = Thread(target=run)
        thread.start()
        try:
            first()
        finally:
            if not self._alone:
                self._end(0)
            thread.join()
        if raised:
            raise raised[0]

    def _end(self, mine: int) -> None:
        """The other runs on alone."""
        self._alone, self._running = True, 1 - mine
        self._gates[1 - mine].release()
