"""Products in tf32: a switch of torch on CUDA; emulated elsewhere by rounding fp32 operands to 10 bits of mantissa.

    tf32(x) = x rounded to a multiple of 2^-10 of its power of two, ties away from zero (PTX: cvt.rna.tf32.f32)

On CUDA the switch affects all fp32 products of the process, also routers, head and attention's core. Emulation covers
linear layers, the head and experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.job import Job
from fivefold.trainer.model.experts import Ends, GroupedGemms, GroupedLinear
from fivefold.trainer.model.float8.cast import Cast
from fivefold.trainer.model.linear import Linear, LinearGemms

FIRST_TF32 = (8, 0)  # lowest compute capability with tf32 units: Ampere
DROPPED = 13  # of fp32's 23 bits of mantissa


def attach(module: nn.Module, job: Job, *, device: torch.device) -> None:
    """Switch tf32 products on or off for this process' CUDA device; round operands if the job emulates them."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = job.precision.number_format.rounds_operands
    if not job.precision.number_format.rounds_operands or not job.emulate:
        return
    dense, grouped = Tf32Gemms(), Tf32GroupedGemms()
    for submodule in module.modules():
        if isinstance(submodule, Linear):
            submodule.gemms = dense
        elif isinstance(submodule, GroupedLinear):
            submodule.gemms = grouped


def has_units() -> bool:
    """Return whether this computer's CUDA device multiplies in tf32."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= FIRST_TF32


def round_to_tf32(x: Tensor) -> Tensor:
    """Return fp32 ``x`` rounded to tf32; infinities and NaN are unchanged."""
    bits = (x.contiguous().view(torch.int32) + (1 << (DROPPED - 1))) & (-1 << DROPPED)
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


class Tf32Gemms(LinearGemms):
    """Products of a linear layer with operands rounded to tf32."""

    adds = False

    def fprop(self, operand: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x Wᵀ + b`` [R, out]."""
        y: Tensor = tf32_mm(operand, weight.t())
        return y if bias is None else y.add_(bias)

    def dgrad(self, gradient: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
        """Return ``g W`` [R, in], added to ``total`` in place if given."""
        product: Tensor = tf32_mm(gradient, weight)
        return product if total is None else total.add_(product)

    def wgrad(self, gradient: Tensor, columns: Tensor) -> Tensor:
        """Return ``gᵀ x`` [out, in]."""
        return tf32_mm(gradient.t(), columns)


class Tf32GroupedGemms(GroupedGemms):
    """Products of experts with operands rounded to tf32."""

    def operand(self, x: Tensor) -> Tensor:
        """Round rows [n, in]."""
        return round_to_tf32(x)

    def fprop(self, operand: Tensor, weights: Tensor, offsets: Tensor, ends: Ends) -> Tensor:
        """Multiply rows [n, in] by their expert's ``weights`` [E, out, in], transposed → [n, out]."""
        return super().fprop(operand, round_to_tf32(weights), offsets, ends)

    def dgrad(self, gradient: Tensor, weights: Tensor, offsets: Tensor, ends: Ends, total: Tensor | None) -> Tensor:
        """Multiply rows [n, out] by their expert's ``weights`` [E, out, in] → [n, in], added to ``total`` if given."""
        return super().dgrad(round_to_tf32(gradient), round_to_tf32(weights), offsets, ends, total)

    def columns(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Round rows [n, in]."""
        return round_to_tf32(x)

    def wgrad(self, gradient: Tensor, columns: Tensor, offsets: Tensor, ends: Ends) -> Tensor | Cast:
        """Multiply [n, out]ᵀ by [n, in] in each group → [E, out, in]."""
        return super().wgrad(round_to_tf32(gradient), columns, offsets, ends)


@torch.library.custom_op("fivefold::tf32_mm", mutates_args=())
def tf32_mm(a: Tensor, b: Tensor) -> Tensor:
    """Multiply ``a`` [M, K] by ``b`` [K, N] → [M, N], all fp32, as one custom op: no memory is counted for rounding."""
    return round_to_tf32(a) @ round_to_tf32(b)


tf32_mm.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
