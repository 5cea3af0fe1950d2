"""The formats of frozen weights in few bits: which matrices each quantizes, and the bytes of elements and scales.

    nf4, fp4   as bitsandbytes stores linear layers: two elements in a byte, and an fp32 scale for each 64 elements of
               the rows, one after another. With double quantization the scale is one byte, with an fp32 scale for each
               256 of these and an fp32 offset for each weight.
    int8       as bitsandbytes' LLM.int8 stores linear layers: an fp32 scale for each row
    fp8        as DeepSeek-V3 and others are published, routed experts too: E4M3, an fp32 scale for each 128 x 128
    mxfp4      as gpt-oss is published, routed experts alone: two elements in a byte, and a scale of one byte for each
               32 of a row

Sources: bitsandbytes@0.50.2:bitsandbytes/functional.py (quantize_4bit; double quantization: compress_statistics) and
bitsandbytes/nn/modules.py (Int8Params; arXiv:2208.07339); arXiv:2412.19437 §3.3.2 and
transformers@5.23.0:src/transformers/integrations/finegrained_fp8.py; OCP Microscaling Formats 1.0 §5.3 and
transformers@5.23.0:src/transformers/integrations/mxfp4.py.
"""

from collections.abc import Mapping
from math import prod
from typing import Literal, NamedTuple, get_args

from fivefold.units import ceil_div

QuantizedBase = Literal["nf4", "fp4", "int8", "fp8", "mxfp4"]
QUANTIZED_BASES: tuple[str, ...] = get_args(QuantizedBase)
FOUR_BIT_BASES = ("nf4", "fp4")
BITSANDBYTES_BASES = (*FOUR_BIT_BASES, "int8")
FOUR_BIT_BLOCK, FOUR_BIT_SCALES_BLOCK = 64, 256  # of bitsandbytes
FP8_BLOCK, MXFP4_BLOCK = 128, 32
KEPT_IN_TRAINING = (*BITSANDBYTES_BASES, "fp8")  # in which transformers keeps quantized weights under adapters


class BaseFormat(NamedTuple):
    """The format in which a base stores the matrices that it quantizes."""

    name: QuantizedBase
    bits: Literal[4, 8]  # of an element
    quantizes_linears: bool  # the linear layers of blocks
    quantizes_experts: bool  # routed experts
    double_quantization: bool = False  # the scales are quantized too: of nf4 and fp4

    @property
    def is_four_bit(self) -> bool:
        """Tell whether it is one of bitsandbytes' formats in 4 bits."""
        return self.name in FOUR_BIT_BASES

    @property
    def label(self) -> str:
        """Return its name, and that its scales are not quantized if those of such a base often are."""
        has_single_scales = self.is_four_bit and not self.double_quantization
        return f"{self.name} without double quantization" if has_single_scales else self.name

    def count_bytes(self, *shape: int) -> int:
        """Return the bytes of a weight [rows, columns], or of stacked experts, with its scales."""
        return self.count_element_bytes(prod(shape)) + self.count_scale_bytes(*shape)

    def count_element_bytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` elements, without their scales."""
        return ceil_div(numel * self.bits, 8)

    def count_scale_bytes(self, *shape: int) -> int:
        """Return the bytes of the scales of a weight [rows, columns], or of stacked experts, without codebooks."""
        *experts, rows, columns = shape
        if self.is_four_bit:
            blocks = ceil_div(prod(shape), FOUR_BIT_BLOCK)
            return blocks + self.count_outer_scale_bytes(prod(shape)) + 4 if self.double_quantization else 4 * blocks
        if self.name == "int8":
            return 4 * prod(experts) * rows
        if self.name == "fp8":
            return 4 * prod(experts) * ceil_div(rows, FP8_BLOCK) * ceil_div(columns, FP8_BLOCK)
        return prod(experts) * rows * ceil_div(columns, MXFP4_BLOCK)

    def count_outer_scale_bytes(self, numel: int) -> int:
        """Return the bytes of the fp32 scales of the scales of a weight of ``numel`` elements."""
        return 4 * ceil_div(numel, FOUR_BIT_BLOCK * FOUR_BIT_SCALES_BLOCK) if self.double_quantization else 0

    @property
    def codebook_bytes(self) -> int:
        """Return the bytes of the codebooks that bitsandbytes keeps for each weight: 16 values in fp32, and 256."""
        return 4 * (16 + 256 * self.double_quantization) if self.is_four_bit else 0


BASE_FORMATS: Mapping[str | None, BaseFormat] = {
    base.name: base
    for base in (
        BaseFormat("nf4", 4, quantizes_linears=True, quantizes_experts=False, double_quantization=True),
        BaseFormat("fp4", 4, quantizes_linears=True, quantizes_experts=False, double_quantization=True),
        BaseFormat("int8", 8, quantizes_linears=True, quantizes_experts=False),
        BaseFormat("fp8", 8, quantizes_linears=True, quantizes_experts=True),
        BaseFormat("mxfp4", 4, quantizes_linears=False, quantizes_experts=True),
    )
}
