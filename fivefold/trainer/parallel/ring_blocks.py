"""Which blocks of queries and keys a rank of a ring computes at each hop, in the zig-zag order of tokens.

At hop i the keys of rank r − i are here. Rank r holds the chunks r and 2cp − 1 − r of 2cp: the first chunk of a lower
rank precedes both of ours and its second follows both; the two chunks of a higher rank lie between ours. So without a
window every rank computes half of its score matrix at every hop: the work is balanced. With a window, blocks are pairs
of chunks, and those that it does not reach are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.trainer.model.attention_mask import ScoreRule
from fivefold.trainer.model.flash_attention import Noise, Span, across, within
from fivefold.trainer.parallel.mesh import Axis


class Block(NamedTuple):
    """Own queries and the keys here that they attend to, as tokens; ``offset`` and ``spans`` as of ``attend``."""

    queries: slice
    keys: slice
    offset: int
    spans: tuple[Span, ...] | None
    places: tuple[int, ...] = ()  # positions of the first query and key, and of this rank's chunks: tokens, gap

    def noise(self, noise: Noise | None) -> Noise | None:
        """Dropout for the positions of this block."""
        if noise is None:
            return None
        query, key, gap_at, gap = self.places
        return noise._replace(query=query, key=key, gap_at=gap_at, gap=gap)


Hops = list[list[Block]]


def zigzag(*, ranks: int, rank: int, sequence: int) -> Tensor:
    """Positions of the tokens of ``rank``, in its order: int64 [T / cp]."""
    chunks = torch.arange(sequence).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def ring_hops(
    axis: Axis, rule: ScoreRule, *, sequences: int, tokens: int, documents_BT: Tensor | None
) -> Hops:  # fmt: skip
    """The blocks of every hop of this rank, which holds ``tokens`` of each sequence; the first is of all its tokens."""
    ids = None
    if documents_BT is not None:
        whole, places = tokens * axis.size, range(axis.size)
        ids = [documents_BT[:, zigzag(ranks=axis.size, rank=rank, sequence=whole)] for rank in places]
    if rule.window is None:
        return _halves(axis, tokens=tokens, ids=ids)
    return _pairs_of_chunks(axis, window=rule.window, sequences=sequences, tokens=tokens, ids=ids)


def _halves(axis: Axis, *, tokens: int, ids: list[Tensor] | None) -> Hops:
    """One block per hop."""
    first, second, both = slice(0, tokens // 2), slice(tokens // 2, tokens), slice(0, tokens)
    blocks = [Block(both, both, 0, None)]
    blocks += [Block(both, first, tokens, None)] * axis.rank
    blocks += [Block(second, both, tokens, None)] * (axis.size - 1 - axis.rank)
    if ids is None:
        return [[block] for block in blocks]
    own = ids[axis.rank]
    found = [[blocks[0]._replace(spans=within(own))]]
    for hop, block in enumerate(blocks[1:], start=1):
        # all of the keys are seen, whatever lies between: every span is as far as the block
        spans = across(own[:, block.queries], ids[axis.rank - hop][:, block.keys], offset=2 * tokens)
        found.append([block._replace(spans=spans)])
    return found


def _pairs_of_chunks(
    axis: Axis, *, window: int, sequences: int, tokens: int, ids: list[Tensor] | None
) -> Hops:  # fmt: skip
    """A block for each of this rank's two chunks and each of those here, where the window reaches from one to other."""
    chunk = tokens // 2
    halves = (slice(0, chunk), slice(chunk, tokens))
    own = None if ids is None else ids[axis.rank]
    first, second = _chunks(axis.rank, axis)
    inside = (first * chunk, first * chunk, chunk, (second - first - 1) * chunk)
    found: Hops = [[Block(slice(0, tokens), slice(0, tokens), 0, _own_chunks(sequences, chunk, own), inside)]]
    for hop in range(axis.size):
        other = (axis.rank - hop) % axis.size
        blocks = found[0] if hop == 0 else []
        for mine, queries in zip(_chunks(axis.rank, axis), halves, strict=True):
            for theirs, keys in zip(_chunks(other, axis), halves, strict=True):
                apart = (mine - theirs) * chunk
                if 0 < apart < window + chunk - 1:  # the last key is this near to the first query: apart − chunk + 1
                    spans = None
                    if ids is not None:
                        spans = across(ids[axis.rank][:, queries], ids[other][:, keys], offset=apart)
                    blocks.append(Block(queries, keys, apart, spans, (mine * chunk, theirs * chunk, 0, 0)))
        if hop:
            found.append(blocks)
    return found


def _own_chunks(sequences: int, chunk: int, ids: Tensor | None) -> tuple[Span, ...]:
    """Each of this rank's chunks on itself, within documents if there are any."""
    if ids is not None:
        return within(ids.reshape(-1, chunk))
    runs = [slice(start, start + chunk) for start in range(0, 2 * sequences * chunk, chunk)]
    return tuple(Span(run, run) for run in runs)


def _chunks(rank: int, axis: Axis) -> tuple[int, int]:
    """Numbers of the two chunks of a rank, of 2cp."""
    return rank, 2 * axis.size - 1 - rank
