"""Format quantities for people, in SI and binary units.

Everywhere else a quantity is a plain number of bytes, seconds or FLOPs.
"""

from __future__ import annotations

import re
from math import ceil
from typing import Literal

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4"]

KIB, MIB, GIB = 2**10, 2**20, 2**30


def show_bytes(count: float) -> str:
    """Format bytes: ``1536`` → ``"1.50 KiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(round(size, 2)) < 1024 or unit == "TiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def show_rate(bytes_per_second: float) -> str:
    """Format a bandwidth in SI units: ``450e9`` → ``"450 GB/s"``, ``3.35e12`` → ``"3.35 TB/s"``."""
    rate = float(bytes_per_second)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(float(f"{rate:.3g}")) < 1000 or unit == "TB":
            return f"{rate:.3g} {unit}/s"
        rate /= 1000
    raise AssertionError("unreachable")


def choose_byte_unit(largest: float) -> tuple[int, str]:
    """Return the unit for a column of sizes up to ``largest``: its bytes and its name."""
    return (GIB, "GiB") if largest >= GIB else (MIB, "MiB") if largest >= MIB else (KIB, "KiB")


def show_risk(probability: float) -> str:
    """Format a probability in per cent: ``< 1 %``, ``22 %``, ``> 99 %``."""
    if probability < 0.01:
        return "< 1 %"
    return "> 99 %" if probability > 0.99 else f"{probability * 100:.0f} %"


def show_risk_option(probability: float) -> str:
    """Format the least ``--risk``, to two digits, that admits a probability: 0.411 → ``0.42``."""
    return f"{ceil(probability * 100) / 100:g}"


def show_cause(cause: str) -> str:
    """Return where in a step memory peaks: ``block 3 backward mlp.act`` → "backward of mlp.act in block 3"."""
    match = re.fullmatch(r"(embed|head|block(?: \d+)?) (forward|backward)(?: (\S+))?", cause)
    if match is None:
        return cause
    unit, phase, operation = match.groups()
    place = "" if operation is None or operation.startswith(f"{unit}.") else f" in {unit}"
    return f"{phase} of {operation or unit}{place}"


def show_count(count: float) -> str:
    """Format a count of parameters or tokens, billions as B: ``8_030_261_248`` → ``"8.03 B"``."""
    return _show_thousands(count, (" k", " M", " B", " T"))


def show_flops(flops: float) -> str:
    """Format FLOPs with an SI prefix, to be followed by their unit: ``8_030_261_248`` → ``"8.03 G"``."""
    return _show_thousands(flops, (" k", " M", " G", " T", " P", " E"))


def _show_thousands(count: float, units: tuple[str, ...]) -> str:
    size = float(count)
    for unit in ("", *units):
        if abs(round(size, 2)) < 1000 or unit == units[-1]:
            return f"{size:.0f}" if unit == "" and size == int(size) else f"{size:.2f}{unit}"
        size /= 1000
    raise AssertionError("unreachable")


def show_seconds(seconds: float) -> str:
    """Format seconds: ``0.0123`` → ``"12.3 ms"``; later ``"2 min 05 s"``, ``"2 h 05 min"``."""
    if seconds < 120:
        seconds = float(f"{seconds:.4g}")  # round as it will print, so that 999.99 ms becomes 1.00 s
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    if seconds < 7200:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return -(-a // b)


def round_up_to_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()
