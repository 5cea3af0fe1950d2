"""Our own linear layer: several on one input at once, the weights' gradients apart, now or later.

    y_i = x W_iᵀ + b_i        backward: dx = Σ g_i W_i   ·   dW_i = g_iᵀ x, db_i = Σ g_i

What is common to layers on one input, an input gathered over ranks, is done once, and travels while the other product
is computed. Zero-bubble schedules put dW off by ``WgradStore``; no forward has to run again for it.
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


class LinearHooks:
    """What happens to rows before and after a linear layer: nothing, unless a parallelism says otherwise.

    ``begin`` methods start something and return what waits for it. ``partial``: what is left is summed over ranks.
    """

    partial = False

    def enter(self, x: Tensor) -> Tensor:
        """Input rows as the matmul wants them."""
        return x

    def begin_reenter(self, x: Tensor) -> Wait:
        """The same in the backward, from the input that was kept."""
        return lambda: x

    def begin_enter_backward(self, gradient: Tensor) -> Wait:
        """Gradient of the entered rows, which may be overwritten → of the input rows."""
        return lambda: gradient

    def leave(self, y: Tensor) -> Tensor:
        """Rows of the product → rows of the output."""
        return y

    def leave_backward(self, gradient: Tensor) -> Tensor:
        """Gradient of the output rows → of the rows of the product."""
        return gradient


class LinearGemms:
    """The three GEMMs (fprop, dgrad, wgrad) of linear layers, in the width of their operands; ``train/float8`` has
    narrower ones.

    ``operand`` and ``columns`` make of an input what ``out`` and ``weight`` read, once for all layers on it.
    """

    def operand(self, x: Tensor) -> Any:
        """Rows ``x`` [R, in] for ``out``."""
        return x

    def fprop(self, operand: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x Wᵀ + b`` [R, out]."""
        return F.linear(operand, weight, bias)

    def dgrad(self, gradient: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
        """``g W`` [R, in], added to ``total``."""
        return gradient @ weight if total is None else total.addmm_(gradient, weight)

    def columns(self, x: Tensor) -> Any:
        """Rows ``x`` [R, in] for ``weight``."""
        return x

    def wgrad(self, gradient: Tensor, columns: Any) -> Tensor:
        """``gᵀ x`` [out, in]."""
        found: Tensor = gradient.t() @ columns
        return found


class WgradStore:
    """Where the weights' gradients wait while ``deferring``; who plays the schedule takes and runs them."""

    def __init__(self) -> None:
        self.deferring = False
        self._works: list[Work] = []

    def run_or_defer(self, work: Work) -> None:
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
        self.hooks = LinearHooks()
        self.gemms = LinearGemms()
        self.wgrad_store = WgradStore()
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
        out: Tensor = fused_linears(x, self)[0]
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fused_linears(x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
    """Each of ``linears``, which share what is around them, of rows ``x`` [R, in]."""
    found: tuple[Tensor, ...] = _FusedLinears.apply(x, linears[0].matrix, linears)  # type: ignore[no-untyped-call]
    return found


def accumulate_grad(weight: Tensor, gradient: Tensor) -> None:
    """Hand the gradient of ``weight`` to whoever collects it (``weight.collect``), or add it to ``weight.grad``."""
    collect = getattr(weight, "collect", None)
    if collect is not None:
        collect(gradient)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad += gradient


_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """Within it linears keep their input as entered: who recomputes enters it anew before the backward as it is."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


class _FusedLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor, linears: tuple[Linear, ...]) -> tuple[Tensor, ...]:
        ctx.linears, ctx.entered = linears, _recomputing.get()
        hooks = linears[0].hooks
        whole = hooks.enter(x)
        ctx.save_for_backward(whole if ctx.entered else x)
        gemms, outs = linears[0].gemms, []
        operand = gemms.operand(whole)
        for linear in linears:
            early = None if hooks.partial else linear.bias
            y = hooks.leave(gemms.fprop(operand, linear.matrix, early))
            outs.append(y.add_(linear.bias) if hooks.partial and linear.bias is not None else y)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        linears: tuple[Linear, ...] = ctx.linears
        hooks, wgrad_store, gemms = linears[0].hooks, linears[0].wgrad_store, linears[0].gemms
        (kept,) = ctx.saved_tensors
        if wgrad_store.deferring:  # else what is put off would hold the graph, and that the entry of the stage
            kept, gradients = kept.detach(), tuple(gradient.detach() for gradient in gradients)
        if ctx.entered:
            again: Wait = lambda: kept  # noqa: E731
        elif wgrad_store.deferring:  # until then only the rank's own rows are held
            again = lambda: hooks.enter(kept)  # noqa: E731
        else:
            again = hooks.begin_reenter(kept)
        left = [hooks.leave_backward(gradient) for gradient in gradients]
        total: Tensor | None = None
        for linear, gradient in zip(linears, left, strict=True):
            total = gemms.dgrad(gradient, linear.matrix, total)
        assert total is not None
        entered = hooks.begin_enter_backward(total)
        del total
        outer = [None if one.bias is None else gradient for one, gradient in zip(linears, gradients, strict=True)]
        wgrad_store.run_or_defer(lambda: _weights(linears, again, inner=left, outer=outer))
        return entered(), None, None


@torch.no_grad()
def _weights(linears: tuple[Linear, ...], again: Wait, *, inner: list[Tensor], outer: list[Tensor | None]) -> None:
    """Gradients of weights and biases one after another; each may be let go before the next is made.

    ``inner`` gradients of the GEMMs, ``outer`` of the outputs that have a bias: of a sum over ranks each has its
    own rows.
    """
    gemms = linears[0].gemms
    columns = gemms.columns(again())
    for linear, product, output in zip(linears, inner, outer, strict=True):
        if linear.bias is not None and output is not None:
            accumulate_grad(linear.bias, output.sum(0))
        accumulate_grad(linear.matrix, gemms.wgrad(product, columns))
