"""Replays a rank's tapes on the caching allocator: peak allocated and reserved bytes, or the allocation that fails.

ALLOC, FREE → blocks (``caching_allocator.py``) → peaks of allocated and reserved bytes | ``Shortage``
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from fivefold.dry_run.memory.breakdown import list_events
from fivefold.dry_run.memory.caching_allocator import Allocator, AllocatorBlock
from fivefold.dry_run.record.tape import ALLOC, FREE, SCOPE, CodeSite, Tape
from fivefold.units import show_bytes


class Shortage(NamedTuple):
    """An out-of-memory finding: the failing allocation, and the allocator's state at that moment."""

    rank: int
    tape: int  # index of the tape; 0: the first step
    event: int  # index in that tape
    site: CodeSite
    requested_bytes: int
    live_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    expandable: bool

    def __str__(self) -> str:
        free_bytes = self.capacity_bytes - self.live_bytes
        site = str(self.site) or self.site.category
        line = (
            f"rank {self.rank} runs out of memory in step {self.tape + 1}: {site} asks for "
            f"{show_bytes(self.requested_bytes)}, but {show_bytes(self.live_bytes)} of "
            f"{show_bytes(self.capacity_bytes)} are used"
        )
        if self.requested_bytes <= free_bytes and not self.expandable:
            return f"{line} and {show_bytes(free_bytes)} lie free in pieces; try expandable_segments = true"
        return f"{line}; try ac=full, a smaller mbs, or zero3 or tp over more ranks"


class Reserved(NamedTuple):
    """The peaks over all tapes, as PyTorch counts them; with a ``shortage``, the peaks until it."""

    requested_bytes: int  # by tensors, before rounding
    allocated_bytes: int  # in blocks: torch.cuda.max_memory_allocated
    reserved_bytes: int  # in segments: torch.cuda.max_memory_reserved
    inactive_bytes: int  # reserved but not allocated, when reserved first reached its peak
    tape: int  # tape and event of that moment
    event: int
    site: CodeSite  # of the allocation that made reserved reach its peak
    shortage: Shortage | None


def replay_allocator(
    tapes: Sequence[Tape], *, expandable: bool, capacity_bytes: int | None = None, workspaces: Sequence[int] = ()
) -> Reserved:
    """Replay the ``tapes`` of one rank in order, and return the peaks of the allocator.

    ``workspaces``: sizes in bytes of allocations that are live throughout, such as the workspaces of cuBLAS.
    """
    allocator = Allocator(expandable=expandable, capacity_bytes=capacity_bytes)
    requested = peak_requested = sum(workspaces)
    for size in workspaces:
        allocator.allocate(size)
    peak_allocated, peak_reserved = allocator.allocated_bytes, allocator.reserved_bytes
    inactive = peak_reserved - peak_allocated
    peak_event = (0, 0, CodeSite("", "", ""))
    shortage = None
    blocks: dict[int, tuple[AllocatorBlock, int]] = {}
    for tape_index, event, storage, size, site in list_changes(tapes):
        if not size:
            block, freed_bytes = blocks.pop(storage)
            allocator.free(block)
            requested -= freed_bytes
            continue
        new_block = allocator.allocate(size)
        if new_block is None:
            tape, live = tapes[tape_index], allocator.allocated_bytes
            shortage = Shortage(
                tape.rank,
                tape_index,
                event,
                tape.sites[site],
                size,
                live,
                allocator.reserved_bytes,
                capacity_bytes or 0,
                expandable,
            )
            break
        blocks[storage] = new_block, size
        requested += size
        peak_requested = max(peak_requested, requested)
        peak_allocated = max(peak_allocated, allocator.allocated_bytes)
        if allocator.reserved_bytes > peak_reserved:
            peak_reserved = allocator.reserved_bytes
            inactive = peak_reserved - allocator.allocated_bytes
            peak_event = (tape_index, event, tapes[tape_index].sites[site])
    return Reserved(peak_requested, peak_allocated, peak_reserved, inactive, *peak_event, shortage)


def list_changes(tapes: Sequence[Tape]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield allocations and frees of one rank's ``tapes`` as (tape, event, storage, bytes or 0 for a free, site).

    A tape begins with an ALLOC of every live storage: a storage of the previous tape that is missing there was freed.
    """
    live: set[int] = set()
    for tape_index, tape in enumerate(tapes):
        initial = {storage for storage, _ in list_initial_allocations(tape)}
        for storage in sorted(live - initial):
            yield tape_index, 0, storage, 0, 0
        live &= initial
        events = list_events(tape)
        rows = np.flatnonzero(events[:, 0] <= FREE)  # the others, of which there are more, change nothing
        for number, (kind, storage, size, site) in zip(rows.tolist(), events[rows].tolist(), strict=True):
            if kind == ALLOC:
                if size and storage not in live:
                    live.add(storage)
                    yield tape_index, number, storage, size, site
            elif storage in live:
                live.remove(storage)
                yield tape_index, number, storage, 0, 0


def list_initial_allocations(tape: Tape) -> Iterator[tuple[int, int]]:
    """Yield (storage, site) of the ALLOC events at the start of a tape, before any other event but a SCOPE."""
    for kind, storage, _, site in takewhile(lambda event: event[0] in (SCOPE, ALLOC), tape):
        if kind == ALLOC:
            yield storage, site
