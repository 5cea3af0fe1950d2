"""The products of experts side by side with operands in eight bits: as ``matmul.py``, group of rows by group.

    y = x W_eᵀ · dx = g W_e · dW_e = gᵀ x of its rows       the last is summed, and so scaled, along a group's rows

The weight of each expert is a tensor of its own; of rows, one scale for all is one for all that are on this rank. No
kernel of these is used yet: they are emulated on every chip.
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
    """Products by group of rows, which end at ``offsets`` [E]."""

    def __init__(self, recipe: Recipe) -> None:
        self.casts, self.wide, self.scaling = casts_of(recipe), recipe.wide_gradients, recipe.scaling
        self.powers = recipe.dispatches == "fp8"  # so that a cast along rows, and then along columns, is one
        if self.powers:
            self.casts = self.casts._replace(x=TILES_OF_POWERS, gradient=TILES_OF_POWERS)

    def operand(self, x: Tensor) -> Cast:
        """Rows for ``out``."""
        return self.casts.x(x)

    def fprop(self, operand: Cast, weights: Tensor, offsets: Tensor, ends: Ends) -> Tensor:
        """Rows [n, in] times [E, out, in]."""
        found: Tensor = scaled_by_group(*operand, *self.casts.weight(weights), offsets, weights.dtype)
        return found

    def dgrad(
        self, gradient: Tensor, weights: Tensor, offsets: Tensor, ends: Ends, total: Tensor | None
    ) -> Tensor:  # fmt: skip
        """Rows [n, out] times [E, out, in], added to ``total``."""
        turned = self.casts.weight_back(weights.mT)
        made: Tensor = scaled_by_group(*self.casts.gradient(gradient), *turned, offsets, weights.dtype)
        return made if total is None else total.add_(made)

    def columns(self, x: Tensor, offsets: Tensor) -> Tensor | Cast:
        """Rows for ``weight``."""
        return x if self.wide else self._along_groups(self.casts.x, x, offsets)

    def wgrad(self, gradient: Tensor, columns: Tensor | Cast, offsets: Tensor, ends: Ends) -> Tensor:
        """[n, out]ᵀ times [n, in] of each group → [E, out, in]."""
        if not isinstance(columns, Cast):
            return summed_by_group(gradient, columns, offsets, ends)
        left = self._along_groups(self.casts.gradient, gradient, offsets)
        found: Tensor = scaled_sums(*left, *columns, offsets, gradient.dtype)
        return found

    def _along_groups(self, caster: Caster, x: Tensor, offsets: Tensor) -> Cast:
        """``x`` [n, C] → [C, n], scaled along each group."""
        if self.scaling == "tensorwise":
            return caster(x.t())
        return Cast(*cast_groups(x, offsets, self.scaling == "tiles", self.powers))


@torch.library.custom_op("fivefold::scaled_by_group", mutates_args=())
def scaled_by_group(
    x: Tensor, x_scale: Tensor, weights: Tensor, scales: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Rows [n, K] times the matrix of their group, of [E, N, K] → [n, N]."""
    out = torch.empty(x.shape[0], weights.shape[1], dtype=dtype, device=x.device)
    for expert, rows in enumerate(_groups(offsets)):
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
    """Rows [n, C] → [C, n], scaled along those of each group: one scale per column, or one per 128 of its rows."""
    data, scale = _room(x, offsets, tiled)
    scale.fill_(1)
    for rows, places in zip(_groups(offsets), _places(offsets, tiled), strict=True):
        if rows.start < rows.stop:
            turned = x[rows].t()
            data[:, rows], scale[:, places] = by_tile(turned, powers=powers) if tiled else by_row(turned, powers=True)
    return data, scale


@cast_groups.register_fake
def _(x: Tensor, offsets: Tensor, tiled: bool, powers: bool = False) -> tuple[Tensor, Tensor]:
    return _room(x, offsets, tiled)


@torch.library.custom_op("fivefold::scaled_sums", mutates_args=())
def scaled_sums(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Columns [M, n] and [N, n] of each group times one another → [E, M, N]; zeros where a group has no rows."""
    out = torch.zeros(offsets.shape[0], a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    tiled = bool(a_scale.dim()) and a_scale.shape[1] != offsets.shape[0]
    for group, rows, places in zip(out, _groups(offsets), _places(offsets, tiled), strict=True):
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


def _room(x: Tensor, offsets: Tensor, tiled: bool) -> tuple[Tensor, Tensor]:
    """For the cast of [n, C] along groups; tiles are as many as there can be."""
    scales = x.shape[0] // TILE + offsets.shape[0] + 1 if tiled else offsets.shape[0]
    data = torch.empty(x.shape[1], x.shape[0], dtype=torch.float8_e4m3fn, device=x.device)
    return data, torch.empty(x.shape[1], scales, device=x.device)


def _groups(offsets: Tensor) -> list[slice]:
    """The host waits for them."""
    return [slice(start, end) for start, end in pairwise([0, *offsets.tolist()])]


def _places(offsets: Tensor, tiled: bool) -> Iterator[slice]:
    """Of each group's scales."""
    start = 0
    for rows in _groups(offsets):
        end = start + (ceil_div(rows.stop - rows.start, TILE) if tiled else 1)
        yield slice(start, end)
        start = end
