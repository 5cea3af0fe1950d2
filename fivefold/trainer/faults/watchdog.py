"""Finds hanging and slow ranks, from a thread in each process, through torch.distributed's key-value store.

    no micro-batch begins a pass and no step ends for SECONDS on some rank → alarm
    → every rank writes its stacks and its status
    → culprits: the ranks without an answer, else those behind in steps, else those not waiting for peers → all exit
    a rank that is cut off from the store, and so sees no alarm, exits by itself

Other ranks of the host send SIGCONT to a stopped process, so that it writes its stacks. A rank's own time is the share
of samples of its main thread that are not waits for peers (on GPUs the host waits for the device: all look equal).
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from fivefold.errors import RunFailure, StopSignal
from fivefold.trainer.faults.signals import EXIT_RETRY
from fivefold.trainer.logs.run_log import note
from fivefold.trainer.parallel import collectives

STACKS = signal.SIGUSR2  # makes a process write its stacks, at any time
SAMPLES_PER_SECOND = 20
GRACE_SECONDS = 3.0  # to answer an alarm, and again to exit after it
ALARM_SECONDS = 8 * GRACE_SECONDS  # upper bound from an alarm to the exit, with a margin
SLOW_RATIO = 1.5  # a rank is slow if its own time exceeds this times the median of the other ranks
SLOW_WINDOWS, WINDOW_SECONDS = 3, 10.0  # in this many windows in a row


class RankStatus(NamedTuple):
    """The status of a rank's main thread: steps done, activity, source line, and whether it waits for peers."""

    step: int
    activity: str
    line: str
    is_waiting: bool

    def __str__(self) -> str:
        return f"{self.activity} after step {self.step}, {self.line}"


