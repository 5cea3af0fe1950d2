"""Gated DeltaNet (arXiv:2412.06464) on rows [R, D], chunk by chunk.

    q, k, v, z, b, a = h W        q, k, v ← silu(conv(·))        o = scan(q, k, v, b, a)        out(norm(o) · silu(z))

The scan computes a chunk of tokens by matmuls and hands its state [B, heads, key dim, value dim] on to the next chunk.
It saves its inputs alone (``chunks.py``), and is in fp32. Same formulas as transformers 5.23,
``torch_chunk_gated_delta_rule``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.mixers.chunk_groups import split_into_groups
from fivefold.model.mixers.gated_delta_net import CHUNK, GatedDeltaNet
from fivefold.model.spec import Model
from fivefold.trainer.model.linear import Linear, fused_linears
from fivefold.trainer.model.mixers import chunks
from fivefold.trainer.model.mixers.convolution import Conv, convolve_silu, get_sum_dtype
from fivefold.trainer.model.mixers.heads import ALL_HEADS, MixerHooks
from fivefold.trainer.model.operation import Run, call_directly, exclude_from_graphs
from fivefold.trainer.model.rotary import RowInputs

UNIT_EPSILON = 1e-6  # of the lengths of queries and keys, as in flash-linear-attention


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
        q, k, v, z, b, a = self.run("mixer.project", fused_linears, h_RD, *linears)
        tokens, share = rows.tokens, ALL_HEADS
        if self.hooks is not None:
            tokens, share = tokens * self.hooks.share.ranks, self.hooks.share
            q, k, v, b, a = self.run("mixer.enter", self.hooks.enter, rows.tokens, q, k, v, b, a)
        q, k, v = self.run("mixer.core.conv", convolve_silu, self.conv.weight, tokens, share, q, k, v)
        (a_log,), (dt_bias,) = share.take(self.a_log), share.take(self.dt_bias)
        o = self.run("mixer.core.scan", scan, q, k, v, b, a, a_log, dt_bias, tokens, self.shape)
        del q, k, v, b, a
        if self.hooks is not None:
            o = self.run("mixer.leave", self.hooks.leave, rows.tokens, o)
        y = self.run("mixer.core.gate", gated_norm, o, z, self.norm.weight, self.epsilon)
        del o, z
        out_RD: Tensor = self.run("mixer.out", self.out, y)
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
) -> Tensor:
    """Return the outputs [R, value heads · value dim] of the gated delta rule.

    ``q``, ``k``, ``v`` [R, heads · dims]; ``b``, ``a`` [R, value heads].
    """
    heads = shape.key_heads, shape.value_heads
    chunk = partial(delta_chunk, heads=heads, doubles=shape.negative_eigenvalues)
    groups = split_into_groups(tokens, CHUNK)
    return chunks.scan(chunk, (q, k, v, b, a), (a_log, dt_bias), columns=v.shape[1], groups=groups)


GateName = Literal["silu", "sigmoid"]
GATES: Mapping[GateName, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


@exclude_from_graphs
def gated_norm(x: Tensor, z: Tensor, weight: Tensor, epsilon: float, gate: GateName = "silu") -> Tensor:
    """Return ``norm(x) · weight · gate(z)``, the norm over each head; ``x``, ``z`` [R, N · H], ``weight`` [H]."""
    out: Tensor = _GatedNorm.apply(x, z, weight, epsilon, gate)  # type: ignore[no-untyped-call]
    return out


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


def delta_chunk(
    inputs: Sequence[Tensor],
    state: Tensor | None,
    *,
    heads: tuple[int, int],
    doubles: bool = False,
    is_last: bool = False,
    only_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [B, C, value heads · value dim] of a chunk, and the state after it (``GroupFunction``).

    ``inputs``: q, k, v [B, C, heads · dims], b and a [B, C, value heads], ``a_log`` and ``dt_bias`` [value heads].
    ``heads``: number of key and value heads. ``doubles``: β is 2 σ(b).
    """
    q, k, v, b, a, a_log, dt_bias = inputs
    q, k, v = (x.unflatten(-1, (n, -1)) for x, n in ((q, heads[0]), (k, heads[0]), (v, heads[1])))
    dtype = get_sum_dtype(v.dtype)
    repeats = v.shape[2] // k.shape[2]
    k = normalize_to_unit_length(k.to(dtype)).transpose(1, 2).repeat_interleave(repeats, dim=1)
    v = v.to(dtype).transpose(1, 2)
    beta = b.to(dtype).sigmoid().transpose(1, 2)[..., None]
    if doubles:
        beta = beta * 2
    decay = F.softplus(a.to(dtype) + dt_bias.to(dtype)) * -a_log.to(dtype).exp()
    decay = decay.transpose(1, 2).cumsum(-1)  # its log, from the start of the chunk [B, heads, C]
    # decay from one token to a later one; the diagonal is 1, and its gradients would cancel but for their rounding
    pairs = (decay[..., :, None] - decay[..., None, :]).tril(-1).exp().tril()
    lefts, decay = [k * beta], decay[..., None]
    if not only_state:
        q = normalize_to_unit_length(q.to(dtype)).transpose(1, 2).repeat_interleave(repeats, dim=1)
        lefts.append(q * k.shape[-1] ** -0.5)
    products = [(left @ k.mT) * pairs for left in lefts]
    return apply_delta_rule(lefts, k, v, beta, decay, products, state, is_last=is_last)


def apply_delta_rule(
    lefts: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    products: Sequence[Tensor],
    state: Tensor | None,
    *,
    is_last: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [B, C, heads · value dim] of a chunk, and the state after it, None if the chunk is the last.

    ``lefts``: β k, and queries unless the state alone is asked for, [B, heads, C, dim]; ``products``: of each with the
    decayed keys before it, [B, heads, C, C]. ``beta`` [B, heads, C, 1]; ``decay``: its log since the start of the
    chunk, [B, heads, C, dim], or 1 instead of dim.
    """
    corrections = v * beta
    if state is not None:
        corrections = corrections - (lefts[0] * decay.exp()) @ state
    values = invert_unit_lower(products[0]) @ corrections
    out = v
    if len(lefts) > 1:
        out = products[1] @ values
        if state is not None:
            out = out + (lefts[1] * decay.exp()) @ state
        out = out.transpose(1, 2).flatten(2)
    if is_last:
        return out, None
    last = decay[:, :, -1:]
    new_state = (k * (last - decay).exp()).mT @ values
    return out, new_state if state is None else new_state + state * last.exp().mT


def normalize_to_unit_length(x: Tensor) -> Tensor:
    """Return ``x`` divided by its length along the last dim."""
    unit: Tensor = x * (x.square().sum(-1, keepdim=True) + UNIT_EPSILON).rsqrt()
    return unit


def invert_unit_lower(matrix: Tensor) -> Tensor:
    """Return the inverse of I + the part of ``matrix`` [..., C, C] below the diagonal."""
    inverse: Tensor = _UnitLowerInverse.apply(matrix)  # type: ignore[no-untyped-call]
    return inverse


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
        inverse: Tensor = torch.linalg.solve_triangular(matrix, identity, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        inner: Tensor = grad @ inverse.mT
        product: Tensor = inverse.mT @ inner
        return product.tril_(-1).neg_()
