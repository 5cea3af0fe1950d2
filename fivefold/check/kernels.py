"""The memory-bound kernels that ``calibrate`` times: from a one-dimensional tensor to the work on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Work(NamedTuple):
    """Something to time, and the bytes that it reads and writes."""

    run: Callable[[], object]
    moved_bytes: int


def copy(x: Tensor) -> Work:
    """Read x, write a copy into memory that is already there."""
    target = torch.empty_like(x)
    return Work(lambda: target.copy_(x), 2 * x.nbytes)


def add(x: Tensor) -> Work:
    """Read x and y, write the sum into new memory, as a residual connection does."""
    y = torch.ones_like(x)
    return Work(lambda: x + y, 3 * x.nbytes)


def adamw(x: Tensor) -> Work:
    """Read parameter, gradient and two moments; write all but the gradient."""
    parameter = torch.nn.Parameter(x)
    parameter.grad = torch.ones_like(x)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return Work(optimizer.step, 7 * x.nbytes)


KERNELS: dict[str, Callable[[Tensor], Work]] = {"copy": copy, "add": add, "adamw": adamw}
