"""RG-LRU (arXiv:2402.19427 §2.4) on rows [R, D], in groups of chunks.

    x, y = h W        x ← conv(x)        i, r = x W_i, x W_r        S = scan(x, i, r)        out(S · act(y))

The core, from the convolution to the gate, saves its inputs and the states, and computes the convolution and the gates
again. ``ChunkHGRNFunction`` of flash-linear-attention, a scan of the same form
(fla-org/flash-linear-attention@03ab3ad:fla/ops/hgrn/chunk.py), saves the logarithms of the decays and the states too.
The scan (``chunks.py``) is in fp32. Same formulas as transformers 5.23, ``RecurrentGemmaRglru``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.model.mixers.rg_lru import CHUNK_TOKENS, split_tokens
from fivefold.model.spec import Model
from fivefold.trainer.model.kernels.activations import FUNCTIONS, ActivationFunction
from fivefold.trainer.model.linear import Linear, fused_linears
from fivefold.trainer.model.mixers.chunks import accumulate, scan_backward, scan_forward
from fivefold.trainer.model.mixers.convolution import (
    Conv,
    convolve,
    convolve_backward,
    filter_gradient,
    get_sum_dtype,
)
from fivefold.trainer.model.mixers.heads import ALL_HEADS, MixerHooks
from fivefold.trainer.model.operation import Run, call_directly, exclude_from_graphs
from fivefold.trainer.model.rotary import RowInputs

SHARPNESS = 8.0  # factor on the logarithm of the decays
LARGEST_ROOT_GRADIENT = 1000.0  # of √(1 − a²), whose derivative has no bound


class BlockDiagonal(nn.Module):
    """The weight [blocks, in, out] of a gate, and its bias [blocks, out]."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, width, width))
        self.bias = nn.Parameter(torch.empty(blocks, width))


