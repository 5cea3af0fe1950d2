"""A judge that shares nothing with the product: every nanosecond of a window, one by one, from the file's JSON.

For GPU traces: what runs in it, and for idle ones whether the next kernel had been launched when the last one ended.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.profiling.traces.recorded import select_outermost

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Swept(NamedTuple):
    """Nanoseconds."""

    window: int
    compute: int
    communication: int
    exposed: int
    memcpy: int
    alone: int
    idle: int
    host: int
    waiting: int


def ns(event: dict[str, Any]) -> tuple[int, int]:
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def windows(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """A step lasts from the end of the one before to the end of the last kernel that it launched."""
    annotations = sorted(ns(event) for event in events if str(event.get("name")).startswith("ProfilerStep"))
    launches = {event["args"]["correlation"]: ns(event)[0] for event in events if event.get("cat") == "cuda_runtime"}
    kernels = [(*ns(event), launches[event["args"]["correlation"]]) for event in events if event.get("cat") in DEVICE]
    results, begin = [], annotations[0][0]
    for start, end in annotations:
        last = max([until for _, until, launch in kernels if start <= launch < end], default=begin)
        if last > begin:
            results.append((begin, last))
        begin = max(begin, last)
    return results


def sweep_gpu(events: list[dict[str, Any]], window: tuple[int, int]) -> Swept:
    """Sweep a window of a trace with kernels."""
    begin, end = window
    returns = {item["args"]["correlation"]: ns(item)[1] for item in events if item.get("cat") == "cuda_runtime"}
    runs = {name: np.zeros(end - begin, bool) for name in ("compute", "message", "copy")}
    starts: dict[int, int] = {}  # when the first of those that start there was launched
    for event in events:
        if event.get("cat") in DEVICE:
            start, until = ns(event)
            kind = "copy" if event["cat"] != "kernel" else "message" if re.match("nccl", event["name"]) else "compute"
            runs[kind][max(0, start - begin) : max(0, until - begin)] = True
            launch = min(start, returns[event["args"]["correlation"]])
            starts[start] = min(launch, starts.get(start, launch))
    compute, message, copy = runs["compute"], runs["message"], runs["copy"]
    idle = ~(compute | message | copy)
    host = waiting = 0
    last_end = begin
    for moment in np.flatnonzero(np.diff(np.concatenate(([False], idle, [False])).astype(int))).reshape(-1, 2).tolist():
        last_end, next_start = begin + moment[0], begin + moment[1]
        if starts.get(next_start, last_end) < last_end:
            waiting += next_start - last_end
        else:
            host += next_start - last_end
    return Swept(
        end - begin,
        int(compute.sum()),
        int(message.sum()),
        int((message & ~compute).sum()),
        int(copy.sum()),
        int((copy & ~compute & ~message).sum()),
        int(idle.sum()),
        host,
        waiting,
    )


def sweep_cpu(path: Path) -> list[Swept]:
    """Sweep every step of a CPU trace, in tenths of a microsecond."""
    text = path.read_text(encoding="utf-8")
    events = [entry for entry in json.loads(text, parse_float=Decimal)["traceEvents"] if entry.get("ph") == "X"]
    annotations = sorted(ns(event) for event in events if str(event["name"]).startswith("ProfilerStep"))
    ends = [start for start, _ in annotations[1:]] + [annotations[-1][1]]
    work = select_outermost(events)
    results = []
    for (begin, _), end in zip(annotations, ends, strict=True):
        compute, message = np.zeros((end - begin) // 100, bool), np.zeros((end - begin) // 100, bool)
        for item in work:
            start, until = ns(item)
            runs = message if item["name"].startswith("gloo:") else compute
            runs[max(0, start - begin) // 100 : max(0, until - begin) // 100] = True
        idle = int((~(compute | message)).sum()) * 100
        exposed = int((message & ~compute).sum()) * 100
        sums = (int(compute.sum()) * 100, int(message.sum()) * 100)
        results.append(Swept(end - begin, *sums, exposed, 0, 0, idle, idle, 0))
    return results