class Watchdog:
    """A watchdog of one rank; a context manager around its training. ``report``: writes a step's event to the log."""

    def __init__(
        self, folder: Path, *, rank: int, world: int, seconds: float, report: Callable[[int, str], None]
    ) -> None:
        self.folder, self.rank, self.world, self.seconds, self.report = folder, rank, world, seconds, report
        self._main = threading.get_ident()
        self._step, self._activity, self._since = 0, "start", time.monotonic()
        self._alarmed, self._stopped = False, threading.Event()
        self._n_samples = self._n_busy_samples = 0
        self._slow_windows = dict.fromkeys(range(world), 0)

    def __enter__(self) -> Watchdog:
        self._path = self.folder / f"stacks-rank{self.rank}.txt"
        self._file = self._path.open("w")
        faulthandler.register(STACKS, file=self._file, all_threads=True, chain=False)
        store: Any = distributed_c10d._get_default_store()
        self._store = PrefixStore("watchdog", store.clone())  # a separate connection: the other one may be blocked
        self._store.set(f"process/{self.rank}", f"{socket.gethostname()} {os.getpid()}")
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_store, name="watchdog's watchdog", daemon=True).start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and self._alarmed:  # failed because other ranks exited; let the thread end this one
            try:
                self._thread.join(ALARM_SECONDS)
            except StopSignal:  # torchrun ends the remaining processes
                os._exit(EXIT_RETRY)
        self._stopped.set()
        self._thread.join(GRACE_SECONDS)
        faulthandler.unregister(STACKS)
        self._file.close()
        if self._path.stat().st_size == 0:
            self._path.unlink()

    def enter_phase(self, step: int, activity: str) -> None:
        """Record that the main thread starts ``activity`` after ``step`` steps; resets the timer.

        After an alarm it does not return: a rank that was stopped is woken for its stacks, and no rank may train on
        from the step that the verdict names.
        """
        while self._alarmed and not self._stopped.is_set():
            time.sleep(GRACE_SECONDS)  # until the thread ends the process
        self._step, self._activity, self._since = step, activity, time.monotonic()

    def note_progress(self) -> None:
        """Reset the timer: the main thread begins the next forward or backward of its step or evaluation."""
        self._since = time.monotonic()

    # In the thread

    def _watch(self) -> None:
        """Run in a thread until stopped: raise the alarm if a step takes too long, and compare the speed of ranks."""
        checked, window = time.monotonic(), (time.monotonic(), 0, self._step)
        pause = min(1.0, self.seconds / 4)
        while not self._stopped.wait(1 / SAMPLES_PER_SECOND):
            self._take_sample()
            now = time.monotonic()
            try:
                if now - checked >= pause:
                    checked = now
                    if now - self._since > self.seconds or self._store.check(["alarm"]):
                        self._raise_alarm()
                if self.world > 1 and now - window[0] >= WINDOW_SECONDS:
                    number = window[1] + 1
                    self._compare_ranks(number, steps=self._step - window[2], seconds=now - window[0])
                    window = (now, number, self._step)
            except (dist.DistError, RuntimeError) as error:  # the process with the store is gone
                if now - self._since > self.seconds:
                    self._exit_with_message(
                        f"the store of the processes does not answer: {next(iter(str(error).splitlines()), '')}"
                    )

    def _watch_store(self) -> None:
        """Exit if ``_watch`` itself is blocked on a store that has become unreachable and so never answers."""
        while not self._stopped.wait(1.0):
            if time.monotonic() - self._since > self.seconds + ALARM_SECONDS:
                faulthandler.dump_traceback(self._file, all_threads=True)
                self._exit_with_message(f"rank {self.rank} is cut off: the store of the processes does not answer")

    def _take_sample(self) -> None:
        self._n_samples += 1
        self._n_busy_samples += not self._get_status().is_waiting

    def _get_status(self) -> RankStatus:
        """Return step, activity and current line of the main thread, and whether it waits for a message."""
        frame: FrameType | None = sys._current_frames().get(self._main)
        if frame is None:
            return RankStatus(self._step, self._activity, "", is_waiting=False)
        name = frame.f_code.co_filename
        is_waiting = name in (collectives.__file__, distributed_c10d.__file__)
        while "fivefold" not in name and frame.f_back is not None:
            frame = frame.f_back
            name = frame.f_code.co_filename
        line = f"{frame.f_code.co_name} ({Path(name).name}:{frame.f_lineno})"
        return RankStatus(self._step, self._activity, line, is_waiting)

    def _raise_alarm(self) -> None:
        """Write stacks and status, then exit with the verdict of the lowest rank that answered.

        A rank that was woken after the verdict gives no verdict, as it does not know which ranks waited for it.
        """
        self._alarmed = True
        self._store.set("alarm", "1")
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._store.set(f"place/{self.rank}", json.dumps(self._get_status()))
        time.sleep(GRACE_SECONDS)
        statuses = self._read_values("place")
        silent = [rank for rank in range(self.world) if rank not in statuses]
        gives_verdict = self.rank == min(statuses) and not self._store.check(["verdict"])
        if gives_verdict:
            line = _describe_missing_ranks(
                {rank: RankStatus(*json.loads(status_text)) for rank, status_text in statuses.items()},
                silent,
                self.seconds,
            )
            self._store.set("verdict", f"{line}; every rank's stack is in {self.folder}/stacks-rank*.txt")
        self._wake_silent_ranks(silent)
        self._store.wait(["verdict"], timedelta(seconds=3 * GRACE_SECONDS))
        self._exit_with_message(self._store.get("verdict").decode(), reports=gives_verdict)

    def _read_values(self, kind: str) -> dict[int, Any]:
        """Return the values that ranks have set under ``kind``, by rank; ranks without a value are left out."""
        answered = [rank for rank in range(self.world) if self._store.check([f"{kind}/{rank}"])]
        return {rank: self._store.get(f"{kind}/{rank}").decode() for rank in answered}

    def _wake_silent_ranks(self, silent: list[int]) -> None:
        """Wake silent ranks of this host (SIGCONT), so that they see the alarm; ask those still silent for stacks."""
        for signal_number in (signal.SIGCONT, STACKS):  # one after the other, so that two dumps do not interleave
            for rank, host_and_pid in self._read_values("process").items():
                host, _, pid = host_and_pid.rpartition(" ")
                if rank in silent and rank not in self._read_values("place") and host == socket.gethostname():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal_number)
            time.sleep(GRACE_SECONDS / 2 if silent else 0)

    def _exit_with_message(self, line: str, *, reports: bool = True) -> None:
        if reports:
            with suppress(OSError, RunFailure):
                note(self.folder, step=self._step, text=line) if self.rank else self.report(self._step, line)
            print(f"fivefold: {line}", file=sys.stderr, flush=True)
        time.sleep(GRACE_SECONDS)  # all ranks write before one exits: its launcher may then end the others
        os._exit(EXIT_RETRY)

    def _compare_ranks(self, number: int, *, steps: int, seconds: float) -> None:
        """Publish this rank's own seconds per step; rank 0 reports ranks that lag ``SLOW_WINDOWS`` times in a row."""
        busy_share, self._n_samples, self._n_busy_samples = self._n_busy_samples / max(1, self._n_samples), 0, 0
        if steps:
            self._store.set(f"own/{self.rank}", json.dumps([number, busy_share * seconds / steps]))
        if self.rank:
            return
        own_seconds = {rank: json.loads(text) for rank, text in self._read_values("own").items()}
        if len(own_seconds) < self.world or any(abs(count - number) > 1 for count, _ in own_seconds.values()):
            return
        for rank, (_, own_step_seconds) in own_seconds.items():
            median = statistics.median(other for peer, (_, other) in own_seconds.items() if peer != rank)
            self._slow_windows[rank] = self._slow_windows[rank] + 1 if own_step_seconds > SLOW_RATIO * median else 0
            if self._slow_windows[rank] == SLOW_WINDOWS:
                self.report(
                    self._step,
                    f"rank {rank} lags: {own_step_seconds:.3g} s of its own per step, where the other ranks "
                    f"take {median:.3g}",
                )


def _describe_missing_ranks(statuses: dict[int, RankStatus], silent: list[int], seconds: float) -> str:
    """Describe which ranks did not come, and where they are."""
    if silent:
        return f"{_format_ranks(silent)} did not come for {seconds:g} s: no answer, stopped or cut off"
    min_steps = min(status.step for status in statuses.values())
    lagging = [rank for rank, status in statuses.items() if status.step == min_steps]
    not_waiting = [rank for rank, status in statuses.items() if not status.is_waiting]
    for culprits in (lagging, not_waiting):
        if 0 < len(culprits) < len(statuses):
            return f"{_format_ranks(culprits)} did not come for {seconds:g} s: {statuses[culprits[0]]}"
    return f"no rank went on for {seconds:g} s: {statuses[min(statuses)]}"


def _format_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
