"""Gated activations, forward and backward in one kernel each. Saved: gate, up (and the share of each row)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.model.activations import ActivationName
from fivefold.trainer.model.kernels import activations as eager
from fivefold.trainer.model.kernels import kinds
from fivefold.trainer.model.kernels.activations import FUNCTIONS
from fivefold.trainer.model.kernels.fused.launch import ELEMENTS, round_up_to_power_of_two
from fivefold.units import ceil_div

WALK = 1024  # maximum columns at a time of a kernel that loops along a row


class _FusedPlain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor, kind: int) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(up)
        return plain_forward(up, kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (up,) = ctx.saved_tensors
        return plain_backward(grad, up, ctx.kind), None


class _FusedGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: int) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(gate, up)
        return gate_forward(gate, up, kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        return *gate_backward(grad, gate, up, ctx.kind), None


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, share: Tensor, kind: int) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(gate, up, share)
        return weighted_forward(gate, up, share, kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gate, up, share = ctx.saved_tensors
        return *weighted_backward(grad, gate, up, share, ctx.kind), None


def activate(up: Tensor, name: ActivationName) -> Tensor:
    """Compute ``activate`` of ``kernels/activations.py`` in one kernel, if the activation has one."""
    kind = FUNCTIONS[name].kind
    if kind is None:
        return eager.activate(up, name)
    return _FusedPlain.apply(up, kind)


def activate_gated(gate: Tensor, up: Tensor, name: ActivationName) -> Tensor:
    """Compute ``activate_gated`` of ``kernels/activations.py`` in one kernel, if the activation has one."""
    kind = FUNCTIONS[name].kind
    if kind is None:
        return eager.activate_gated(gate, up, name)
    return _FusedGated.apply(gate, up, kind)


def weighted_swiglu(gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
    """Compute ``weighted_swiglu`` of ``kernels/activations.py`` in one kernel."""
    return _Weighted.apply(gate, up, share, kinds.SILU)


def input_weighted_swiglu(gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
    """Compute ``input_weighted_swiglu`` of ``kernels/activations.py`` in one kernel."""
    return _Weighted.apply(gate, up, share, kinds.INPUT_WEIGHTED_SILU)


def weighted_clamped_swiglu(gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
    """Compute ``weighted_clamped_swiglu`` of ``kernels/activations.py`` in one kernel."""
    return _Weighted.apply(gate, up, share, kinds.CLAMPED_SWIGLU)


@torch.library.custom_op("fivefold::plain", mutates_args=())
def plain_forward(up: Tensor, kind: int) -> Tensor:
    """Return f(up)."""
    from fivefold.trainer.model.kernels.triton import activations

    y = torch.empty_like(up, memory_format=torch.contiguous_format)
    if y.numel():
        activations.plain_forward[(ceil_div(y.numel(), ELEMENTS),)](
            up.contiguous(), y, y.numel(), KIND=kind, BLOCK=ELEMENTS, num_warps=8
        )
    return y


plain_forward.register_fake(lambda up, *_: torch.empty_like(up, memory_format=torch.contiguous_format))


@torch.library.custom_op("fivefold::plain_backward", mutates_args=())
def plain_backward(gradient: Tensor, up: Tensor, kind: int) -> Tensor:
    """Return the gradient of up."""
    from fivefold.trainer.model.kernels.triton import activations

    up_gradient = torch.empty_like(up, memory_format=torch.contiguous_format)
    if up_gradient.numel():
        activations.plain_backward[(ceil_div(up_gradient.numel(), ELEMENTS),)](
            gradient.contiguous(),
            up.contiguous(),
            up_gradient,
            up_gradient.numel(),
            KIND=kind,
            BLOCK=ELEMENTS,
            num_warps=8,
        )
    return up_gradient


plain_backward.register_fake(lambda gradient, up, *_: torch.empty_like(up, memory_format=torch.contiguous_format))


@torch.library.custom_op("fivefold::gated", mutates_args=())
def gate_forward(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    """Return f(gate) · up."""
    from fivefold.trainer.model.kernels.triton import activations

    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if y.numel():
        activations.gated_forward[(ceil_div(y.numel(), ELEMENTS),)](
            gate.contiguous(), up.contiguous(), y, y.numel(), KIND=kind, BLOCK=ELEMENTS, num_warps=8
        )
    return y


gate_forward.register_fake(lambda gate, *_: torch.empty_like(gate, memory_format=torch.contiguous_format))


@torch.library.custom_op("fivefold::gated_backward", mutates_args=())
def gate_backward(gradient: Tensor, gate: Tensor, up: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    from fivefold.trainer.model.kernels.triton import activations

    gradients = _pair(gate)
    if gate.numel():
        activations.gated_backward[(ceil_div(gate.numel(), ELEMENTS),)](
            gradient.contiguous(),
            gate.contiguous(),
            up.contiguous(),
            *gradients,
            gate.numel(),
            KIND=kind,
            BLOCK=ELEMENTS,
            num_warps=8,
        )
    return gradients


gate_backward.register_fake(lambda gradient, gate, *_: _pair(gate))


@torch.library.custom_op("fivefold::weighted", mutates_args=())
def weighted_forward(gate: Tensor, up: Tensor, share: Tensor, kind: int) -> Tensor:
    """Return f(gate) · up · share; ``gate``, ``up`` [n, F], ``share`` [n]."""
    from fivefold.trainer.model.kernels.triton import activations

    y, (rows, width) = torch.empty_like(gate, memory_format=torch.contiguous_format), gate.shape
    block = min(ELEMENTS, round_up_to_power_of_two(width))
    if y.numel():
        activations.weighted_forward[(rows, ceil_div(width, block))](
            gate.contiguous(), up.contiguous(), share.contiguous(), y, width, KIND=kind, BLOCK=block, num_warps=4
        )
    return y


weighted_forward.register_fake(lambda gate, *_: torch.empty_like(gate, memory_format=torch.contiguous_format))


@torch.library.custom_op("fivefold::weighted_backward", mutates_args=())
def weighted_backward(
    gradient: Tensor, gate: Tensor, up: Tensor, share: Tensor, kind: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate, up and share."""
    from fivefold.trainer.model.kernels.triton import activations

    gradients, (rows, width) = (*_pair(gate), torch.empty_like(share)), gate.shape
    if rows:
        activations.weighted_backward[(rows,)](
            gradient.contiguous(),
            gate.contiguous(),
            up.contiguous(),
            share.contiguous(),
            *gradients,
            width,
            KIND=kind,
            BLOCK=min(WALK, round_up_to_power_of_two(width)),
            num_warps=4,
        )
    return gradients


weighted_backward.register_fake(lambda gradient, gate, up, share, *_: (*_pair(gate), torch.empty_like(share)))


def _pair(gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return two empty contiguous tensors like ``gate``."""
    first, second = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    return first, second
