"""Products of casts on the chip's fp8 units, by torch's operations; and one line about what is missing for them.

by tensor, by row   torch._scaled_mm             compute capability from 8.9
tiles               F.scaled_mm                  9.0, CUDA from 12.9: x by 1 x 128, W by 128 x 128 (or 1 x 128 for dW)
experts, by row     torch._scaled_grouped_mm     9.0: not dW, whose groups would have to begin at multiples of 16 rows

Layouts of scales: pytorch/pytorch, aten/src/ATen/native/cuda/ScaledBlas.cpp. Not run on a GPU so far.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.job import Recipe
from fivefold.trainer.model.float8.cast import TILE, Cast

ALIGNED = 16  # elements of a row: torch supports only multiples
FIRST_FP8, HOPPER = (8, 9), (9, 0)  # compute capabilities: the lowest with fp8 units; the one with kernels for more
FIRST_TILES = (12, 9)  # first CUDA version with products of tiles


def describe_missing(recipe: Recipe, *, experts: bool) -> str:
    """Return what this computer is missing for the recipe's products, "" if nothing."""
    if recipe.scaling in ("blocks", "blocks16"):
        return "the trainer has no kernel for blocks"
    if not torch.cuda.is_available():
        return "a CPU has no fp8 units"
    if torch.version.hip is not None:
        return "" if not experts and recipe.scaling != "tiles" else "the trainer has no kernel for it on AMD's chips"
    capability = torch.cuda.get_device_capability()
    device_name = torch.cuda.get_device_name()
    if capability < FIRST_FP8:
        return f"{device_name} has no fp8 units (compute capability {capability[0]}.{capability[1]}, not 8.9)"
    if recipe.gradients_bytes == 1:
        return "the trainer has no kernel for gradients in fp8"
    if experts and not (recipe.scaling == "rowwise" and recipe.wide_gradients):
        return "the trainer has no kernel for experts but that of fp8-rowwise-gw"
    if not experts and recipe.scaling != "tiles":
        return ""
    operands = "experts" if experts else "tiles"
    if capability != HOPPER:
        return (
            f"torch multiplies {operands} only on Hopper, "
            f"and {device_name} has compute capability {capability[0]}.{capability[1]}"
        )
    if experts:
        return "" if hasattr(torch, "_scaled_grouped_mm") else "this torch has no _scaled_grouped_mm"
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if version < FIRST_TILES:
        return f"torch multiplies tiles from CUDA 12.9 on, and this one is built for {torch.version.cuda}"
    return "" if hasattr(F, "scaled_mm") else "this torch has no scaled_mm"


def supports(a: Cast, b: Cast) -> bool:
    """Return whether torch's operation supports these sizes; others are emulated."""
    sizes = a.data.shape[-1] | b.data.shape[-2]
    return bool(a.data.numel()) and sizes % ALIGNED == 0 and (not _is_tiled(a, b) or a.data.shape[-1] % TILE == 0)


def multiply(a: Cast, b: Cast, *, dtype: torch.dtype, fast: bool) -> Tensor:
    """Multiply ``a`` [M, K] by ``b`` [N, K] transposed → [M, N] in ``dtype``. ``fast``: Hopper's fast accumulation."""
    if _is_tiled(a, b):
        (a_scale, a_scaling), (b_scale, b_scaling) = _tile_scales(a), _tile_scales(b)
        return F.scaled_mm(a.data, b.data.t(), a_scale, a_scaling, b_scale, b_scaling, output_dtype=dtype)
    is_rowwise = max(a.scale.numel(), b.scale.numel()) > 1
    a_scale = a.scale.expand(a.data.shape[0], 1).contiguous() if is_rowwise else a.scale.view(())
    b_scale = b.scale.expand(b.data.shape[0], 1).contiguous().t() if is_rowwise else b.scale.view(())
    return torch._scaled_mm(a.data, b.data.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)


def multiply_by_group(x: Cast, weights: Cast, offsets: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Multiply rows ``x`` [n, K] by their group's ``weights`` [E, N, K], transposed; groups end at ``offsets``."""
    return torch._scaled_grouped_mm(
        x.data,
        weights.data.mT,
        x.scale.view(-1),
        weights.scale.expand(*weights.data.shape[:2], 1).squeeze(-1).contiguous(),
        offs=offsets,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def _is_tiled(a: Cast, b: Cast) -> bool:
    """Return whether scales are of tiles along K, not of rows or of the full tensor."""
    scales = [cast.scale for cast in (a, b) if cast.scale.dim()]
    is_tile_along_k = b.scale.dim() > 1 and b.scale.shape[-2] not in (
        1,
        b.data.shape[-2],
    )  # one tile along K, blocks of rows
    return is_tile_along_k or any(scale.shape[-1] > 1 for scale in scales)


def _tile_scales(cast: Cast) -> tuple[Tensor, F.ScalingType]:
    """Return scales in the layout of F.scaled_mm.

    Scales of 1 x 128 are [rows, K/128] with rows contiguous; of 128 x 128 transposed, [K/128 padded to a multiple of 4,
    rows/128], with K/128 contiguous.
    """
    scale = cast.scale
    if scale.shape[0] == cast.data.shape[0]:
        return scale.t().contiguous().t(), F.ScalingType.BlockWise1x128
    return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t(), F.ScalingType.BlockWise128x128
