"""Flash attention over a block of keys; returns the log-sum-exp with which the outputs of blocks are merged.

    out = softmax(q·kᵀ·scale)·v        lse = log Σ exp(q·kᵀ·scale)      p = exp(q·kᵀ·scale − lse) in the backward
    sinks     one learned logit per head, a key without a value: lse' = log(exp lse + exp sink)   (gpt-oss)

The backward of one block is exact if it is given output and lse over all keys (Dao, arXiv:2205.14135). Packed
documents are contiguous, so they are attended to as ranges of queries and keys; no mask tensor is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.errors import UserError
from fivefold.trainer.model.attention_mask import AttentionMask, Heads
from fivefold.trainer.model.chunked_attention import make_chunk_keys
from fivefold.trainer.model.dropout import PROBABILITIES, place_in
from fivefold.trainer.model.operation import exclude_from_graphs
from fivefold.trainer.model.sliding_window_attention import band_attention, band_attention_backward

aten = torch.ops.aten


class DocumentSpan(NamedTuple):
    """Queries of one document and the keys they attend to, as ranges of rows of [B · T] and [B · S].

    ``offset``: position of the first query − that of the first key.
    """

    queries: slice
    keys: slice
    offset: int = 0


Spans = Sequence[DocumentSpan]


class DropoutNoise(NamedTuple):
    """Dropout of probabilities at a ``place``: ``keys`` [B] of the sequences.

    Indices of the first head, query and key.
    """

    keys: Tensor
    rate: float
    place: int
    head: int
    query: int = 0
    key: int = 0
    gap_at: int = 0  # on a ring rank, positions from this token on are ``gap`` higher; 0: there is no gap
    gap: int = 0
    chunks: int = 1  # that each sequence is split into before the core; their keys are made when they are used

    @property
    def chunk_keys(self) -> Tensor:
        """Return the keys of the sequences that the core gets, [B · chunks]."""
        return self.keys if self.chunks == 1 else make_chunk_keys(self.keys, chunks=self.chunks)

    def restrict_to(self, span: DocumentSpan, *, queries: int, keys: int) -> DropoutNoise:
        """Return the dropout for a span of sequences with ``queries`` queries and ``keys`` keys each."""
        (sequence, query), key = divmod(span.queries.start, queries), span.keys.start % keys
        query, key = (
            position + (self.gap if self.gap_at and position >= self.gap_at else 0) for position in (query, key)
        )
        own_keys = self.chunk_keys[sequence : sequence + 1]
        return self._replace(keys=own_keys, query=self.query + query, key=self.key + key, chunks=1)


class Flash:
    """Attention core for a rank that has full sequences: causal, within documents if there are any."""

    def __init__(self, rule: AttentionMask, *, heads: Heads = Heads()) -> None:  # noqa: B008  frozen
        self.rule, self.heads = rule, heads

    def __call__(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        documents_BT: Tensor | None = None,
        sinks_N: Tensor | None = None,
        keys_B: Tensor | None = None,
    ) -> Tensor:
        """Attend: q [B, T, N, H], k and v [B, T, K, H] → [B, T, N, H of v]; keeps q, k, v, the output and lse.

        ``documents_BT``: a document id per token, on the CPU if possible (it is read there). ``sinks_N``: a logit for
        each head; with Ulysses, for the heads of all ranks. ``keys_B``: keys of the sequences for dropout, fewer than
        q's if these are chunks of sequences; None: no dropout.
        """
        rule = self.rule.apply_dropout(q_BTNH.shape[1], training=keys_B is not None)
        if rule.slopes:
            rule = rule.select_heads(self.heads.first_index(q_BTNH.shape[2]), q_BTNH.shape[2])
        # SDPA has a flash kernel for these. If q and v differ in head dim, it materializes the scores on CPU, and on
        # GPUs if there are fewer key heads than query heads.
        groups = q_BTNH.shape[2] != k_BTKH.shape[2]
        has_kernel = q_BTNH.shape[-1] == v_BTKH.shape[-1] or (q_BTNH.is_cuda and not groups)
        if documents_BT is None and sinks_N is None and rule.is_plain and has_kernel:
            out_BNTH = F.scaled_dot_product_attention(
                q_BTNH.transpose(1, 2),
                k_BTKH.transpose(1, 2),
                v_BTKH.transpose(1, 2),
                is_causal=True,
                scale=rule.scale,
                enable_gqa=groups,
            )
            return out_BNTH.transpose(1, 2)
        noise = None
        if rule.dropout and keys_B is not None:
            place = place_in(rule.layer, PROBABILITIES)
            chunks = len(q_BTNH) // len(keys_B)
            noise = DropoutNoise(keys_B, rule.dropout, place, self.heads.first_index(q_BTNH.shape[2]), chunks=chunks)
        return self._attend_by_blocks(q_BTNH, k_BTKH, v_BTKH, sinks_N, rule, documents_BT, noise)

    @exclude_from_graphs
    def _attend_by_blocks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rule: AttentionMask,
        documents_BT: Tensor | None,
        noise: DropoutNoise | None,
    ) -> Tensor:
        """Attend with our own autograd function, document by document if ``documents_BT`` is given."""
        spans = None if documents_BT is None else list_self_attention_spans(documents_BT)
        rank = self.heads.rank
        return _FlashAttention.apply(q, k, v, sinks, rule, spans, rank, noise)


class _FlashAttention(torch.autograd.Function):
    """Causal attention on full sequences, within ``spans`` if given; saves q, k, v, out and lse."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rule: AttentionMask,
        spans: Spans | None,
        rank: int,
        noise: DropoutNoise | None,
    ) -> Tensor:
        ctx.noise = noise
        ctx.rule, ctx.spans, ctx.heads = rule, spans, slice(rank * q.shape[2], (rank + 1) * q.shape[2])
        out, lse = attend(q, k, v, rule, spans=spans, noise=noise)
        if sinks is not None:
            add_sinks(out, lse, sinks[ctx.heads])
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        d_sinks = None
        if sinks is not None:
            d_sinks = torch.zeros_like(sinks)
            d_sinks[ctx.heads] = sinks_backward(gradient, out, lse, sinks[ctx.heads])
        dqkv = attend_backward(gradient, q, k, v, out, lse, ctx.rule, spans=ctx.spans, noise=ctx.noise)
        return *dqkv, d_sinks, None, None, None, None


