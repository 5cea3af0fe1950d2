"""Self-attention on rows [R, D], R = B · T: grouped-query (GQA), or multi-head latent (MLA, arXiv:2405.04434).

    grouped   x → q, k, v → (norm, clip) → rope → (norm, temperature) → core → out
    latent    x → q_down → norm → q_up;  x → kv_down → latent → norm → kv_up, and one rotary key that all heads share

The core, softmax(q·kᵀ·scale, causal)·v, is flash attention with the layer's window, soft cap and sinks. It keeps q, k,
v, its output and one log-sum-exp per query (arXiv:2205.14135). Parallelisms replace ``run``, ``core``, ``hooks`` and,
for MLA, ``share``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.factors import Multipliers
from fivefold.model.spec import Model
from fivefold.model.weights import compute_norm_shape
from fivefold.trainer.model import dynamic_mask
from fivefold.trainer.model.attention_mask import AttentionMask
from fivefold.trainer.model.chunked_attention import get_last_chunk, join_chunks, split_chunks
from fivefold.trainer.model.differential import compute_initial_factor, repeat_halves, subtract_heads
from fivefold.trainer.model.dynamic_mask import DynamicMask
from fivefold.trainer.model.flash_attention import Flash
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.lora import project
from fivefold.trainer.model.norm import UnitNorm, build_norm
from fivefold.trainer.model.operation import Run, call_directly
from fivefold.trainer.model.rotary import RowInputs
from fivefold.trainer.model.unfused_attention import Unfused

Heads = tuple[Tensor, Tensor, Tensor]  # q, k and v
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
Core = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]


class AttentionHooks(Protocol):
    """Calls around the core, for a rank that attends with other heads or tokens than its own: Ulysses, the KV cache."""

    def enter(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, ...]:
        """Exchange this rank's q, k and v for those that the core gets."""

    def leave(self, out_BTNH: Tensor) -> Tensor:
        """Exchange the output of the core for the output for this rank's queries [B, T, N, H]."""


class SelfAttention(nn.Module):
    """The common part of GQA and MLA: core and output projection. Subclasses make q, k and v in ``_compute_heads``."""

    out: Linear

    def __init__(self, model: Model, *, layer: int) -> None:
        super().__init__()
        self.run: Run = call_directly
        self.kernels: Kernels = EAGER
        slides, self.shape = model.has_window(layer), model.attention(layer)
        self.rotates, self.has_temperature = model.has_rope(layer), model.has_temperature(layer)
        self.has_sliding_rope = slides and model.rope_theta_sliding is not None
        self.chunk = model.window if slides and model.window_kind == "chunks" else None
        self.rule = AttentionMask.from_layer(model, layer=layer)
        self.core: Core | Unfused = Flash(self.rule)
        self.hooks: AttentionHooks | None = None
        self.gate_activation = model.gate_activation
        self.out_norm = build_norm(model, self.shape.output_dims) if model.sub_norm else None
        self.sinks = nn.Parameter(torch.empty(self.shape.heads)) if self.shape.sinks else None
        self.lends_kv, self.shares_kv = model.lends_kv(layer), model.shares_kv(layer)
        self.differential = model.differential
        self.mask = DynamicMask(model, self.shape) if model.dynamic_mask is not None else None

    def forward(self, x_RD: Tensor, rows: RowInputs) -> Tensor | tuple[Tensor, ...]:
        """Apply attention: [R, D] → [R, D]; with keys and values [B, T, K, H], if later layers attend to them."""
        out, gate, lent = self._attend_rows(x_RD, rows)
        if gate is not None:
            out = self.run("attention.core.gate", self.kernels.gate_output, out, gate, self.gate_activation)
            del gate
        if self.out_norm is not None:
            out = self.run("attention.out_norm", self.out_norm, out)
        (out_RD,) = project(self.run, "attention.out", out, self.out, keys_B=rows.keys)
        return out_RD if lent is None else (out_RD, *lent)

    def _attend_rows(self, x_RD: Tensor, rows: RowInputs) -> tuple[Tensor, Any, tuple[Tensor, ...] | None]:
        """Return the output of the core [R, N · H], what else ``_compute_heads`` returns, and k and v if lent."""
        heads, carried = self._compute_heads(x_RD, rows)
        lent = heads[1:] if self.lends_kv else None
        if self.hooks is not None:
            heads = self.run("attention.enter", self.hooks.enter, *heads)
        sequences, tokens = heads[0].shape[:2]
        if self.mask is not None:
            out_BTNH = dynamic_mask.attend(self.run, self.mask, heads, self.rule)
        else:
            out_BTNH = self._attend_in_pairs(heads, rows) if self.differential else self._attend(heads, rows)
        del heads
        if out_BTNH.shape[1] != tokens or len(out_BTNH) != sequences:
            out_BTNH = join_chunks(out_BTNH, sequences=sequences, tokens=tokens)
        if self.hooks is not None:
            out_BTNH = self.run("attention.leave", self.hooks.leave, out_BTNH)
        return out_BTNH.flatten(2).flatten(0, 1), carried, lent

    def _attend_in_pairs(self, heads: tuple[Tensor, ...], rows: RowInputs) -> Tensor:
        """Return the differences of pairs of heads [B, T, N/2, 2H]."""
        raise NotImplementedError

    def _attend(self, heads: tuple[Tensor, ...], rows: RowInputs, *, name: str = "attention.core") -> Tensor:
        """Return the core's output [B, T, N, H]; if the layer attends inside chunks, the output of every chunk."""
        (q, k, v), documents, keys = heads, rows.documents, rows.keys
        if self.chunk is not None and k.shape[1] > self.chunk:
            if q.shape[1] < k.shape[1]:
                k, v = (get_last_chunk(x, chunk=self.chunk) for x in (k, v))
            else:
                q, k, v = (split_chunks(x, chunk=self.chunk) for x in (q, k, v))
                documents = None if documents is None else split_chunks(documents, chunk=self.chunk, fill=-1)
        del heads
        if isinstance(self.core, Unfused):
            return self.core(q, k, v, documents, keys, run=self.run)
        return self.run(name, self.core, q, k, v, documents, self.sinks, keys)

    def _compute_heads(self, x_RD: Tensor, rows: RowInputs) -> tuple[Heads, Any]:
        """Compute q [B, T, N, H], k and v [B, T, K, H], rotated, from x [R, D]; and the gate, [R, N · H] or [R, N].

        ``ExpertAttention`` has what its output needs of the routing in place of the gate.
        """
        raise NotImplementedError


