"""Runs the computation of requests: short ones one at a time in a thread, long ones in processes that can be killed.

A search or dry run has its own process, which lives while a client is connected, and at most ``LONG_SECONDS``.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from fivefold.errors import UserError

T = TypeVar("T")

SHORT_SECONDS, LONG_SECONDS = 20.0, 600.0
AT_ONCE = 2  # concurrent searches and dry runs
LINE_BYTES = 2**26
ENDS = frozenset({"result", "mistake", "stopped"})  # the last event of a process


class Busy(Exception):
    """Too many requests at once; ``str`` says in one line what to do."""


class WorkQueue:
    """Computes the answers of requests. ``at_once``: concurrent processes; ``python``: the command that starts one."""

    def __init__(
        self,
        *,
        at_once: int = AT_ONCE,
        short_limit_seconds: float = SHORT_SECONDS,
        long_limit_seconds: float = LONG_SECONDS,
        python: tuple[str, ...] = (sys.executable, "-P"),
    ) -> None:
        self.lock, self.free_slots, self.python = Lock(), at_once, python
        self.short_limit_seconds, self.long_limit_seconds = short_limit_seconds, long_limit_seconds
        # Work that returns what it has found so far when it is stopped.
        self.interruptible: dict[str, asyncio.subprocess.Process] = {}
        self.next_id = count(1)

    async def run_soon(self, action: Callable[[], T]) -> T:
        """Return the result of ``action``, while nothing else runs; raises ``Busy`` if it is not ready in time."""

        def run_alone() -> T:
            if not self.lock.acquire(timeout=self.short_limit_seconds):
                raise Busy("an earlier request is still being computed; try again in a few seconds")
            try:
                return action()
            finally:
                self.lock.release()

        try:
            return await asyncio.wait_for(asyncio.to_thread(run_alone), timeout=2 * self.short_limit_seconds)
        except TimeoutError:
            limit = self.short_limit_seconds
            raise Busy(f"took longer than {limit:.0f} s; ask fewer micro-batches or stages") from None

    async def stream(self, verb: str, query: dict[str, Any], *, cwd: Path) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a process that computes ``verb``.

        They are ``begun`` (a name for ``stop``) if it returns what it has found so far when it is stopped, ``progress``
        (done, total, doing), then ``result``, ``mistake`` or ``stopped``. The process is killed when the iteration
        ends, however it ends.
        """
        if not self.free_slots:
            raise Busy("as many searches and dry runs are running as are allowed at once; stop one, or wait")
        self.free_slots -= 1
        process, name = None, str(next(self.next_id))
        try:
            process = await asyncio.create_subprocess_exec(
                *self.python,
                "-m",
                "fivefold.web.worker",
                verb,
                cwd=cwd,
                limit=LINE_BYTES,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(ConnectionError):  # the process has ended already, without an answer
                process.stdin.write(json.dumps(query).encode())
                await process.stdin.drain()
                process.stdin.close()
            try:
                async with asyncio.timeout(self.long_limit_seconds):
                    async for line in process.stdout:
                        event = json.loads(line)
                        if "begun" in event:
                            self.interruptible[name], event = process, {"begun": name}
                        yield event
                        if not ENDS.isdisjoint(event):
                            break  # a process on a busy machine may end seconds after its answer
            except TimeoutError:
                raise UserError(
                    f"took longer than {self.long_limit_seconds / 60:.0f} minutes and was stopped; narrow the search"
                ) from None
        finally:
            self.free_slots += 1
            self.interruptible.pop(name, None)
            if process is not None and process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await asyncio.shield(process.wait())

    def stop(self, name: str) -> None:
        """Ask the work of that name to end with what it has found so far; does nothing if it has ended."""
        if name in self.interruptible:
            with suppress(ProcessLookupError):
                self.interruptible[name].send_signal(signal.SIGINT)
