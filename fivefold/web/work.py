"""Where requests are computed: short ones one after another in a thread, long ones in processes that can be killed.

A search or rehearsal is a process of its own; it lives as long as somebody listens, and at most ``LONG_SECONDS``.
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

from fivefold.record import Mistake

T = TypeVar("T")

SHORT_SECONDS, LONG_SECONDS = 20.0, 600.0
AT_ONCE = 2  # searches and rehearsals
LINE_BYTES = 2**26


class Busy(Exception):
    """More is asked at once than is answered; ``str`` says what to do, in one line."""


class Work:
    """Computes what requests ask. ``at_once``: processes for searches and rehearsals; ``python``: what starts one."""

    def __init__(
        self, *, at_once: int = AT_ONCE, short: float = SHORT_SECONDS, long: float = LONG_SECONDS,
        python: tuple[str, ...] = (sys.executable, "-P"),
    ) -> None:  # fmt: skip
        self.lock, self.free, self.python = Lock(), at_once, python
        self.short, self.long = short, long
        self.begun: dict[str, asyncio.subprocess.Process] = {}  # work that keeps what it has found when it is stopped
        self.numbers = count(1)

    async def soon(self, action: Callable[[], T]) -> T:
        """The result of ``action``, which runs alone; ``Busy`` if it is not there in time."""

        def alone() -> T:
            if not self.lock.acquire(timeout=self.short):
                raise Busy("the answer before this one still takes long; try again")
            try:
                return action()
            finally:
                self.lock.release()

        try:
            return await asyncio.wait_for(asyncio.to_thread(alone), timeout=2 * self.short)
        except TimeoutError:
            raise Busy(f"took longer than {self.short:.0f} s; ask fewer micro-batches or stages") from None

    async def stream(self, verb: str, asked: dict[str, Any], *, cwd: Path) -> AsyncIterator[dict[str, Any]]:
        """The events of a process that computes ``verb``: ``begun`` (a name for ``stop``) if it keeps what it has found
        when it is stopped, ``progress`` (done, total, doing), then ``result``, ``mistake`` or ``stopped``.

        The process is killed when the iteration ends, however it ends.
        """
        if not self.free:
            raise Busy("as many searches and rehearsals run as may at once; stop one, or wait")
        self.free -= 1
        process, name = None, str(next(self.numbers))
        try:
            process = await asyncio.create_subprocess_exec(
                *self.python, "-m", "fivefold.web.worker", verb, cwd=cwd, limit=LINE_BYTES,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(ConnectionError):  # it has ended already: there is no answer
                process.stdin.write(json.dumps(asked).encode())
                await process.stdin.drain()
                process.stdin.close()
            try:
                async with asyncio.timeout(self.long):
                    async for line in process.stdout:
                        event = json.loads(line)
                        if "begun" in event:
                            self.begun[name], event = process, {"begun": name}
                        yield event
            except TimeoutError:
                raise Mistake(f"took longer than {self.long / 60:.0f} minutes and was stopped; ask for less") from None
        finally:
            self.free += 1
            self.begun.pop(name, None)
            if process is not None and process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await asyncio.shield(process.wait())

    def stop(self, name: str) -> None:
        """Ask the work of that name to end with what it has found; nothing happens if it has ended."""
        if name in self.begun:
            with suppress(ProcessLookupError):
                self.begun[name].send_signal(signal.SIGINT)