class GroupedAttention(SelfAttention):
    """GQA (arXiv:2305.13245). Under tp the weights are a rank's slice; head counts are read from their shapes."""

    def __init__(self, model: Model, *, layer: int = 0) -> None:
        super().__init__(model, layer=layer)
        shape = self.shape
        self.qk_norm, self.clip, self.value_scale = model.qk_norm, model.qkv_clip, model.value_scale
        factors = model.multipliers or Multipliers()
        self.in_scale = factors.attention_in
        self.key_scale = factors.key
        self.norms_heads = model.qk_norm in ("head", "heads") or (model.qk_norm == "unit" and self.rotates)
        self.norms_rotated = model.qk_norm_after_rope
        self.q = Linear(model.width, shape.query_dims, bias=model.qkv_bias)
        dims = {"k": shape.kv_heads * shape.head_dim, "v": shape.kv_heads * shape.value_dim}
        left_out = "kv" if self.shares_kv else "v" if shape.tied_values else ""
        self.k, self.v = (
            None if name in left_out else Linear(model.width, size, bias=model.qkv_bias) for name, size in dims.items()
        )
        gate_width = model.count_gate_columns(shape)
        self.gate = Linear(model.width, gate_width, bias=model.qkv_bias) if model.output_gate else None
        self.gate_bias = nn.Parameter(torch.empty(shape.heads)) if model.gate_bias else None
        self.q_norm: nn.Module
        self.k_norm: nn.Module
        if model.qk_norm == "unit" and self.rotates:
            self.q_norm, self.k_norm = (UnitNorm(epsilon=model.norm_epsilon) for _ in range(2))
        of_norms = [compute_norm_shape(model, heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads)]
        if of_norms[0] is not None and of_norms[1] is not None:
            self.q_norm = build_norm(model, *of_norms[0])
            if not self.shares_kv:
                self.k_norm = build_norm(model, *of_norms[1])
        self.v_norm = UnitNorm(epsilon=model.norm_epsilon) if model.value_norm else None
        if model.differential:
            self.initial_factor, self.epsilon = compute_initial_factor(layer), model.norm_epsilon
            for vector in LAMBDAS:
                self.register_parameter(vector, nn.Parameter(torch.empty(shape.head_dim)))
        self.out = Linear(shape.output_dims, model.width, bias=model.has_out_bias(layer))

    def _compute_heads(self, x_RD: Tensor, rows: RowInputs) -> tuple[Heads, Tensor | None]:
        """Return queries, keys and values [B, T, heads, dim] as the core reads them, and the output gate, if any."""
        # reusing the names frees each tensor once the operation on it has run
        linears = [linear for linear in (self.k, self.v, self.gate) if linear is not None]
        if self.in_scale != 1:
            x_RD = self.run("attention.in.scale", torch.mul, x_RD, self.in_scale)
        q, *others = project(self.run, "attention.qkv", x_RD, self.q, *linears, keys_B=rows.keys)
        gate = others.pop() if self.gate is not None else None
        if gate is not None and self.gate_bias is not None:
            gate = self.run("attention.gate.bias", _add_head_bias, gate, self.gate_bias)
        if self.shares_kv:
            assert rows.keys_values is not None
            return (self._make_queries(q, rows), *rows.keys_values), gate
        v = others.pop() if self.v is not None else others[0]
        k = others.pop()
        if self.qk_norm == "full":
            q, k = self._normalize(q, k)
        if self.clip is not None:
            q = self.run("attention.clip.q", F.hardtanh, q, -self.clip, self.clip)
            k = self.run("attention.clip.k", F.hardtanh, k, -self.clip, self.clip)
            v = self.run("attention.clip.v", F.hardtanh, v, -self.clip, self.clip)
        if self.key_scale != 1:
            k = self.run("attention.scale.k", torch.mul, k, self.key_scale)
        if self.value_scale != 1:
            v = self.run("attention.scale.v", torch.mul, v, self.value_scale)
        q, k = (split_heads(x, rows.tokens, self.shape.head_dim) for x in (q, k))
        v = split_heads(v, rows.tokens, self.shape.value_dim)
        if self.v_norm is not None:
            v = self.run("attention.v_norm", self.v_norm, v)
        if self.norms_heads and not self.norms_rotated:
            q, k = self._normalize(q, k)
        if self.rotates:
            tables = rows.rotary(sliding=self.has_sliding_rope)
            q = self.run("rope.q", self.kernels.rotate_first, q, *tables)
            k = self.run("rope.k", self.kernels.rotate_first, k, *tables)
        if self.norms_heads and self.norms_rotated:
            q, k = self._normalize(q, k)
        if self.has_temperature:
            q = self.run("rope.temperature", self.kernels.rotate_first, q, *rows.temperature())
        return (q, k, v), gate

    def _attend_in_pairs(self, heads: tuple[Tensor, ...], rows: RowInputs) -> Tensor:
        """Apply differential attention: attend to both halves of the values, and subtract the outputs."""
        q, k, v = heads
        halves = self.run("attention.core.halves", repeat_halves, v)
        del heads, v
        outs = [
            self._attend((q, k, half), rows, name=f"attention.core.{index}") for index, half in enumerate(halves, 1)
        ]
        del q, k, halves
        vectors = (getattr(self, vector) for vector in LAMBDAS)
        settings = self.initial_factor, self.epsilon
        return self.run("attention.core.difference", subtract_heads, *outs, *vectors, *settings)

    def _make_queries(self, q: Tensor, rows: RowInputs) -> Tensor:
        """Return the queries [B, T, N, H] of a layer without keys and values of its own."""
        q = split_heads(q, rows.tokens, self.shape.head_dim)
        if self.norms_heads:
            q = self.run("attention.q_norm", self.q_norm, q)
        if self.rotates:
            q = self.run("rope.q", self.kernels.rotate_first, q, *rows.rotary(sliding=self.has_sliding_rope))
        if self.has_temperature:
            q = self.run("rope.temperature", self.kernels.rotate_first, q, *rows.temperature())
        return q

    def _normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.run("attention.q_norm", self.q_norm, q), self.run("attention.k_norm", self.k_norm, k)


