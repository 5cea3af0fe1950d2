"""Low-rank adapters (LoRA) next to frozen linear layers, in two operations on one input.

    low_i = x A_iᵀ   [R, rank]            (``lower``: saves x)
    y_i   = x W_iᵀ + b_i + s · low_i B_iᵀ  (``raise_``: saves low)

    backward   dlow = s · g B   ·   dB = s · gᵀ low   ·   dA = dlowᵀ x   ·   dx = g W + dlow A

DoRA has a third operation, which trains magnitudes m [out]; n [out] are the norms of the rows of W + s · B A:

    z_i = x W_iᵀ + s · low_i B_iᵀ          (``raise_``, which computes n too)
    y_i = m / n · z_i + b_i                 (``rescale``: saves z and n)

    backward   dm = Σ g z / n   ·   dz = m / n · g          n is a constant: arXiv:2402.09353 §4.3

Several layers that are one in transformers share a factor A, which the first of them holds (``model/adapted.py``): its
low is multiplied by the B of each, and dlow is the sum over them.
Dropout of the adapter's input keeps x and a mask of one byte per element; x · mask / (1 − rate) is made again in the
backward. Every adapter draws a mask of its own, as in peft, and the same one under every layout (``dropout.py``).
W may be stored in few bits (QLoRA): it is dequantized before each product and freed after it (``quantized/``).
W and b are frozen parameters (``requires_grad`` is False): no gradient of them is computed, and dx only where a trained
layer lies below. Under tensor parallelism A is sharded like the input of its layer and B and m like the output, so that
the update is part of the sum that the layer sends anyway; a replicated weight gets partial gradients, which are reduced
with those of data parallelism (``layout/sharding.py``). Squared norms are summed over ranks that share a row of W.
Source: arXiv:2106.09685 §4.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.adapter import EMBEDDING, Adapter
from fivefold.model.adapted import has_adapter, map_linears, resolve_linear
from fivefold.model.spec import Model
from fivefold.trainer.model import embed_lora
from fivefold.trainer.model.dropout import ADAPTERS, AdapterDropout, apply_mask
from fivefold.trainer.model.linear import Linear, accumulate_grad, fused_linears, is_recomputing
from fivefold.trainer.model.operation import Run


class _Switch:
    """Turns all adapters on or off: a class attribute, as torch.compile breaks its graph at a ``ContextVar``."""

    is_on = True


@contextmanager
def disable_adapters() -> Iterator[None]:
    """Run linear layers without their adapters, as the base computes."""
    was_on, _Switch.is_on = _Switch.is_on, False
    try:
        yield
    finally:
        _Switch.is_on = was_on


def has_adapters_on() -> bool:
    """Tell whether layers run with their adapters."""
    return _Switch.is_on


def attach(blocks: nn.Module, *, head: Linear, table: nn.Embedding, model: Model, adapter: Adapter) -> None:
    """Add the adapter's weights, not initialized, to the layers that it targets.

    They are linear layers of ``blocks``, the output projection ``head`` and the ``table`` of the embedding.
    """
    place = ADAPTERS
    for modules in (*(dict(block.named_modules()) for block in blocks.children()), {"head.out": head}):
        linears = {
            name: linear
            for name, linear in modules.items()
            if isinstance(linear, Linear) and has_adapter(model, adapter, name)
        }
        for name, linear in linears.items():
            leader = linears[map_linears(model)[name].leader]
            _attach_to_linear(linear, leader, resolve_linear(model, adapter, name), place=place)
            place += linear is leader
    if adapter.has_target(EMBEDDING):
        embed_lora.attach_to_table(table, adapter)


def _attach_to_linear(linear: Linear, leader: Linear, adapter: Adapter, *, place: int) -> None:
    """Add the weights of ``adapter`` to a layer whose factor A ``leader`` holds; ``place``: of its draws of dropout."""
    out_features, in_features = linear.matrix.shape
    if linear is not leader:
        linear.follow(leader)
    else:
        linear.lora_a = nn.Parameter(torch.empty(adapter.rank, in_features))
        linear.lora_dropout = AdapterDropout(adapter.dropout, place=place) if adapter.dropout else None
    linear.lora_b = nn.Parameter(torch.empty(out_features, adapter.rank))
    if adapter.has_magnitudes:
        linear.lora_magnitude = nn.Parameter(torch.empty(out_features))
    linear.lora_scale = adapter.scale


def project(run: Run, name: str, x: Tensor, *linears: Linear, keys_B: Tensor | None = None) -> tuple[Tensor, ...]:
    """Run ``linears`` on rows ``x`` [R, in], with their adapters, as the operation ``name``.

    ``keys_B``: keys of the sequences, for dropout of the adapters' input; None: no dropout.
    With adapters it is two operations, because a recomputed block may end before the second: see ``RecomputedLayer``.
    Each layer with DoRA's magnitudes adds one, before which it may end too.
    """
    leaders = _list_leaders(linears) if _Switch.is_on else []
    if leaders:
        rows, *lows = run(f"{name}.lora_a", lower, x, keys_B, *leaders)  # followed by the masks of dropout
        outs = run(name, raise_, linears, x, rows, *lows)
        if (n_norms := len(outs) - len(linears)) > 0:
            norms = iter(outs[-n_norms:])
            outs = tuple(
                out if linear.lora_magnitude is None else run(f"{name}.lora_scale", rescale, linear, out, next(norms))
                for linear, out in zip(linears, outs[:-n_norms], strict=True)
            )
    else:
        outs = run(name, fused_linears, x, *linears)
    return outs


def lower(x: Tensor, keys_B: Tensor | None, *leaders: Linear) -> tuple[Tensor, ...]:
    """Project ``x`` down: return the rows that the layers read, low_i = x A_iᵀ [R, rank] of each, and masks of dropout.

    ``leaders``: the layers that hold a factor A.

    The rows are those of ``x``, or under sequence parallelism those of all ranks. ``keys_B``: keys of the sequences,
    from which masks are drawn; None: no dropout. Rows and masks have no gradient.
    """
    factor = None if x.requires_grad else leaders[0].lora_a  # autograd calls the backward if one input has a gradient
    return _Lower.apply(x, factor, keys_B, leaders)


def raise_(linears: tuple[Linear, ...], x: Tensor, rows: Tensor, *lows: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of ``linears`` on ``x``, of which ``rows`` are those of all ranks, with their adapters.

    ``lows``: the low-rank activations x·Aᵀ of the adapters, followed by the masks of their dropout if there is one.
    With magnitudes the outputs are those to ``rescale``, followed by the norms of the rows of each updated weight.
    """
    return _Raise.apply(x, rows, linears, *lows)


