"""Two pieces of work that run in turn, changing whenever one would wait for a message: each computes while the other's
messages travel. For DualPipe's F+BW (DeepSeek-V3, arXiv:2412.19437 §3.2.1).

    forward    compute  start  ·······  wait  compute  start  ·······
    backward                   compute  start  ·······  wait  compute

Only one runs at a time and they change at nothing but waits, so all ranks start their messages in one order and need no
groups of their own for it. On CUDA both launch into one stream, in that order; NCCL's messages travel beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Semaphore, Thread

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode


class PartnerFailed(BaseException):
    """The other has failed. No ``Exception``, so that nobody on the way takes it for a failure of his own."""


class Interleaver:
    """Whoever waits for a message calls ``yield_turn`` before; outside of ``run_both`` it does nothing.

    It may be called from any thread that works for one of the two: autograd's own, on CUDA. ``alone``: nothing runs
    beside.
    """

    def __init__(self) -> None:
        self.alone = True
        self._gates = (Semaphore(0), Semaphore(0))
        self._running = 0  # 0: the first, in the thread that called ``run_both``; 1: the second
        self._failed = False

    def yield_turn(self) -> None:
        """Let the other run until it swaps back or ends; it does not return where the other has failed."""
        if not self.alone:
            mine, self._running = self._running, 1 - self._running
            self._gates[1 - mine].release()
            self._gates[mine].acquire()
        if self._failed:
            raise PartnerFailed

    def run_both(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both to their ends. What one raises is raised, and the other ends where it waits next."""
        self._gates, self._running, self.alone = (Semaphore(0), Semaphore(0)), 0, False
        raised: list[BaseException] = []
        like_here = _copy_thread_state()

        def run() -> None:
            self._gates[1].acquire()
            try:
                if not self._failed:
                    with like_here():
                        second()
            except PartnerFailed:
                pass
            except BaseException as error:
                raised.append(error)
            self._end(1, failed=bool(raised))

        thread = Thread(target=run, daemon=True)  # a message that never comes does not keep the process alive
        try:
            thread.start()
            first()
        except PartnerFailed:
            pass
        except BaseException:
            self._failed = True
            raise
        finally:
            self._end(0)
            thread.join()
            self._failed = False
        if raised:
            raise raised[0]

    def _end(self, mine: int, *, failed: bool = False) -> None:
        """The other, if it still runs, runs on alone."""
        self._failed = self._failed or failed
        if not self.alone:
            self.alone, self._running = True, 1 - mine
            self._gates[1 - mine].release()


def _copy_thread_state() -> Callable[[], AbstractContextManager[None]]:
    """A context that makes another thread like this one: all of this torch keeps by thread."""
    threads, modes = torch.get_num_threads(), _get_current_dispatch_mode_stack()
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    @contextmanager
    def alike() -> Iterator[None]:
        torch.set_num_threads(threads)  # of OpenMP: matmuls would take as many as there are cores
        with torch.cuda.stream(stream):  # and its device; None: neither
            for mode in modes:
                _push_mode(mode)  # it is entered already: only this thread learns of it
            try:
                yield
            finally:
                for _ in modes:
                    _pop_mode()

    return alike
