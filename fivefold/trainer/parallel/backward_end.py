"""The end of a module's backward, where its first weight does not mark it: when the gradient of its input is complete.

A block that begins with a norm has its last weight gradient there. One whose norms come after attention and MLP does
not: its input goes through a node of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Ends = Sequence[Callable[[], None]]


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Ends) -> Tensor:
        ctx.ends = ends
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        for end in ctx.ends:
            end()
        return gradient, None


def entered(inputs: tuple[Any, ...], ends: Ends) -> tuple[Any, ...]:
    """``inputs`` of a module, of which the first calls ``ends`` once its gradient is complete."""
    if not inputs[0].requires_grad:
        return inputs
    return (_Entry.apply(inputs[0], ends), *inputs[1:])  # type: ignore[no-untyped-call]
