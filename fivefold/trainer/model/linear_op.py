"""Linear layers in the graph of a compiled block, so that torch.compile makes one graph of it.

    products       x → y_i: matrix products in the graph, for layers that neither communicate nor cast
    one_operation  x → y_i as one operation of the graph (``linears``), for layers that do, with their messages
    backward       (dy_i, x) → dx, dW_i accumulated or deferred inside: one operation (``linears_backward``)

The compiler sees only shapes. *Tokens* identify the layers: numbers in tensors, because a plain number would be
compiled in, and every block compiled separately. Hooks, GEMMs and gradients are those of ``linear.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.trainer.model.linear import Linear, LinearGemms, LinearHooks, input_gradient, outputs

# An operation takes tensors and numbers, no modules: it looks them up here, as long as they exist.
_layers: WeakValueDictionary[int, Linear] = WeakValueDictionary()
_numbers = count()


def attach(modules: Iterable[nn.Module]) -> None:
    """Let compiled code call the linear layers among ``modules`` without breaking its graph.

    Call it once they have their hooks and GEMMs.
    """
    for module in modules:
        if isinstance(module, Linear):
            number = next(_numbers)
            _layers[number] = module
            module.token = torch.tensor(number, device="cpu")
            is_plain = type(module.hooks) is LinearHooks and type(module.gemms) is LinearGemms
            module.compiled_call = products if is_plain else apply_as_one_op


def _get_layers(tokens: list[Tensor]) -> tuple[Linear, ...]:
    return tuple(_layers[int(token)] for token in tokens)


def products(x: Tensor, layers: tuple[Linear, ...]) -> tuple[Tensor, ...]:
    """Compute ``fused_linears`` in a graph, whose compiler allocates the products; only dW is a custom operation."""
    tokens, weights, biases = zip(*((layer.token, layer.matrix, layer.bias) for layer in layers), strict=True)
    return _Products.apply(x, len(layers), *tokens, *weights, *biases)


class _Products(torch.autograd.Function):
    """Matrix products in the graph. Inputs: x, the number n of layers, n tokens, n weights, n biases or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, *rest: Any) -> tuple[Tensor, ...]:
        tokens = rest[:number]
        weights = rest[number : 2 * number]
        biases = rest[2 * number :]
        ctx.save_for_backward(x, *tokens)
        # x as a batch: inductor would fuse a 2D product and the residual's sum into one GEMM that copies the sum
        return tuple(F.linear(x[None], weight, bias)[0] for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *tokens = ctx.saved_tensors
        return torch.ops.fivefold.linears_backward(list(gradients), x, tokens), None, *[None] * (3 * len(tokens))


def apply_as_one_op(x: Tensor, layers: tuple[Linear, ...]) -> tuple[Tensor, ...]:
    """Compute ``fused_linears`` in a graph, with hooks and GEMMs that cannot be compiled."""
    tokens = [layer.token for layer in layers]
    widths = [layer.matrix.shape[0] for layer in layers]
    outs: list[Tensor] = linears(x, layers[0].matrix, tokens, layers[0].hooks.rows(x.shape[0]), widths)
    return tuple(outs)


@torch.library.custom_op("fivefold::linears", mutates_args=())
def linears(x: Tensor, weight: Tensor, tokens: list[Tensor], rows: int, widths: list[int]) -> list[Tensor]:
    """Compute outputs [``rows``, width] of the layers of ``tokens`` on ``x`` [R, in]; autograd needs ``weight``."""
    layers = _get_layers(tokens)
    return list(outputs(x, layers))


linears.register_fake(lambda x, weight, tokens, rows, widths: [x.new_empty(rows, width) for width in widths])


def linears_backward(gradients: list[Tensor], x: Tensor, tokens: list[Tensor]) -> Tensor:
    """Return the gradient of ``x``; accumulate those of the weights, or defer them."""
    gradient = input_gradient(x, tuple(gradients), _get_layers(tokens), writes_into_buffers=True)
    assert gradient is not None
    return gradient if gradient.shape == x.shape else gradient.view_as(x)


# not by ``custom_op``, whose checks around each call take longer than the operation without its GEMMs
_library = torch.library.Library("fivefold", "FRAGMENT")
_library.define(
    "linears_backward(Tensor[] gradients, Tensor x, Tensor[] tokens) -> Tensor", tags=torch.Tag.pt2_compliant_tag
)
_library.impl("linears_backward", linears_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fivefold::linears_backward", lambda gradients, x, tokens: torch.empty_like(x), lib=_library
)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, _weight, tokens, _rows, _widths = inputs
    ctx.number = len(tokens)
    ctx.save_for_backward(x, *tokens)


def _backward(ctx: Any, gradients: list[Tensor]) -> Any:
    """Call the backward operator with the saved input and the tokens that name the layers."""
    x, *tokens = ctx.saved_tensors
    return torch.ops.fivefold.linears_backward(gradients, x, tokens), None, [None] * ctx.number, None, None


linears.register_autograd(_backward, setup_context=_keep)