def rescale(linear: Linear, z: Tensor, norms: Tensor) -> Tensor:
    """Return the output of ``linear`` with DoRA: ``z`` [R, out] times m / n; ``norms``: n [out] in fp32."""
    return _Rescale.apply(z, norms, linear)


class _Lower(torch.autograd.Function):
    """Products with A. The gradient of x through them is part of that of ``_Raise``, which adds it in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _factor: Tensor | None, keys_B: Tensor | None, leaders: tuple[Linear, ...]
    ) -> tuple[Tensor, ...]:
        rows = leaders[0].hooks.enter(x)
        ctx.leaders, ctx.entered = leaders, is_recomputing()
        lows, masks = list[Tensor](), list[Tensor]()
        for linear in leaders:
            if linear.lora_dropout is not None and keys_B is not None:
                columns = linear.hooks.columns(rows.shape[1])
                masks.append(linear.lora_dropout.draw(keys_B, rows=len(rows), columns=columns))
            lows.append(_drop(rows, linear, masks[-1:]) @ _get_factors(linear)[0].t())
        ctx.save_for_backward(rows if ctx.entered else x, *masks)
        rows = rows.view_as(rows) if rows is x else rows
        ctx.mark_non_differentiable(rows, *masks)
        ctx.set_materialize_grads(False)  # no gradients of zeros of rows and masks
        return (rows, *lows, *masks)

    @staticmethod
    def backward(ctx: Any, _rows: Tensor, *gradients: Tensor) -> tuple[None, None, None, None]:
        saved, *masks = ctx.saved_tensors
        rows = saved if ctx.entered else ctx.leaders[0].hooks.begin_reenter(saved)()
        for index, linear in enumerate(ctx.leaders):
            dropped = _drop(rows, linear, masks[index : index + 1])
            accumulate_grad(_get_factors(linear)[0], gradients[index].t() @ dropped)
            del dropped
        return None, None, None, None


class _Raise(torch.autograd.Function):
    """Frozen products, to which those with B are added in place before they are reduced over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, linears: tuple[Linear, ...], *lows: Tensor) -> tuple[Tensor, ...]:
        ctx.linears, hooks, outs, norms = linears, linears[0].hooks, list[Tensor](), list[Tensor]()
        low_of = dict(zip(_list_leaders(linears), lows, strict=False))  # masks follow
        ctx.save_for_backward(*lows)
        for linear in linears:
            weight = linear.dense_matrix()
            is_rescaled = linear.lora_magnitude is not None
            if is_rescaled:
                norms.append(_compute_row_norms(weight, linear))
            y = linears[0].gemms.fprop(rows, weight, None if hooks.partial or is_rescaled else linear.bias)
            del weight
            if linear.lora_b is not None:
                y.addmm_(low_of[linear.lora_leader], linear.lora_b.t(), alpha=linear.lora_scale)
            if not is_rescaled:
                y = hooks.leave(y)
                y = y.add_(linear.bias) if hooks.partial and linear.bias is not None else y
            outs.append(y)
        constant = [y for linear, y in zip(linears, outs, strict=True) if linear.lora_b is None]
        ctx.mark_non_differentiable(*norms, *(() if ctx.needs_input_grad[0] else constant))
        return (*outs, *norms)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        linears: tuple[Linear, ...] = ctx.linears
        hooks, low_gradients, total = linears[0].hooks, dict[Linear, Tensor](), None
        leaders = _list_leaders(linears)
        low_of = dict(zip(leaders, ctx.saved_tensors, strict=False))
        masks = ctx.saved_tensors[len(leaders) :]
        last_of = {linear.lora_leader: linear for linear in linears}
        for linear, gradient in zip(linears, gradients, strict=False):  # norms have none
            inner = gradient if linear.lora_magnitude is not None else hooks.leave_backward(gradient)
            if ctx.needs_input_grad[0]:
                total = linears[0].gemms.dgrad(inner, linear.dense_matrix(), total)
            if linear.lora_b is None:
                continue
            (factor_a, factor_b), leader = _get_factors(linear), linear.lora_leader
            accumulate_grad(factor_b, (inner.t() @ low_of[leader]).mul_(linear.lora_scale))
            if leader in low_gradients:
                low_gradients[leader].addmm_(inner, factor_b, alpha=linear.lora_scale)
            else:
                low_gradients[leader] = (inner @ factor_b).mul_(linear.lora_scale)
            if total is None or linear is not last_of[leader]:
                continue
            low_gradient = low_gradients[leader]
            if masks:
                mask = masks[leaders.index(leader)]
                total.add_((low_gradient @ factor_a).mul_(mask).mul_(_compute_dropout_scale(leader)))
            else:
                total.addmm_(low_gradient, factor_a)
        wait = None if total is None else hooks.begin_enter_backward(total)
        del total
        of_lows = (low_gradients[leader] for leader in leaders)
        return (None if wait is None else wait(), None, None, *of_lows, *(None for _ in masks))


