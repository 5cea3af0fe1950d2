"""The allocator's rules by hand-worked tapes, and what holds for all: blocks tile segments, nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.dry_run.memory.caching_allocator import IDLE, UNMAPPED, USED, Allocator, AllocatorBlock
from fivefold.dry_run.memory.reserved import Reserved, replay_allocator
from fivefold.dry_run.record.tape import ALLOC, FREE, SCOPE, CodeSite, Scope, Tape
from fivefold.planner.counts.memory.allocator import segment
from fivefold.units import MIB

SITE = CodeSite("blocks.3.mlp", "fivefold/trainer/model/mlp.py:31 Mlp.forward", "aten::mm")


def tape(*sizes: int, living: dict[int, int] | None = None) -> Tape:
    """A positive number n is the allocation of n bytes, numbered from 0 (after ``living``); −n frees number n."""
    made, born = Tape(rank=5), len(living or {})
    made.add(SCOPE, made.scope(Scope("start")))
    for storage, size in (living or {}).items():
        made.add(ALLOC, storage, size, made.site(CodeSite("", "", "", "parameters")))
    made.add(SCOPE, made.scope(Scope("forward")))
    for size in sizes:
        if size > 0:
            made.add(ALLOC, born, size, made.site(SITE))
            born += 1
        else:
            made.add(FREE, -size)
    return made


def reserve(*sizes: int, expandable: bool = False, capacity: int | None = None) -> Reserved:
    return replay_allocator([tape(*sizes)], expandable=expandable, capacity_bytes=capacity)


@pytest.mark.parametrize(
    ("sizes", "allocated", "total"),
    [
        ((1, 513, 512), 512 + 1024 + 512, 2 * MIB),
        ((MIB, MIB, 1), 2 * MIB + 512, 4 * MIB),  # the largest of the small pool: a segment holds two
        ((MIB + 1,), MIB + 512, 20 * MIB),
        ((10 * MIB - 512,), 10 * MIB - 512, 20 * MIB),
        ((10 * MIB,), 10 * MIB, 10 * MIB),
        ((10 * MIB + 1,), 10 * MIB + 512, 12 * MIB),  # 2 MiB − 512 are split off
        ((11 * MIB + 1,), 12 * MIB, 12 * MIB),  # 1 MiB − 512 are not
        ((4 * MIB,) * 5, 20 * MIB, 20 * MIB),
        ((4 * MIB,) * 6, 24 * MIB, 40 * MIB),
    ],
)
def test_requests_are_rounded_and_placed_in_segments(sizes: tuple[int, ...], allocated: int, total: int) -> None:
    result = reserve(*sizes)
    assert (result.requested_bytes, result.allocated_bytes, result.reserved_bytes) == (sum(sizes), allocated, total)


def test_split_free_blocks_cannot_hold_the_former_tensor() -> None:
    """20 comes and goes, 12 takes its place; the next 20 needs a segment, and 8 lie idle."""
    result = reserve(20 * MIB, -0, 12 * MIB, 20 * MIB)
    assert result[:4] == (32 * MIB, 32 * MIB, 40 * MIB, 8 * MIB)
    assert (result.tape, result.event, result.site) == (0, 5, SITE)


def test_the_smallest_block_that_fits_is_used_and_split_only_if_enough_is_left() -> None:
    result = reserve(30 * MIB, 20 * MIB, 12 * MIB, -0, -1, 19 * MIB)
    assert result.reserved_bytes == 62 * MIB
    blocks = Allocator(expandable=False)
    first, second = blocks.allocate(30 * MIB), blocks.allocate(20 * MIB)
    assert first is not None
    assert second is not None
    blocks.free(first)
    blocks.free(second)
    taken = blocks.allocate(19 * MIB)
    assert taken is not None
    assert (taken.address, taken.size) == (second.address, 20 * MIB)


def test_free_neighbouring_blocks_are_merged() -> None:
    assert reserve(*[4 * MIB] * 5, -1, -0, 8 * MIB).reserved_bytes == 20 * MIB
    assert reserve(*[4 * MIB] * 5, -1, -2, 8 * MIB).reserved_bytes == 20 * MIB
    assert reserve(*[4 * MIB] * 5, -1, -3, 8 * MIB).reserved_bytes == 40 * MIB  # 2 lies between


@pytest.mark.parametrize(
    ("sizes", "plain", "expandable"),
    [
        ((30 * MIB,), 30, 40),  # pages of 20 MiB
        ((30 * MIB, 12 * MIB), 42, 60),
        ((30 * MIB, 12 * MIB, -0, -1, 60 * MIB), 102, 60),  # one piece again
        ((30 * MIB, 12 * MIB, -0, 60 * MIB), 102, 120),  # 12 lie in the way: 42 + 60 of addresses
        ((MIB, MIB, MIB), 4, 4),  # pages of 2 MiB
        ((20 * MIB, -0, 12 * MIB, 20 * MIB), 40, 40),  # 8 idle at the end grow
        ((20 * MIB, -0, 19 * MIB + 512, MIB // 2, MIB + MIB // 2), 42, 42),  # nothing is left over
    ],
)
def test_expandable_segments_reserve_less(sizes: tuple[int, ...], plain: int, expandable: int) -> None:
    assert reserve(*sizes).reserved_bytes == plain * MIB
    assert reserve(*sizes, expandable=True).reserved_bytes == expandable * MIB


def test_expandable_segments_are_used_last() -> None:
    """Idle are 6 MiB at the start and 4 at the end: 3 go into the 6, though 4 is the better fit as it is."""
    blocks = Allocator(expandable=True)
    first, *_ = (blocks.allocate(size * MIB) for size in (6, 14, 16))
    assert first is not None
    blocks.free(first)
    taken = blocks.allocate(3 * MIB)
    assert taken is not None
    assert taken.address == first.address
    assert blocks.reserved_bytes == 40 * MIB


def test_the_allocator_frees_cached_blocks_before_it_fails() -> None:
    assert reserve(20 * MIB, -0, 30 * MIB, capacity=40 * MIB).reserved_bytes == 30 * MIB
    pages = reserve(40 * MIB, -0, *[MIB] * 26, expandable=True, capacity=60 * MIB)
    assert pages.shortage is None
    assert pages.reserved_bytes == 60 * MIB  # before the pages of the 40 went


def test_a_job_that_does_not_fit_is_a_finding() -> None:
    result = reserve(20 * MIB, 12 * MIB, capacity=30 * MIB)
    assert result.reserved_bytes == 20 * MIB
    assert result.shortage is not None
    assert result.shortage[1:8] == (0, 3, SITE, 12 * MIB, 20 * MIB, 20 * MIB, 30 * MIB)
    assert str(result.shortage) == (
        "rank 5 runs out of memory in step 1: blocks.3.mlp mm (fivefold/trainer/model/mlp.py:31 Mlp.forward) asks for "
        "12.00 MiB, but 20.00 MiB of 30.00 MiB are used; try ac=full, a smaller mbs, or zero3 or tp over more ranks"
    )


def test_a_job_that_fails_by_fragmentation_is_a_finding() -> None:
    sizes = (20 * MIB, 20 * MIB, -0, -1, 11 * MIB, 11 * MIB, 12 * MIB)  # 9 and 9 are left
    shortage = reserve(*sizes, capacity=40 * MIB).shortage
    assert shortage is not None
    assert str(shortage).endswith("and 18.00 MiB lie free in pieces; try expandable_segments = true")
    assert reserve(*sizes, expandable=True, capacity=40 * MIB).shortage is None


def test_the_allocator_state_carries_over_to_the_next_step() -> None:
    """Storages that a tape begins with are not allocated again; those it does not name were freed between steps."""
    first = tape(30 * MIB, 12 * MIB, living={0: 40 * MIB})
    assert replay_allocator([first], expandable=False).allocated_bytes == 82 * MIB
    kept = tape(12 * MIB, living={0: 40 * MIB, 1: 30 * MIB, 2: 12 * MIB})
    assert replay_allocator([first, kept], expandable=False).allocated_bytes == 94 * MIB
    gone = tape(30 * MIB, living={0: 40 * MIB, 3: 512})  # 1 and 2, and what is made anew has the place of 1
    assert replay_allocator([first, gone], expandable=False)[:3] == (82 * MIB, 82 * MIB, 84 * MIB)


def test_resident_tensors_add_to_the_peak() -> None:
    result = replay_allocator([tape(12 * MIB)], expandable=False, workspaces=(32 * MIB, 32 * MIB))
    assert result[:3] == (76 * MIB, 76 * MIB, 76 * MIB)


# What holds for all

SIZES = st.one_of(st.integers(1, MIB), st.integers(MIB, 12 * MIB), st.integers(12 * MIB, 80 * MIB))
MOVES = st.lists(st.one_of(SIZES, st.floats(0, 1, exclude_max=True)), max_size=60)  # a fraction: which one is freed


def round_sizes(sizes: Iterable[int]) -> int:
    return sum(max(512, (size + 511) // 512 * 512) for size in sizes)


def check(blocks: Allocator, living: dict[int, tuple[AllocatorBlock, int]]) -> None:
    total = used = 0
    for head in blocks.heads.values():
        block, address, former = head, head.address, None
        while block is not None:
            assert block.address == address  # no gap and no overlap
            assert block.before is former
            assert former is None or block.state == USED or block.state != former.state  # merged
            assert block.size % 512 == 0
            total += block.size if block.state != UNMAPPED else 0
            if block.state == USED:
                used += block.size
                assert living[block.address][0] is block
                assert block.size >= living[block.address][1]
            former, address, block = block, address + block.size, block.after
    assert (blocks.reserved_bytes, blocks.allocated_bytes) == (total, used)
    assert len(living) == sum(block.state == USED for run in blocks.segments() for block in run)
    assert blocks.reserved_bytes >= blocks.allocated_bytes >= round_sizes(size for _, size in living.values())
    for pool in blocks._pools:
        assert [entry[2].state for entry in pool.idle] == [IDLE] * len(pool.idle)
        assert sum(entry[2].size for entry in pool.idle) + sum(
            block.size for block, _ in living.values() if block.pool is pool
        ) == sum(block.size for run in blocks.segments() if run[0].pool is pool for block in run)


@settings(max_examples=150, deadline=None)
@given(MOVES, st.booleans(), st.one_of(st.none(), st.integers(20, 200)))
def test_blocks_cover_segments_without_gaps(moves: list[int | float], expandable: bool, capacity: int | None) -> None:
    limit = None if capacity is None else capacity * MIB
    blocks = Allocator(expandable=expandable, capacity_bytes=limit)
    living: dict[int, tuple[AllocatorBlock, int]] = {}
    for move in moves:
        before = blocks.reserved_bytes
        if isinstance(move, int):
            made = blocks.allocate(move)
            if made is None:  # and there is no complete segment left to release
                assert limit is not None
                assert expandable or blocks.reserved_bytes + segment(round_sizes([move])) > limit
                assert expandable or all(len(run) > 1 or run[0].state == USED for run in blocks.segments())
            else:
                living[made.address] = made, move
        elif living:
            gone, _ = living.pop(sorted(living)[int(move * len(living))])
            blocks.free(gone)
        check(blocks, living)
        assert limit is None or blocks.reserved_bytes <= limit
        assert limit is not None or blocks.reserved_bytes >= before
    for gone, _ in living.values():
        blocks.free(gone)
    blocks.release()
    assert (blocks.reserved_bytes, blocks.allocated_bytes) == (0, 0)


@pytest.mark.slow
def test_a_hundred_thousand_allocator_events_take_seconds() -> None:
    sizes: list[int] = []
    for number in range(50_000):
        sizes += [(number * 7919) % (30 * MIB) + 1, *([-(number - 900)] if number > 900 else [])]
    made = tape(*sizes)
    begin = time.perf_counter()
    for expandable in (False, True):
        replay_allocator([made], expandable=expandable)
    assert time.perf_counter() - begin < 10  # ten times what it takes
