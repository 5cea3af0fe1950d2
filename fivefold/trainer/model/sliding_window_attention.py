"""Attention kernels of our own, for what PyTorch's flash kernels lack: windows, soft caps, dropout. Custom operators:

    forward    chunk of query rows: scores of the keys it sees → lse, p = exp(scores − lse), out = p·v
    backward   the same scores again: dv = pᵀ·g · ds = p·(g·vᵀ − Σ g·out) · dq = ds·k · dk = dsᵀ·q

Neither holds more than ``LARGEST`` scores at once. Written in PyTorch's own matmuls, in fp32. As in flash attention,
the backward takes output and log-sum-exp over all keys (arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.trainer.model.dropout import kept, row_keys, scale_of, score_rows

LARGEST = 2**22  # scores at once; 16 MiB


class Chunk(NamedTuple):
    """Rows of queries and the keys that at least one of them sees."""

    queries: slice
    keys: slice


def chunks(q: Tensor, k: Tensor, *, offset: int, window: int) -> Iterator[Chunk]:
    """Chunks of the queries [B, N, T, H] that see keys of [B, K, S, H]; ``window`` 0: none."""
    (sequences, heads, tokens, _), keys = q.shape, k.shape[2]
    wide = min(window, keys) if window else keys
    most = max(1, LARGEST // (sequences * heads))
    # rows · (wide + rows) ≤ most; not many more rows than a window is wide, as half of their square is masked
    rows = max(1, min((isqrt(wide * wide + 4 * most) - wide) // 2, max(wide, 64)))
    for first in range(0, tokens, rows):
        last = min(first + rows, tokens)
        start = max(0, first + offset - window + 1) if window else 0
        stop = min(keys, last + offset)
        if start < stop:
            yield Chunk(slice(first, last), slice(start, stop))


@torch.library.custom_op("fivefold::band_attention", mutates_args=())
def band_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int, window: int, softcap: float, keys_B: Tensor | None,
    rate: float, firsts: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [B, N, T, H], k and v [B, K, S, H] → out [B, N, T, H of v] and lse [B, N, T], fp32 (fp64 for fp64).

    Query t sees the keys s ≤ t + ``offset``, of them the last ``window`` (0: all); ``softcap`` 0: none. Queries that
    see none get out 0 and lse −∞. ``keys``: of the sequences, to drop probabilities with ``rate``; ``firsts``: the
    place of these masks, and the numbers of the first head, query and key.
    """
    out, lse = _outputs(q, v)
    out.zero_()
    lse.fill_(-torch.inf)
    for queries, keys in chunks(q, k, offset=offset, window=window):
        rule = _Rule(scale, offset + queries.start - keys.start, window, softcap)
        part = _Part(queries, k.shape[1])
        scores = rule.scores(part.of(q), k[:, :, keys], rows=part.rows)
        sums = scores.logsumexp(-1)
        shares = scores.sub_(_finite(sums)[..., None]).exp_()
        if keys_B is not None:
            shares.mul_(part.kept(keys_B, q.shape[1], keys, rate=rate, firsts=firsts)).mul_(scale_of(rate))
        found = torch.matmul(shares, v[:, :, keys].to(shares.dtype))
        lse[:, :, queries], out[:, :, queries] = part.by_head(sums), part.by_head(found).to(q.dtype)
    return out, lse


