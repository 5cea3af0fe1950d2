"""Our own linear layer: several on one input at once, the weights' gradients apart, now or later.

    y_i = x W_iᵀ + b_i        backward: dx = Σ g_i W_i   ·   dW_i = g_iᵀ x, db_i = Σ g_i

What is common to a fan of layers, an input gathered over ranks, is done once, and travels while the other product is
computed. Zero-bubble schedules put dW off by ``Later``; no forward has to run again for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Work = Callable[[], None]
Wait = Callable[[], Tensor]


class Around:
    """What happens to rows before and after a linear layer: nothing, unless a parallelism says otherwise.

    ``begin`` methods start something and return what waits for it. ``partial``: what is left is summed over ranks.
    """

    partial = False

    def enter(self, x: Tensor) -> Tensor:
        """Input rows as the matmul wants them."""
        return x

    def begin_again(self, x: Tensor) -> Wait:
        """The same in the backward, from the input that was kept."""
        return lambda: x

    def begin_entered_gradient(self, gradient: Tensor) -> Wait:
        """Gradient of the entered rows, which may be overwritten → of the input rows."""
        return lambda: gradient

    def leave(self, y: Tensor) -> Tensor:
        """Rows of the product → rows of the output."""
        return y

    def left_gradient(self, gradient: Tensor) -> Tensor:
        """Gradient of the output rows → of the rows of the product."""
        return gradient


class Products:
    """The three products of linear layers, in the width of their operands; ``train/float8`` has narrower ones.

    ``operand`` and ``columns`` make of an input what ``out`` and ``weight`` read, once for all layers on it.
    """

    def operand(self, x: Tensor) -> Any:
        """Rows ``x`` [R, in] for ``out``."""
        return x

    def out(self, operand: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x Wᵀ + b`` [R, out]."""
        return F.linear(operand, weight, bias)

    def into(self, gradient: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
        """``g W`` [R, in], added to ``total``."""
        return gradient @ weight if total is None else total.addmm_(gradient, weight)

    def columns(self, x: Tensor) -> Any:
        """Rows ``x`` [R, in] for ``weight``."""
        return x

    def weight(self, gradient: Tensor, columns: Any) -> Tensor:
        """``gᵀ x`` [out, in]."""
        found: Tensor = gradient.t() @ columns
        return found


class Later:
    """Where the weights' gradients wait while ``deferring``; who plays the schedule takes and runs them."""

    def __init__(self) -> None:
        self.deferring = False
        self._works: list[Work] = []

    def do(self, work: Work) -> None:
        """Run ``work`` now or keep it."""
        self._works.append(work) if self.deferring else work()

    def take(self) -> list[Work]:
        """What was put off, in order."""
        works, self._works = self._works, []
        return works


class Linear(nn.Module):
    """``x`` [R, in] → [R, out]; weight [out, in] as in ``torch.nn.Linear``."""

    def __init__(self, into: int, outof: int, *, bias: bool, owner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outof, into)) if owner is None else None
        self.bias = nn.Parameter(torch.empty(outof)) if bias else None
        self.around = Around()
        self.products = Products()
        self.later = Later()
        self._owner = (owner,)  # in a tuple, so that its weight is listed once, with the owner

    @classmethod
    def tied(cls, owner: nn.Module, *, bias: bool = False) -> Linear:
        """One that multiplies by the weight of ``owner``, an embedding, whatever that weight is by then."""
        table = owner.get_parameter("weight")
        return cls(table.shape[1], table.shape[0], bias=bias, owner=owner)

    @property
    def matrix(self) -> nn.Parameter:
        """The weight, its own or the owner's. Its gradient is delivered once per backward, and once by each owner."""
        (owner,) = self._owner
        if owner is not None:
            return owner.get_parameter("weight")
        assert self.weight is not None
        return self.weight

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Alone on its input."""
        out: Tensor = fan(x, self)[0]
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fan(x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
    """Each of ``linears``, which share what is around them, of rows ``x`` [R, in]."""
    found: tuple[Tensor, ...] = _Fan.apply(x, linears[0].matrix, linears)  # type: ignore[no-untyped-call]
    return found


def deliver(weight: Tensor, gradient: Tensor) -> None:
    """Hand the gradient of ``weight`` to whoever collects it (``weight.collect``), or add it to ``weight.grad``."""
    collect = getattr(weight, "collect", None)
    if collect is not None:
        collect(gradient)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad += gradient


_running_again: ContextVar[bool] = ContextVar("running_again", default=False)


@contextmanager
def running_again() -> Iterator[None]:
    """Within it linears keep their input as entered: who recomputes enters it anew before the backward as it is."""
    token = _running_again.set(True)
    try:
        yield
    finally:
        _running_again.reset(token)


class _Fan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor, linears: tuple[Linear, ...]) -> tuple[Tensor, ...]:
        ctx.linears, ctx.entered = linears, _running_again.get()
        around = linears[0].around
        whole = around.enter(x)
        ctx.save_for_backward(whole if ctx.entered else x)
        products, outs = linears[0].products, []
        operand = products.operand(whole)
        for linear in linears:
            early = None if around.partial else linear.bias
            y = around.leave(products.out(operand, linear.matrix, early))
            outs.append(y.add_(linear.bias) if around.partial and linear.bias is not None else y)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        linears: tuple[Linear, ...] = ctx.linears
        around, later, products = linears[0].around, linears[0].later, linears[0].products
        (kept,) = ctx.saved_tensors
        if later.deferring:  # else what is put off would hold the graph, and that the entry of the stage
            kept, gradients = kept.detach(), tuple(gradient.detach() for gradient in gradients)
        if ctx.entered:
            again: Wait = lambda: kept  # noqa: E731
        elif later.deferring:  # until then only the rank's own rows are held
            again = lambda: around.enter(kept)  # noqa: E731
        else:
            again = around.begin_again(kept)
        left = [around.left_gradient(gradient) for gradient in gradients]
        total: Tensor | None = None
        for linear, gradient in zip(linears, left, strict=True):
            total = products.into(gradient, linear.matrix, total)
        assert total is not None
        entered = around.begin_entered_gradient(total)
        del total
        outer = [None if one.bias is None else gradient for one, gradient in zip(linears, gradients, strict=True)]
        later.do(lambda: _weights(linears, again, inner=left, outer=outer))
        return entered(), None, None


@torch.no_grad()
def _weights(linears: tuple[Linear, ...], again: Wait, *, inner: list[Tensor], outer: list[Tensor | None]) -> None:
    """Gradients of weights and biases one after another; each may be let go before the next is made.

    ``inner`` gradients of the products, ``outer`` of the outputs that have a bias: of a sum over ranks each has its
    own rows.
    """
    products = linears[0].products
    columns = products.columns(again())
    for linear, product, output in zip(linears, inner, outer, strict=True):
        if linear.bias is not None and output is not None:
            deliver(linear.bias, output.sum(0))
        deliver(linear.matrix, products.weight(product, columns))
