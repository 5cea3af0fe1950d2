"""Grouped GEMMs of experts in fp8: ``matmul.py`` by group of rows.

    y = x W_eᵀ · dx = g W_e · dW_e = gᵀ x of its rows       dW sums over a group's rows, so it is scaled along them

Tensorwise scales: one per expert for weights, one for all rows on this rank. With rowwise scales y and dx run on the
chip's fp8 units (``units.py``); all other GEMMs are emulated.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fivefold.job import SCALED_ELEMENTS, Recipe
from fivefold.trainer.model.experts import Ends, GroupedGemms, sum_by_group
from fivefold.trainer.model.float8 import blocks, units
from fivefold.trainer.model.float8.cast import TILES_OF_POWERS, Cast, cast_per_matrix, cast_per_row, cast_per_tile
from fivefold.trainer.model.float8.matmul import (
    Caster,
    choose_casts,
    emulate_product,
    get_compute_dtype,
    get_stored_cast,
)
from fivefold.units import ceil_div


class Float8GroupedGemms(GroupedGemms):
    """fp8 grouped GEMMs with the casts of ``recipe``; groups of rows end at ``offsets`` [E]."""

    def __init__(self, recipe: Recipe, *, kernel: bool = False, fused: bool = False) -> None:
        """Choose the casts of ``recipe``. ``kernel``: multiply in the chip's fp8 units; otherwise emulate them.

        ``fused``: cast rows and weights with Triton.
        """
        self.kernel, self.casts, self.scaling = kernel, choose_casts(recipe, fused=fused), recipe.scaling
        self.gradients_in_16_bits = recipe.wide_gradients
        self.group_size = SCALED_ELEMENTS.get(recipe.scaling, 0)  # elements of a row that share a scale; 0: all
        self.gradients_in_8_bits = recipe.gradients_bytes == 1
        # rows arrive in fp8: casting them again must be exact
        self.power_of_two_scales = recipe.dispatches == "fp8"
        if self.power_of_two_scales:
            tiles = partial(TILES_OF_POWERS, fused=fused)
            self.casts = self.casts._replace(x=tiles, gradient=tiles)

    def operand(self, x: Tensor) -> Cast:
        """Cast rows [n, in] for ``fprop``."""
        return self.casts.x(x)

    def fprop(self, operand: Cast, weights: Tensor, offsets: Tensor, ends: Ends) -> Tensor:
        """Multiply rows [n, in] by their expert's ``weights`` [E, out, in], transposed → [n, out]."""
        weights_cast = get_stored_cast(weights) or self.casts.weight(weights)
        return scaled_mm_by_group(
            *operand, *weights_cast, offsets, weights.shape[2], get_compute_dtype(weights), self.kernel
        )

    def dgrad(self, gradient: Tensor, weights: Tensor, offsets: Tensor, ends: Ends, total: Tensor | None) -> Tensor:
        """Multiply rows [n, out] by their expert's ``weights`` [E, out, in] → [n, in], added to ``total`` if given."""
        transposed_cast = get_stored_cast(weights, turned=True) or self.casts.weight_back(weights.mT)
        gradient_cast = self.casts.gradient(gradient)
        product: Tensor = scaled_mm_by_group(
            *gradient_cast, *transposed_cast, offsets, weights.shape[1], get_compute_dtype(weights), self.kernel
        )
        return product if total is None else total.add_(product)

    def columns(self, x: Tensor, offsets: Tensor) -> Tensor | Cast:
        """Prepare rows [n, in] for ``wgrad``: cast along each group, or unchanged if dW is not computed in fp8."""
        return x if self.gradients_in_16_bits else self._cast_along_groups(self.casts.x, x, offsets)

    def wgrad(self, gradient: Tensor, columns: Tensor | Cast, offsets: Tensor, ends: Ends) -> Tensor | Cast:
        """Multiply ``gradient`` [n, out]ᵀ by rows [n, in], summed by group → [E, out, in].

        The result is in fp8 with one scale per expert if the recipe has such gradients.
        """
        if not isinstance(columns, Cast):
            return sum_by_group(gradient, columns, offsets, ends)
        gradient_cast = self._cast_along_groups(self.casts.gradient, gradient, offsets)
        if self.gradients_in_8_bits:
            return Cast(*scaled_sums_cast(*gradient_cast, *columns, offsets, gradient.shape[0], self.group_size))
        return scaled_sums(*gradient_cast, *columns, offsets, gradient.shape[0], self.group_size, gradient.dtype)

    def _cast_along_groups(self, caster: Caster, x: Tensor, offsets: Tensor) -> Cast:
        """Cast ``x`` [n, C] transposed → [C, n], with scales that do not cross groups."""
        if self.scaling == "tensorwise":
            return caster(x.t())
        data, scale, outer = cast_groups(x, offsets, self.group_size, self.power_of_two_scales)
        return Cast(data, scale, outer if outer.numel() else None)


