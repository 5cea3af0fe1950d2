"""The formats of frozen weights in few bits by the name of the base."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.adapter import Base
from fivefold.trainer.model.quantized.fp8 import Fp8Weight
from fivefold.trainer.model.quantized.int8 import Int8Weight
from fivefold.trainer.model.quantized.mxfp4 import Mxfp4Weight
from fivefold.trainer.model.quantized.nf4 import Nf4Weight
from fivefold.trainer.model.quantized.weight import QuantizedWeight

FORMATS: Mapping[Base | None, type[QuantizedWeight]] = {
    weight.base: weight for weight in (Nf4Weight, Int8Weight, Fp8Weight, Mxfp4Weight)
}
