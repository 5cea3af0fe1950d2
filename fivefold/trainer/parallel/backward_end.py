"""Detection of the end of a module's backward for modules whose first weight does not mark it.

The backward has ended when the gradient of the module's input is complete. In a block that begins with a norm, the
norm's weight gradient is the last one. If the norms come after attention and MLP, the input goes through an autograd
node of its own.
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


def watch_backward_end(inputs: tuple[Any, ...], ends: Ends) -> tuple[Any, ...]:
    """Return the ``inputs`` of a module, with ``ends`` called once the gradient of the first input is complete."""
    if not inputs[0].requires_grad:
        return inputs
    return (_Entry.apply(inputs[0], ends), *inputs[1:])  # type: ignore[no-untyped-call]
