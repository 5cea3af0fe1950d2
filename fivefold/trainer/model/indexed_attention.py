"""Latent attention on rows [R, D] to the keys that an indexer chooses, absorbed, as each query has keys of its own.

    x → q_down → norm → q_up → W_uk → rope;  x → kv_down → norm → latent | rotary key;  core → W_uv → out

A layer chooses the keys itself, or attends to those that an earlier layer chose (GLM-5.1's cross-layer sharing,
arXiv:2603.12201). Equal to transformers 5.23, ``DeepseekV32Attention`` and ``GlmMoeDsaAttention``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.model.spec import Model
from fivefold.trainer.model.attention import LatentAttention
from fivefold.trainer.model.indexer import LightningIndexer
from fivefold.trainer.model.kernels.rotary import rotate, turn
from fivefold.trainer.model.lora import project
from fivefold.trainer.model.rotary import RowInputs
from fivefold.trainer.model.sparse_attention import SparseCore, UpGradient, absorb_keys, absorb_values


class IndexedAttention(LatentAttention):
    """Latent attention with an indexer, or with the choice of an earlier layer's."""

    def __init__(self, model: Model, *, layer: int = 0) -> None:
        super().__init__(model, layer=layer)
        mla = self.mla
        assert mla.indexer is not None
        assert mla.q_rank is not None
        self.sparse_core = SparseCore(self.rule, value_dim=mla.kv_rank)
        self.lends_chosen = model.lends_chosen(layer)
        self.indexer = (
            LightningIndexer(mla.indexer, q_rank=mla.q_rank, width=model.width) if model.has_indexer(layer) else None
        )

    def forward(self, x_RD: Tensor, rows: RowInputs) -> Tensor | tuple[Tensor, ...]:
        """Apply attention: [R, D] → [R, D]; with the indices [R, K] of keys, if later layers attend to them."""
        mla, tokens, up = self.mla, rows.tokens, UpGradient(self.kv_up, key_dim=self.mla.nope_dim)
        tables = rows.rotary(sliding=False)
        q, kv, gate, query_latent = self._project_down(x_RD, rows.keys)
        if self.indexer is None:
            assert rows.chosen is not None
            chosen = rows.chosen
        else:
            chosen = self.indexer(x_RD, query_latent, rows)
        del query_latent
        latent, key = kv.split((mla.kv_rank, mla.rope_dim), dim=-1)
        del kv
        key = self._share_key(key)
        latent = self.share(self._normalize_latent(latent))
        q = q.view(-1, tokens, q.shape[1] // (mla.nope_dim + mla.rope_dim), mla.nope_dim + mla.rope_dim)
        absorbed = self.run("attention.core.absorb_k", absorb_keys, q, up)
        q = self.run("rope.q", _join_queries, absorbed, q, *tables)
        del absorbed
        keys = self.run("attention.core.key", _join_keys, latent, key, *tables)
        del latent, key
        out = self.run("attention.core", self.sparse_core, q, keys, chosen, self.sinks, tokens)
        del q, keys
        out = self.run("attention.core.absorb_v", absorb_values, out, up)
        if gate is not None:
            out = self.run("attention.core.gate", self.kernels.gate_output, out, gate, self.gate_activation)
            del gate
        (out_RD,) = project(self.run, "attention.out", out, self.out, keys_B=rows.keys)
        return (out_RD, chosen) if self.lends_chosen else out_RD


def _join_queries(absorbed: Tensor, q_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Append the last dims of each head, rotated, to its query of the latent: → [R, N, kv_rank + rope_dim]."""
    return _JoinQueries.apply(absorbed, q_BTNH, cos, sin)


class _JoinQueries(torch.autograd.Function):
    """``_join_queries``; its gradients are tensors of their own, so that none keeps the other's storage until W."""

    @staticmethod
    def forward(ctx: Any, absorbed: Tensor, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.shape = q.shape
        rotated = turn(q[..., -cos.shape[-1] :], cos, sin)
        return torch.cat((absorbed, rotated.flatten(0, 1)), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        rotary_dim = cos.shape[-1]
        q_grad = gradient.new_zeros(ctx.shape)
        rotated = gradient[..., -rotary_dim:].unflatten(0, ctx.shape[:2])
        q_grad[..., -rotary_dim:] = turn(rotated, cos, -sin)
        return gradient[..., :-rotary_dim].contiguous(), q_grad, None, None


def _join_keys(latent: Tensor, key_RH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Append the rotary key, rotated, to the latent: → [R, kv_rank + rope_dim]."""
    rotated = rotate(key_RH.view(-1, len(cos), 1, key_RH.shape[1]), cos_TH=cos, sin_TH=sin)
    return torch.cat((latent, rotated.flatten(0, 2)), dim=-1)
