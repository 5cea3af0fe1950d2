"""Runs two commands in turns on a machine whose speed drifts, so that both see the same moments of it.

Each command and all its processes are frozen (SIGSTOP) while the other runs. A step that was frozen takes longer than
a turn, and is left out by whoever reads the times. A turn holds many steps: of those that are frozen the medians of the
least disturbed half must not hear.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TURN_SECONDS, TURN_STEPS = 2.5, 10  # a turn takes at least these seconds, and about this number of steps


def turn(step_seconds: float) -> float:
    """Seconds of a turn, for steps of about ``step_seconds``."""
    return max(TURN_SECONDS, TURN_STEPS * step_seconds)


def run_in_turns(
    first: Sequence[str], second: Sequence[str], *, log: Path, timeout: float, seconds: float = TURN_SECONDS
) -> tuple[int, int]:
    """Run both commands to their ends, ``seconds`` a turn; return their exit codes. What they print goes to ``log``."""
    end = time.monotonic() + timeout
    with log.open("w") as out:
        pair = [
            subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
            for command in (first, second)
        ]
        runs = list(pair)
        try:
            _signal(runs[1], signal.SIGSTOP)
            while any(run.poll() is None for run in runs):
                _wait(runs[0], until=min(end, time.monotonic() + seconds))
                if time.monotonic() >= end:
                    break
                if runs[1].poll() is None:
                    _signal(runs[0], signal.SIGSTOP)
                    _signal(runs[1], signal.SIGCONT)
                    runs.reverse()
        finally:
            for run in runs:
                _signal(run, signal.SIGKILL)
                run.wait()
    return pair[0].returncode, pair[1].returncode


def unfrozen(steps: Sequence[float], *, seconds: float = TURN_SECONDS) -> list[float]:
    """The ``steps`` that were not frozen for a turn of ``seconds``."""
    return [step for step in steps if step < min(steps) + 0.8 * seconds]


def _wait(run: subprocess.Popen[bytes], *, until: float) -> None:
    while run.poll() is None and time.monotonic() < until:
        time.sleep(0.02)


def _signal(run: subprocess.Popen[bytes], number: int) -> None:
    """Signal a command and its processes, some of which lead a session of their own."""
    parents = {int(stat.parent.name): parent for stat in Path("/proc").glob("[0-9]*/stat") if (parent := _parent(stat))}
    family = {run.pid}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _parent(stat: Path) -> int:
    """The parent of a process; 0 if it has ended."""
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