class _Rescale(torch.autograd.Function):
    """Products with m / n, before they are reduced over ranks; accumulates the gradient of m itself."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, norms: Tensor, linear: Linear) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(z, norms)
        y = linear.hooks.leave(z * _compute_row_scales(linear, norms))
        return y if linear.bias is None else y.add_(linear.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        linear: Linear = ctx.linear
        z, norms = ctx.saved_tensors
        magnitude = linear.get_parameter("lora_magnitude")
        inner = linear.hooks.leave_backward(gradient)
        accumulate_grad(magnitude, (inner * z).sum(0, dtype=torch.float32).div_(norms).to(magnitude.dtype))
        return inner * _compute_row_scales(linear, norms), None, None


def _compute_row_norms(weight: Tensor, linear: Linear) -> Tensor:
    """Return the norms [out] in fp32 of the rows of W + s · B A, over the columns of all ranks; ``weight``: W."""
    factor_a, factor_b = _get_factors(linear)
    updated = torch.addmm(weight, factor_b, factor_a, alpha=linear.lora_scale)
    norms = torch.linalg.vector_norm(updated, dim=1, dtype=torch.float32)
    return linear.hooks.sum_over_columns(norms.square_()).sqrt_() if linear.hooks.partial else norms


def merge_adapter(
    weight: Tensor,
    *,
    factor_a: Tensor,
    factor_b: Tensor,
    scale: float,
    magnitude: Tensor | None,
    is_embedding: bool = False,
) -> Tensor:
    """Return rows of a weight with its adapter merged, in fp32: W + s · B A, and with DoRA its rows times m / n.

    Weights and factors of experts are stacked. The table of an embedding has the update transposed.
    """
    if is_embedding:
        return torch.addmm(weight.float(), factor_a.float().t(), factor_b.float().t(), alpha=scale)
    if weight.dim() == 3:
        return torch.baddbmm(weight.float(), factor_b.float(), factor_a.float(), alpha=scale)
    updated = torch.addmm(weight.float(), factor_b.float(), factor_a.float(), alpha=scale)
    return updated if magnitude is None else updated.mul_((magnitude.float() / updated.norm(dim=1))[:, None])


def _compute_row_scales(linear: Linear, norms: Tensor) -> Tensor:
    """Return m / n [out] in the dtype of the layer's outputs."""
    magnitude = linear.get_parameter("lora_magnitude")
    return (magnitude / norms).to(magnitude.dtype)


def _drop(x: Tensor, linear: Linear, masks: Sequence[Tensor]) -> Tensor:
    """Return x · mask / (1 − rate) by the only mask of ``masks``, or x if there is none."""
    return apply_mask(x, masks[0], scale=_compute_dropout_scale(linear)) if masks else x


def _compute_dropout_scale(linear: Linear) -> float:
    assert linear.lora_dropout is not None
    return linear.lora_dropout.scale


def _list_leaders(linears: Sequence[Linear]) -> list[Linear]:
    """Return the layers that hold a factor A, which others may share."""
    return [linear for linear in linears if linear.lora_a is not None]


def _get_factors(linear: Linear) -> tuple[nn.Parameter, nn.Parameter]:
    assert linear.lora_leader.lora_a is not None
    assert linear.lora_b is not None
    return linear.lora_leader.lora_a, linear.lora_b
