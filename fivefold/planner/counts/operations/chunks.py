"""Groups of chunks: how many chunks of a sequence a recurrent token mixer computes at once, by layout and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, Self

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES, split_into_groups
from fivefold.planner.counts.operations.local_shapes import Local


class ChunkedGeometry(Protocol):
    """The geometry of a mixer that scans a sequence in chunks."""

    @property
    def chunk(self) -> int:
        """Return the tokens of a chunk."""

    def shard(self, ranks: int) -> Self:
        """Return the part of one of ``ranks`` ranks."""

    def split_tokens(self, tokens: int, *, sequences: int, temporary_bytes: int) -> list[int]:
        """Return the tokens of each group of chunks that the trainer computes at once."""


def split_sequence(local: Local, net: ChunkedGeometry, *, fused: bool) -> list[int]:
    """Return the tokens of each group of chunks of a sequence; ``net``: the geometry on one rank of tp.

    PyTorch's operations compute many chunks at once; ``fused`` kernels hold one chunk's temporaries.
    """
    if not fused:
        limit = local.job.stack.scan_temporary_bytes or GPU_TEMPORARY_BYTES
        net = net.shard(local.part.cp)
        return net.split_tokens(local.job.sequence, sequences=local.part.sequences, temporary_bytes=limit)
    return split_into_groups(local.job.sequence, net.chunk)


class ChunkGroup(NamedTuple):
    """Equal groups of ``chunks`` of ``size`` tokens."""

    chunks: int
    size: int
    has_state: bool  # groups before them have left a state
    updates: bool  # groups after them read the state
    repeats: int

    @property
    def tokens(self) -> int:
        """Return the tokens of a group."""
        return self.chunks * self.size

    @property
    def reads_states(self) -> bool:
        """Return whether chunks of a group read states."""
        return self.has_state or self.chunks > 1

    @property
    def makes_states(self) -> bool:
        """Return whether chunks of a group make states."""
        return self.updates or self.chunks > 1


def list_distinct_groups(groups: Sequence[int], size: int) -> Iterator[ChunkGroup]:
    """Yield the groups of a sequence, in chunks of ``size`` tokens: the first, those between by their tokens, the last.

    A sequence of millions of tokens has tens of thousands of chunks, nearly all of which are equal.
    """
    last = len(groups) - 1
    distinct = [(groups[0], 1)] if groups else []
    distinct += [*Counter(groups[1:-1]).items(), (groups[-1], 1)] if last > 0 else []
    for index, (tokens, repeats) in enumerate(distinct):
        chunk = min(size, tokens)
        yield ChunkGroup(
            tokens // chunk, chunk, has_state=index > 0, updates=index + 1 < len(distinct), repeats=repeats
        )


def sum_flops(
    groups: Sequence[int], size: int, count_flops: Callable[[ChunkGroup], tuple[int, int]]
) -> tuple[int, int]:
    """Return the FLOPs of a sequence, forward and backward; ``count_flops`` returns those of one group of chunks."""
    forward = backward = 0
    for group in list_distinct_groups(groups, size):
        of_forward, of_backward = count_flops(group)
        forward += group.repeats * of_forward
        backward += group.repeats * of_backward
    return forward, backward


def count_hand_on_flops(group: ChunkGroup, state: int) -> int:
    """Return the FLOPs of the matmul that hands states of ``state`` numbers on within a group."""
    return 2 * (group.chunks + group.updates) ** 2 * state if group.chunks > 1 else 0
