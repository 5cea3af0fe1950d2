"""Grouped GEMMs of experts in fp8: ``matmul.py`` by group of rows.

    y = x W_eᵀ · dx = g W_e · dW_e = gᵀ x of its rows       dW sums over a group's rows, so it is scaled along them

Tensorwise scales: one per expert for weights, one for all rows on this rank. No grouped fp8 kernel is used yet: the
GEMMs are emulated on every chip.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from fivefold.job import Recipe
from fivefold.train.model.experts import Ends, GroupedGemms, summed_by_group
from fivefold.train.model.float8.cast import TILE, TILES_OF_POWERS, Cast, by_row, by_tile
from fivefold.train.model.float8.matmul import Caster, casts_of, emulated
from fivefold.units import ceil_div


class Float8GroupedGemms(GroupedGemms):
    """fp8 grouped GEMMs with the casts of ``recipe``; groups of rows end at ``offsets`` [E]."""

    def __init__(self, recipe: Recipe) -> None:
        self.casts, self.wide, self.scaling = casts_of(recipe), recipe.wide_gradients, recipe.scaling
        self.powers = recipe.dispatches == "fp8"  # rows come in fp8: casting them again must lose nothing more
        if self.powers:
            self.casts = self.casts._replace(x=TILES_OF_POWERS, gradient=TILES_OF_POWERS)

    def operand(self, x: Tensor) -> Cast:
        """Cast rows [n, in] for ``fprop``."""
        return self.casts.x(x)

    def fprop(self, operand: Cast, weights: Tensor, offsets: Tensor, ends: Ends) -> Tensor:
        """Rows [n, in] times their expert's ``weights`` [E, out, in], transposed → [n, out]."""
        found: Tensor = scaled_by_group(*operand, *self.casts.weight(weights), offsets, weights.dtype)
        return found

    def dgrad(
        self, gradient: Tensor, weights: Tensor, offsets: Tensor, ends: Ends, total: Tensor | None
    ) -> Tensor:  # fmt: skip
        """Rows [n, out] times their expert's ``weights`` [E, out, in] → [n, in], added to ``total`` if given."""
        turned = self.casts.weight_back(weights.mT)
        made: Tensor = scaled_by_group(*self.casts.gradient(gradient), *turned, offsets, weights.dtype)
        return made if total is None else total.add_(made)

    def columns(self, x: Tensor, offsets: Tensor) -> Tensor | Cast:
        """Rows [n, in] for ``wgrad``: cast along each group, or as they are if the recipe has wide weight gradients."""
        return x if self.wide else self._along_groups(self.casts.x, x, offsets)

    def wgrad(self, gradient: Tensor, columns: Tensor | Cast, offsets: Tensor, ends: Ends) -> Tensor:
        """``gradient`` [n, out]ᵀ times rows [n, in], summed by group → [E, out, in]."""
        if not isinstance(columns, Cast):
            return summed_by_group(gradient, columns, offsets, ends)
        left = self._along_groups(self.casts.gradient, gradient, offsets)
        found: Tensor = scaled_sums(*left, *columns, offsets, gradient.dtype)
        return found

    def _along_groups(self, caster: Caster, x: Tensor, offsets: Tensor) -> Cast:
        """Cast ``x`` [n, C] transposed → [C, n], with scales that do not cross groups."""
        if self.scaling == "tensorwise":
            return caster(x.t())
        return Cast(*cast_groups(x, offsets, self.scaling == "tiles", self.powers))


@torch.library.custom_op("fivefold::scaled_by_group", mutates_args=())
def scaled_by_group(
    x: Tensor, x_scale: Tensor, weights: Tensor, scales: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """fp8 rows [n, K] times their group's fp8 ``weights`` [E, N, K], transposed → [n, N] in ``dtype``."""
    out = torch.empty(x.shape[0], weights.shape[1], dtype=dtype, device=x.device)
    for expert, rows in enumerate(_row_slices(offsets)):
        left = Cast(x[rows], x_scale[rows] if x_scale.dim() else x_scale)
        out[rows] = emulated(left, Cast(weights[expert], scales[expert]))
    return out


@scaled_by_group.register_fake
def _(
    x: Tensor, x_scale: Tensor, weights: Tensor, scales: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    return torch.empty(x.shape[0], weights.shape[1], dtype=dtype, device=x.device)


@torch.library.custom_op("fivefold::cast_groups", mutates_args=())
def cast_groups(x: Tensor, offsets: Tensor, tiled: bool, powers: bool = False) -> tuple[Tensor, Tensor]:
    """Cast ``x`` [n, C] → data [C, n]; one scale per column and group, or (``tiled``) per 128 rows of the group."""
    data, scale = _empty_cast(x, offsets, tiled)
    scale.fill_(1)
    for rows, places in zip(_row_slices(offsets), _scale_slices(offsets, tiled), strict=True):
        if rows.start < rows.stop:
            turned = x[rows].t()
            data[:, rows], scale[:, places] = by_tile(turned, powers=powers) if tiled else by_row(turned, powers=True)
    return data, scale


@cast_groups.register_fake
def _(x: Tensor, offsets: Tensor, tiled: bool, powers: bool = False) -> tuple[Tensor, Tensor]:
    return _empty_cast(x, offsets, tiled)


@torch.library.custom_op("fivefold::scaled_sums", mutates_args=())
def scaled_sums(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """fp8 ``a`` [M, n] times ``b`` [N, n] transposed, summed by group → [E, M, N]; 0 for a group without rows."""
    out = torch.zeros(offsets.shape[0], a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    tiled = bool(a_scale.dim()) and a_scale.shape[1] != offsets.shape[0]
    for group, rows, places in zip(out, _row_slices(offsets), _scale_slices(offsets, tiled), strict=True):
        if rows.start < rows.stop:
            left, right = (
                Cast(data[:, rows], scale[:, places] if scale.dim() else scale)
                for data, scale in ((a, a_scale), (b, b_scale))
            )
            group.copy_(emulated(left, right))
    return out


@scaled_sums.register_fake
def _(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    return torch.empty(offsets.shape[0], a.shape[0], b.shape[0], dtype=dtype, device=a.device)


def _empty_cast(x: Tensor, offsets: Tensor, tiled: bool) -> tuple[Tensor, Tensor]:
    """Empty data [C, n] and scales of ``cast_groups``; tiled scales have room for the most tiles there can be."""
    scales = x.shape[0] // TILE + offsets.shape[0] + 1 if tiled else offsets.shape[0]
    data = torch.empty(x.shape[1], x.shape[0], dtype=torch.float8_e4m3fn, device=x.device)
    return data, torch.empty(x.shape[1], scales, device=x.device)


def _row_slices(offsets: Tensor) -> list[slice]:
    """Slice of rows of each group. Synchronises host and device."""
    return [slice(start, end) for start, end in pairwise([0, *offsets.tolist()])]


def _scale_slices(offsets: Tensor, tiled: bool) -> Iterator[slice]:
    """Slice of each group's columns in the scales of ``cast_groups``."""
    start = 0
    for rows in _row_slices(offsets):
        end = start + (ceil_div(rows.stop - rows.start, TILE) if tiled else 1)
        yield slice(start, end)
        start = end
