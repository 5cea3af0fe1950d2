"""Kimi delta attention (arXiv:2510.26692) on rows [R, D], chunk by chunk.

    q, k, v, b, f, z = h W        q, k, v ← silu(conv(·))        o = scan(q, k, v, f, b)        out(norm(o) · σ(z))

The scan computes a chunk of tokens by matmuls and hands its state [B, heads, dim, dim] on to the next chunk. A decay
from one token to another is the product of two, to and from the first token of the later one's sub-chunk, neither of
which exceeds 1; within a sub-chunk it is computed pair by pair. The scan saves its inputs alone (``chunks.py``), and is
in fp32. Same formulas as transformers 5.23, ``chunk_kimi_delta_attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.mixers.chunk_groups import split_into_groups
from fivefold.model.mixers.kimi_delta import CHUNK, SUBCHUNK, KimiDelta
from fivefold.model.spec import Model
from fivefold.trainer.model.linear import Linear, fused_linears
from fivefold.trainer.model.mixers import chunks
from fivefold.trainer.model.mixers.convolution import Conv, convolve_silu, get_sum_dtype
from fivefold.trainer.model.mixers.gated_delta_net import (
    Factor,
    apply_delta_rule,
    gated_norm,
    normalize_to_unit_length,
)
from fivefold.trainer.model.mixers.heads import ALL_HEADS, MixerHooks
from fivefold.trainer.model.operation import Run, call_directly
from fivefold.trainer.model.rotary import RowInputs


class KimiDeltaMixer(nn.Module):
    """The token mixer of a layer that is Kimi delta attention."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        shape = model.kimi_delta
        assert shape is not None
        self.run: Run = call_directly
        self.hooks: MixerHooks | None = None
        self.shape, self.epsilon = shape, model.norm_epsilon
        width, inner = model.width, shape.inner_width
        for name, outputs in shape.linears.items():
            self.add_module(name, Linear(width, outputs, bias=False))
        if shape.rank is not None:
            self.decay_up, self.gate_up = (Linear(shape.rank, inner, bias=False) for _ in range(2))
        self.conv = Conv(3 * inner, taps=shape.taps, bias=False)
        self.a_log = nn.Parameter(torch.empty(shape.heads))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.norm = Factor(shape.dim)
        self.out = Linear(inner, width, bias=False)

    def forward(self, h_RD: Tensor, rows: RowInputs) -> Tensor:
        """Mix the tokens of each sequence: [R, D] → [R, D]."""
        linears = [self.get_submodule(name) for name in self.shape.linears]
        q, k, v, b, f, z = self.run("mixer.project", fused_linears, h_RD, *linears)
        if self.shape.rank is not None:
            f = self.run("mixer.decay_up", self.decay_up, f)
            z = self.run("mixer.gate_up", self.gate_up, z)
        tokens, share = rows.tokens, ALL_HEADS
        if self.hooks is not None:
            tokens, share = tokens * self.hooks.share.ranks, self.hooks.share
            q, k, v, f, b = self.run("mixer.enter", self.hooks.enter, rows.tokens, q, k, v, f, b)
        q, k, v = self.run("mixer.core.conv", convolve_silu, self.conv.weight, tokens, share, q, k, v)
        (a_log,), (dt_bias,) = share.take(self.a_log), share.take(self.dt_bias)
        o = self.run("mixer.core.scan", scan, q, k, v, f, b, a_log, dt_bias, tokens, self.shape)
        del q, k, v, f, b
        if self.hooks is not None:
            o = self.run("mixer.leave", self.hooks.leave, rows.tokens, o)
        y = self.run("mixer.core.gate", gated_norm, o, z, self.norm.weight, self.epsilon, "sigmoid")
        del o, z
        out_RD: Tensor = self.run("mixer.out", self.out, y)
        return out_RD


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    tokens: int,
    shape: KimiDelta,
) -> Tensor:
    """Return the outputs [R, heads · dim] of the delta rule; all inputs [R, heads · dim], but ``b`` [R, heads]."""
    chunk = partial(kimi_delta_chunk, shape=shape)
    groups = split_into_groups(tokens, CHUNK)
    return chunks.scan(chunk, (q, k, v, f, b), (a_log, dt_bias), columns=v.shape[1], groups=groups)


def kimi_delta_chunk(
    inputs: Sequence[Tensor],
    state: Tensor | None,
    *,
    shape: KimiDelta,
    is_last: bool = False,
    only_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [B, C, heads · dim] of a chunk, and the state after it (``GroupFunction``).

    ``inputs``: q, k, v, f [B, C, heads · dim], b [B, C, heads], ``a_log`` [heads] and ``dt_bias`` [heads · dim].
    """
    q, k, v, f, b, a_log, dt_bias = inputs
    dtype = get_sum_dtype(v.dtype)
    q, k, v, f = (x.unflatten(-1, (shape.heads, -1)).transpose(1, 2) for x in (q, k, v, f))
    rates = a_log.to(dtype).exp()[:, None, None]
    logits = f.to(dtype) + dt_bias.to(dtype).view(shape.heads, 1, -1)
    bound = shape.lower_bound
    decay = F.softplus(logits) * -rates if bound is None else (logits * rates).sigmoid() * bound
    decay = decay.cumsum(2)  # its log, from the start of the chunk [B, heads, C, dim]
    k = normalize_to_unit_length(k.to(dtype))
    v = v.to(dtype)
    beta = b.to(dtype).sigmoid().transpose(1, 2)[..., None]
    lefts = [k * beta]
    if not only_state:
        q = normalize_to_unit_length(q.to(dtype)) * shape.dim**-0.5
        lefts.append(q)
    products = multiply_decayed(lefts, k, decay)
    return apply_delta_rule(lefts, k, v, beta, decay, products, state, is_last=is_last)


def multiply_decayed(lefts: Sequence[Tensor], right: Tensor, decay: Tensor) -> list[Tensor]:
    """Return of each x in ``lefts`` Σ_d x[i, d] right[j, d] e^(decay[i, d] − decay[j, d]) for j ≤ i, else 0.

    ``lefts``, ``right`` and ``decay`` [B, heads, C, dim]; the results [B, heads, C, C].
    """
    tokens = right.shape[2]
    rows: list[list[Tensor]] = [[] for _ in lefts]
    for first in range(0, tokens, SUBCHUNK):
        last = min(first + SUBCHUNK, tokens)
        local = decay[:, :, first:last]
        begin = local[:, :, :1].detach()  # it cancels, and so do its gradients but for their rounding
        # from a token to itself 1, to an earlier one 0; neither has a gradient
        fixed = torch.full([last - first] * 2, float("-inf"), dtype=decay.dtype, device=decay.device).triu(1)
        is_later = torch.ones_like(fixed, dtype=torch.bool).tril(-1)[..., None]
        pairs = torch.where(is_later, local[:, :, :, None] - local[:, :, None], fixed[..., None]).exp()
        pairs = pairs * right[:, :, None, first:last]
        before = right[:, :, :first] * (begin - decay[:, :, :first]).exp() if first else None
        for row, left in zip(rows, lefts, strict=True):
            x = left[:, :, first:last]
            block = (pairs @ x[..., None])[..., 0]
            if before is not None:
                block = torch.cat([(x * (local - begin).exp()) @ before.mT, block], dim=-1)
            row.append(F.pad(block, (0, tokens - last)))
    return [torch.cat(row, dim=2) for row in rows]
