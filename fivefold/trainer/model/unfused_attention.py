"""Unfused attention: scores and probabilities are tensors [B, N, T, S], as before flash attention.

    scores = q·kᵀ·scale → probabilities = softmax(masked scores) → (dropout) → out = probabilities·v

The backward keeps q, k, v and the probabilities: 2·N·T²·B bytes in 16 bits, with dropout its mask and output too, the
5·N·T²·B of Korthikanti 2022 (arXiv:2205.05198, table 2). Use it to measure what flash attention saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fivefold.trainer.model.attention_mask import AttentionMask, Heads
from fivefold.trainer.model.dropout import PROBABILITIES, apply_dropout, place_in, row_keys, score_rows
from fivefold.trainer.model.operation import Run, call_directly, exclude_from_graphs

ROWS = 128  # query rows that are masked at a time


class Unfused:
    """Attention core for a rank that has full sequences: causal, within documents if there are any."""

    def __init__(self, rule: AttentionMask, *, heads: Heads = Heads()) -> None:  # noqa: B008  frozen
        self.rule, self.heads = rule, heads

    def __call__(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        documents_BT: Tensor | None = None,
        keys_B: Tensor | None = None,
        *,
        run: Run = call_directly,
    ) -> Tensor:
        """Attend: q [B, T, N, H], k and v [B, T, K, H] → [B, T, N, H of v]; each step is an operation for ``run``."""
        scores: Tensor = run("attention.core.scores", _scores, q_BTNH, k_BTKH, self.rule)
        probabilities: Tensor = run("attention.core.softmax", _softmax, scores, self.rule, documents_BT)
        del scores
        if self.rule.dropout and keys_B is not None:
            probabilities = run("attention.core.dropout", self._drop, probabilities, keys_B)
        return run("attention.core.values", _values, probabilities, v_BTKH)

    @exclude_from_graphs
    def _drop(self, shares: Tensor, keys_B: Tensor) -> Tensor:
        _, heads, tokens, _ = shares.shape
        first = self.heads.first_index(heads)
        numbers = score_rows(range(first, first + heads), range(tokens), device=shares.device)
        keys = row_keys(keys_B, numbers, place=place_in(self.rule.layer, PROBABILITIES))
        return apply_dropout(shares, keys, self.rule.dropout)


@exclude_from_graphs
def _scores(q: Tensor, k: Tensor, rule: AttentionMask) -> Tensor:
    return _Scores.apply(q, k, rule.scale)


@exclude_from_graphs
def _softmax(scores: Tensor, rule: AttentionMask, documents: Tensor | None) -> Tensor:
    return _Softmax.apply(scores, rule, documents)


@exclude_from_graphs
def _values(shares: Tensor, v: Tensor) -> Tensor:
    return _Values.apply(shares, v)


class _Scores(torch.autograd.Function):
    """Compute q·kᵀ·scale [B, N, T, S]; saves q and k."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(q, k)
        return _product(_group_by_key_head(q, k.shape[2]), _keys(k).mT, scale).view(
            q.shape[0], q.shape[2], q.shape[1], -1
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k = ctx.saved_tensors
        d_scores = gradient.reshape(q.shape[0] * k.shape[2], -1, k.shape[1])
        dq = _product(d_scores, _keys(k), ctx.scale)
        dk = _product(d_scores.mT, _group_by_key_head(q, k.shape[2]), ctx.scale)
        return _tokens_first(dq, q), _tokens_first(dk, k), None


class _Softmax(torch.autograd.Function):
    """Compute the probabilities of masked scores; overwrites the scores and saves the probabilities."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, rule: AttentionMask, documents: Tensor | None) -> Tensor:
        for rows, hidden in list_masks(scores.shape[2], window=rule.window, documents=documents, device=scores.device):
            scores[:, :, rows].masked_fill_(hidden, -torch.inf)
        probabilities = scores.softmax(-1)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (probabilities,) = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradient, probabilities, -1, probabilities.dtype), None, None


class _Values(torch.autograd.Function):
    """Compute probabilities · v [B, T, N, H of v]; saves both."""

    @staticmethod
    def forward(ctx: Any, shares: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(shares, v)
        (sequences, heads, tokens, keys), kv_heads = shares.shape, v.shape[2]
        out = torch.bmm(shares.view(sequences * kv_heads, -1, keys), _keys(v))
        return out.view(sequences, heads, tokens, -1).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        probabilities, v = ctx.saved_tensors
        g = _group_by_key_head(gradient, v.shape[2])
        d_probabilities = torch.bmm(g, _keys(v).mT).view(probabilities.shape)
        dv = torch.bmm(probabilities.view(g.shape[0], -1, probabilities.shape[-1]).mT, g)
        return d_probabilities, _tokens_first(dv, v)


def list_masks(
    tokens: int, *, window: int | None, documents: Tensor | None, device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of queries and a mask [B or 1, 1, rows, S] of the keys hidden from them.

    Hidden are later keys, keys beyond the window and those of other documents.
    """
    positions = torch.arange(tokens, device=device)
    ids = None if documents is None else documents.to(device)
    for start in range(0, tokens, ROWS):
        rows = slice(start, min(start + ROWS, tokens))
        distance = positions[rows, None] - positions
        hidden = (distance < 0)[None]
        if window is not None:
            hidden = hidden | (distance >= window)
        if ids is not None:
            hidden = hidden | (ids[:, rows, None] != ids[:, None])
        yield rows, hidden[:, None]


def _product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return ``scale`` · left · right, in one kernel."""
    return torch.baddbmm(left.new_empty(1).expand(left.shape[0], 1, 1), left, right, beta=0, alpha=scale)


def _group_by_key_head(x: Tensor, kv_heads: int) -> Tensor:
    """Group query heads by key head: [B, T, N, H] → [B · K, N / K · T, H]."""
    sequences, tokens, heads, dim = x.shape
    return x.transpose(1, 2).reshape(sequences * kv_heads, heads // kv_heads * tokens, dim)


def _keys(x: Tensor) -> Tensor:
    """Transpose keys or values: [B, S, K, H] → [B · K, S, H]."""
    return x.transpose(1, 2).flatten(0, 1)


def _tokens_first(x: Tensor, like: Tensor) -> Tensor:
    """Reverse ``_group_by_key_head``: [B · K, N / K · T, H] → the shape of ``like`` [B, T, N, H]."""
    sequences, tokens, heads, dim = like.shape
    return x.view(sequences, heads, tokens, dim).transpose(1, 2).contiguous()
