"""The mask of a dropout in one kernel; see ``trainer/model/dropout.py``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fivefold.trainer.model.kernels.fused.launch import explain_unavailability, round_up_to_power_of_two
from fivefold.units import ceil_div

MAX_GROUPS = 256  # of four columns, of a program


@cache
def is_available() -> bool:
    """Return whether Triton's kernels can run in this process."""
    return not explain_unavailability()


def draw_mask(keys: Tensor, columns: int, *, first: int, dropped: int) -> Tensor:
    """Return the mask [..., columns] of the rows with ``keys``, from column ``first`` on.

    ``dropped``: how many of 2¹⁶ values of an element's 16 bits drop it.
    """
    from fivefold.trainer.model.kernels.triton import dropout

    mask = torch.empty(*keys.shape, columns, dtype=torch.bool, device=keys.device)
    if mask.numel():
        groups = ceil_div(first + columns, 4) - first // 4
        block = min(MAX_GROUPS, round_up_to_power_of_two(groups))
        dropout.draw[(keys.numel(), ceil_div(groups, block))](
            keys.contiguous(), mask, columns, first, dropped, GROUPS=block, num_warps=4
        )
    return mask
