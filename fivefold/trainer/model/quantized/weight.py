"""The interface of a frozen weight in few bits: its scales, which every rank has, and its elements, which are sharded.

quantize     weight [out, in] → elements, a flat tensor of bytes; the scales are kept here
dequantize   elements → weight [out, in], before each product; freed after it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from fivefold.adapter import QuantizedBase, count_element_bytes


class QuantizedWeight(ABC):
    """The scales of a weight [out, in], which are all here even where ZeRO-3 shards its elements.

    ``shape`` and ``dtype`` are those of the dequantized weight.
    """

    base: QuantizedBase
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    @abstractmethod
    def allocate(
        cls, shapes: Sequence[torch.Size], *, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Self], list[Tensor]]:
        """Return the weights of ``shapes`` without values, and the buffers of which their scales are views."""

    @abstractmethod
    def quantize(self, weight: Tensor) -> Tensor:
        """Set the scales to those of ``weight``, and return its elements as a flat tensor of bytes."""

    @abstractmethod
    def dequantize(self, elements: Tensor) -> Tensor:
        """Return the weight [out, in] of all ``elements``, in one operation that allocates only its output."""

    @abstractmethod
    def dequantize_rows(self, elements: Tensor, *, first: int, rows: int) -> Tensor:
        """Return ``rows`` rows from row ``first`` on in fp32; ``elements`` has only those of these rows."""

    @classmethod
    def count_bytes(cls, numel: int) -> int:
        """Return the bytes of ``numel`` elements."""
        return count_element_bytes(cls.base, numel)

    @classmethod
    def round(cls, weight: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return ``weight`` as it is computed with in ``dtype`` when it is stored in this format."""
        (stored,), _ = cls.allocate([weight.shape], dtype=dtype, device=weight.device)
        return stored.dequantize(stored.quantize(weight))