class RGLRUMixer(nn.Module):
    """The token mixer of a layer that is an RG-LRU."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        shape = model.rg_lru
        assert shape is not None
        self.run: Run = call_directly
        self.hooks: MixerHooks | None = None
        self.temporary_bytes = GPU_TEMPORARY_BYTES
        self.shape = shape
        self.activation = FUNCTIONS[model.activation]
        self.x, self.y = (Linear(model.width, shape.inner, bias=True) for _ in range(2))
        self.conv = Conv(shape.inner, taps=shape.taps, bias=True)
        self.input_gate, self.rate_gate = (BlockDiagonal(shape.blocks, shape.block_width) for _ in range(2))
        self.rate = nn.Parameter(torch.empty(shape.inner))
        self.out = Linear(shape.inner, model.width, bias=True)

    def forward(self, h_RD: Tensor, rows: RowInputs) -> Tensor:
        """Mix the tokens of each sequence: [R, D] → [R, D]."""
        x, y = self.run("mixer.project", fused_linears, h_RD, self.x, self.y)
        gates = self.input_gate.weight, self.input_gate.bias, self.rate_gate.weight, self.rate_gate.bias
        tokens, share = rows.tokens, ALL_HEADS
        if self.hooks is not None:
            tokens, share = tokens * self.hooks.share.ranks, self.hooks.share
            x, y = self.run("mixer.enter", self.hooks.enter, rows.tokens, x, y)
        assert self.conv.bias is not None
        factors = [share.take(tensor)[0] for tensor in (self.conv.weight, self.conv.bias, *gates, self.rate)]
        o = self.run("mixer.core", core, x, y, *factors, tokens, self.activation, self.temporary_bytes)
        del x, y
        if self.hooks is not None:
            o = self.run("mixer.leave", self.hooks.leave, rows.tokens, o)
        return self.run("mixer.out", self.out, o)


@exclude_from_graphs
def core(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    input_weight: Tensor,
    input_bias: Tensor,
    rate_weight: Tensor,
    rate_bias: Tensor,
    rate: Tensor,
    tokens: int,
    activation: ActivationFunction,
    temporary_bytes: int = GPU_TEMPORARY_BYTES,
) -> Tensor:
    """Return the gated states [R, I] of ``x`` and ``y`` [R, I]; ``weight`` and ``bias``: bias of the convolution."""
    factors = weight, bias, input_weight, input_bias, rate_weight, rate_bias, rate
    return _Core.apply(x, y, *factors, tokens, activation, temporary_bytes)


class _Core(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, *rest: Any) -> Tensor:
        weight, bias, *gates, rate, tokens, activation, temporary_bytes = rest
        convolved = _convolve_rows(x, weight, bias, tokens=tokens)
        inputs = convolved, *(_project(convolved, *gate) for gate in (gates[:2], gates[2:]))
        del convolved
        groups = split_tokens(tokens, sequences=len(x) // tokens, channels=x.shape[1], temporary_bytes=temporary_bytes)
        o = scan_forward(compute_chunks, inputs, (rate,), columns=x.shape[1], groups=groups)
        del inputs
        ctx.save_for_backward(x, y, weight, bias, *gates, rate, o)
        ctx.settings = tokens, groups, activation
        return activation.of(y.to(get_sum_dtype(y.dtype))).mul_(o).to(o.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, *gates, rate, o = ctx.saved_tensors
        tokens, groups, activation = ctx.settings
        y_wide = y.to(get_sum_dtype(y.dtype))
        o_grad = activation.of(y_wide).mul_(grad).to(o.dtype)
        y_grad = activation.gradient(grad.to(y_wide.dtype) * o, y_wide).to(y.dtype)
        del y_wide
        convolved = _convolve_rows(x, weight, bias, tokens=tokens)
        inputs = convolved, *(_project(convolved, *gate) for gate in (gates[:2], gates[2:]))
        grads = [torch.empty_like(part) for part in inputs]
        (rate_grad,) = scan_backward(compute_chunks, inputs, (rate,), o_grad, grads=grads, groups=groups)
        del inputs, o_grad
        convolved_grad, *logit_grads = grads
        del grads
        gate_grads: list[Tensor] = []
        for logit_grad, gate_weight in zip(logit_grads, gates[::2], strict=True):
            blocks = _split_blocks(logit_grad, len(gate_weight))
            gate_grads += [_split_blocks(convolved, len(gate_weight)).mT @ blocks, blocks.sum(1)]
            convolved_grad += (blocks @ gate_weight.mT).transpose(0, 1).flatten(1)
        del convolved, logit_grads
        x_BTD = x.view(-1, tokens, x.shape[1])
        inner = convolved_grad.view(x_BTD.shape).to(get_sum_dtype(x.dtype))
        conv_grads = filter_gradient(inner, x_BTD, weight), inner.sum((0, 1)).to(bias.dtype)
        x_grad = convolve_backward(inner, weight).to(x.dtype).flatten(0, 1)
        return x_grad, y_grad, *conv_grads, *gate_grads, rate_grad, None, None, None


def _convolve_rows(x: Tensor, weight: Tensor, bias: Tensor, *, tokens: int) -> Tensor:
    """Return conv(``x``) [R, I] in the dtype of ``x``, in sequences of ``tokens``."""
    return convolve(x.view(-1, tokens, x.shape[1]), weight, bias).to(x.dtype).flatten(0, 1)


def _split_blocks(x: Tensor, blocks: int) -> Tensor:
    """Return a view [blocks, R, I / blocks] of ``x`` [R, I]."""
    return x.unflatten(1, (blocks, -1)).transpose(0, 1)


def _project(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the logits [R, I] of a gate: each block of channels times its matrix."""
    return torch.baddbmm(bias[:, None], _split_blocks(x, len(weight)), weight).transpose(0, 1).flatten(1)


def compute_chunks(
    inputs: Sequence[Tensor], state: Tensor | None, *, is_last: bool = False, only_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the states [B, T, I] of a group, and the last one [B, I]; see ``chunks.GroupFunction``.

    ``inputs``: x and the logits of both gates [B, T, I]; the rates [I].
    """
    x, input_logits, rate_logits, rate = inputs
    dtype = get_sum_dtype(x.dtype)
    log_decay = rate_logits.to(dtype).sigmoid() * (F.softplus(rate.to(dtype)) * -SHARPNESS)
    root = _BoundedRoot.apply(-(log_decay * 2).expm1())
    if state is None:  # a sequence begins with its input as it is
        root = torch.cat([torch.ones_like(root[:, :1]), root[:, 1:]], dim=1)
    states = x.to(dtype) * input_logits.to(dtype).sigmoid() * root
    decay = log_decay.exp()
    states = accumulate(states, decay, state, size=CHUNK_TOKENS)
    return states, None if is_last else states[:, -1].clone()  # a view would keep the states of all tokens


class _BoundedRoot(torch.autograd.Function):
    """√x, with a gradient of at most ``LARGEST_ROOT_GRADIENT``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = x.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return grad / (root * 2).clamp(min=1 / LARGEST_ROOT_GRADIENT)
