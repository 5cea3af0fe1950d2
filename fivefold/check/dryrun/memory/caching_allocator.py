"""PyTorch's CUDA caching allocator, block by block, without a GPU.

    the smallest free block that holds it, split        else a segment of 2 MiB | 20 MiB | its size in steps of 2 MiB
    expandable: else a segment grows by pages of 2 MiB (tensors of up to 1 MiB) | 20 MiB

One stream: all that the engine allocates belongs to that of compute. Addresses rise; a driver's may not, which decides
nothing but which of two equal blocks is taken. Source: pytorch/pytorch@eb42ad6:c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from fivefold.plan.count.memory.allocator import segment
from fivefold.units import MIB, ceil_div

SMALLEST = 512  # all sizes are multiples of it
SMALL = MIB  # the largest tensor of the small pool; of a large block no less is split off
PAGES = (20 * MIB, 2 * MIB)  # of an expandable segment of the large and of the small pool
FIRST_ADDRESS, ENDLESS = 1 << 40, 1 << 46  # an expandable segment's addresses, where no capacity bounds them
USED, IDLE, UNMAPPED = range(3)
OnSegment = Callable[[str, int, int], None]


class Block:
    """A piece of a segment; ``before`` and ``after`` are its neighbours in it."""

    __slots__ = ("address", "after", "before", "pool", "size", "state")

    def __init__(self, address: int, size: int, pool: Pool, state: int) -> None:
        self.address, self.size, self.pool, self.state = address, size, pool, state
        self.before: Block | None = None
        self.after: Block | None = None

    def cut(self, size: int, state: int) -> Block:
        """Keep the first ``size`` bytes; the rest is a block of its own in that state."""
        rest = Block(self.address + size, self.size - size, self.pool, state)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def join(self) -> None:
        """Take in the block after."""
        gone = self.after
        assert gone is not None
        self.size += gone.size
        self.after = gone.after
        if gone.after is not None:
            gone.after.before = self


class Pool:
    """Blocks of small or of large tensors that nobody uses: ``idle`` in order of size, ``unmapped`` of address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page = PAGES[small]
        self.idle: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def settle(self, block: Block) -> Block:
        """List an unused block, as one with its neighbours of the same state."""
        before, after = block.before, block.after
        if before is not None and before.state == block.state:
            self.take(before)
            before.join()
            block = before
        if after is not None and after.state == block.state:
            self.take(after)
            block.join()
        if block.state == IDLE:
            insort(self.idle, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))
        return block

    def take(self, block: Block) -> None:
        """It is listed no more."""
        if block.state == IDLE:
            del self.idle[bisect_left(self.idle, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class Allocator:
    """``on_segment`` is told of each segment: segment_alloc, _free, _map or _unmap, address, bytes."""

    def __init__(
        self, *, expandable: bool, capacity_bytes: int | None = None, on_segment: OnSegment | None = None
    ) -> None:  # fmt: skip
        self.expandable, self.capacity_bytes = expandable, capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0  # now
        self.heads: dict[int, Block] = {}  # the first block of each segment, by address
        self._tell = on_segment or (lambda _action, _address, _size: None)
        self._pools = (Pool(small=False), Pool(small=True))
        self._next = FIRST_ADDRESS

    def allocate(self, size: int) -> Block | None:
        """A block of ``size`` bytes or a little more; None if the capacity does not allow it."""
        size = max(SMALLEST, ceil_div(size, SMALLEST) * SMALLEST)
        pool = self._pools[size <= SMALL]
        block = self._fitting(pool, size) or self._grow(pool, size)
        if block is None:
            self.release()
            block = self._grow(pool, size)
            if block is None:
                return None
        pool.take(block)
        block.state = USED
        rest = block.size - size
        if rest >= SMALLEST if pool.small or self.expandable else rest > SMALL:
            pool.settle(block.cut(size, IDLE))
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        """It may be used again, at once: on one stream what comes later waits."""
        self.allocated_bytes -= block.size
        block.state = IDLE
        block.pool.settle(block)

    def release(self) -> None:
        """Give back to the driver what is wholly unused: segments, or pages of them."""
        for pool in self._pools:
            for _, _, block in list(pool.idle):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    del self.heads[block.address]
                    self._reserve("segment_free", block.address, -block.size)

    def segments(self) -> Iterator[list[Block]]:
        """The blocks of each, in order of address; of an expandable segment those of each mapped range."""
        for head in self.heads.values():
            run: list[Block] = []
            block: Block | None = head
            while block is not None:
                if block.state != UNMAPPED:
                    run.append(block)
                elif run:
                    yield run
                    run = []
                block = block.after
            if run:
                yield run

    def _fitting(self, pool: Pool, size: int) -> Block | None:
        """The smallest idle block, where one that can grow counts as large as it can become."""
        idle = pool.idle
        place = bisect_left(idle, (size,))
        if place == len(idle):
            return None
        if self.expandable:
            while place + 1 < len(idle) and _could_be(idle[place + 1][2]) < _could_be(idle[place][2]):
                place += 1
        return idle[place][2]

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """More from the driver: an idle block of at least ``size`` bytes."""
        if self.expandable:
            return self._expand(pool, size)
        size = segment(size)
        if not self._has_room(size):
            return None
        block = pool.settle(self._segment(pool, size, IDLE))
        self._reserve("segment_alloc", block.address, size)
        return block

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Map pages at the lowest address where, with the idle block before them, there are enough in a row."""
        starts = (_start(gap) for _, gap in pool.unmapped)
        block = next((start for start in starts if _room_from(start, size) >= size), None)
        if block is None:
            total = ENDLESS if self.capacity_bytes is None else self.capacity_bytes * 9 // 8
            block = pool.settle(self._segment(pool, ceil_div(total, pool.page) * pool.page, UNMAPPED))
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

    def _map(self, gap: Block, size: int) -> Block | None:
        """Make the first ``size`` bytes of unmapped pages idle: whole pages, at one with the idle block before."""
        pool = gap.pool
        size = ceil_div(size, pool.page) * pool.page
        if not self._has_room(size):
            return None
        pool.take(gap)
        gap.state = IDLE
        if size < gap.size:
            pool.settle(gap.cut(size, UNMAPPED))
        self._reserve("segment_map", gap.address, size)
        return pool.settle(gap)

    def _unmap(self, block: Block) -> None:
        """The whole pages of an idle block."""
        pool = block.pool
        first = ceil_div(block.address - FIRST_ADDRESS, pool.page) * pool.page + FIRST_ADDRESS
        size = (block.address + block.size - first) // pool.page * pool.page
        if size <= 0:
            return
        pool.take(block)
        if first > block.address:
            start, block = block, block.cut(first - block.address, UNMAPPED)
            pool.settle(start)
        block.state = UNMAPPED
        if size < block.size:
            pool.settle(block.cut(size, IDLE))
        pool.settle(block)
        self._reserve("segment_unmap", first, -size)

    def _segment(self, pool: Pool, size: int, state: int) -> Block:
        block = self.heads[self._next] = Block(self._next, size, pool, state)
        self._next += ceil_div(size, PAGES[False]) * PAGES[False]  # so that pages of all segments are aligned alike
        return block

    def _has_room(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + size <= self.capacity_bytes

    def _reserve(self, action: str, address: int, size: int) -> None:
        self.reserved_bytes += size
        self._tell(action, address, abs(size))


def _could_be(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)


def _start(gap: Block) -> Block:
    return gap.before if gap.before is not None and gap.before.state == IDLE else gap


def _room_from(start: Block, enough: int) -> int:
    """Bytes of unused blocks in a row, as far as they matter."""
    room, block = 0, start
    while room < enough and block.state != USED:
        room += block.size
        if block.after is None:
            break
        block = block.after
    return room
