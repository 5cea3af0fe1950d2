"""The chunks of a sequence that a recurrent token mixer computes one after the other, in groups of equal cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class ChunkGroup(NamedTuple):
    """Chunks of equally many ``tokens``, all of which read a state, or update one, or neither."""

    tokens: int
    has_state: bool  # chunks before them have left a state
    updates: bool  # chunks after them read the state
    repeats: int


def group_chunks(chunks: Sequence[int]) -> Iterator[ChunkGroup]:
    """Yield the chunks of a sequence in groups: the first, those between by their tokens, the last.

    A sequence of millions of tokens has tens of thousands of chunks, nearly all of which are equal.
    """
    last = len(chunks) - 1
    if last >= 0:
        yield ChunkGroup(chunks[0], has_state=False, updates=last > 0, repeats=1)
    if last > 0:
        for tokens, repeats in Counter(chunks[1:-1]).items():
            yield ChunkGroup(tokens, has_state=True, updates=True, repeats=repeats)
        yield ChunkGroup(chunks[-1], has_state=True, updates=False, repeats=1)


def count_hand_on_flops(chunks: int, state: int, *, updates: bool) -> int:
    """Return the FLOPs of the matmul that hands states of ``state`` numbers on within a group of ``chunks``."""
    return 2 * (chunks + updates) ** 2 * state if chunks > 1 else 0
