"""Replays a rank's tapes on the caching allocator: peak allocated and reserved bytes, or the allocation that fails.

ALLOC, FREE → blocks (``caching_allocator.py``) → peaks of allocated and reserved bytes | ``Shortage``
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from fivefold.dry_run.memory.caching_allocator import Allocator, Block
from fivefold.dry_run.record.tape import ALLOC, FREE, SCOPE, Site, Tape
from fivefold.units import show_bytes


class Shortage(NamedTuple):
    """An out-of-memory finding: the allocation that fails, and the allocator's state at that moment."""

    rank: int
    tape: int  # index of the tape; 0: the first step
    event: int  # index in that tape
    site: Site
    wanted_bytes: int
    live_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    expandable: bool

    def __str__(self) -> str:
        free = self.capacity_bytes - self.live_bytes
        where = str(self.site) or self.site.category
        line = (
            f"rank {self.rank} runs out of memory in step {self.tape + 1}: {where} asks for "
            f"{show_bytes(self.wanted_bytes)}, but {show_bytes(self.live_bytes)} of "
            f"{show_bytes(self.capacity_bytes)} are used"
        )
        if self.wanted_bytes <= free and not self.expandable:
            return f"{line} and {show_bytes(free)} lie free in pieces; try expandable_segments = true"
        return f"{line}; try ac=full, a smaller mbs, or zero3 or tp over more ranks"


class Reserved(NamedTuple):
    """Peaks over all tapes, as PyTorch counts them; with a ``shortage``, the peaks until it."""

    requested_bytes: int  # by tensors, before rounding
    allocated_bytes: int  # in blocks: torch.cuda.max_memory_allocated
    reserved_bytes: int  # in segments: torch.cuda.max_memory_reserved
    inactive_bytes: int  # reserved but not allocated, when reserved first reached its peak
    tape: int  # tape and event of that moment
    event: int
    site: Site  # of the allocation that made reserved reach its peak
    shortage: Shortage | None


def reserved(
    tapes: Sequence[Tape], *, expandable: bool, capacity_bytes: int | None = None, resident: Sequence[int] = ()
) -> Reserved:
    """Replay the ``tapes`` of one rank in order.

    ``resident``: sizes in bytes of allocations that are live throughout, such as the workspaces of cuBLAS.
    """
    allocator = Allocator(expandable=expandable, capacity_bytes=capacity_bytes)
    requested = most_requested = sum(resident)
    for size in resident:
        allocator.allocate(size)
    most_allocated, most_reserved = allocator.allocated_bytes, allocator.reserved_bytes
    inactive, at, shortage = most_reserved - most_allocated, (0, 0, Site("", "", "")), None
    blocks: dict[int, tuple[Block, int]] = {}
    for place, event, storage, size, site in changes(tapes):
        if not size:
            block, freed = blocks.pop(storage)
            allocator.free(block)
            requested -= freed
            continue
        made = allocator.allocate(size)
        if made is None:
            tape, live = tapes[place], allocator.allocated_bytes
            shortage = Shortage(tape.rank, place, event, tape.sites[site], size, live, allocator.reserved_bytes,
                                capacity_bytes or 0, expandable)  # fmt: skip
            break
        blocks[storage] = made, size
        requested += size
        most_requested = max(most_requested, requested)
        most_allocated = max(most_allocated, allocator.allocated_bytes)
        if allocator.reserved_bytes > most_reserved:
            most_reserved = allocator.reserved_bytes
            inactive, at = most_reserved - allocator.allocated_bytes, (place, event, tapes[place].sites[site])
    return Reserved(most_requested, most_allocated, most_reserved, inactive, *at, shortage)


def changes(tapes: Sequence[Tape]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield allocations and frees of one rank's ``tapes`` as (tape, event, storage, bytes or 0 for a free, site).

    A tape begins with an ALLOC of all that is live: a storage of the tape before that is missing there was freed.
    """
    living: set[int] = set()
    for place, tape in enumerate(tapes):
        named = {storage for storage, _ in initial_allocations(tape)}
        for storage in sorted(living - named):
            yield place, 0, storage, 0, 0
        living &= named
        for number, (kind, storage, size, site) in enumerate(tape):
            if kind == ALLOC:
                if size and storage not in living:
                    living.add(storage)
                    yield place, number, storage, size, site
            elif kind == FREE and storage in living:
                living.remove(storage)
                yield place, number, storage, 0, 0


def initial_allocations(tape: Tape) -> Iterator[tuple[int, int]]:
    """Yield (storage, site) of the ALLOC events at the start of a tape, before any other event but a SCOPE."""
    for kind, storage, _, site in takewhile(lambda event: event[0] in (SCOPE, ALLOC), tape):
        if kind == ALLOC:
            yield storage, site
