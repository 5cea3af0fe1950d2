"""The interface of a frozen weight in few bits: its scales, and its elements, which ZeRO-3 shards.

quantize     weight [out, in] → elements, a flat tensor of bytes; the scales are kept here
dequantize   elements → weight [out, in], before each product; freed after it

Under tensor parallelism both are those of a rank's slice, and equal those of the full weight there: it is quantized in
full and cut. No block that shares a scale is cut (``layout/quantized_base.py``). Stacked experts [E, out, in] are one
weight, whose matrices are quantized one by one; a rank has those of its experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fivefold.base_format import BaseFormat
from fivefold.units import ceil_div


class MatrixSlice(NamedTuple):
    """A slice of a matrix of shape ``full``: ``parts`` of its rows and columns, one after another along dim 0.

    Of stacked experts it is a slice of each of some matrices.
    """

    full: torch.Size
    parts: tuple[tuple[slice, ...], ...]

    @classmethod
    def from_shape(cls, shape: torch.Size) -> MatrixSlice:
        """Return the slice that is the full matrix."""
        return cls(shape, (tuple(slice(0, size) for size in shape),))

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the slice."""
        *experts, _, columns = self.parts[0]
        stacked = [part.stop - part.start for part in experts]
        rows = sum(part[-2].stop - part[-2].start for part in self.parts)
        return torch.Size((*stacked, rows, columns.stop - columns.start))

    @property
    def experts(self) -> range:
        """Return the experts of a slice of a stack of matrices."""
        experts, *_ = self.parts[0]
        return range(experts.start, experts.stop)

    @property
    def matrix(self) -> MatrixSlice:
        """Return the slice of the matrix, or of that of each expert."""
        return MatrixSlice(self.full[-2:], tuple(part[-2:] for part in self.parts))

    def cut(self, matrix: Tensor, *, rows: int = 1, columns: int = 1) -> Tensor:
        """Return the slice of ``matrix``, which has one element for ``rows`` x ``columns`` of the full one.

        Not of stacked experts, but of the matrix of one (``matrix``).
        """
        pieces = [
            matrix[
                part_rows.start // rows : ceil_div(part_rows.stop, rows),
                part_columns.start // columns : ceil_div(part_columns.stop, columns),
            ]
            for part_rows, part_columns in self.parts
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class QuantizedWeight(ABC):
    """The scales of a weight [out, in], or of a slice of it, which are all here even where ZeRO-3 shards its elements.

    ``base`` is the format, ``shape`` and ``dtype`` are those of the dequantized slice.
    """

    base: BaseFormat
    piece: MatrixSlice
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    @abstractmethod
    def allocate(
        cls, base: BaseFormat, slices: Sequence[MatrixSlice], *, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Self], list[Tensor]]:
        """Return the weights of ``slices`` without values, and the buffers of which their scales are views."""

    def quantize(self, weight: Tensor) -> Tensor:
        """Set the scales to those of the full ``weight``, and return the slice's elements as a flat tensor of bytes."""
        if weight.dim() == 2:
            return self.quantize_matrix(weight)
        experts = self.piece.experts
        return torch.cat([self.quantize_matrix(weight[there], expert=here) for here, there in enumerate(experts)])

    @abstractmethod
    def quantize_matrix(self, matrix: Tensor, *, expert: int | None = None) -> Tensor:
        """Set the scales to those of the full ``matrix``, and return its slice's elements as a flat tensor of bytes.

        ``expert``: its place in the slice of a stack.
        """

    @abstractmethod
    def keep(self, codes: Tensor, *scales: Tensor, expert: int | None = None) -> Tensor:
        """Set the scales to those of a full matrix, and return of its ``codes`` those of its slice, of bytes.

        Both are as the format has them; ``expert``: as of ``quantize_matrix``.
        """

    @abstractmethod
    def dequantize(self, elements: Tensor) -> Tensor:
        """Return the weight [out, in] of all ``elements``, in one operation that allocates only its output."""

    @abstractmethod
    def dequantize_rows(self, elements: Tensor, *, first: int, rows: int) -> Tensor:
        """Return ``rows`` rows from row ``first`` on in fp32; ``elements`` has only those of these rows.

        Stacked experts [E, out, in] have E · out rows.
        """


class BlockScaledWeight(QuantizedWeight):
    """A weight whose matrices have a scale for each block of ``block`` rows and columns; ``scales`` are of its slice.

    Stacked experts have scales [E, rows, columns].
    """

    block: tuple[int, int]
    scale_dtype: torch.dtype

    def __init__(self, base: BaseFormat, piece: MatrixSlice, *, dtype: torch.dtype, scales: Tensor) -> None:
        self.base, self.piece, self.shape, self.dtype = base, piece, piece.shape, dtype
        self.scales = scales

    @classmethod
    def allocate(
        cls, base: BaseFormat, slices: Sequence[MatrixSlice], *, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Self], list[Tensor]]:
        """Return the weights of ``slices`` without values, and the buffer of their scales."""
        grids = [[*piece.shape[:-2], *map(ceil_div, piece.shape[-2:], cls.block)] for piece in slices]
        sizes = [prod(grid) for grid in grids]
        buffer = torch.zeros(sum(sizes), dtype=cls.scale_dtype, device=device)
        parts = buffer.split(sizes) if sizes else ()
        weights = [
            cls(base, piece, dtype=dtype, scales=part.view(grid))
            for piece, part, grid in zip(slices, parts, grids, strict=True)
        ]
        return weights, [buffer]

    def set_scales(self, scales: Tensor, *, expert: int | None) -> None:
        """Set the scales to those of a full matrix; ``expert``: as of ``quantize_matrix``."""
        held = self.scales if expert is None else self.scales[expert]
        rows, columns = self.block
        held.copy_(self.piece.matrix.cut(scales, rows=rows, columns=columns))