def add_sinks(out: Tensor, lse: Tensor, sinks_N: Tensor) -> None:
    """Add a key without a value and with the logit ``sinks`` to every query, in ``out`` and ``lse`` in place."""
    merged_lse = torch.logaddexp(lse, sinks_N.to(lse.dtype))
    out.mul_((lse - merged_lse).exp_()[..., None])
    lse.copy_(merged_lse)


def sinks_backward(gradient: Tensor, out: Tensor, lse: Tensor, sinks_N: Tensor) -> Tensor:
    """Return the gradient of the sinks [N]: −Σ over queries of exp(sink − lse) · (gradient · out).

    ``lse`` includes them.
    """
    inner = (gradient * out).sum(-1, dtype=lse.dtype)
    return (sinks_N.to(lse.dtype) - lse).exp_().mul_(inner).sum((0, 1)).neg_().to(sinks_N.dtype)


def list_self_attention_spans(documents_BT: Tensor) -> tuple[DocumentSpan, ...]:
    """Return the spans for self-attention: each document of each sequence attends to itself."""
    ids = documents_BT.cpu()
    is_start = torch.ones_like(ids, dtype=torch.bool)
    is_start[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = is_start.flatten().nonzero().flatten().tolist()
    documents = [slice(start, stop) for start, stop in zip(starts, [*starts[1:], ids.numel()], strict=True)]
    return tuple(DocumentSpan(document, document) for document in documents)


def list_earlier_key_spans(queries_BT: Tensor, keys_BS: Tensor, *, offset: int) -> tuple[DocumentSpan, ...]:
    """Return the spans of queries over earlier keys: in each sequence, only the document that continues attends.

    The ids are document ids. ``offset``: position of the first query − that of the first key.
    """
    (B, T), S = queries_BT.shape, keys_BS.shape[1]
    last_ids = keys_BS[:, -1:]
    span_lengths = zip((queries_BT == last_ids).sum(1).tolist(), (keys_BS == last_ids).sum(1).tolist(), strict=True)
    lengths_by_sequence = zip(range(B), span_lengths, strict=True)
    return tuple(
        DocumentSpan(slice(b * T, b * T + t), slice(b * S + S - s, b * S + S), offset - (S - s))
        for b, (t, s) in lengths_by_sequence
        if t
    )


def attend(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    rule: AttentionMask,
    *,
    offset: int = 0,
    spans: Spans | None = None,
    noise: DropoutNoise | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute out [B, T, N, H of v] and lse [B, T, N] (fp32, fp64 for fp64), without autograd.

    ``offset``: position of the first query − that of the first key: 0 is causal (T = S), S or more sees all keys, and
    values between are valid only for queries and keys without a gap. ``spans``: only these queries attend to these
    keys, by the offset of each; others get out 0, lse −∞.
    """
    if spans is None:
        return _forward(q_BTNH, k_BSKH, v_BSKH, rule, offset, noise)
    out = q_BTNH.new_zeros(*q_BTNH.shape[:3], v_BSKH.shape[-1])
    lse = q_BTNH.new_full(q_BTNH.shape[:3], -torch.inf, dtype=torch.promote_types(q_BTNH.dtype, torch.float32))
    q, k, v = (x.flatten(0, 1)[None] for x in (q_BTNH, k_BSKH, v_BSKH))
    for span in spans:
        queries, keys, span_offset = span
        span_noise = noise and noise.restrict_to(span, queries=q_BTNH.shape[1], keys=k_BSKH.shape[1])
        out.view(q.shape[1], *out.shape[2:])[queries], lse.view(-1, lse.shape[2])[queries] = _forward(
            q[:, queries], k[:, keys], v[:, keys], rule, span_offset, span_noise
        )
    return out, lse


def attend_backward(
    gradient: Tensor,
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    out: Tensor,
    lse: Tensor,
    rule: AttentionMask,
    *,
    offset: int = 0,
    spans: Spans | None = None,
    noise: DropoutNoise | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v from that of ``out``.

    ``out`` and ``lse`` may be over more keys than the block's.
    """
    if spans is None:
        return _backward(gradient, q_BTNH, k_BSKH, v_BSKH, out, lse, rule, offset, noise)
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q_BTNH, k_BSKH, v_BSKH))
    flat_queries = [x.flatten(0, 1)[None] for x in (gradient, q_BTNH, out, lse)]
    k, v = k_BSKH.flatten(0, 1)[None], v_BSKH.flatten(0, 1)[None]
    for span in spans:
        query_rows, key_rows, span_offset = span
        span_noise = noise and noise.restrict_to(span, queries=q_BTNH.shape[1], keys=k_BSKH.shape[1])
        g, q, o, s = (x[:, query_rows] for x in flat_queries)
        dq.flatten(0, 1)[query_rows], dk.flatten(0, 1)[key_rows], dv.flatten(0, 1)[key_rows] = (
            gradients[0]
            for gradients in _backward(g, q, k[:, key_rows], v[:, key_rows], o, s, rule, span_offset, span_noise)
        )
    return dq, dk, dv