@torch.library.custom_op("fivefold::scaled_by_group", mutates_args=())
def scaled_mm_by_group(
    x: Tensor,
    x_scale: Tensor,
    x_outer: Tensor | None,
    weights: Tensor,
    scales: Tensor,
    outers: Tensor | None,
    offsets: Tensor,
    inner: int,
    dtype: torch.dtype,
    kernel: bool,
) -> Tensor:
    """Multiply fp8 rows [n, K = ``inner``] by their group's fp8 ``weights`` [E, N, K], transposed → [n, N].

    The result is in ``dtype``.
    """
    operands = Cast(x, x_scale, x_outer), Cast(weights, scales, outers)
    if kernel and x.is_cuda and units.supports(*operands):
        return units.multiply_by_group(*operands, offsets, dtype=dtype)
    out = torch.empty(x.shape[0], weights.shape[1], dtype=dtype, device=x.device)
    for expert, rows in enumerate(_list_row_slices(offsets)):
        left = Cast(x[rows], x_scale[rows] if x_scale.dim() else x_scale, x_outer)
        right = Cast(weights[expert], scales[expert], None if outers is None else outers[expert])
        out[rows] = emulate_product(left, right)
    return out


scaled_mm_by_group.register_fake(
    lambda x, x_scale, x_outer, weights, scales, outers, offsets, inner, dtype, *_: torch.empty(
        x.shape[0], weights.shape[1], dtype=dtype, device=x.device
    )
)


