"""Linear layers, fused if they share an input; weight gradients are computed separately from dx, at once or deferred.

    y_i = x W_iᵀ + b_i        backward: dx = Σ g_i W_i   ·   dW_i = g_iᵀ x, db_i = Σ g_i

Layers on one input gather it over ranks once, and the gather of the backward overlaps with the dx GEMMs. Zero-bubble
schedules defer dW through ``WgradStore``, without running the forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.trainer.model.dropout import AdapterDropout
from fivefold.trainer.model.float8.cast import Cast, widen
from fivefold.trainer.model.operation import exclude_from_graphs
from fivefold.trainer.model.quantized.weight import QuantizedWeight

Work = Callable[[], None]
Wait = Callable[[], Tensor]
Exchange = Callable[[Tensor], Tensor]
Gather = Callable[[Sequence[Tensor]], list[Tensor]]


class LinearHooks:
    """Calls before and after the GEMMs of a linear layer: no-ops here, collectives under tensor parallelism.

    ``begin_`` methods start a collective and return a function that waits for it and gives the result. ``partial``:
    the output is summed over ranks (row-parallel), so that the bias is added after ``leave``.
    """

    partial = False

    def rows(self, number: int) -> int:
        """Return the number of rows that the layer returns for ``number`` input rows on this rank."""
        return number

    def columns(self, number: int) -> range:
        """Return the columns of the full input that this rank's input of ``number`` columns has."""
        return range(number)

    def enter(self, x: Tensor) -> Tensor:
        """Return the rows for the GEMM: under sp, the input rows gathered over ranks."""
        return x

    def operand(self, x: Tensor, gemms: LinearGemms) -> Any:
        """Return the operand of ``fprop``: cast before the gather if ``gemms`` supports it, so that less is sent."""
        return gemms.operand(self.enter(x))

    def begin_reenter(self, x: Tensor) -> Wait:
        """Start to gather the saved input again in the backward, as ``enter`` did in the forward."""
        return lambda: x

    def begin_enter_backward(self, gradient: Tensor) -> Wait:
        """Start the backward of ``enter``: gradient of its output → of its input. ``gradient`` may be overwritten."""
        return lambda: gradient

    def leave(self, y: Tensor) -> Tensor:
        """Return the layer's output rows: those of the GEMM, reduced over ranks if ``partial``."""
        return y

    def sum_over_columns(self, squares: Tensor) -> Tensor:
        """Return sums over the weight's columns of one number per row: of those of all ranks, if ``partial``."""
        return squares

    def leave_backward(self, gradient: Tensor) -> Tensor:
        """Run the backward of ``leave``: gradient of its output → of its input."""
        return gradient


class GradBuffer(NamedTuple):
    """Buffer into which a weight's gradient may be written: ``sums`` [out, in]. ``fresh``: it holds no gradient yet."""

    sums: Tensor
    fresh: bool


