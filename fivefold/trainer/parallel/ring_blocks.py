"""The blocks of queries and keys that a rank of a ring computes at each hop, in the zig-zag order of tokens.

At hop i this rank holds the keys of rank r − i. Rank r holds the chunks r and 2cp − 1 − r of 2cp: the first chunk of a
lower rank precedes both chunks of rank r and its second follows both; the two chunks of a higher rank lie between them.
So without a window every rank computes half of its score matrix at every hop: the work is balanced. With a window,
blocks are pairs of chunks, and pairs that the window does not reach are skipped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.trainer.model.attention_mask import AttentionMask
from fivefold.trainer.model.flash_attention import (
    DocumentSpan,
    DropoutNoise,
    list_earlier_key_spans,
    list_self_attention_spans,
)
from fivefold.trainer.parallel.mesh import AxisGroup


class RingBlock(NamedTuple):
    """Local queries and the held keys that they attend to, as tokens.

    ``offset`` and ``spans`` are arguments of ``attend``.
    """

    queries: slice
    keys: slice
    offset: int
    spans: tuple[DocumentSpan, ...] | None
    places: tuple[int, ...] = ()  # positions of the first query and key, and of this rank's chunks: tokens, gap

    def noise(self, noise: DropoutNoise | None) -> DropoutNoise | None:
        """Return the dropout for the positions of this block."""
        if noise is None:
            return None
        query, key, gap_at, gap = self.places
        return noise._replace(query=query, key=key, gap_at=gap_at, gap=gap)


Hops = list[list[RingBlock]]


def list_zigzag_positions(*, ranks: int, rank: int, sequence: int) -> Tensor:
    """Return the positions of the tokens of ``rank``, in its order: int64 [T / cp]."""
    chunks = torch.arange(sequence).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def list_hops(
    axis: AxisGroup, rule: AttentionMask, *, sequences: int, tokens: int, documents_BT: Tensor | None
) -> Hops:
    """Return the blocks of every hop of this rank, which holds ``tokens`` of each sequence.

    The first has all its tokens.
    """
    ids = None
    if documents_BT is not None:
        sequence, places = tokens * axis.size, range(axis.size)
        ids = [documents_BT[:, list_zigzag_positions(ranks=axis.size, rank=rank, sequence=sequence)] for rank in places]
    if rule.window is None:
        return _list_halves(axis, tokens=tokens, ids=ids)
    return _list_chunk_pairs(axis, window=rule.window, sequences=sequences, tokens=tokens, ids=ids)


def _list_halves(axis: AxisGroup, *, tokens: int, ids: list[Tensor] | None) -> Hops:
    """Return one block per hop."""
    first = slice(0, tokens // 2)
    second = slice(tokens // 2, tokens)
    both = slice(0, tokens)
    blocks = [RingBlock(both, both, 0, None)]
    blocks += [RingBlock(both, first, tokens, None)] * axis.rank
    blocks += [RingBlock(second, both, tokens, None)] * (axis.size - 1 - axis.rank)
    if ids is None:
        return [[block] for block in blocks]
    local_ids = ids[axis.rank]
    hops = [[blocks[0]._replace(spans=list_self_attention_spans(local_ids))]]
    for hop, block in enumerate(blocks[1:], start=1):
        # the queries see all of these keys, whatever the distance: every span has the offset of the block
        spans = list_earlier_key_spans(
            local_ids[:, block.queries], ids[axis.rank - hop][:, block.keys], offset=2 * tokens
        )
        hops.append([block._replace(spans=spans)])
    return hops


def _list_chunk_pairs(axis: AxisGroup, *, window: int, sequences: int, tokens: int, ids: list[Tensor] | None) -> Hops:
    """Return the pairs of local and held chunks of each hop that lie within the window, as blocks."""
    chunk = tokens // 2
    halves = (slice(0, chunk), slice(chunk, tokens))
    local_ids = None if ids is None else ids[axis.rank]
    first, second = _list_chunks(axis.rank, axis)
    places = (first * chunk, first * chunk, chunk, (second - first - 1) * chunk)
    hops: Hops = [
        [RingBlock(slice(0, tokens), slice(0, tokens), 0, _list_local_chunks(sequences, chunk, local_ids), places)]
    ]
    for hop in range(axis.size):
        source = (axis.rank - hop) % axis.size
        blocks = hops[0] if hop == 0 else []
        for query_chunk, queries in zip(_list_chunks(axis.rank, axis), halves, strict=True):
            for key_chunk, keys in zip(_list_chunks(source, axis), halves, strict=True):
                offset = (query_chunk - key_chunk) * chunk
                if 0 < offset < window + chunk - 1:  # from the last key to the first query: offset − chunk + 1 tokens
                    spans = None
                    if ids is not None:
                        spans = list_earlier_key_spans(ids[axis.rank][:, queries], ids[source][:, keys], offset=offset)
                    blocks.append(
                        RingBlock(queries, keys, offset, spans, (query_chunk * chunk, key_chunk * chunk, 0, 0))
                    )
        if hop:
            hops.append(blocks)
    return hops


def _list_local_chunks(sequences: int, chunk: int, ids: Tensor | None) -> tuple[DocumentSpan, ...]:
    """Return the spans of each of this rank's chunks on itself, within documents if there are any."""
    if ids is not None:
        return list_self_attention_spans(ids.reshape(-1, chunk))
    runs = [slice(start, start + chunk) for start in range(0, 2 * sequences * chunk, chunk)]
    return tuple(DocumentSpan(run, run) for run in runs)


def _list_chunks(rank: int, axis: AxisGroup) -> tuple[int, int]:
    """Return the indices of the two chunks of a rank, of 2cp."""
    return rank, 2 * axis.size - 1 - rank
