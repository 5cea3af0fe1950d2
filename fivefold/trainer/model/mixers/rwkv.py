"""The time mixing of RWKV-4 (arXiv:2305.13048 §3.1) on rows [R, D], in groups of chunks.

    h₋ = shift(h)      k, v, r = key(mix(h, h₋)), value(mix(h, h₋)), receptance(mix(h, h₋))      out(σ(r) · o)

    o_t = (A_(t − 1) + e^(u + k_t) v_t) / (B_(t − 1) + e^(u + k_t))      A_t = e^(−w) A_(t − 1) + e^(k_t) v_t
                                                                         B_t = e^(−w) B_(t − 1) + e^(k_t)

The core saves k and v and computes the sums A and B again. They are held as multiples of e^level, where a level is
about log B, so that nothing overflows or vanishes. The scan (``chunks.py``) is in fp32. Same formulas as transformers
5.23, ``RwkvSelfAttention``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.model.mixers.rwkv import CHUNK_TOKENS, MIXED, split_tokens
from fivefold.model.spec import Model
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.mixers.chunks import accumulate, scan
from fivefold.trainer.model.mixers.convolution import get_sum_dtype
from fivefold.trainer.model.operation import Run, call_directly
from fivefold.trainer.model.rotary import RowInputs
from fivefold.trainer.model.token_shift import mix_tokens, shift_tokens


class RWKVMixer(nn.Module):
    """The token mixer of a layer of RWKV-4."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        net = model.rwkv
        assert net is not None
        self.run: Run = call_directly
        self.kernels: Kernels = EAGER
        self.temporary_bytes = GPU_TEMPORARY_BYTES
        for name in MIXED:
            self.register_parameter(f"mix_{name}", nn.Parameter(torch.empty(model.width)))
            self.add_module(name, Linear(model.width, net.inner, bias=False))
        self.decay, self.first = (nn.Parameter(torch.empty(net.inner)) for _ in range(2))
        self.out = Linear(net.inner, model.width, bias=False)

    def forward(self, h_RD: Tensor, rows: RowInputs) -> Tensor:
        """Mix the tokens of each sequence: [R, D] → [R, D]."""
        shifted_RD = self.run("mixer.shift", shift_tokens, h_RD, rows.tokens)
        projected = []
        for name in MIXED:
            mixed_RD = self.run(f"mixer.mix_{name}", mix_tokens, h_RD, shifted_RD, self.get_parameter(f"mix_{name}"))
            projected.append(self.run(f"mixer.{name}", self.get_submodule(name), mixed_RD))
            del mixed_RD
        del shifted_RD
        receptance = projected.pop()
        o = self.run("mixer.core", average, *projected, self.decay, self.first, rows.tokens, self.temporary_bytes)
        del projected
        o = self.run("mixer.core.gate", self.kernels.gate_output, o, receptance, "sigmoid")
        del receptance
        return self.run("mixer.out", self.out, o)


def average(
    k: Tensor, v: Tensor, decay: Tensor, first: Tensor, tokens: int, temporary_bytes: int = GPU_TEMPORARY_BYTES
) -> Tensor:
    """Return averages [R, I] of the values ``v`` [R, I], by keys ``k`` and age; ``decay``: log w; ``first``: u [I]."""
    sequences, channels = len(k) // tokens, k.shape[1]
    groups = split_tokens(tokens, sequences=sequences, channels=channels, temporary_bytes=temporary_bytes)
    return scan(compute_chunks, (k, v), (decay, first), columns=channels, groups=groups)


def compute_chunks(
    inputs: Sequence[Tensor], state: Tensor | None, *, is_last: bool = False, only_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the averages [B, T, I] of a group, and A, B and their level after it [B, 3, I].

    See ``chunks.GroupFunction``. ``inputs``: k and v [B, T, I]; decay and first [I].
    """
    k, v, decay, first = inputs
    dtype = get_sum_dtype(k.dtype)
    k, v, rate = k.to(dtype), v.to(dtype), decay.to(dtype).exp()
    before, after = _compute_levels(k, rate, state)
    kept = (before - rate - after).exp_()  # of the sums before a token; of the first of a sequence 0
    factors = (k - after).exp()
    start = k.new_zeros(len(k), 2, k.shape[2]) if state is None else state[:, :2]
    of_values = accumulate(factors * v, kept, None if state is None else start[:, 0], size=CHUNK_TOKENS)
    of_factors = accumulate(factors.clone(), kept, None if state is None else start[:, 1], size=CHUNK_TOKENS)
    new_state = None if is_last else torch.stack((of_values[:, -1], of_factors[:, -1], after[:, -1]), dim=1)
    if only_state:
        return of_values, new_state
    keys = k + first.to(dtype)
    top = torch.maximum(before, keys.detach())
    old, new = (before - top).exp_(), (keys - top).exp()
    of_values = torch.cat((start[:, :1], of_values[:, :-1]), dim=1) * old + new * v
    of_factors = torch.cat((start[:, 1:], of_factors[:, :-1]), dim=1) * old + new
    return of_values / of_factors, new_state


@torch.no_grad()
def _compute_levels(k: Tensor, rate: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the levels of A and B before and after each token [B, T, I]: −∞ before a sequence, then about log B.

    Any numbers would do that are near enough; nothing differentiates them.
    """
    ages = torch.arange(k.shape[1], device=k.device, dtype=k.dtype)[:, None] * rate
    lifted = k + ages
    if state is None:
        start = torch.full_like(k[:, :1], -torch.inf)
    else:
        start = state[:, 2:]
        lifted[:, :1] = torch.logaddexp(lifted[:, :1], start - rate)
    after = lifted.logcumsumexp(1).sub_(ages)
    return torch.cat((start, after[:, :-1]), dim=1), after
