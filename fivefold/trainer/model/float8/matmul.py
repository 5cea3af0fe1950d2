"""The three GEMMs of a linear layer with fp8 operands.

    y = x Wᵀ · dx = g W · dW = gᵀ x        each operand cast along the dim that is summed over

tensorwise, rowwise   as torchao's recipes of those names (torchao 0.18.0: torchao/float8/config.py)
tiles                 x and g by 1 x 128, W by 128 x 128, all e4m3, summed in fp32 every 128 (arXiv:2412.19437 §3.3)
blocks, blocks16      all by 1 x 32 in MXFP8, by 1 x 16 in NVFP4 (``blocks.py``)
The backward casts x again. Without a kernel the fp8 operands are multiplied in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fivefold.job import Recipe, Scaling
from fivefold.trainer.model.float8 import units
from fivefold.trainer.model.float8.blocks import cast_mxfp8, cast_nvfp4, has_block_scales, product_of_blocks
from fivefold.trainer.model.float8.cast import (
    TILE,
    Cast,
    cast_per_block,
    cast_per_matrix,
    cast_per_row,
    cast_per_tensor,
    cast_per_tile,
)
from fivefold.trainer.model.linear import Exchange, Gather, LinearGemms

Caster = Callable[..., Cast]  # casts a tensor; with one scale per tensor it also takes ``amax``, if that is known


class OperandCasts(NamedTuple):
    """The cast of each operand, whose last dim is the one summed over; ``weight_back``: the cast of W in dx."""

    x: Caster
    gradient: Caster
    weight: Caster
    weight_back: Caster


_row = partial(cast_per_row, power_of_two_scales=True)
_matrix = partial(cast_per_matrix, power_of_two_scales=True)
CASTS: dict[Scaling, OperandCasts] = {
    "tensorwise": OperandCasts(
        cast_per_tensor, partial(cast_per_tensor, dtype=torch.float8_e5m2), cast_per_matrix, cast_per_matrix
    ),
    "rowwise": OperandCasts(_row, _row, _row, _row),
    "tiles": OperandCasts(cast_per_tile, cast_per_tile, cast_per_block, cast_per_block),
    "blocks": OperandCasts(cast_mxfp8, cast_mxfp8, cast_mxfp8, cast_mxfp8),
    "blocks16": OperandCasts(cast_nvfp4, cast_nvfp4, cast_nvfp4, cast_nvfp4),
}


COMMON = ("tensorwise", "blocks16")  # scalings with a scale of the full matrix


def choose_casts(recipe: Recipe, *, fused: bool = False) -> OperandCasts:
    """Return the casts of ``recipe``.

    With high-precision weight gradients W has one scale in dx (torchao's rowwise_with_gw_hp). ``fused``: use Triton's
    kernels, except for blocks.
    """
    casts = CASTS[recipe.scaling]
    casts = casts._replace(weight_back=_matrix) if recipe.wide_gradients else casts
    if not fused or recipe.scaling in ("blocks", "blocks16"):
        return casts
    return OperandCasts(*(partial(caster, fused=True) for caster in casts))


class Float8Gemms(LinearGemms):
    """fp8 GEMMs with the casts of ``recipe``.

    ``kernel``: use the chip's fp8 units, else emulate in fp32; ``fused``: cast with Triton's kernels.
    """

    def __init__(self, recipe: Recipe, *, kernel: bool, fused: bool = False) -> None:
        self.casts, self.kernel, self.gradients_in_16_bits = (
            choose_casts(recipe, fused=fused),
            kernel,
            recipe.wide_gradients,
        )
        self.common = recipe.scaling in COMMON
        self.gradients_in_8_bits = recipe.gradients_bytes == 1

    travels, adds = True, False

    def operand(self, x: Tensor) -> Cast:
        """Cast ``x`` [R, in] for ``fprop``, once for all layers on it."""
        return self.casts.x(x)

    def shared_operand(self, x: Tensor, *, agree: Exchange, gather: Gather) -> Cast:
        """Return the cast of all ranks' rows, equal element for element, gathered from the casts of each rank's rows.

        Data and scales of rows are gathered; for a scale of the full matrix the ranks first agree on the largest |x|.
        """
        if self.common:
            largest = vector_norm(x, torch.inf, dtype=torch.float32)
            cast = self.casts.x(x, amax=agree(largest))
        else:
            cast = self.casts.x(x)
        if not cast.scale.dim():
            (data,) = gather([cast.data.view(torch.uint8)])
            return cast._replace(data=data.view(cast.data.dtype))
        parts = [part.view(torch.uint8) if part.itemsize == 1 else part for part in cast[:2] if part is not None]
        data, scale = gather(parts)
        return cast._replace(data=data.view(cast.data.dtype), scale=scale.view(cast.scale.dtype))

    def fprop(self, operand: Cast, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x Wᵀ + b`` [R, out]; ``operand``: x [R, in], cast to fp8."""
        weight_cast = get_stored_cast(weight) or self.casts.weight(weight)
        inner = weight.shape[1]
        dtype = get_compute_dtype(weight)
        y = product(operand, weight_cast, inner=inner, dtype=dtype, kernel=self.kernel, fast=True)
        return y if bias is None else y.add_(bias)

    def dgrad(self, gradient: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
        """Return ``g W`` [R, in], added to ``total`` in place if given."""
        transposed_cast = get_stored_cast(weight, turned=True) or self.casts.weight_back(weight.t())
        dx = product(
            self.casts.gradient(gradient),
            transposed_cast,
            inner=weight.shape[0],
            dtype=get_compute_dtype(weight),
            kernel=self.kernel,
        )
        return dx if total is None else total.add_(dx)

    def columns(self, x: Tensor) -> Tensor | Cast:
        """Prepare ``x`` [R, in] for ``wgrad``: cast along its columns, or unchanged if dW is not computed in fp8."""
        return x if self.gradients_in_16_bits else self.casts.x(x.t())

    def wgrad(self, gradient: Tensor, columns: Tensor | Cast) -> Tensor | Cast:
        """Return ``gᵀ x`` [out, in], in fp8 with one scale if the recipe has such gradients.

        ``gradient``: g [R, out]; ``columns``: x as the method ``columns`` prepared it.
        """
        if not isinstance(columns, Cast):
            return gradient.t() @ columns
        gradient_cast = self.casts.gradient(gradient.t())
        inner = gradient.shape[0]
        if self.gradients_in_8_bits:
            return Cast(*scaled_mm_cast(*gradient_cast, *columns, inner))
        return product(gradient_cast, columns, inner=inner, dtype=gradient.dtype, kernel=self.kernel)


def get_stored_cast(weight: Tensor, *, turned: bool = False) -> Cast | None:
    """Return the cast in which a weight is stored (``turned``: transposed); None: it is stored in 16 bits or more."""
    scale: Tensor | None = getattr(weight, "scale", None)
    if weight.itemsize > 1 or scale is None:
        return None
    data = weight.detach()
    return Cast(data.mT.contiguous(), scale.mT) if turned else Cast(data, scale)


def get_compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of products with ``weight``: its own, or bf16 if it is stored as a cast."""
    return weight.dtype if weight.itemsize > 1 else torch.bfloat16


def product(a: Cast, b: Cast, *, inner: int, dtype: torch.dtype, kernel: bool, fast: bool = False) -> Tensor:
    """Multiply ``a`` [M, K = ``inner``] by ``b`` [N, K] transposed → [M, N] in ``dtype``.

    ``fast``: fast accumulation of ``torch._scaled_mm``.
    """
    return scaled_mm(*a, *b, inner, dtype, kernel, fast)


@torch.library.custom_op("fivefold::scaled_mm", mutates_args=())
def scaled_mm(
    a: Tensor,
    a_scale: Tensor,
    a_outer: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_outer: Tensor | None,
    inner: int,
    dtype: torch.dtype,
    kernel: bool,
    fast: bool,
) -> Tensor:
    """Compute ``product`` as one custom op, so that the dry run and the meter can count it."""
    left, right = Cast(a, a_scale, a_outer), Cast(b, b_scale, b_outer)
    if kernel and a.is_cuda and units.supports(left, right):
        return units.multiply(left, right, dtype=dtype, fast=fast)
    return emulate_product(left, right).to(dtype)


scaled_mm.register_fake(
    lambda a, a_scale, a_outer, b, b_scale, b_outer, inner, dtype, *_: torch.empty(
        a.shape[0], b.shape[0], dtype=dtype, device=a.device
    )
)


@torch.library.custom_op("fivefold::scaled_mm_cast", mutates_args=())
def scaled_mm_cast(
    a: Tensor, a_scale: Tensor, a_outer: Tensor | None, b: Tensor, b_scale: Tensor, b_outer: Tensor | None, inner: int
) -> tuple[Tensor, Tensor]:
    """Compute ``product`` cast to e4m3 with one scale [1, 1] as one custom op; its fp32 product is not counted."""
    product_cast = cast_per_matrix(emulate_product(Cast(a, a_scale, a_outer), Cast(b, b_scale, b_outer)))
    return product_cast.data, product_cast.scale


@scaled_mm_cast.register_fake
def _(
    a: Tensor, a_scale: Tensor, a_outer: Tensor | None, b: Tensor, b_scale: Tensor, b_outer: Tensor | None, inner: int
) -> tuple[Tensor, Tensor]:
    data = torch.empty(a.shape[0], b.shape[0], dtype=torch.float8_e4m3fn, device=a.device)
    return data, torch.empty(1, 1, device=a.device)


def emulate_product(a: Cast, b: Cast) -> Tensor:
    """Compute ``product`` in fp32: each tile of K is multiplied, then scaled, then added to the total."""
    if has_block_scales(a):
        return product_of_blocks(a, b)
    left_scale, right_scale = (cast.scale if cast.scale.dim() else cast.scale.view(1, 1) for cast in (a, b))
    if right_scale.shape[0] not in (1, b.data.shape[0]):  # scales of 128 x 128 blocks
        right_scale = right_scale.repeat_interleave(TILE, 0)[: b.data.shape[0]]
    if left_scale.shape[1] == right_scale.shape[1] == 1:
        return (a.data.float() @ b.data.float().t()).mul_(left_scale).mul_(right_scale.t())
    total = torch.zeros(a.data.shape[0], b.data.shape[0], device=a.data.device)
    for tile in range(left_scale.shape[1]):
        inner = slice(tile * TILE, (tile + 1) * TILE)
        tile_product = a.data[:, inner].float() @ b.data[:, inner].float().t()
        total.add_(tile_product.mul_(left_scale[:, tile, None]).mul_(right_scale[:, tile]))
    return total
