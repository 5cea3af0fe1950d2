"""The formats of frozen weights in few bits by that of the base."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.base_format import BaseFormat
from fivefold.trainer.model.quantized.four_bit import Fp4Weight, Nf4Weight, SingleFp4Weight, SingleNf4Weight
from fivefold.trainer.model.quantized.fp8 import Fp8Weight
from fivefold.trainer.model.quantized.int8 import Int8Weight
from fivefold.trainer.model.quantized.mxfp4 import Mxfp4Weight
from fivefold.trainer.model.quantized.weight import QuantizedWeight

FORMATS: Mapping[BaseFormat | None, type[QuantizedWeight]] = {
    weight.base: weight
    for weight in (Nf4Weight, SingleNf4Weight, Fp4Weight, SingleFp4Weight, Int8Weight, Fp8Weight, Mxfp4Weight)
}
