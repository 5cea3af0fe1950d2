"""Kimi delta attention (arXiv:2510.26692) on rows [R, D], in groups of chunks.

    q, k, v, b, f, z = h W        q, k, v ← silu(conv(·))        o = scan(q, k, v, f, b)        out(norm(o) · σ(z))

The scan applies the delta rule (``delta_rule.py``) with a decay of each key dim and token. It saves only its inputs
(``chunks.py``), and is in fp32. Same formulas as transformers 5.23, ``chunk_kimi_delta_attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.spec import Model
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.lora import project
from fivefold.trainer.model.mixers import chunks, fused_scans
from fivefold.trainer.model.mixers.chunks import GroupFunction
from fivefold.trainer.model.mixers.convolution import Conv, convolve_silu
from fivefold.trainer.model.mixers.delta_rule import (
    apply_delta_rule,
    compute_beta,
    compute_decay,
    normalize_to_unit_length,
    split_heads,
)
from fivefold.trainer.model.mixers.gated_delta_net import Factor, gated_norm
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
        self.fuses_scan = False
        self.temporary_bytes = GPU_TEMPORARY_BYTES
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
        linears = [cast(Linear, self.get_submodule(name)) for name in self.shape.linears]
        q, k, v, b, f, z = project(self.run, "mixer.project", h_RD, *linears, keys_B=rows.keys)
        if self.shape.rank is not None:
            (f,) = project(self.run, "mixer.decay_up", f, self.decay_up, keys_B=rows.keys)
            (z,) = project(self.run, "mixer.gate_up", z, self.gate_up, keys_B=rows.keys)
        tokens, share = rows.tokens, ALL_HEADS
        if self.hooks is not None:
            tokens, share = tokens * self.hooks.share.ranks, self.hooks.share
            q, k, v, f, b = self.run("mixer.enter", self.hooks.enter, rows.tokens, q, k, v, f, b)
        q, k, v = self.run("mixer.core.conv", convolve_silu, self.conv.weight, tokens, share, q, k, v)
        (a_log,), (dt_bias,) = share.take(self.a_log), share.take(self.dt_bias)
        settings = tokens, self.shape, self.fuses_scan, self.temporary_bytes
        o = self.run("mixer.core.scan", scan, q, k, v, f, b, a_log, dt_bias, *settings)
        del q, k, v, f, b
        if self.hooks is not None:
            o = self.run("mixer.leave", self.hooks.leave, rows.tokens, o)
        y = self.run("mixer.core.gate", gated_norm, o, z, self.norm.weight, self.epsilon, "sigmoid")
        del o, z
        (out_RD,) = project(self.run, "mixer.out", y, self.out, keys_B=rows.keys)
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
    fused: bool = False,
    temporary_bytes: int = GPU_TEMPORARY_BYTES,
) -> Tensor:
    """Return the outputs [R, heads · dim] of the delta rule; all inputs [R, heads · dim], but ``b`` [R, heads]."""
    compute: GroupFunction = partial(compute_chunks, shape=shape)
    groups = shape.split_tokens(tokens, sequences=len(q) // tokens, temporary_bytes=temporary_bytes)
    if fused:
        compute = fused_scans.make_group_function(partial(fused_scans.scan_kimi_delta, shape=shape))
        groups = [tokens]
    return chunks.scan(compute, (q, k, v, f, b), (a_log, dt_bias), columns=v.shape[1], groups=groups)


def compute_chunks(
    inputs: Sequence[Tensor],
    state: Tensor | None,
    *,
    shape: KimiDelta,
    is_last: bool = False,
    only_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [B, tokens, heads · dim] of a group, and the state after it (``GroupFunction``).

    ``inputs``: q, k, v, f [B, tokens, heads · dim], b [B, tokens, heads], ``a_log`` [heads] and ``dt_bias`` [heads ·
    dim]. The state is [B, heads, dim, dim].
    """
    q, k, v, f, b, a_log, dt_bias = inputs
    a_log, dt_bias = a_log[:, None, None], dt_bias.view(shape.heads, 1, -1)
    decay = compute_decay(split_heads(f, shape.heads), a_log, dt_bias, lower_bound=shape.lower_bound)
    decay = decay.cumsum(-2)  # its log, from the start of the chunk
    k = normalize_to_unit_length(split_heads(k, shape.heads))
    beta = compute_beta(split_heads(b, shape.heads))
    lefts = [k * beta]
    if not only_state:
        lefts.append(normalize_to_unit_length(split_heads(q, shape.heads)) * shape.dim**-0.5)
    products = multiply_decayed(lefts, k, decay)
    return apply_delta_rule(lefts, k, split_heads(v, shape.heads), beta, decay, products, state, is_last=is_last)


def multiply_decayed(lefts: Sequence[Tensor], right: Tensor, decay: Tensor) -> list[Tensor]:
    """Return of each x in ``lefts`` Σ_d x[i, d] right[j, d] e^(decay[i, d] − decay[j, d]) for j ≤ i, else 0.

    ``lefts``, ``right`` and ``decay`` [..., T, dim]; the results [..., T, T]. Blocks of 1, 2, 4 … tokens are joined in
    pairs: a decay from a token of the first to one of the second is the product of two, to and from the second one's
    first token, neither of which exceeds 1.
    """
    tokens = right.shape[-2]
    padding = 2 ** (tokens - 1).bit_length() - tokens
    if padding:  # tokens that neither decay nor hold anything
        decay = torch.cat([decay, decay[..., -1:, :].expand(*decay.shape[:-2], padding, -1)], dim=-2)
        right, *lefts = (F.pad(x, (0, 0, 0, padding)) for x in (right, *lefts))
    results = [(left * right).sum(-1)[..., None, None] for left in lefts]  # [..., blocks, tokens, tokens]
    while results[0].shape[-3] > 1:
        size = results[0].shape[-1]
        earlier, later = _split_pairs(decay, size)
        begin = later[..., :1, :].detach()  # it cancels, and so do its gradients but for their rounding
        before, factor = _split_pairs(right, size)[0] * (begin - earlier).exp(), (later - begin).exp()
        for index, left in enumerate(lefts):
            block = (_split_pairs(left, size)[1] * factor) @ before.mT
            first, second = results[index].unflatten(-3, (-1, 2)).unbind(-3)
            second = torch.cat([block, second], dim=-1)
            results[index] = torch.cat([F.pad(first, (0, size)), second], dim=-2)
    return [result.squeeze(-3)[..., :tokens, :tokens] for result in results]


def _split_pairs(x: Tensor, size: int) -> tuple[Tensor, ...]:
    """Return views [..., pairs of blocks, ``size``, dim] of the first and the second block of each pair."""
    return x.unflatten(-2, (-1, 2, size)).unbind(-3)
