"""Seconds of one collective.

    latency · hops + bytes sent ÷ bandwidth of the nearest link that joins the group

On a calibrated machine the measured curve of that collective and group size, straight between sizes in the logarithm.
"""

from __future__ import annotations

import math
from itertools import pairwise

from fivefold.machine.spec import Machine
from fivefold.plan.count.traffic import Message
from fivefold.step import sent_bytes


def seconds(message: Message, *, machine: Machine, span: int) -> float:
    """One message among ranks that reach ``span`` neighbours across."""
    curve = _curve(message, machine)
    if curve:
        return _along(curve, message.payload)
    link = machine.link(span)
    hops = 2 * (message.ranks - 1) if message.collective == "all_reduce" else message.ranks - 1
    sent = sent_bytes(message.collective, payload=message.payload, ranks=message.ranks)
    return link.latency_seconds * math.log2(max(2, hops)) + sent / link.bandwidth


def _curve(message: Message, machine: Machine) -> list[tuple[int, float]]:
    if machine.calibration is None:
        return []
    points = [p for p in machine.calibration.collectives if p.collective == message.collective]
    return sorted((p.bytes, p.seconds) for p in points if p.ranks == message.ranks)


def _along(curve: list[tuple[int, float]], size: int) -> float:
    """Below the smallest size its time; above the largest its rate."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (small, quick), (large, slow) in pairwise(curve):
        if size <= large:
            share = math.log(size / small) / math.log(large / small)
            return float(quick * (slow / quick) ** share)
    return curve[-1][1] * size / curve[-1][0]
