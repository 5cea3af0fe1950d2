"""The cores that other programs keep busy while ``calibrate`` measures (Linux; without torch)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from fivefold.bounded_file import read_bytes

STAT = Path("/proc/stat")
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # of a core's line: user, nice, system, irq, softirq, steal (proc_stat(5))


class ProcessorTime(NamedTuple):
    """Seconds at one moment: of the clock, of the cores that this process may use, and of itself and its children.

    Of children those count that have ended and were waited for.
    """

    clock: float
    busy: float
    own: float

    @classmethod
    def read(cls) -> ProcessorTime | None:
        """Read the seconds of now; None if the system does not count them."""
        if not STAT.exists():
            return None
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        cores = [fields for name, *fields in map(str.split, read_bytes(STAT).decode().splitlines()) if name in names]
        ticks = sum(int(fields[at]) for fields in cores for at in BUSY_FIELDS)
        own = os.times()
        own_seconds = own.user + own.system + own.children_user + own.children_system
        return cls(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own_seconds)


def count_cores_of_others(begin: ProcessorTime | None, end: ProcessorTime | None) -> float | None:
    """Return how many cores other programs kept busy between two moments, on average."""
    if begin is None or end is None or end.clock <= begin.clock:
        return None
    return max(0.0, (end.busy - begin.busy - (end.own - begin.own)) / (end.clock - begin.clock))