@torch.library.custom_op("fivefold::cast_groups", mutates_args=())
def cast_groups(
    x: Tensor, offsets: Tensor, group_size: int, power_of_two_scales: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast ``x`` [n, C] → data [C, n], scale, and ``outer`` [1, 1] (NVFP4, else no elements).

    There is one scale per column and group (``group_size`` 0), or one per ``group_size`` rows of the group. In NVFP4 a
    group begins at a byte of its own.
    """
    data, scale, outer = _empty_cast(x, offsets, group_size)
    scale.fill_(1)
    amax = None
    if outer.numel():
        amax = x.abs().amax().float().view(1, 1) if x.numel() else outer.zero_()
        outer = amax / (blocks.LARGEST_VALUE[blocks.NV] * blocks.LARGEST_VALUE[blocks.MX])
    for rows, data_columns, scale_columns in zip(*_slice_groups(offsets, group_size), strict=True):
        if rows.start < rows.stop:
            cast = _cast_turned(x[rows].t(), group_size, power_of_two_scales, amax)
            data[:, data_columns], scale[:, scale_columns] = cast.data, cast.scale
    return data, scale, outer


@cast_groups.register_fake
def _(x: Tensor, offsets: Tensor, group_size: int, power_of_two_scales: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_cast(x, offsets, group_size)


def _cast_turned(turned: Tensor, group_size: int, power_of_two_scales: bool, amax: Tensor | None) -> Cast:
    """Return the cast of one group's columns [C, n of the group]."""
    if group_size == blocks.MX:
        return blocks.cast_mxfp8(turned)
    if group_size == blocks.NV:
        return blocks.cast_nvfp4(turned, amax=amax)
    return (
        cast_per_tile(turned, power_of_two_scales=power_of_two_scales)
        if group_size
        else cast_per_row(turned, power_of_two_scales=True)
    )


@torch.library.custom_op("fivefold::scaled_sums", mutates_args=())
def scaled_sums(
    a: Tensor,
    a_scale: Tensor,
    a_outer: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_outer: Tensor | None,
    offsets: Tensor,
    inner: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply fp8 ``a`` [M, n = ``inner``] by ``b`` [N, n] transposed, summed by group → [E, M, N].

    It is 0 for a group without rows. ``group_size``: as in ``cast_groups``.
    """
    out = torch.zeros(offsets.shape[0], a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    for group, rows, data_columns, scale_columns in zip(out, *_slice_groups(offsets, group_size), strict=True):
        if rows.start < rows.stop:
            left, right = (
                Cast(data[:, data_columns], scale[:, scale_columns] if scale.dim() else scale, outer)
                for data, scale, outer in ((a, a_scale, a_outer), (b, b_scale, b_outer))
            )
            group.copy_(emulate_product(left, right))
    return out


scaled_sums.register_fake(
    lambda a, a_scale, a_outer, b, b_scale, b_outer, offsets, inner, group_size, dtype: torch.empty(
        offsets.shape[0], a.shape[0], b.shape[0], dtype=dtype, device=a.device
    )
)


@torch.library.custom_op("fivefold::scaled_sums_cast", mutates_args=())
def scaled_sums_cast(
    a: Tensor,
    a_scale: Tensor,
    a_outer: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_outer: Tensor | None,
    offsets: Tensor,
    inner: int,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    """Compute ``scaled_sums`` cast to e4m3 with one scale per expert, [E, 1, 1], as one custom op."""
    sums_cast = cast_per_matrix(
        scaled_sums(a, a_scale, a_outer, b, b_scale, b_outer, offsets, inner, group_size, torch.float32)
    )
    return sums_cast.data, sums_cast.scale


@scaled_sums_cast.register_fake
def _(
    a: Tensor,
    a_scale: Tensor,
    a_outer: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_outer: Tensor | None,
    offsets: Tensor,
    inner: int,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    shape = offsets.shape[0], a.shape[0], b.shape[0]
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=a.device)
    return data, torch.empty(shape[0], 1, 1, device=a.device)


def _empty_cast(x: Tensor, offsets: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty data, scales and outer of ``cast_groups``, with room for the largest number of blocks and bytes."""
    (rows, columns), groups, is_nvfp4 = x.shape, offsets.shape[0], group_size == blocks.NV
    scale_dtypes = {blocks.MX: blocks.E8M0, blocks.NV: torch.float8_e4m3fn}
    data = (rows // 2 + groups, torch.uint8) if is_nvfp4 else (rows, torch.float8_e4m3fn)
    scales = rows // group_size + groups + 1 if group_size else groups
    return (
        torch.empty(columns, data[0], dtype=data[1], device=x.device),
        torch.empty(columns, scales, dtype=scale_dtypes.get(group_size, torch.float32), device=x.device),
        torch.empty((1, 1) if is_nvfp4 else (0,), device=x.device),
    )


def _list_row_slices(offsets: Tensor) -> list[slice]:
    """Return the slice of rows of each group. Synchronizes host and device."""
    return [slice(start, end) for start, end in pairwise([0, *offsets.tolist()])]


def _slice_groups(offsets: Tensor, group_size: int) -> tuple[list[slice], list[slice], list[slice]]:
    """Return slices for each group: its rows, and its columns in the data and in the scales of ``cast_groups``.

    Data of nvfp4 have half as many columns as rows, because a byte holds two values.
    """
    rows = _list_row_slices(offsets)
    counts = [group_rows.stop - group_rows.start for group_rows in rows]
    scales = _list_slices([ceil_div(count, group_size) if group_size else 1 for count in counts])
    return rows, _list_slices([ceil_div(count, 2) for count in counts]) if group_size == blocks.NV else rows, scales


def _list_slices(sizes: list[int]) -> list[slice]:
    """Return slices of ``sizes`` elements, one after another."""
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
