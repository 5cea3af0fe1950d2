"""Moments of 8 bits: a uint8 code per element and an fp32 scale per block of 256 elements of a row.

    x ≈ table[code] · scale      scale = max |x| of the block      table: 7 decades, finer towards 1

Dettmers et al., arXiv:2110.02861 §2.2 (dynamic tree quantization). v has no code for 0 (``low_precision_moments.py``).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.trainer.optimizers.low_precision_moments import by_block

DECADES = 7


class Codes(NamedTuple):
    """Quantisation table: ascending ``values`` of the codes, and ``middles`` between neighbours; fp32."""

    values: Tensor
    middles: Tensor
    dtype: torch.dtype = torch.uint8
    scaled: bool = True

    @classmethod
    def of(cls, *, signed: bool, device: torch.device) -> Codes:
        """Table of up to 256 values: each decade has twice as many as the one below, evenly spaced; and 1."""
        found = [1.0]
        for decade in range(DECADES):
            many = 2**decade * (1 if signed else 2)
            found += [10.0 ** (decade + 1 - DECADES) * (0.1 + 0.9 * (part + 0.5) / many) for part in range(many)]
        if signed:
            found += [0.0, *(-value for value in found if value < 1)]
        values = sorted(found)
        middles = [(low + high) / 2 for low, high in pairwise(values)]
        return cls(torch.tensor(values, device=device), torch.tensor(middles, device=device))

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Dequantise codes [rows, columns] with scales [rows, blocks] → fp32 [rows, columns]."""
        found = self.values.index_select(0, codes.view(-1).int()).view(codes.shape)
        for block, scale in by_block(found, scales):
            block.mul_(scale)
        return found

    def write(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Quantise fp32 ``rows`` to the nearest values, into ``codes`` and ``scales``; overwrites ``rows``."""
        for block, scale in by_block(rows, scales):
            scale.copy_(torch.linalg.vector_norm(block, ord=float("inf"), dim=-1, keepdim=True))
            block.div_(scale.clamp(min=torch.finfo(torch.float32).tiny))
        codes.copy_(torch.bucketize(rows, self.middles, out_int32=True))
