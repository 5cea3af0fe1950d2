"""Launch parameters of the kernels: program sizes as powers of two, and the availability of Triton."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch

from fivefold.job import KERNEL_ELEMENTS as ELEMENTS
from fivefold.job import tile_rows
from fivefold.units import round_up_to_power_of_two

__all__ = ["ELEMENTS", "explain_unavailability", "round_up_to_power_of_two", "tile"]


class Tile(NamedTuple):
    """Rows and columns of a program, powers of two, and the warps that compute it."""

    rows: int
    columns: int
    warps: int


def tile(rows: int, width: int) -> Tile:
    """Return a tile of full rows of ``width``."""
    columns, height = round_up_to_power_of_two(width), tile_rows(rows, width)
    return Tile(height, columns, min(16, max(4, height * columns // 512)))


def explain_unavailability() -> str:
    """Return the reason why Triton's kernels cannot run in this process; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.is_available():
        return ""
    from triton import knobs

    return "" if knobs.runtime.interpret else "Triton compiles for GPUs, and here is none"
