"""Interleaving of two micro-batches: each computes while the messages of the other travel.

They switch whenever one would wait for a message. For DualPipe's F+BW (DeepSeek-V3, arXiv:2412.19437 §3.2.1).

    forward    compute  start  ·······  wait  compute  start  ·······
    backward                   compute  start  ·······  wait  compute

Only one runs at a time and they switch only at waits, so all ranks start their messages in the same order and both
can use the same process groups. On CUDA both launch into one stream; NCCL's messages overlap with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Semaphore, Thread

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode


class PartnerFailed(BaseException):
    """Ends one of the two functions when the other has raised.

    It is a BaseException, so that no ``except Exception`` catches it.
    """


class Interleaver:
    """Switches between two functions, which call ``yield_turn`` before they wait; outside ``run_both`` that is a no-op.

    ``yield_turn`` may be called from any thread that works for one of the two, such as autograd's on CUDA.
    ``is_running_one``: at most one function is running.
    """

    def __init__(self) -> None:
        self.is_running_one = True
        self._gates = (Semaphore(0), Semaphore(0))
        self._running = 0  # 0: the first, in the thread that called ``run_both``; 1: the second
        self._failed = False

    @property
    def running_index(self) -> int:
        """Return the index of the function that runs now: 0 for the first, and if there is only one."""
        return self._running

    def yield_turn(self) -> None:
        """Let the other function run until it yields or returns; raises ``PartnerFailed`` if the other has raised."""
        if not self.is_running_one:
            own_index, self._running = self._running, 1 - self._running
            self._gates[1 - own_index].release()
            self._gates[own_index].acquire()
        if self._failed:
            raise PartnerFailed

    def run_both(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both functions to completion. An exception of one is raised here.

        The other then stops at its next wait.
        """
        self._gates, self._running, self.is_running_one = (Semaphore(0), Semaphore(0)), 0, False
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
            self._on_finished(1, failed=bool(raised))

        thread = Thread(target=run, daemon=True)  # daemon: a lost message must not keep the process alive
        try:
            thread.start()
            first()
        except PartnerFailed:
            pass
        except BaseException:
            self._failed = True
            raise
        finally:
            self._on_finished(0)
            thread.join()
            self._failed, self._running = False, 0
        if raised:
            raise raised[0]

    def _on_finished(self, number: int, *, failed: bool = False) -> None:
        """Record that one function has ended; the other, if it is still running, continues alone."""
        self._failed = self._failed or failed
        if not self.is_running_one:
            self.is_running_one, self._running = True, 1 - number
            self._gates[1 - number].release()


def _copy_thread_state() -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that gives another thread this one's thread count, CUDA stream and dispatch modes."""
    threads = torch.get_num_threads()
    modes = _get_current_dispatch_mode_stack()
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    @contextmanager
    def restore_thread_state() -> Iterator[None]:
        """Use the stream, modes and number of threads of the thread that made this function."""
        torch.set_num_threads(threads)  # OpenMP's number is per thread; its default is all cores
        with torch.cuda.stream(stream):  # sets the device too; None: no CUDA
            for mode in modes:
                _push_mode(mode)  # the mode is already entered; only make it active in this thread
            try:
                yield
            finally:
                for _ in modes:
                    _pop_mode()

    return restore_thread_state
