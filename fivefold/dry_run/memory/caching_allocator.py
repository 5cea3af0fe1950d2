"""Models PyTorch's CUDA caching allocator, block by block, without a GPU.

    best fit: the smallest free block, split            else a new segment of 2 MiB | 20 MiB | size in steps of 2 MiB
    expandable: else a segment grows by pages of 2 MiB (tensors of up to 1 MiB) | 20 MiB

One stream: the trainer allocates everything on the compute stream. Addresses here only rise; a driver's may not, which
only matters for the choice between two equal blocks. Source: pytorch/pytorch@eb42ad6:c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from fivefold.planner.counts.memory.allocator import segment
from fivefold.units import MIB, ceil_div

BLOCK_ALIGNMENT_BYTES = 512  # block sizes are multiples of it
MAX_SMALL_BYTES = MIB  # the largest tensor of the small pool; a large block is split only if more than this remains
PAGE_BYTES = (20 * MIB, 2 * MIB)  # page sizes of expandable segments: large pool, small pool
FIRST_ADDRESS = 1 << 40
UNLIMITED_SEGMENT_BYTES = 1 << 46  # size of an expandable segment if there is no capacity
USED, IDLE, UNMAPPED = range(3)
OnSegment = Callable[[str, int, int], None]


class AllocatorBlock:
    """A contiguous range of a segment, all in one state; ``before`` and ``after`` are its neighbours."""

    __slots__ = ("address", "after", "before", "pool", "size", "state")

    def __init__(self, address: int, size: int, pool: Pool, state: int) -> None:
        self.address, self.size, self.pool, self.state = address, size, pool, state
        self.before: AllocatorBlock | None = None
        self.after: AllocatorBlock | None = None

    def split(self, size: int, state: int) -> AllocatorBlock:
        """Shrink to the first ``size`` bytes; return the rest as a new block in ``state``."""
        rest = AllocatorBlock(self.address + size, self.size - size, self.pool, state)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def merge_next(self) -> None:
        """Merge the next block into this one."""
        merged = self.after
        assert merged is not None
        self.size += merged.size
        self.after = merged.after
        if merged.after is not None:
            merged.after.before = self


class Pool:
    """The unused blocks of the small or large pool: ``idle`` sorted by size, ``unmapped`` sorted by address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page = PAGE_BYTES[small]
        self.idle: list[tuple[int, int, AllocatorBlock]] = []
        self.unmapped: list[tuple[int, AllocatorBlock]] = []

    def insert(self, block: AllocatorBlock) -> AllocatorBlock:
        """Insert an unused block, merged with neighbours of the same state; return the merged block."""
        before, after = block.before, block.after
        if before is not None and before.state == block.state:
            self.take(before)
            before.merge_next()
            block = before
        if after is not None and after.state == block.state:
            self.take(after)
            block.merge_next()
        if block.state == IDLE:
            insort(self.idle, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))
        return block

    def take(self, block: AllocatorBlock) -> None:
        """Remove a block from its list."""
        if block.state == IDLE:
            del self.idle[bisect_left(self.idle, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class Allocator:
    """The allocator. ``on_segment(action, address, bytes)``: action is segment_alloc, segment_free, _map or _unmap."""

    def __init__(
        self, *, expandable: bool, capacity_bytes: int | None = None, on_segment: OnSegment | None = None
    ) -> None:
        self.expandable, self.capacity_bytes = expandable, capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0  # current, as torch.cuda.memory_allocated and _reserved
        self.heads: dict[int, AllocatorBlock] = {}  # the first block of each segment, by address
        self._on_segment = on_segment or (lambda _action, _address, _size: None)
        self._pools = (Pool(small=False), Pool(small=True))
        self._next = FIRST_ADDRESS

    def allocate(self, size: int) -> AllocatorBlock | None:
        """Allocate a block of at least ``size`` bytes; None if out of memory, after unused segments were released."""
        size = max(BLOCK_ALIGNMENT_BYTES, ceil_div(size, BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES)
        pool = self._pools[size <= MAX_SMALL_BYTES]
        block = self._find_best_fit(pool, size) or self._grow(pool, size)
        if block is None:
            self.release()
            block = self._grow(pool, size)
            if block is None:
                return None
        pool.take(block)
        block.state = USED
        rest = block.size - size
        if rest >= BLOCK_ALIGNMENT_BYTES if pool.small or self.expandable else rest > MAX_SMALL_BYTES:
            pool.insert(block.split(size, IDLE))
        self.allocated_bytes += block.size
        return block

    def free(self, block: AllocatorBlock) -> None:
        """Free a block; it can be reused at once, as all kernels run in order on one stream."""
        self.allocated_bytes -= block.size
        block.state = IDLE
        block.pool.insert(block)

    def release(self) -> None:
        """Return completely unused segments, or pages of expandable ones, to the driver (``empty_cache``)."""
        for pool in self._pools:
            for _, _, block in list(pool.idle):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    del self.heads[block.address]
                    self._reserve("segment_free", block.address, -block.size)

    def segments(self) -> Iterator[list[AllocatorBlock]]:
        """Yield the blocks of each segment in order of address; of an expandable one, of each mapped range."""
        for head in self.heads.values():
            run: list[AllocatorBlock] = []
            block: AllocatorBlock | None = head
            while block is not None:
                if block.state != UNMAPPED:
                    run.append(block)
                elif run:
                    yield run
                    run = []
                block = block.after
            if run:
                yield run

    def _find_best_fit(self, pool: Pool, size: int) -> AllocatorBlock | None:
        """Return the smallest idle block that fits; if expandable, prefer those that can grow least."""
        idle = pool.idle
        index = bisect_left(idle, (size,))
        if index == len(idle):
            return None
        if self.expandable:
            while index + 1 < len(idle) and _compute_grown_size(idle[index + 1][2]) < _compute_grown_size(
                idle[index][2]
            ):
                index += 1
        return idle[index][2]

    def _grow(self, pool: Pool, size: int) -> AllocatorBlock | None:
        """Ask the driver for more; return an idle block of at least ``size`` bytes, or None."""
        if self.expandable:
            return self._expand(pool, size)
        size = segment(size)
        if not self._has_room(size):
            return None
        block = pool.insert(self._segment(pool, size, IDLE))
        self._reserve("segment_alloc", block.address, size)
        return block

    def _expand(self, pool: Pool, size: int) -> AllocatorBlock | None:
        """Map pages at the lowest address where they and the idle block before them are contiguous and enough."""
        starts = (_find_growth_start(gap) for _, gap in pool.unmapped)
        block = next((start for start in starts if _count_contiguous_bytes(start, size) >= size), None)
        if block is None:
            total = UNLIMITED_SEGMENT_BYTES if self.capacity_bytes is None else self.capacity_bytes * 9 // 8
            block = pool.insert(self._segment(pool, ceil_div(total, pool.page) * pool.page, UNMAPPED))
            if block.size < size:
                return None
        if block.state == UNMAPPED:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            gap = block.after
            assert gap is not None
            mapped = self._map(gap, min(gap.size, size - block.size))
            if mapped is None:
                return None
            block = mapped
        return block

    def _map(self, gap: AllocatorBlock, size: int) -> AllocatorBlock | None:
        """Map pages for the first ``size`` bytes of ``gap``; return the idle block, merged with the one before."""
        pool = gap.pool
        size = ceil_div(size, pool.page) * pool.page
        if not self._has_room(size):
            return None
        pool.take(gap)
        gap.state = IDLE
        if size < gap.size:
            pool.insert(gap.split(size, UNMAPPED))
        self._reserve("segment_map", gap.address, size)
        return pool.insert(gap)

    def _unmap(self, block: AllocatorBlock) -> None:
        """Unmap the complete pages of an idle block."""
        pool = block.pool
        first = ceil_div(block.address - FIRST_ADDRESS, pool.page) * pool.page + FIRST_ADDRESS
        size = (block.address + block.size - first) // pool.page * pool.page
        if size <= 0:
            return
        pool.take(block)
        if first > block.address:
            start, block = block, block.split(first - block.address, UNMAPPED)
            pool.insert(start)
        block.state = UNMAPPED
        if size < block.size:
            pool.insert(block.split(size, IDLE))
        pool.insert(block)
        self._reserve("segment_unmap", first, -size)

    def _segment(self, pool: Pool, size: int, state: int) -> AllocatorBlock:
        block = self.heads[self._next] = AllocatorBlock(self._next, size, pool, state)
        self._next += ceil_div(size, PAGE_BYTES[False]) * PAGE_BYTES[False]  # keep all segments aligned to large pages
        return block

    def _has_room(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + size <= self.capacity_bytes

    def _reserve(self, action: str, address: int, size: int) -> None:
        self.reserved_bytes += size
        self._on_segment(action, address, abs(size))


def _compute_grown_size(block: AllocatorBlock) -> int:
    after = block.after
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)


def _find_growth_start(gap: AllocatorBlock) -> AllocatorBlock:
    return gap.before if gap.before is not None and gap.before.state == IDLE else gap


def _count_contiguous_bytes(start: AllocatorBlock, enough: int) -> int:
    """Return the bytes of contiguous unused blocks from ``start``; stops counting at ``enough``."""
    contiguous, block = 0, start
    while contiguous < enough and block.state != USED:
        contiguous += block.size
        if block.after is None:
            break
        block = block.after
    return contiguous
