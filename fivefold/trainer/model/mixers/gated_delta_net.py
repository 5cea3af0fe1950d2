"""Gated DeltaNet (arXiv:2412.06464) on rows [R, D], in groups of chunks.

    q, k, v, z, b, a = h W        q, k, v ← silu(conv(·))        o = scan(q, k, v, b, a)        out(norm(o) · silu(z))

The scan applies the delta rule (``delta_rule.py``) with one decay of each head and token. It saves only its inputs
(``chunks.py``), and is in fp32. Same formulas as transformers 5.23, ``torch_chunk_gated_delta_rule``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.spec import Model
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.lora import project
from fivefold.trainer.model.mixers import chunks, fused_scans
from fivefold.trainer.model.mixers.chunks import GroupFunction, decay_pairs
from fivefold.trainer.model.mixers.convolution import Conv, convolve_silu, get_sum_dtype
from fivefold.trainer.model.mixers.delta_rule import (
    apply_delta_rule,
    compute_beta,
    compute_decay,
    normalize_to_unit_length,
    split_heads,
)
from fivefold.trainer.model.mixers.heads import ALL_HEADS, MixerHooks
from fivefold.trainer.model.operation import Run, call_directly, exclude_from_graphs
from fivefold.trainer.model.rotary import RowInputs


class Factor(nn.Module):
    """The weight of a norm, multiplied as it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class GatedDeltaNetMixer(nn.Module):
    """The token mixer of a layer that is a Gated DeltaNet."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        shape = model.gated_delta_net
        assert shape is not None
        self.run: Run = call_directly
        self.hooks: MixerHooks | None = None
        self.fuses_scan = False
        self.temporary_bytes = GPU_TEMPORARY_BYTES
        self.shape, self.epsilon = shape, shape.norm_epsilon or model.norm_epsilon
        width, keys, values = model.width, shape.key_width, shape.value_width
        self.q, self.k = (Linear(width, keys, bias=False) for _ in range(2))
        self.v, self.z = (Linear(width, values, bias=False) for _ in range(2))
        self.b, self.a = (Linear(width, shape.value_heads, bias=False) for _ in range(2))
        self.conv = Conv(2 * keys + values, taps=shape.taps, bias=False)
        self.a_log = nn.Parameter(torch.empty(shape.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(shape.value_heads))
        self.norm = Factor(shape.value_dim)
        self.out = Linear(values, width, bias=False)

    def forward(self, h_RD: Tensor, rows: RowInputs) -> Tensor:
        """Mix the tokens of each sequence: [R, D] → [R, D]."""
        linears = self.q, self.k, self.v, self.z, self.b, self.a
        q, k, v, z, b, a = project(self.run, "mixer.project", h_RD, *linears, keys_B=rows.keys)
        tokens, share = rows.tokens, ALL_HEADS
        if self.hooks is not None:
            tokens, share = tokens * self.hooks.share.ranks, self.hooks.share
            q, k, v, b, a = self.run("mixer.enter", self.hooks.enter, rows.tokens, q, k, v, b, a)
        q, k, v = self.run("mixer.core.conv", convolve_silu, self.conv.weight, tokens, share, q, k, v)
        (a_log,), (dt_bias,) = share.take(self.a_log), share.take(self.dt_bias)
        settings = tokens, self.shape, self.fuses_scan, self.temporary_bytes
        o = self.run("mixer.core.scan", scan, q, k, v, b, a, a_log, dt_bias, *settings)
        del q, k, v, b, a
        if self.hooks is not None:
            o = self.run("mixer.leave", self.hooks.leave, rows.tokens, o)
        y = self.run("mixer.core.gate", gated_norm, o, z, self.norm.weight, self.epsilon)
        del o, z
        (out_RD,) = project(self.run, "mixer.out", y, self.out, keys_B=rows.keys)
        return out_RD


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    tokens: int,
    shape: GatedDeltaNet,
    fused: bool = False,
    temporary_bytes: int = GPU_TEMPORARY_BYTES,
) -> Tensor:
    """Return the outputs [R, value heads · value dim] of the gated delta rule.

    ``q``, ``k``, ``v`` [R, heads · dims]; ``b``, ``a`` [R, value heads].
    """
    compute: GroupFunction = partial(compute_chunks, shape=shape)
    groups = shape.split_tokens(tokens, sequences=len(q) // tokens, temporary_bytes=temporary_bytes)
    if fused:
        compute = fused_scans.make_group_function(partial(fused_scans.scan_gated_delta_net, shape=shape))
        groups = [tokens]
    return chunks.scan(compute, (q, k, v, b, a), (a_log, dt_bias), columns=v.shape[1], groups=groups)


GateName = Literal["silu", "sigmoid"]
GATES: Mapping[GateName, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


@exclude_from_graphs
def gated_norm(x: Tensor, z: Tensor, weight: Tensor, epsilon: float, gate: GateName = "silu") -> Tensor:
    """Return ``norm(x) · weight · gate(z)``, the norm over each head; ``x``, ``z`` [R, N · H], ``weight`` [H]."""
    return _GatedNorm.apply(x, z, weight, epsilon, gate)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, epsilon: float, gate: GateName) -> Tensor:
        heads = x.view(len(x), -1, len(weight))
        norm = torch.linalg.vector_norm(heads, dim=-1, keepdim=True, dtype=get_sum_dtype(x.dtype))
        rstd = norm.square_().div_(len(weight)).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, z, weight, rstd)
        ctx.gate = gate
        normal = torch.mul(heads, rstd).mul_(weight)  # fp32, because rstd is
        return normal.mul_(GATES[gate](z.to(normal.dtype)).view(normal.shape)).to(x.dtype).flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, z, weight, rstd = ctx.saved_tensors
        shape = (len(x), -1, len(weight))
        z_wide, normal = z.view(shape).to(rstd.dtype), x.view(shape) * rstd
        if ctx.gate == "sigmoid":
            z_wide = z_wide.sigmoid()  # of which its derivative is made
            inner = z_wide * grad.view(shape)
        else:
            inner = F.silu(z_wide).mul_(grad.view(shape))
        weight_grad = (inner * normal).sum((0, 1)).to(weight.dtype)
        derive = torch.ops.aten.sigmoid_backward if ctx.gate == "sigmoid" else torch.ops.aten.silu_backward
        z_grad = derive((normal * weight).mul_(grad.view(shape)), z_wide).to(z.dtype)
        del z_wide
        inner.mul_(weight)
        mean = (inner * normal).mean(-1, keepdim=True)
        return (
            inner.sub_(normal.mul_(mean)).mul_(rstd).to(x.dtype).flatten(1),
            z_grad.flatten(1),
            weight_grad,
            None,
            None,
        )


def compute_chunks(
    inputs: Sequence[Tensor],
    state: Tensor | None,
    *,
    shape: GatedDeltaNet,
    is_last: bool = False,
    only_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [B, tokens, value heads · value dim] of a group, and the state after it (``GroupFunction``).

    ``inputs``: q, k, v [B, tokens, heads · dims], b and a [B, tokens, value heads], ``a_log`` and ``dt_bias`` [value
    heads]. The state is [B, value heads, key dim, value dim].
    """
    q, k, v, b, a, a_log, dt_bias = inputs
    repeats = shape.value_heads // shape.key_heads
    k = normalize_to_unit_length(split_heads(k, shape.key_heads)).repeat_interleave(repeats, dim=2)
    beta = compute_beta(split_heads(b, shape.value_heads), negative_eigenvalues=shape.negative_eigenvalues)
    a_log, dt_bias = (factor[:, None, None] for factor in (a_log, dt_bias))
    decay = compute_decay(split_heads(a, shape.value_heads), a_log, dt_bias)
    decay = decay.cumsum(-2)  # its log, from the start of the chunk
    pairs = decay_pairs(decay[..., 0]).tril()
    lefts = [k * beta]
    if not only_state:
        q = normalize_to_unit_length(split_heads(q, shape.key_heads)) * shape.key_dim**-0.5
        lefts.append(q.repeat_interleave(repeats, dim=2))
    products = [(left @ k.mT) * pairs for left in lefts]
    return apply_delta_rule(lefts, k, split_heads(v, shape.value_heads), beta, decay, products, state, is_last=is_last)
