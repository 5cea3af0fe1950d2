"""Low-rank adapters (LoRA) of routed experts, as peft adapts their stacked matrices, in two operations on one input.

    low = x A_eᵀ   [n, rank]                (``lower``: saves x)
    y_i = x W_i,eᵀ + s · low B_i,eᵀ          (``raise_``: saves low)      i: gate and up, or down alone

    backward   dlow = s · Σ g_i B_i,e   ·   dB_i,e = s · g_iᵀ low   ·   dA_e = dlowᵀ x   ·   dx = Σ g_i W_i,e + dlow A_e

Rows are sorted by their expert e (``experts.py``). Gate and up of an expert share A, as peft adapts the parameter in
which transformers has both. Unlike peft, no sum of W and B A is made. See ``lora.py`` for adapters of linear layers.
Source: huggingface/peft@0.21.2:src/peft/tuners/lora/layer.py, ParamWrapper.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fivefold.adapter import Adapter
from fivefold.trainer.model.experts import Experts, multiply_by_group, sum_by_group
from fivefold.trainer.model.linear import accumulate_grad
from fivefold.trainer.model.lora import has_adapters_on
from fivefold.trainer.model.operation import Run, exclude_from_graphs


def attach_to_experts(experts: Experts, adapter: Adapter) -> None:
    """Add the adapter's factors, not initialized, to the experts of a layer that ``adapter`` targets."""
    for shared, names in (("gate_up", experts.entries), ("down", ("down",))):
        if not adapter.has_target(target := f"experts.{shared}_proj"):
            continue
        resolved = adapter.resolve_target(target)
        n_experts, _, in_features = experts.get_parameter(names[0]).shape
        factor_a = nn.Parameter(torch.empty(n_experts, resolved.rank, in_features))
        experts.register_parameter(f"{shared}_lora_a", factor_a)
        for name in names:
            out_features = experts.get_parameter(name).shape[1]
            factor_b = nn.Parameter(torch.empty(n_experts, out_features, resolved.rank))
            experts.register_parameter(f"{name}_lora_b", factor_b)
        experts.lora_scales[shared] = resolved.scale


def gate_up(run: Run, experts: Experts, x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """Run ``experts.gate_up`` with its adapters, if it has some, as the operation ``moe.experts.gate_up``."""
    name = "moe.experts.gate_up"
    if "gate_up" not in experts.lora_scales or not has_adapters_on():
        return run(name, experts.gate_up, x, offsets)
    low = run(f"{name}.lora_a", lower, x, offsets, experts, "gate_up")
    return run(name, raise_, x, low, offsets, experts, "gate_up")


def project_down(run: Run, experts: Experts, m: Tensor, share: Tensor, offsets: Tensor) -> Tensor:
    """Run ``experts.project_down`` with its adapter, if it has one, as the operation ``moe.experts.down``."""
    name = "moe.experts.down"
    if "down" not in experts.lora_scales or not has_adapters_on():
        return run(name, experts.project_down, m, share, offsets)
    low = run(f"{name}.lora_a", lower, m, offsets, experts, "down")
    (raised,) = run(name, raise_, m, low, offsets, experts, "down", share)
    return cast(Tensor, raised)


@exclude_from_graphs
def lower(x: Tensor, offsets: Tensor, experts: Experts, shared: str) -> Tensor:
    """Return low = x A_eᵀ [n, rank] of rows ``x`` [n, in]; ``shared``: gate_up or down."""
    factor = None if x.requires_grad else experts.get_parameter(f"{shared}_lora_a")
    return _LowerExperts.apply(x, factor, offsets, experts, shared)


@exclude_from_graphs
def raise_(
    x: Tensor, low: Tensor, offsets: Tensor, experts: Experts, shared: str, share: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the outputs of the experts on rows ``x``, with their adapters; ``share``: routing weights, of down."""
    names = experts.entries if shared == "gate_up" else ("down",)
    outs: tuple[Tensor, ...] = _RaiseExperts.apply(x, low, offsets, experts, names)
    return tuple(experts.apply_bias(y, name, offsets, share) for y, name in zip(outs, names, strict=True))


class _LowerExperts(torch.autograd.Function):
    """Products with A. The gradient of x through them is part of that of ``_RaiseExperts``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _factor: Tensor | None, offsets: Tensor, experts: Experts, shared: str) -> Tensor:
        ctx.experts, ctx.name = experts, f"{shared}_lora_a"
        ctx.save_for_backward(x, offsets)
        return multiply_by_group(x, experts.get_parameter(ctx.name).mT, offsets, experts.ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        x, offsets = ctx.saved_tensors
        experts: Experts = ctx.experts
        _accumulate(experts, ctx.name, sum_by_group(gradient, x, offsets, experts.ends))
        return None, None, None, None, None


class _RaiseExperts(torch.autograd.Function):
    """Frozen products, to which those with B are added."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, low: Tensor, offsets: Tensor, experts: Experts, names: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        ctx.experts, ctx.names = experts, names
        ctx.save_for_backward(low, offsets)
        gemms, ends, outs = experts.gemms, experts.ends, list[Tensor]()
        operand = gemms.operand(x)
        for name in names:
            y = gemms.fprop(operand, experts.dense_weights(name), offsets, ends)
            factor_b = experts.get_parameter(f"{name}_lora_b")
            outs.append(y.add_(multiply_by_group(low, factor_b.mT, offsets, ends), alpha=_get_scale(experts, names)))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        experts: Experts = ctx.experts
        low, offsets = ctx.saved_tensors
        ends, scale = experts.ends, _get_scale(experts, ctx.names)
        total: Tensor | None = None
        low_gradient: Tensor | None = None
        for name, outer in zip(ctx.names, gradients, strict=True):
            gradient = outer.contiguous()  # grouped_mm does not support strides of 0
            if ctx.needs_input_grad[0]:
                total = experts.gemms.dgrad(gradient, experts.dense_weights(name), offsets, ends, total)
            factor_b = experts.get_parameter(f"{name}_lora_b")
            _accumulate(experts, f"{name}_lora_b", sum_by_group(gradient, low, offsets, ends).mul_(scale))
            product = multiply_by_group(gradient, factor_b, offsets, ends).mul_(scale)
            low_gradient = product if low_gradient is None else low_gradient.add_(product)
        if total is not None and low_gradient is not None:
            factor_a = experts.get_parameter(f"{_name_shared(ctx.names)}_lora_a")
            total.add_(multiply_by_group(low_gradient, factor_a, offsets, ends))
        return total, low_gradient, None, None, None


def _accumulate(experts: Experts, name: str, gradient: Tensor) -> None:
    """Accumulate the gradient of a factor, of which ``experts.copies`` ranks send the same rows."""
    accumulate_grad(experts.get_parameter(name), gradient.div_(experts.copies) if experts.copies > 1 else gradient)


def _get_scale(experts: Experts, names: tuple[str, ...]) -> float:
    return experts.lora_scales[_name_shared(names)]


def _name_shared(names: tuple[str, ...]) -> str:
    return "down" if names == ("down",) else "gate_up"
