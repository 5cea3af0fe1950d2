"""Copies of rows in order of expert and back, in one kernel each; see ``trainer/model/moe.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.trainer.model.kernels.fused.launch import ELEMENTS, round_up_to_power_of_two
from fivefold.units import ceil_div


@torch.library.custom_op("fivefold::gather_rows", mutates_args=())
def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``index`` [n] of ``x`` [R, D] as [n, D]."""
    from fivefold.trainer.model.kernels.triton import rows

    y = x.new_empty(index.shape[0], x.shape[1])
    if y.numel():
        block = min(ELEMENTS, round_up_to_power_of_two(x.shape[1]))
        rows.gather[(len(y), ceil_div(x.shape[1], block))](
            x.contiguous(), index, y, x.shape[1], BLOCK=block, num_warps=4
        )
    return y


gather_rows.register_fake(lambda x, index: x.new_empty(index.shape[0], x.shape[1]))


@torch.library.custom_op("fivefold::sum_copies", mutates_args=())
def sum_copies(copies: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    """Sum the rows ``places[starts[r] : starts[r + 1]]`` of ``copies`` [n, D] for each r → [R, D], in fp32 inside."""
    from fivefold.trainer.model.kernels.triton import rows

    y = copies.new_empty(starts.shape[0], copies.shape[1])
    if y.numel():
        block = min(ELEMENTS, round_up_to_power_of_two(copies.shape[1]))
        rows.sum_copies[(len(y), ceil_div(copies.shape[1], block))](
            copies.contiguous(), places, starts, y, len(y), places.shape[0], copies.shape[1], BLOCK=block, num_warps=4
        )
    return y


sum_copies.register_fake(lambda copies, places, starts: copies.new_empty(starts.shape[0], copies.shape[1]))