def _forward(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionMask, offset: int, noise: DropoutNoise | None
) -> tuple[Tensor, Tensor]:
    """Run torch's flash kernel or ``band_attention``: out [B, T, N, H of v] and lse [B, T, N]."""
    if not rule.is_plain:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = band_attention(
            *heads,
            *(rule.scale, offset, rule.window or 0, rule.softcap or 0.0),
            *_list_dropout_arguments(noise),
            list(rule.slopes),
        )
        return out.transpose(1, 2), lse.transpose(1, 2)
    dim, causal = _choose_kernel_dim(q, v), offset < k.shape[1] - 1
    qkv = [_heads(x, dim) for x in (q, k, v)]
    if q.is_cuda:
        out, lse = aten._scaled_dot_product_flash_attention(*qkv, 0.0, causal, False, scale=rule.scale)[:2]
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, causal, scale=rule.scale)
    return _tokens(out, v.shape[-1]), _tokens(lse)


def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rule: AttentionMask,
    offset: int,
    noise: DropoutNoise | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward of the same kernel: dq, dk, dv."""
    if not rule.is_plain:
        heads = (x.transpose(1, 2) for x in (gradient, q, k, v, out, lse))
        settings = rule.scale, offset, rule.window or 0, rule.softcap or 0.0
        gradients = band_attention_backward(*heads, *settings, *_list_dropout_arguments(noise), list(rule.slopes))
        dq, dk, dv = (x.transpose(1, 2) for x in gradients)
        return dq, dk, dv
    dim, causal = _choose_kernel_dim(q, v), offset < k.shape[1] - 1
    inputs = [_heads(x, dim) for x in (gradient, q, k, v, out)]
    if q.is_cuda:
        # cum_seq_q, cum_seq_k and the dropout state are unused: sequences have one length, dropout is 0
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        gradients = aten._scaled_dot_product_flash_attention_backward(
            *inputs,
            lse.transpose(1, 2).contiguous(),
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            unused,
            unused,
            scale=rule.scale,
        )
    else:
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, lse.contiguous().transpose(1, 2), 0.0, causal, scale=rule.scale
        )
    dq, dk, dv = (_tokens(d, x.shape[-1]) for d, x in zip(gradients, (q, k, v), strict=True))
    return dq, dk, dv


def _list_dropout_arguments(noise: DropoutNoise | None) -> tuple[Tensor | None, float, list[int]]:
    """Return the dropout arguments of ``band_attention``."""
    return (None, 0.0, []) if noise is None else (noise.chunk_keys, noise.rate, list(noise[2:6]))


def _choose_kernel_dim(q: Tensor, v: Tensor) -> int:
    """Return the head dim to which q, k and v are padded.

    Kernels need one dim for all three (zeros change nothing), on GPUs a multiple of 8.
    """
    if q.is_cuda and q.dtype not in (torch.bfloat16, torch.float16):
        raise UserError(
            f"flash attention by blocks runs on GPUs in bf16 or fp16, not {q.dtype}; set the precision to bf16"
        )
    dim = max(q.shape[-1], v.shape[-1])
    return (dim + 7) // 8 * 8 if q.is_cuda else dim


def _heads(x_BTNH: Tensor, dim: int) -> Tensor:
    """Transpose [B, T, N, H] → [B, N, T, dim], zero-padded.

    A view of contiguous [B, T, N, dim], as the kernels need.
    """
    x = x_BTNH.contiguous() if x_BTNH.shape[-1] == dim else F.pad(x_BTNH, (0, dim - x_BTNH.shape[-1]))
    return x.transpose(1, 2)


def _tokens(x: Tensor, dim: int | None = None) -> Tensor:
    """Transpose [B, N, T, …] → [B, T, N, …], last dim cut to ``dim``.

    Contiguous, so that no padding stays allocated.
    """
    transposed = x.transpose(1, 2)
    return (transposed if dim is None else transposed[..., :dim]).contiguous()
