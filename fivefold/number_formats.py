"""Number formats of matrix multiplications, and their properties. Whoever adds a format states its properties here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fivefold.units import Dtype, ceil_div


class NumberFormat(NamedTuple):
    """Properties of a format that affect bytes, kernels and what can be trained."""

    operand_bits: int  # bits of an element that a matrix multiplication reads; with fewer than 16 it is a scaled cast
    rounds_operands: bool = False  # matrix units round operands that are stored with more digits
    needs_loss_scaling: bool = False  # small gradients are 0 if the loss is not scaled

    def count_bytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` operands next to one another, without scales."""
        return ceil_div(self.operand_bits * numel, 8)


NUMBER_FORMATS: Mapping[Dtype, NumberFormat] = {
    "fp64": NumberFormat(64),
    "fp32": NumberFormat(32),
    "tf32": NumberFormat(32, rounds_operands=True),
    "bf16": NumberFormat(16),
    "fp16": NumberFormat(16, needs_loss_scaling=True),
    "fp8": NumberFormat(8),
    "fp4": NumberFormat(4),
}
