"""Linear layers as one operation of a compiled graph, so that torch.compile makes one graph of a block.

    linears             x → y_i         linears_backward      (dy_i, x) → dx, and dW_i accumulated or put off inside

The compiler sees shapes only. Which layers are meant is told by *tokens*: numbers in tensors, as a plain number would
be compiled in, and every block compiled for itself. Hooks, GEMMs and gradients are those of ``linear.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fivefold.train.model.linear import Linear, input_gradient, outputs

# An operation takes tensors and numbers, no modules: this is how it finds them, as long as they live.
_layers: WeakValueDictionary[int, Linear] = WeakValueDictionary()
_numbers = count()


def attach(modules: Iterable[nn.Module]) -> None:
    """Let compiled code call the linear layers among ``modules`` without breaking its graph."""
    for part in modules:
        if isinstance(part, Linear):
            number = next(_numbers)
            _layers[number] = part
            part.token, part.in_graph = torch.tensor(number, device="cpu"), in_graph


def in_graph(x: Tensor, layers: tuple[Linear, ...]) -> tuple[Tensor, ...]:
    """``fused_linears`` in a graph."""
    tokens, widths = [layer.token for layer in layers], [layer.matrix.shape[0] for layer in layers]
    found: list[Tensor] = linears(x, layers[0].matrix, tokens, layers[0].hooks.rows(x.shape[0]), widths)
    return tuple(found)


def _found(tokens: list[Tensor]) -> tuple[Linear, ...]:
    return tuple(_layers[int(token)] for token in tokens)


@torch.library.custom_op("fivefold::linears", mutates_args=())
def linears(x: Tensor, weight: Tensor, tokens: list[Tensor], rows: int, widths: list[int]) -> list[Tensor]:
    """Outputs [``rows``, width] of the layers of ``tokens`` on ``x`` [R, in]. ``weight``: for autograd to see one."""
    layers = _found(tokens)
    return list(outputs(x, layers))


@linears.register_fake
def _(x: Tensor, weight: Tensor, tokens: list[Tensor], rows: int, widths: list[int]) -> list[Tensor]:
    return [x.new_empty(rows, width) for width in widths]


@torch.library.custom_op("fivefold::linears_backward", mutates_args=())
def linears_backward(gradients: list[Tensor], x: Tensor, tokens: list[Tensor]) -> Tensor:
    """Gradient of ``x``. Accumulates those of the weights, or puts them off."""
    made = input_gradient(x, tuple(gradients), _found(tokens))
    return made if made.shape == x.shape else made.view_as(x)


@linears_backward.register_fake
def _(gradients: list[Tensor], x: Tensor, tokens: list[Tensor]) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, _weight, tokens, _rows, _widths = inputs
    ctx.number = len(tokens)
    ctx.save_for_backward(x, *tokens)


def _backward(ctx: Any, gradients: list[Tensor]) -> Any:
    x, *tokens = ctx.saved_tensors
    return linears_backward(gradients, x, tokens), None, [None] * ctx.number, None, None


linears.register_autograd(_backward, setup_context=_keep)
