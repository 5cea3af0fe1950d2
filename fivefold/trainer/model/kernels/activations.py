"""Activations of feed-forward layers as autograd functions: they save their inputs and compute the activation again.

plain     act(up)                gated              act(gate) · up; act: silu, gelu, gelu_tanh, relu2 = max(x, 0)²
weighted_plain     act(up) · share of a row (experts without a gate)
weighted_gated     act(gate) · up · share of a row, for any activation
weighted_swiglu    silu(gate) · up · share of a row (experts)
input_weighted_swiglu    silu(share · gate) · share · up, for experts whose input is weighted
clamped   g σ(1.702 g) (u + 1), g = gate up to 7, u = up from −7 to 7 (gpt-oss, arXiv:2508.10925)
limited   act(g) · u · share, g = gate up to a limit, u = up within ± it (Hy 4, DeepSeek-V4)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.activations import ACTIVATIONS, Activation, ActivationName
from fivefold.trainer.model.kernels import kinds

GAIN, LIMIT = 1.702, 7.0
XIELU_BETA, XIELU_EPSILON = 0.5, -1e-6  # transformers 5.23:src/transformers/activations.py, XIELUActivation
GateActivation = Literal["sigmoid", "softplus"]


class ActivationFunction(NamedTuple):
    """An activation: ``of`` maps x to act(x), ``gradient`` maps (∂/∂act(x), x) to ∂/∂x, both as new tensors.

    ``kind``: its number for the Triton kernels.
    """

    of: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    kind: int | None


def _make_gelu(approximate: str, kind: int) -> ActivationFunction:
    return ActivationFunction(
        lambda x: F.gelu(x, approximate=approximate),
        lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate=approximate),
        kind,
    )


def _from_formulas(activation: Activation) -> ActivationFunction:
    """Return the function of an activation that has no kernels of its own."""
    value, derivative = activation.value, activation.derivative
    assert value is not None
    assert derivative is not None
    return ActivationFunction(value, lambda g, x: derivative(x).mul_(g), None)


# activations of dense feed-forward layers
FUNCTIONS: dict[ActivationName, ActivationFunction] = {
    "silu": ActivationFunction(F.silu, lambda g, x: torch.ops.aten.silu_backward(g, x), kinds.SILU),
    "gelu": _make_gelu("none", kinds.GELU),
    "gelu_tanh": _make_gelu("tanh", kinds.GELU_TANH),
    "gelu_new": _make_gelu("tanh", kinds.GELU_TANH),
    "gelu_fast": _make_gelu("tanh", kinds.GELU_TANH),
    "relu2": ActivationFunction(
        lambda x: F.relu(x).square_(), lambda g, x: F.relu(x).mul_(g).mul_(2), kinds.SQUARED_RELU
    ),
    **{name: _from_formulas(record) for name, record in ACTIVATIONS.items() if record.value is not None},
}


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor, activation: ActivationFunction) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(up)
        return activation.of(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (up,) = ctx.saved_tensors
        return ctx.activation.gradient(grad, up), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: ActivationFunction) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return activation.of(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        up_grad = ctx.activation.of(gate).mul_(grad)
        return ctx.activation.gradient(grad * up, gate), up_grad, None


def activate(up: Tensor, name: ActivationName) -> Tensor:
    """Return ``act(up)`` for the activation ``name``."""
    return _Plain.apply(up, FUNCTIONS[name])


class _Xielu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        ctx.save_for_backward(up, alpha_p, alpha_n)
        out = up.clamp(max=XIELU_EPSILON).expm1_().sub_(up).mul_(F.softplus(alpha_n.float()) + XIELU_BETA)
        out.masked_fill_(up > 0, 0).add_(up, alpha=XIELU_BETA)
        return out.add_(up.clamp(min=0).square_().mul_(F.softplus(alpha_p.float())))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        up, alpha_p, alpha_n = ctx.saved_tensors
        part = up.clamp(max=XIELU_EPSILON).expm1_().sub_(up).masked_fill_(up > 0, 0).mul_(grad)
        negative_grad = _sum_number(part, alpha_n)
        del part
        part = up.clamp(min=0).square_().mul_(grad)
        positive_grad = _sum_number(part, alpha_p)
        del part
        slope = up.clamp(max=XIELU_EPSILON).expm1_().mul_(F.softplus(alpha_n.float()) + XIELU_BETA)
        slope.masked_fill_(up > 0, 0).add_(up.clamp(min=0).mul_(2 * F.softplus(alpha_p.float())))
        return slope.add_(XIELU_BETA).mul_(grad), positive_grad, negative_grad


def _sum_number(part: Tensor, alpha: Tensor) -> Tensor:
    """Return the gradient of ``alpha`` [1], whose softplus multiplies the sum of ``part``."""
    gradient: Tensor = part.sum(dtype=torch.float32) * alpha.float().sigmoid()
    return gradient.to(alpha.dtype)


def xielu(up: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """Return xIELU of ``up`` (arXiv:2411.13010); ``alpha_p``, ``alpha_n`` [1]: inverse softplus of α_p and α_n − β."""
    return _Xielu.apply(up, alpha_p, alpha_n)


class _OutputGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, name: GateActivation) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.name = name
        factor = _GATES[name][0](gate)
        return factor.mul_(x) if gate.shape == x.shape else _scale_heads(x, factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gate = ctx.saved_tensors
        function, gradient = _GATES[ctx.name]
        if gate.shape == x.shape:
            factor = function(gate)
            gate_grad = gradient(grad * x, gate, factor)
            return factor.mul_(grad), gate_grad, None
        factor_grad = (grad * x).unflatten(-1, (gate.shape[-1], -1)).sum(-1)
        factor = function(gate)
        gate_grad = gradient(factor_grad, gate, factor)
        del factor_grad
        return _scale_heads(grad, factor), gate_grad, None


# function of a gate, and its gradient from (∂/∂factor, gate, factor)
_GATES: dict[GateActivation, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "sigmoid": (torch.sigmoid, lambda grad, gate, factor: torch.ops.aten.sigmoid_backward(grad, factor)),
    "softplus": (F.softplus, lambda grad, gate, factor: torch.ops.aten.softplus_backward(grad, gate, 1, 20)),
}


def _scale_heads(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply each of the N heads of ``x`` [R, N · H] by its ``factor`` [R, N]."""
    scaled: Tensor = x.unflatten(-1, (factor.shape[-1], -1)) * factor[..., None]
    return scaled.flatten(-2)


