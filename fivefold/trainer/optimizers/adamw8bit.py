"""8-bit AdamW as in bitsandbytes: a uint8 code per element and an fp32 scale per block of 256 elements of a row.

    x ≈ table[code] · scale      scale = max |x| of the block      table: 7 decades, finer towards 1

Dettmers et al., arXiv:2110.02861 §2.2 (dynamic tree quantization). v has no code for 0 (``low_precision_moments.py``).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.trainer.optimizers.adamw import build_narrow
from fivefold.trainer.optimizers.low_precision_moments import NarrowAdamW, iterate_blocks
from fivefold.trainer.optimizers.optimized_weights import OptimizedWeights

DECADES = 7


def build(weights: OptimizedWeights) -> NarrowAdamW:
    """Build 8-bit AdamW over this rank's shards."""
    formats = (Codebook.build(signed=True, device=weights.device), Codebook.build(signed=False, device=weights.device))
    return build_narrow(weights, formats, name="adamw8bit")


class Codebook(NamedTuple):
    """Quantization codebook in fp32: the ascending ``values`` of the codes and the ``middles`` between neighbours."""

    values: Tensor
    middles: Tensor
    dtype: torch.dtype = torch.uint8
    has_scales: bool = True

    @classmethod
    def build(cls, *, signed: bool, device: torch.device) -> Codebook:
        """Build a codebook of up to 256 values.

        Each decade has twice as many evenly spaced values as the one below; the last value is 1.
        """
        unsorted_values = [1.0]
        for decade in range(DECADES):
            count = 2**decade * (1 if signed else 2)
            unsorted_values += [
                10.0 ** (decade + 1 - DECADES) * (0.1 + 0.9 * (part + 0.5) / count) for part in range(count)
            ]
        if signed:
            unsorted_values += [0.0, *(-value for value in unsorted_values if value < 1)]
        values = sorted(unsorted_values)
        middles = [(low + high) / 2 for low, high in pairwise(values)]
        return cls(torch.tensor(values, device=device), torch.tensor(middles, device=device))

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Dequantize codes [rows, columns] with scales [rows, blocks] to fp32 [rows, columns]."""
        rows = self.values.index_select(0, codes.view(-1).int()).view(codes.shape)
        for block, scale in iterate_blocks(rows, scales):
            block.mul_(scale)
        return rows

    def write(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Quantize fp32 ``rows`` to the nearest values, into ``codes`` and ``scales``; overwrites ``rows``."""
        for block, scale in iterate_blocks(rows, scales):
            scale.copy_(torch.linalg.vector_norm(block, ord=float("inf"), dim=-1, keepdim=True))
            block.div_(scale.clamp(min=torch.finfo(torch.float32).tiny))
        codes.copy_(torch.bucketize(rows, self.middles, out_int32=True))
