"""One weight on one rank: the slice that this rank computes with, and the rows of it that this rank updates.

full weight ── tp, ep, etp: layout/local_weight.py ──> local slice ── ZeRO, by rows ──> shard
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fivefold.base_format import BaseFormat
from fivefold.layout.local_weight import LocalSlice
from fivefold.layout.sharding import count_chunk_rows
from fivefold.model.weights import Weight
from fivefold.trainer.model.quantized.formats import round_to
from fivefold.trainer.model.quantized.weight import MatrixSlice, QuantizedWeight
from fivefold.trainer.parallel.mesh import AxisGroup


class LocalWeight(NamedTuple):
    """A weight of the model, this rank's slice of it, and ``holders``: the number of ranks that update these rows."""

    weight: Weight
    local_slice: LocalSlice
    holders: int


class Box(NamedTuple):
    """A hyper-rectangle of the full weight: its offsets and sizes there, and its slices in the shard's rows."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rows: tuple[slice, ...]


class WeightShard:
    """The rows of one weight on this rank, which the optimizer updates, and their ``gradient``.

    ``shape`` is that of the local slice; stacked experts [E, F, D] have E · F rows. ``stored``: the format of a weight
    in few bits, whose elements are bytes; ``quantized`` has its scales.
    """

    def __init__(self, held: LocalWeight, *, axis: AxisGroup, stored: BaseFormat | None = None) -> None:
        self.local_weight, self.name, self.shape = held, held.weight.name, torch.Size(held.local_slice.shape)
        self._row = torch.Size(self.shape[2:] if len(self.shape) == 3 else self.shape[1:])  # shape of one row
        self.columns = self._row.numel()
        rows = self.shape.numel() // self.columns
        padded_rows = count_chunk_rows(rows, shards=axis.size)
        self.padded_numel = padded_rows * self.columns
        self.first_row = min(axis.rank * padded_rows, rows)
        self.rows = min(padded_rows, rows - self.first_row)
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.is_offloaded = False  # ``weight`` is in host memory
        self._gradient: Tensor | None = None  # of an offloaded weight
        self.stored = stored
        self.quantized: QuantizedWeight | None = None
        self.keeps_codes = False  # they are those of a published weight, not made here

    @property
    def gradient(self) -> Tensor | None:
        """Return the gradient of these rows on the device: ``weight.grad``, unless the weight is in host memory."""
        return self._gradient if self.is_offloaded else self.weight.grad

    @gradient.setter
    def gradient(self, gradient: Tensor | None) -> None:
        if self.is_offloaded:
            self._gradient = gradient
        else:
            self.weight.grad = gradient

    @property
    def matrix_slice(self) -> MatrixSlice:
        """Return the slice of the full weight, a matrix, that this rank computes with."""
        return MatrixSlice(torch.Size(self.local_weight.weight.shape), self.local_weight.local_slice.parts)

    @property
    def stored_numel(self) -> int:
        """Return the elements of a padded chunk in its storage, which are bytes if the weight is in few bits."""
        return self.padded_numel if self.stored is None else self.stored.count_element_bytes(self.padded_numel)

    def view_local(self, flat: Tensor) -> Tensor:
        """View the unpadded rows of a flat padded chunk [padded_numel] as [rows, …]; in few bits their bytes."""
        if self.stored is not None:
            return flat[: self.stored.count_element_bytes(self.rows * self.columns)]
        return flat[: self.rows * self.columns].view(self.rows, *self._row)

    def load(self, full: Tensor) -> None:
        """Set this shard's rows to those of the full weight ``full``."""
        if self.quantized is None:
            self.weight.copy_(self.select_rows(full))
            return
        for expert, there in self.list_matrices():
            self.load_matrix(full if there is None else full[there], expert=expert)

    def list_matrices(self) -> list[tuple[int | None, int | None]]:
        """Return the place of each matrix in the local slice and in the full weight of experts; None: it is one."""
        return list(enumerate(self.matrix_slice.experts)) if len(self.shape) == 3 else [(None, None)]

    def load_matrix(self, matrix: Tensor, *, expert: int | None = None) -> None:
        """Set this shard's rows of a weight in few bits to those of a full matrix, of experts of that at ``expert``."""
        assert self.quantized is not None
        self._copy_elements(self.quantized.quantize_matrix(matrix, expert=expert), expert=expert)

    def load_codes(self, codes: Tensor, *scales: Tensor, expert: int | None = None) -> None:
        """Set this shard's rows to those of a full matrix in few bits, which is stored as it was published."""
        assert self.quantized is not None
        self.keeps_codes = True
        self._copy_elements(self.quantized.keep(codes, *scales, expert=expert), expert=expert)

    def _copy_elements(self, elements: Tensor, *, expert: int | None) -> None:
        """Copy of the elements of a local matrix those of this shard's rows; ``expert``: its place among experts."""
        assert self.quantized is not None
        offset = 0 if expert is None else expert * self.shape[1]
        start = max(self.first_row, offset)
        stop = min(self.first_row + self.rows, offset + self.shape[-2])
        if start < stop:
            count_bytes = self.quantized.base.count_element_bytes
            here = [count_bytes((row - self.first_row) * self.columns) for row in (start, stop)]
            there = [count_bytes((row - offset) * self.columns) for row in (start, stop)]
            self.weight[slice(*here)] = elements[slice(*there)]

    def round(self, full: Tensor) -> Tensor:
        """Return the full weight ``full`` in fp32 with the values that it has once it is stored."""
        if self.quantized is None or self.keeps_codes:
            return full.to(self.weight.dtype if self.quantized is None else self.quantized.dtype).float()
        return round_to(self.quantized.base, full.to(self.weight.device), dtype=self.quantized.dtype).float()

    def values(self) -> Tensor:
        """Return this shard's rows as they are computed with: dequantized if they are in few bits."""
        if self.quantized is None:
            return self.weight
        return self.quantized.dequantize_rows(self.weight, first=self.first_row, rows=self.rows)

    def select_rows(self, full: Tensor) -> Tensor:
        """Return this shard's rows of a full weight: [rows, …], with zeros for padding."""
        local_slice = self.local_weight.local_slice
        local = full.new_zeros(self.shape)
        for full_part, local_part in local_slice.list_slices():
            local[local_part] = full[full_part]
        return local.reshape(-1, *self._row)[self.first_row : self.first_row + self.rows]

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes of the full weight that this shard's rows cover, in order and without padding."""
        for full_part, local_part in self.local_weight.local_slice.list_slices():
            starts = [part.start for part in full_part]
            sizes = [part.stop - part.start for part in full_part]
            if len(self.shape) == 3:
                yield from self._iterate_stacked(starts, sizes)
                continue
            first = max(self.first_row, local_part[0].start)  # row of the local slice
            rows = min(self.first_row + self.rows, local_part[0].stop) - first
            if rows > 0 and all(sizes[1:]):
                offsets = (starts[0] + first - local_part[0].start, *starts[1:])
                shard_rows = slice(first - self.first_row, first - self.first_row + rows)
                yield Box(offsets, (rows, *sizes[1:]), (shard_rows, *(slice(0, size) for size in sizes[1:])))

    def _iterate_stacked(self, starts: list[int], sizes: list[int]) -> Iterator[Box]:
        """Yield the boxes of a shard of stacked experts [E, F, D], whose rows may begin or end within an expert."""
        expert_rows = self.shape[1]
        stop = self.first_row + self.rows
        for expert in range(self.first_row // expert_rows, -(-stop // expert_rows)):
            low = max(self.first_row, expert * expert_rows)
            high = min(stop, (expert + 1) * expert_rows)
            low_row = low - expert * expert_rows
            shard_rows = slice(low - self.first_row, high - self.first_row)
            yield Box(
                (starts[0] + expert, starts[1] + low_row, starts[2]),
                (1, high - low, sizes[2]),
                (shard_rows, slice(0, sizes[2])),
            )