class LinearGemms:
    """The three GEMMs (fprop, dgrad, wgrad) of a linear layer in the dtype of their operands.

    ``model/float8`` has fp8 ones. ``operand`` and ``columns`` prepare an input for ``fprop`` and ``wgrad``, once for
    all layers on it. ``travels``: the operand can be gathered instead of the rows. ``adds``: supports ``add_wgrad``.
    """

    travels, adds = False, True

    def operand(self, x: Tensor) -> Any:
        """Prepare rows ``x`` [R, in] for ``fprop``: unchanged here."""
        return x

    def shared_operand(self, x: Tensor, *, agree: Exchange, gather: Gather) -> Any:
        """Return ``operand`` of all ranks' rows from this rank's ``x``, if ``travels``.

        ``agree``: takes the maximum over ranks; ``gather``: gathers the rows of all ranks, of byte tensors.
        """
        raise NotImplementedError

    def fprop(self, operand: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x Wᵀ + b`` [R, out]."""
        return F.linear(operand, weight, bias)

    def dgrad(self, gradient: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
        """Return ``g W`` [R, in], added to ``total`` in place if given."""
        return gradient @ weight if total is None else total.addmm_(gradient, weight)

    def columns(self, x: Tensor) -> Any:
        """Return the input ``x`` [R, in] in the format that ``wgrad`` and ``add_wgrad`` take: unchanged here."""
        return x

    def wgrad(self, gradient: Tensor, columns: Any) -> Tensor | Cast:
        """Return the weight gradient ``gᵀ x`` [out, in] of ``gradient`` g [R, out]; ``columns``: x as prepared."""
        return gradient.t() @ columns

    def add_wgrad(self, gradient: Tensor, columns: Tensor, buffer: GradBuffer) -> None:
        """Add the weight gradient (see ``wgrad``) to ``buffer``, or write it there if the buffer is fresh."""
        if buffer.fresh:
            torch.mm(gradient.t(), columns, out=buffer.sums)
        else:
            buffer.sums.addmm_(gradient.t(), columns)


class WgradStore:
    """Queue of deferred weight gradients (zero bubble's W): filled while ``deferring``, run by the pipeline runtime."""

    def __init__(self) -> None:
        self.deferring = False
        self._works: list[Work] = []

    def run_or_defer(self, work: Work) -> None:
        """Run ``work`` at once, or queue it while ``deferring``."""
        self._works.append(work) if self.deferring else work()

    def take(self) -> list[Work]:
        """Empty the queue and return its works in order."""
        works, self._works = self._works, []
        return works


class Linear(nn.Module):
    """Linear layer [R, in] → [R, out]; weight [out, in] as in ``torch.nn.Linear``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        owner: nn.Module | None = None,
        is_low_precision: bool = True,
    ) -> None:
        super().__init__()
        self.is_low_precision = is_low_precision  # its GEMMs are in fp8 if the job's recipe has fp8
        self.weight = nn.Parameter(torch.empty(out_features, in_features)) if owner is None else None
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.hooks = LinearHooks()
        self.gemms = LinearGemms()
        self.wgrad_store = WgradStore()
        self.token: Tensor | None = None
        self.compiled_call: CompiledCall | None = None  # the call for compiled code; None: the graph breaks here
        self.lora_a: nn.Parameter | None = None  # factors [rank, in] and [out, rank] of its adapter (``lora.py``)
        self.lora_b: nn.Parameter | None = None
        self.lora_magnitude: nn.Parameter | None = None  # [out], of DoRA
        self.lora_scale = 0.0
        self.lora_dropout: AdapterDropout | None = None  # of the adapter's input, in training
        self.quantized: QuantizedWeight | None = None  # the scales of its weight, if that is stored in few bits
        self._owner = (owner,)  # in a tuple, so that torch does not register the owner as a submodule of this one
        self._lora_leader: tuple[Linear, ...] = ()

    @classmethod
    def tie(cls, owner: nn.Module, *, bias: bool = False) -> Linear:
        """Build a layer without a weight of its own, which reads that of ``owner``, an embedding, at every use."""
        table = owner.get_parameter("weight")
        return cls(table.shape[1], table.shape[0], bias=bias, owner=owner)

    @property
    def lora_leader(self) -> Linear:
        """Return the layer that holds the factor A of this layer's adapter: itself, unless it follows another."""
        return self._lora_leader[0] if self._lora_leader else self

    def follow(self, leader: Linear) -> None:
        """Share the factor A of ``leader``."""
        self._lora_leader = (leader,)

    @property
    def matrix(self) -> nn.Parameter:
        """Return the weight [out, in], this layer's or the owner's; a tied one gets gradients from both ends."""
        weight = self._parameters.get("weight")  # called often, and ``self.weight`` looks in four places
        (owner,) = self._owner
        if weight is None:
            assert owner is not None
            return owner.get_parameter("weight")
        return weight

    def dense_matrix(self) -> Tensor:
        """Return the weight [out, in] as GEMMs read it: dequantized, if it is stored in few bits."""
        return self.matrix if self.quantized is None else self.quantized.dequantize(self.matrix)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: [R, in] → [R, out]."""
        return fused_linears(x, self)[0]


CompiledCall = Callable[[Tensor, tuple[Linear, ...]], tuple[Tensor, ...]]


def fused_linears(x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
    """Compute the outputs [R, out] of all ``linears`` on rows ``x`` [R, in].

    The first layer's hooks, GEMMs and store of weight gradients serve all of them.
    """
    compiled_call = linears[0].compiled_call
    if compiled_call is not None and torch.compiler.is_compiling():
        return compiled_call(x, linears)
    return _apply_eagerly(x, linears)


@exclude_from_graphs
def _apply_eagerly(x: Tensor, linears: tuple[Linear, ...]) -> tuple[Tensor, ...]:
    weight = None
    if not x.requires_grad:  # a trained one, if there is any
        weight = next((linear.matrix for linear in linears if linear.matrix.requires_grad), linears[0].matrix)
    return _FusedLinears.apply(x, weight, linears)


def accumulate_grad(weight: Tensor, gradient: Tensor | Cast) -> None:
    """Pass ``gradient`` to ``weight.collect`` (a ZeRO bucket) if it has one, else add it to ``weight.grad``."""
    collect = getattr(weight, "collect", None)
    if collect is not None:
        collect(gradient)
        return
    gradient = widen(gradient, weight.dtype) if isinstance(gradient, Cast) else gradient
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad += gradient


_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


@contextmanager
def mark_recomputation() -> Iterator[None]:
    """Mark a recomputed forward: linears save their input as gathered, so that the backward does not gather again."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def is_recomputing() -> bool:
    """Tell whether this forward is marked by ``mark_recomputation``."""
    return _recomputing.get()


class _FusedLinears(torch.autograd.Function):
    """Linear layers on one input; the backward accumulates dW and db itself. If all are frozen, x is not saved.

    ``_weight`` makes autograd call the backward if ``x`` does not require a gradient; else it is None, because autograd
    spends time on a weight even if it gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor | None, linears: tuple[Linear, ...]) -> tuple[Tensor, ...]:
        ctx.linears, ctx.entered = linears, _recomputing.get()
        saved_input = (
            linears[0].hooks.enter(x) if ctx.entered else x
        )  # dW reads all ranks' rows themselves, not their casts
        ctx.frozen = not any(linear.matrix.requires_grad for linear in linears)
        if not ctx.frozen:
            ctx.save_for_backward(saved_input)
        return outputs(saved_input, linears, entered=ctx.entered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        if ctx.frozen:
            hooks = ctx.linears[0].hooks
            return begin_input_gradient([hooks.leave_backward(g) for g in gradients], ctx.linears)(), None, None
        (saved_input,) = ctx.saved_tensors
        needed = ctx.needs_input_grad[0]
        return input_gradient(saved_input, gradients, ctx.linears, entered=ctx.entered, needed=needed), None, None


def outputs(x: Tensor, linears: tuple[Linear, ...], *, entered: bool = False) -> tuple[Tensor, ...]:
    """Return the outputs of ``linears`` on this rank's rows ``x``, or (``entered``) on those of all ranks."""
    hooks, gemms, results = linears[0].hooks, linears[0].gemms, []
    operand = gemms.operand(x) if entered else hooks.operand(x, gemms)
    for linear in linears:
        bias = None if hooks.partial else linear.bias
        y = hooks.leave(gemms.fprop(operand, linear.dense_matrix(), bias))
        results.append(y.add_(linear.bias) if hooks.partial and linear.bias is not None else y)
    return tuple(results)


def input_gradient(
    kept: Tensor,
    gradients: tuple[Tensor, ...],
    linears: tuple[Linear, ...],
    *,
    entered: bool = False,
    needed: bool = True,
    writes_into_buffers: bool = False,
) -> Tensor | None:
    """Return the gradient of the input ``kept`` (of all ranks if ``entered``); accumulate those of weights and biases.

    ``needed``: whether anything below is trained; else the gradient is not computed, and None. ``writes_into_buffers``:
    write weight gradients directly into their accumulation buffers (``GradBuffer``), if any.
    """
    hooks, wgrad_store = linears[0].hooks, linears[0].wgrad_store
    if wgrad_store.deferring:  # detached, because a deferred dW would hold the graph down to the input of the stage
        kept = kept.detach()
        gradients = tuple(gradient.detach() for gradient in gradients)
    if entered:
        wait_input: Wait = lambda: kept  # noqa: E731
    elif wgrad_store.deferring:  # gather when dW is computed; until then hold only this rank's rows
        wait_input = lambda: hooks.enter(kept)  # noqa: E731
    else:
        wait_input = hooks.begin_reenter(kept)
    product_gradients = [hooks.leave_backward(gradient) for gradient in gradients]
    wait_gradient = begin_input_gradient(product_gradients, linears) if needed else None
    output_gradients = [
        None if layer.bias is None else gradient for layer, gradient in zip(linears, gradients, strict=True)
    ]
    wgrad_store.run_or_defer(
        lambda: _accumulate_grads(
            linears,
            wait_input,
            inner=product_gradients,
            outer=output_gradients,
            writes_into_buffers=writes_into_buffers,
        )
    )
    return None if wait_gradient is None else wait_gradient()


def begin_input_gradient(gradients: Sequence[Tensor], linears: tuple[Linear, ...]) -> Wait:
    """Compute dx = Σ g_i W_i of the rows inside the layers, and start its way to this rank's rows.

    ``gradients``: gradients of the outputs.
    """
    total: Tensor | None = None
    for linear, gradient in zip(linears, gradients, strict=True):
        total = linears[0].gemms.dgrad(gradient, linear.dense_matrix(), total)
    assert total is not None
    return linears[0].hooks.begin_enter_backward(total)


def _accumulate_grads(
    linears: tuple[Linear, ...],
    wait_input: Wait,
    *,
    inner: list[Tensor],
    outer: list[Tensor | None],
    writes_into_buffers: bool,
) -> None:
    """Compute and accumulate weight and bias gradients one by one, so that each can be freed before the next.

    ``wait_input``: waits for the input. ``inner``: gradients of the GEMM outputs; ``outer``: gradients of the layers'
    outputs, for the biases, because under row-parallel sp each rank has only its rows of them. None: no bias.
    """
    gemms = linears[0].gemms
    columns = gemms.columns(wait_input())
    # all buffers first: after a GEMM a CPU's caches hold none of this
    buffers = [_get_grad_buffer(linear.matrix) if writes_into_buffers and gemms.adds else None for linear in linears]
    for linear, product, output, buffer in zip(linears, inner, outer, buffers, strict=True):
        if not linear.matrix.requires_grad:
            continue
        if linear.bias is not None and output is not None:
            accumulate_grad(linear.bias, output.sum(0))
        if buffer is None:
            accumulate_grad(linear.matrix, gemms.wgrad(product, columns))
        else:
            gemms.add_wgrad(product, columns, buffer)
    for linear, buffer in zip(linears, buffers, strict=True):
        if buffer is not None:
            linear.matrix.collect(None)  # type: ignore[attr-defined]


def _get_grad_buffer(weight: Tensor) -> GradBuffer | None:
    buffer: Callable[[Tensor], GradBuffer | None] | None = getattr(weight, "grad_buffer", None)
    return None if buffer is None else buffer(weight)
