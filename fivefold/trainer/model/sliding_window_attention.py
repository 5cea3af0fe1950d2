"""Attention kernels for features that PyTorch's flash kernels do not have: windows, soft caps, biases, dropout.

They are custom operators:

    forward    chunk of query rows: scores of the keys it sees → lse, p = exp(scores − lse), out = p·v
    backward   the same scores again: dv = pᵀ·g · ds = p·(g·vᵀ − Σ g·out) · dq = ds·k · dk = dsᵀ·q

Neither holds more than ``MAX_SCORES`` scores at once. Written with PyTorch's matmuls, in fp32. As in flash attention,
the backward takes output and log-sum-exp over all keys (arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.trainer.model.dropout import compute_keep_scale, make_keep_mask, row_keys, score_rows

MAX_SCORES = 2**22  # scores at once; 16 MiB


class QueryChunk(NamedTuple):
    """Rows of queries and the keys that at least one of them sees."""

    queries: slice
    keys: slice


def list_chunks(q: Tensor, k: Tensor, *, offset: int, window: int) -> Iterator[QueryChunk]:
    """Yield the chunks of the queries [B, N, T, H] that see keys of [B, K, S, H]; ``window`` 0: none."""
    (sequences, heads, tokens, _), keys = q.shape, k.shape[2]
    seen_keys = min(window, keys) if window else keys
    max_scores = max(1, MAX_SCORES // (sequences * heads))
    # rows · (seen_keys + rows) ≤ max_scores; not many more rows than a window has keys: half of their square is masked
    rows = max(1, min((isqrt(seen_keys * seen_keys + 4 * max_scores) - seen_keys) // 2, max(seen_keys, 64)))
    for first in range(0, tokens, rows):
        last = min(first + rows, tokens)
        start = max(0, first + offset - window + 1) if window else 0
        stop = min(keys, last + offset)
        if start < stop:
            yield QueryChunk(slice(first, last), slice(start, stop))


@torch.library.custom_op("fivefold::band_attention", mutates_args=())
def band_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    offset: int,
    window: int,
    softcap: float,
    keys_B: Tensor | None,
    rate: float,
    firsts: list[int],
    slopes: list[float],
) -> tuple[Tensor, Tensor]:
    """Attend: q [B, N, T, H], k and v [B, K, S, H] → out [B, N, T, H of v] and lse [B, N, T], fp32 (fp64 for fp64).

    Query t sees the last ``window`` (0: all) of the keys s ≤ t + ``offset``; ``softcap`` 0: none. Queries that see no
    key get out 0 and lse −∞. ``keys_B``: keys of the sequences, to drop probabilities with ``rate``; ``firsts``: the
    place of these masks, and the indices of the first head, query and key. ``slopes``: slope of the bias by distance,
    one for each head; empty: no bias.
    """
    out, lse = _outputs(q, v)
    out.zero_()
    lse.fill_(-torch.inf)
    for queries, keys in list_chunks(q, k, offset=offset, window=window):
        rule = _Rule(scale, offset + queries.start - keys.start, window, softcap, slopes)
        part = _Part(queries, k.shape[1])
        scores = rule.scores(part.select_queries(q), k[:, :, keys], rows=part.rows)
        chunk_lse = scores.logsumexp(-1)
        probabilities = scores.sub_(_replace_infinite(chunk_lse)[..., None]).exp_()
        if keys_B is not None:
            keep_mask = part.keep_mask(keys_B, q.shape[1], keys, rate=rate, firsts=firsts)
            probabilities.mul_(keep_mask).mul_(compute_keep_scale(rate))
        chunk_out = torch.matmul(probabilities, v[:, :, keys].to(probabilities.dtype))
        lse[:, :, queries], out[:, :, queries] = part.to_heads(chunk_lse), part.to_heads(chunk_out).to(q.dtype)
    return out, lse


band_attention.register_fake(lambda q, k, v, *_: _outputs(q, v))


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty out and lse, in memory [B, T, N, …], the order of a sequence's rows."""
    (sequences, heads, tokens, _), lse_dtype = q.shape, torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(sequences, tokens, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(sequences, tokens, heads, dtype=lse_dtype).transpose(1, 2)


@torch.library.custom_op("fivefold::band_attention_backward", mutates_args=())
def band_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    offset: int,
    window: int,
    softcap: float,
    keys_B: Tensor | None,
    rate: float,
    firsts: list[int],
    slopes: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v from that of ``out``; shapes as in ``band_attention``."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    for queries, keys in list_chunks(q, k, offset=offset, window=window):
        rule = _Rule(scale, offset + queries.start - keys.start, window, softcap, slopes)
        part = _Part(queries, k.shape[1])
        q_part, g, o, lse_part = (part.select_queries(x) for x in (q, gradient, out, lse[..., None]))
        scores = rule.scores(q_part, k[:, :, keys], rows=part.rows)
        probabilities = (scores - _replace_infinite(lse_part)).exp_()
        d_scores = torch.matmul(g, v[:, :, keys].to(g.dtype).mT)
        dropped = probabilities
        if keys_B is not None:
            factors = part.keep_mask(keys_B, q.shape[1], keys, rate=rate, firsts=firsts).to(probabilities.dtype)
            d_scores.mul_(factors.mul_(compute_keep_scale(rate)))
            dropped = probabilities * factors
        dv[:, :, keys] += torch.matmul(dropped.mT, g)
        d_scores.sub_((g * o).sum(-1, keepdim=True)).mul_(probabilities)
        if softcap:
            d_scores.mul_(scores.masked_fill_(probabilities == 0, 0.0).div_(softcap).square_().neg_().add_(1.0))
        d_scores.mul_(scale)
        dq[:, :, queries] = part.to_heads(torch.matmul(d_scores, k[:, :, keys].to(g.dtype)))
        dk[:, :, keys] += torch.matmul(d_scores.mT, q_part)
    return _copy_like(dq, q), _copy_like(dk, k), _copy_like(dv, v)


band_attention_backward.register_fake(lambda gradient, q, k, v, *_: (_empty_like(q), _empty_like(k), _empty_like(v)))


class _Part(NamedTuple):
    """Rows of queries of all heads, grouped by the ``kv_heads`` that they attend to."""

    queries: slice
    kv_heads: int

    @property
    def rows(self) -> int:
        """Return the number of rows of one head."""
        return int(self.queries.stop - self.queries.start)

    def select_queries(self, x: Tensor) -> Tensor:
        """Select the part's queries: [B, N, T, H] → fp32 [B, K, N / K · rows, H]."""
        part: Tensor = x[:, :, self.queries].to(torch.promote_types(x.dtype, torch.float32))
        return part.unflatten(1, (self.kv_heads, -1)).flatten(2, 3)

    def keep_mask(self, keys_B: Tensor, heads: int, keys: slice, *, rate: float, firsts: list[int]) -> Tensor:
        """Return a mask of the kept probabilities: bool [B, K, N / K · rows, keys]."""
        place, head, query, key = firsts
        tokens = range(query + self.queries.start, query + self.queries.stop)
        numbers = score_rows(range(head, head + heads), tokens, device=keys_B.device)
        grouped = row_keys(keys_B, numbers, place=place).view(len(keys_B), self.kv_heads, -1)
        return make_keep_mask(grouped, columns=range(key + keys.start, key + keys.stop), rate=rate)

    def to_heads(self, x: Tensor) -> Tensor:
        """Reverse ``of`` in the dtype of ``x``; also for [B, K, N / K · rows]."""
        return x.unflatten(2, (-1, self.rows)).flatten(1, 2)


class _Rule(NamedTuple):
    """The arguments for the scores of a chunk; ``offset`` is from its first key."""

    scale: float
    offset: int
    window: int
    softcap: float
    slopes: list[float]

    def scores(self, q: Tensor, k: Tensor, *, rows: int) -> Tensor:
        """Compute the scores of q [B, K, G · rows, H] on k [B, K, keys, H] → [B, K, G · rows, keys], −∞ if masked."""
        scores = torch.matmul(q, k.to(q.dtype).mT).mul_(self.scale)
        if self.softcap:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        query_positions = torch.arange(rows, device=q.device)
        key_positions = torch.arange(k.shape[2], device=q.device)
        distance = query_positions[:, None] + self.offset - key_positions
        hidden = distance < 0
        if self.window:
            hidden |= distance >= self.window
        by_head = scores.unflatten(2, (-1, rows))
        if self.slopes:
            slopes = torch.tensor(self.slopes, dtype=scores.dtype, device=scores.device).view(q.shape[1], -1, 1, 1)
            by_head.sub_(slopes * distance)
        by_head.masked_fill_(hidden, -torch.inf)
        return scores


def _replace_infinite(sums: Tensor) -> Tensor:
    """Return ``sums`` with 0 for queries that see no key, so that their scores stay −∞."""
    return sums.masked_fill(sums == -torch.inf, 0.0)


def _empty_like(x: Tensor) -> Tensor:
    """Return an empty [B, N, T, H], in memory [B, T, N, H]."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _copy_like(x: Tensor, model: Tensor) -> Tensor:
    """Return ``x`` in the dtype of ``model``, in memory [B, T, N, H]."""
    return _empty_like(model).copy_(x)
