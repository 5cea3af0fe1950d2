"""Frozen weights in few bits by the format of the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fivefold.base_format import BaseFormat, QuantizedBase
from fivefold.trainer.model.quantized.four_bit import FourBitWeight
from fivefold.trainer.model.quantized.fp8 import Fp8Weight
from fivefold.trainer.model.quantized.int8 import Int8Weight
from fivefold.trainer.model.quantized.mxfp4 import Mxfp4Weight
from fivefold.trainer.model.quantized.weight import MatrixSlice, QuantizedWeight

WEIGHTS: Mapping[QuantizedBase, type[QuantizedWeight]] = {
    "nf4": FourBitWeight,
    "fp4": FourBitWeight,
    "int8": Int8Weight,
    "fp8": Fp8Weight,
    "mxfp4": Mxfp4Weight,
}


def allocate(
    base: BaseFormat, slices: Sequence[MatrixSlice], *, dtype: torch.dtype, device: torch.device
) -> tuple[Sequence[QuantizedWeight], list[Tensor]]:
    """Return the weights of ``slices`` in ``base`` without values, and the buffers of which their scales are views."""
    return WEIGHTS[base.name].allocate(base, slices, dtype=dtype, device=device)


def round_to(base: BaseFormat, weight: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return ``weight`` as it is computed with in ``dtype`` when it is stored in ``base``."""
    (stored,), _ = allocate(base, [MatrixSlice.from_shape(weight.shape)], dtype=dtype, device=weight.device)
    return stored.dequantize(stored.quantize(weight))