@band_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, v)


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Empty out and lse, heads inside of tokens, as the rows of a sequence lie."""
    (sequences, heads, tokens, _), wide = q.shape, torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(sequences, tokens, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(sequences, tokens, heads, dtype=wide).transpose(1, 2)


@torch.library.custom_op("fivefold::band_attention_backward", mutates_args=())
def band_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, offset: int,
    window: int, softcap: float, keys_B: Tensor | None, rate: float, firsts: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v from that of ``out``; shapes as in ``band_attention``."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    for queries, keys in chunks(q, k, offset=offset, window=window):
        rule = _Rule(scale, offset + queries.start - keys.start, window, softcap)
        part = _Part(queries, k.shape[1])
        q_here, g, o, sums = (part.of(x) for x in (q, gradient, out, lse[..., None]))
        scores = rule.scores(q_here, k[:, :, keys], rows=part.rows)
        shares = (scores - _finite(sums)).exp_()
        slopes, dropped = torch.matmul(g, v[:, :, keys].to(g.dtype).mT), shares
        if keys_B is not None:
            factors = part.kept(keys_B, q.shape[1], keys, rate=rate, firsts=firsts).to(shares.dtype)
            slopes.mul_(factors.mul_(scale_of(rate)))
            dropped = shares * factors
        dv[:, :, keys] += torch.matmul(dropped.mT, g)
        slopes.sub_((g * o).sum(-1, keepdim=True)).mul_(shares)
        if softcap:
            slopes.mul_(scores.masked_fill_(shares == 0, 0.0).div_(softcap).square_().neg_().add_(1.0))
        slopes.mul_(scale)
        dq[:, :, queries] = part.by_head(torch.matmul(slopes, k[:, :, keys].to(g.dtype)))
        dk[:, :, keys] += torch.matmul(slopes.mT, q_here)
    return _like(dq, q), _like(dk, k), _like(dv, v)


@band_attention_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like(q), _empty_like(k), _empty_like(v)


class _Part(NamedTuple):
    """Rows of queries of all heads, grouped by the ``kv_heads`` that they attend to."""

    queries: slice
    kv_heads: int

    @property
    def rows(self) -> int:
        """Rows of one head."""
        return int(self.queries.stop - self.queries.start)

    def of(self, x: Tensor) -> Tensor:
        """[B, N, T, H] → fp32 [B, K, N / K · rows, H]."""
        part: Tensor = x[:, :, self.queries].to(torch.promote_types(x.dtype, torch.float32))
        grouped: Tensor = part.unflatten(1, (self.kv_heads, -1)).flatten(2, 3)
        return grouped

    def kept(self, keys_B: Tensor, heads: int, keys: slice, *, rate: float, firsts: list[int]) -> Tensor:
        """Which probabilities are kept: bool [B, K, N / K · rows, keys]."""
        place, head, query, key = firsts
        tokens = range(query + self.queries.start, query + self.queries.stop)
        numbers = score_rows(range(head, head + heads), tokens, device=keys_B.device)
        grouped = row_keys(keys_B, numbers, place=place).view(len(keys_B), self.kv_heads, -1)
        return kept(grouped, columns=range(key + keys.start, key + keys.stop), rate=rate)

    def by_head(self, x: Tensor) -> Tensor:
        """The inverse, in the dtype of ``x``; also of [B, K, N / K · rows]."""
        apart: Tensor = x.unflatten(2, (-1, self.rows)).flatten(1, 2)
        return apart


class _Rule(NamedTuple):
    """The arguments that make scores of a chunk; ``offset`` from its first key."""

    scale: float
    offset: int
    window: int
    softcap: float

    def scores(self, q: Tensor, k: Tensor, *, rows: int) -> Tensor:
        """q [B, K, G · rows, H] on k [B, K, keys, H] → [B, K, G · rows, keys], −∞ where masked."""
        found = torch.matmul(q, k.to(q.dtype).mT).mul_(self.scale)
        if self.softcap:
            found.div_(self.softcap).tanh_().mul_(self.softcap)
        first, last = torch.arange(rows, device=q.device), torch.arange(k.shape[2], device=q.device)
        far = first[:, None] + self.offset - last
        hidden = far < 0
        if self.window:
            hidden |= far >= self.window
        found.unflatten(2, (-1, rows)).masked_fill_(hidden, -torch.inf)
        return found


def _finite(sums: Tensor) -> Tensor:
    """0 for queries that see no key, so that their scores stay −∞."""
    return sums.masked_fill(sums == -torch.inf, 0.0)


def _empty_like(x: Tensor) -> Tensor:
    """Empty [B, N, T, H], heads inside of tokens."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _like(x: Tensor, model: Tensor) -> Tensor:
    """``x`` in the dtype of ``model``, heads inside of tokens."""
    return _empty_like(model).copy_(x)