def gate_output(x: Tensor, gate: Tensor, name: GateActivation) -> Tensor:
    """Return ``x`` [R, N · H] times the activation ``name`` of ``gate``, [R, N · H], or [R, N], one for each head."""
    return _OutputGate.apply(x, gate, name)


def activate_gated(gate: Tensor, up: Tensor, name: ActivationName) -> Tensor:
    """Return ``act(gate) · up`` for the activation ``name`` (Shazeer, arXiv:2002.05202)."""
    return _Gated.apply(gate, up, FUNCTIONS[name])


class _WeightedPlain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor, share: Tensor, activation: ActivationFunction) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(up, share)
        return activation.of(up).mul_(share[:, None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        up, share = ctx.saved_tensors
        share_gradient = ctx.activation.of(up).mul_(gradient).sum(-1, dtype=share.dtype)
        weighted = gradient.clone().mul_(share[:, None])
        return ctx.activation.gradient(weighted, up), share_gradient, None


def weighted_plain(up: Tensor, share: Tensor, name: ActivationName) -> Tensor:
    """Return ``act(up) · share``; ``up`` [n, F], ``share`` [n] in fp32."""
    return _WeightedPlain.apply(up, share, FUNCTIONS[name])


class _WeightedGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, share: Tensor, activation: ActivationFunction) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate, up, share)
        return activation.of(gate).mul_(up).mul_(share[:, None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gate, up, share = ctx.saved_tensors
        activated = ctx.activation.of(gate)
        share_gradient = (gradient * up).mul_(activated).sum(-1, dtype=share.dtype)
        weighted = gradient.clone().mul_(share[:, None])
        up_gradient = activated.mul_(weighted)
        return ctx.activation.gradient(weighted.mul_(up), gate), up_gradient, share_gradient, None


def weighted_gated(gate: Tensor, up: Tensor, share: Tensor, name: ActivationName) -> Tensor:
    """Return ``act(gate) · up · share`` for the activation ``name``; ``gate``, ``up`` [n, F], ``share`` [n] in fp32."""
    return _WeightedGated.apply(gate, up, share, FUNCTIONS[name])


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, share)
        return F.silu(gate).mul_(up).mul_(share[:, None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, share = ctx.saved_tensors
        silu = F.silu(gate)
        share_gradient = (gradient * up).mul_(silu).sum(-1, dtype=share.dtype)
        weighted = (gradient * share[:, None]).to(gradient.dtype)
        up_gradient = silu.mul_(weighted)
        return torch.ops.aten.silu_backward(weighted.mul_(up), gate), up_gradient, share_gradient


def weighted_swiglu(gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
    """Return ``silu(gate) · up · share``; ``gate``, ``up`` [n, F], ``share`` [n] in fp32."""
    return _WeightedSwiglu.apply(gate, up, share)


class _WeightedInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, share)
        weight = share[:, None].to(gate.dtype)
        return F.silu(gate * weight, inplace=True).mul_(up).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, share = ctx.saved_tensors
        weight = share[:, None].to(gate.dtype)
        scaled = gate * weight
        up_gradient = F.silu(scaled).mul_(gradient)
        gate_gradient = torch.ops.aten.silu_backward((up * weight).mul_(gradient), scaled)
        del scaled
        share_gradient = (gate_gradient * gate).sum(-1, dtype=share.dtype)
        share_gradient += (up_gradient * up).sum(-1, dtype=share.dtype)
        return gate_gradient.mul_(weight), up_gradient.mul_(weight), share_gradient


def input_weighted_swiglu(gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
    """Return ``silu(share · gate) · share · up``: the SwiGLU of experts whose input was multiplied by ``share`` [n].

    It takes gate and up of the unweighted input, which are linear in it (Llama 4).
    """
    return _WeightedInputs.apply(gate, up, share)


class _WeightedClamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, share)
        out = gate.clamp(max=LIMIT)
        out.mul_((out * GAIN).sigmoid_())
        return out.mul_(up.clamp(-LIMIT, LIMIT).add_(1)).mul_(share[:, None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, share = ctx.saved_tensors
        weighted = (gradient * share[:, None]).to(gradient.dtype)
        clamped_gate = gate.clamp(max=LIMIT)
        clamped_up = up.clamp(-LIMIT, LIMIT)
        sigmoid = (clamped_gate * GAIN).sigmoid_()
        glu = clamped_gate * sigmoid
        share_gradient = (clamped_up + 1).mul_(gradient).mul_(glu).sum(-1, dtype=share.dtype)
        up_gradient = glu.mul_(weighted).masked_fill_(clamped_up.ne(up), 0)
        # d/dg of g σ(αg) is σ (1 + αg (1 − σ))
        slope = clamped_gate.mul_(GAIN).addcmul_(clamped_gate, sigmoid, value=-1).add_(1).mul_(sigmoid)
        gate_gradient = slope.mul_(weighted).mul_(clamped_up.add_(1)).masked_fill_(gate.gt(LIMIT), 0)
        return gate_gradient, up_gradient, share_gradient


def weighted_clamped_swiglu(gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
    """Return the clamped SwiGLU of ``gate``, ``up`` [n, F], times ``share`` [n] in fp32."""
    return _WeightedClamped.apply(gate, up, share)


class _Limited(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, share: Tensor | None, activation: ActivationFunction, limit: float
    ) -> Tensor:
        ctx.activation, ctx.limit = activation, limit
        ctx.save_for_backward(gate, up, share)
        out = activation.of(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))
        return out if share is None else out.mul_(share[:, None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        gate, up, share = ctx.saved_tensors
        limit = ctx.limit
        clamped_gate, clamped_up = gate.clamp(max=limit), up.clamp(-limit, limit)
        activated = ctx.activation.of(clamped_gate)
        share_gradient, weighted = None, gradient
        if share is not None:
            share_gradient = (gradient * clamped_up).mul_(activated).sum(-1, dtype=share.dtype)
            weighted = (gradient * share[:, None]).to(gradient.dtype)
        up_gradient = activated.mul_(weighted).masked_fill_(clamped_up.ne(up), 0)
        gate_gradient = ctx.activation.gradient(clamped_up.mul_(weighted), clamped_gate)
        return gate_gradient.masked_fill_(gate.gt(limit), 0), up_gradient, share_gradient, None, None


def activate_limited(gate: Tensor, up: Tensor, share: Tensor | None, name: ActivationName, limit: float) -> Tensor:
    """Return ``act(gate) · up`` of gates up to ``limit`` and ups within ± ``limit``, times ``share`` [n] if given.

    Neither gate nor up beyond the limit has a gradient.
    """
    return _Limited.apply(gate, up, share, FUNCTIONS[name], limit)