class LatentAttention(SelfAttention):
    """MLA. A head's query and key have ``nope_dim`` dims without positions, then ``rope_dim`` rotated ones.

    ``share``: under tp, gathers the rows of the rotary key (sp) and sums its gradient. ``bare``: the core attends to
    the latent itself (absorbed form, for decoding), so that no keys and values are made from it.
    """

    def __init__(self, model: Model, *, layer: int = 0) -> None:
        mla = model.get_latent(layer)
        assert mla is not None
        super().__init__(model, layer=layer)
        self.mla, heads = mla, self.shape.heads
        self.share: Callable[[Tensor], Tensor] = _identity
        self.bare = False
        q_width = heads * (mla.nope_dim + mla.rope_dim)
        if mla.q_rank is None:
            self.q = Linear(model.width, q_width, bias=False)
        else:
            self.q_down = Linear(model.width, mla.q_rank, bias=model.qkv_bias)
            self.q_norm = build_norm(model, mla.q_rank, epsilon=mla.norm_epsilon)
            q_inputs = 2 * mla.q_rank if mla.gates_queries else mla.q_rank
            self.q_up = Linear(q_inputs, q_width, bias=False)
        self.kv_down = Linear(model.width, mla.kv_rank + mla.rope_dim, bias=model.qkv_bias)
        self.kv_norm = build_norm(model, mla.kv_rank, epsilon=mla.norm_epsilon)
        self.key_norm = build_norm(model, mla.rope_dim, epsilon=mla.norm_epsilon) if mla.key_norm else None
        self.kv_up = Linear(mla.kv_rank, heads * (mla.nope_dim + mla.v_dim), bias=False)
        gate_width = model.count_gate_columns(self.shape)
        gate_inputs = 2 * mla.q_rank if mla.gates_queries and mla.q_rank else model.width
        self.gate = Linear(gate_inputs, gate_width, bias=False) if model.output_gate else None
        self.out = Linear(heads * mla.v_dim, model.width, bias=model.out_bias)
        # √(width / rank) on what follows from the latents: the queries or their latent, and the latent of keys
        self.q_scale, self.kv_scale = (
            sqrt(model.width / rank) if rank and mla.scaled != "none" else 1.0 for rank in (mla.q_rank, mla.kv_rank)
        )

    def _compute_heads(self, x_RD: Tensor, rows: RowInputs) -> tuple[Heads, Tensor | None]:
        """Return queries, keys and values [B, T, heads, dim] as the core reads them, and the output gate, if any."""
        mla, tokens = self.mla, rows.tokens
        tables = rows.rotary(sliding=self.has_sliding_rope) if self.rotates else None
        q, kv, gate = self._project_down(x_RD, rows.keys)[:3]
        latent, key = kv.split((mla.kv_rank, mla.rope_dim), dim=-1)
        key = self._share_key(key).view(-1, tokens, 1, mla.rope_dim)
        latent = self._normalize_latent(latent)
        if self.bare:
            return self._absorbed_heads(q, latent, key, rows), gate
        (kv,) = project(self.run, "attention.kv_up", latent, self.kv_up, keys_B=rows.keys)
        # v is a view into the output of kv_up, so all of that output stays allocated
        k, v = split_heads(kv, tokens, mla.nope_dim + mla.v_dim).split((mla.nope_dim, mla.v_dim), dim=-1)
        q = split_heads(q, tokens, mla.nope_dim + mla.rope_dim)
        if tables is None:
            k = self.run("rope.k", _append_key, k, key)
        else:
            q = self.run("rope.q", self.kernels.rotate_last, q, *tables)
            k = self.run("rope.k", self.kernels.append_rotated, k, key, *tables)
        if self.has_temperature:
            q = self.run("rope.temperature", self.kernels.rotate_first, q, *rows.temperature())
        return (q, k, v), gate

    def _absorbed_heads(self, q: Tensor, latent: Tensor, key: Tensor, rows: RowInputs) -> Heads:
        """Compute ``_heads`` in absorbed form: one key head, latent | rotary key, and one value head, the latent."""
        mla, tokens = self.mla, rows.tokens
        q = split_heads(q, tokens, mla.nope_dim + mla.rope_dim)
        if self.rotates:
            tables = rows.rotary(sliding=self.has_sliding_rope)
            q = self.kernels.rotate_last(q, *tables)
            key = self.kernels.rotate_last(key, *tables)
        if self.has_temperature:
            q = self.kernels.rotate_first(q, *rows.temperature())
        k = torch.cat((latent.view(-1, tokens, 1, mla.kv_rank), key), dim=-1)
        return q, k, k[..., : mla.kv_rank]

    def _project_down(self, x_RD: Tensor, keys_B: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Project x [R, D] to q [R, N · (nope + rope)] of this rank's heads, to latent | rotary key, and to the gate.

        Latent and rotary key are [R, kv_rank + rope]. Last is the normed latent of the queries, if they have one.
        ``keys_B``: random keys of the sequences, for dropout of adapters' inputs.
        """
        gate: Tensor | None = None
        latent: Tensor | None = None
        if self.mla.q_rank is None:
            gates = [self.gate] if self.gate is not None else []
            q, *projected = project(self.run, "attention.q", x_RD, self.q, *gates, keys_B=keys_B)
            gate = projected[0] if projected else None
            (kv,) = project(self.run, "attention.down", x_RD, self.kv_down, keys_B=keys_B)
        else:
            if self.gate is not None and not self.mla.gates_queries:
                (gate,) = project(self.run, "attention.gate", x_RD, self.gate, keys_B=keys_B)
            latent, kv = project(self.run, "attention.down", x_RD, self.q_down, self.kv_down, keys_B=keys_B)
            if self.mla.gates_queries:
                return self._make_gated_queries(latent, kv, keys_B)
            latent = self.run("attention.q_norm", self.q_norm, latent)
            if self.mla.scaled == "latents":
                latent = self.run("attention.scale.q", torch.mul, latent, self.q_scale)
            (q,) = project(self.run, "attention.q_up", latent, self.q_up, keys_B=keys_B)
            if self.mla.scaled == "queries":
                q = self.run("attention.scale.q", torch.mul, q, self.q_scale)
        return q, kv, gate, latent

    def _make_gated_queries(
        self, latent: Tensor, kv: Tensor, keys_B: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return what ``_project_down`` does, with queries and gate of the latent both after and before its norm."""
        assert self.gate is not None
        normed = self.run("attention.q_norm", self.q_norm, latent)
        joined = self.run("attention.q_join", _join, normed, latent)
        del latent
        q, gate = project(self.run, "attention.q_up", joined, self.q_up, self.gate, keys_B=keys_B)
        return q, kv, gate, normed

    def _share_key(self, key: Tensor) -> Tensor:
        """Return the rotary key [R, rope_dim] for the heads of every rank, normed if the model says so."""
        return self.share(key if self.key_norm is None else self.run("attention.key_norm", self.key_norm, key))

    def _normalize_latent(self, latent: Tensor) -> Tensor:
        """Return the normed latent of keys and values [R, kv_rank], scaled if the model says so."""
        latent = self.run("attention.kv_norm", self.kv_norm, latent)
        return latent if self.kv_scale == 1 else self.run("attention.scale.kv", torch.mul, latent, self.kv_scale)


def _append_key(k_BTNH: Tensor, key_BT1H: Tensor) -> Tensor:
    """Append the shared key [B, T, 1, H] to the key of every head, as ``append_rotated`` without a rotation."""
    return torch.cat((k_BTNH, key_BT1H.expand(-1, -1, k_BTNH.shape[2], -1)), dim=-1)


def _join(normed: Tensor, latent: Tensor) -> Tensor:
    """Return a latent [R, q_rank] after and before its norm, side by side."""
    return _Join.apply(normed, latent)


class _Join(torch.autograd.Function):
    """``_join``; both gradients are tensors of their own, so that neither keeps the other's storage."""

    @staticmethod
    def forward(ctx: Any, normed: Tensor, latent: Tensor) -> Tensor:
        ctx.size = normed.shape[1]
        return torch.cat((normed, latent), dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient[:, : ctx.size].contiguous(), gradient[:, ctx.size :].contiguous()


def _identity(rows: Tensor) -> Tensor:
    return rows


def _add_head_bias(gate: Tensor, bias_N: Tensor) -> Tensor:
    """Return the gate [R, N · H] or [R, N] with the bias of each head added."""
    factors: Tensor = gate.view(len(gate), len(bias_N), -1) + bias_N.to(gate.dtype)[:, None]
    return factors.flatten(1)


def split_heads(rows: Tensor, tokens: int, head_dim: int) -> Tensor:
    """View rows [B · T, N · H] as [B, T, N, H]."""
    return rows.view(-1, tokens, rows.shape[1] // head_dim, head_dim)
