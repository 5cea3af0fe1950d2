"""Describe whether a step fits in memory: the verdict, the risk of running out, and the capacity."""

from __future__ import annotations

from fivefold.step import Memory, Verdict
from fivefold.units import show_bytes, show_risk

STYLES: dict[Verdict, str] = {"fits": "green", "tight": "bold yellow", "does not fit": "bold red"}  # in a terminal


def format_verdict(memory: Memory) -> str:
    """Return the verdict and its reason, such as ``tight: 22 % risk of running out of 79.19 GiB``; "" without one."""
    if memory.verdict is None or memory.risk is None or memory.capacity_bytes is None:
        return memory.verdict or ""
    return f"{memory.verdict}: {show_risk(memory.risk)} risk of running out of {show_bytes(memory.capacity_bytes)}"
