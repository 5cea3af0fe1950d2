"""Lightning attention (MiniMax-01, arXiv:2501.08313 §2.2) on rows [R, D], in groups of chunks.

    q, k, v = act(h W)        o = scan(q, k, v)        out(norm(o) · σ(h W_gate))

The columns of q, k and v of a head lie side by side. The scan (``chunks.py``) saves only its inputs and is in fp32.
Same formulas as transformers 5.23, ``MiniMaxLightningAttention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.spec import Model
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.linear import Linear, fused_linears
from fivefold.trainer.model.mixers import chunks, fused_scans
from fivefold.trainer.model.mixers.chunks import GroupFunction, hand_on_states
from fivefold.trainer.model.mixers.convolution import get_sum_dtype
from fivefold.trainer.model.mixers.heads import MixerHooks
from fivefold.trainer.model.norm import RmsNorm
from fivefold.trainer.model.operation import Run, call_directly
from fivefold.trainer.model.rotary import RowInputs


class LightningMixer(nn.Module):
    """The token mixer of a layer that is lightning attention.

    ``decay_rates``: one for each head that this rank of tensor parallelism holds.
    """

    def __init__(self, model: Model, *, layer: int) -> None:
        super().__init__()
        shape = model.lightning
        assert shape is not None
        self.run: Run = call_directly
        self.kernels: Kernels = EAGER
        self.fuses_scan = False
        self.temporary_bytes = GPU_TEMPORARY_BYTES
        self.hooks: MixerHooks | None = None
        self.shape, self.activation = shape, model.activation
        self.decay_rates = shape.list_decay_rates(layer, layers=model.layers)
        self.project = Linear(model.width, 3 * shape.inner_width, bias=False)
        self.gate = Linear(model.width, shape.inner_width, bias=False)
        self.norm = RmsNorm(shape.inner_width, epsilon=shape.norm_epsilon or model.norm_epsilon)
        self.out = Linear(shape.inner_width, model.width, bias=False)

    def forward(self, h_RD: Tensor, rows: RowInputs) -> Tensor:
        """Mix the tokens of each sequence: [R, D] → [R, D]."""
        projected, gate = self.run("mixer.project", fused_linears, h_RD, self.project, self.gate)
        qkv = self.run("mixer.core.act", self.kernels.activate, projected, self.activation)
        del projected
        tokens, rates = rows.tokens, self.decay_rates
        if self.hooks is not None:
            share, held = self.hooks.share, self.shape.heads  # heads of this rank of cp
            tokens, rates = tokens * share.ranks, rates[share.rank * held :][:held]
            (qkv,) = self.run("mixer.enter", self.hooks.enter, rows.tokens, qkv)
        settings = tokens, self.shape, self.fuses_scan, self.temporary_bytes
        o = self.run("mixer.core.scan", scan, qkv, rates, *settings)
        del qkv
        if self.hooks is not None:
            o = self.run("mixer.leave", self.hooks.leave, rows.tokens, o)
        o = self.run("mixer.norm", self.norm, o)
        y = self.run("mixer.core.gate", self.kernels.gate_output, o, gate, "sigmoid")
        del o, gate
        return self.run("mixer.out", self.out, y)


def scan(
    qkv: Tensor,
    rates: Sequence[float],
    tokens: int,
    shape: Lightning,
    fused: bool = False,
    temporary_bytes: int = GPU_TEMPORARY_BYTES,
) -> Tensor:
    """Return the outputs [R, heads · dim] of the decayed sums; ``qkv`` [R, heads · 3 · dim], ``rates`` of each head."""
    compute: GroupFunction = partial(compute_chunks, rates=rates, size=shape.chunk)
    groups = shape.split_tokens(tokens, sequences=len(qkv) // tokens, temporary_bytes=temporary_bytes)
    if fused:
        compute = fused_scans.make_group_function(partial(fused_scans.scan_lightning, rates=rates))
        groups = [tokens]
    return chunks.scan(compute, (qkv,), (), columns=shape.inner_width, groups=groups)


def compute_chunks(
    inputs: Sequence[Tensor],
    state: Tensor | None,
    *,
    rates: Sequence[float],
    size: int,
    is_last: bool = False,
    only_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [B, tokens, heads · dim] of a group of chunks, and the state after it (``GroupFunction``).

    ``inputs``: queries, keys and values [B, tokens, heads · 3 · dim]; ``size``: tokens of a chunk. The state is
    [B, heads, dim, dim].
    """
    (qkv,) = inputs
    dtype = get_sum_dtype(qkv.dtype)
    # without pairs of tokens, all tokens are one chunk
    size = qkv.shape[1] if only_state else min(size, qkv.shape[1])
    heads = qkv.to(dtype).unflatten(1, (-1, size)).unflatten(-1, (len(rates), 3, -1))
    q, k, v = heads.permute(4, 0, 1, 3, 2, 5)  # [B, chunks, heads, T, dim] each
    rate = torch.tensor(rates, dtype=dtype, device=qkv.device)[:, None, None]
    place = torch.arange(1, size + 1, dtype=dtype, device=qkv.device)[:, None]
    before, after = None, None
    if not is_last or k.shape[1] > 1:
        added = (k * torch.exp(-rate * (size - place))).mT @ v
        decay = (-size * rate[:, 0]).expand(1, k.shape[1], -1, -1)
        before, after = hand_on_states(added, decay, state, is_last=is_last)
        del added
    elif state is not None:
        before = state[:, None]
    if only_state:
        return qkv, after
    pairs = torch.exp(-rate * (place - place.mT).relu()).tril()  # decay from a token to a later one
    out = ((q @ k.mT) * pairs) @ v
    if before is not None:
        out = out + (q * torch.exp(-rate * place)) @ before
    return out.transpose(2, 3).flatten(3).flatten(1, 2), after
