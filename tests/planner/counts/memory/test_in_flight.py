"""What is held during each pass: a small pipeline by hand; what is left out is never the largest."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fivefold.errors import UserError
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.action import list_dependencies
from fivefold.layout.schedule.p2p import list_p2p_steps
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES, ScheduleName
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES as SCHEDULE_NAMES
from fivefold.planner.counts.memory import pipelined_passes
from fivefold.planner.counts.memory.in_flight import (
    GatheredHeads,
    LivePass,
    PassOptions,
    PendingReductions,
    PreviousPass,
)
from fivefold.planner.counts.memory.pipelined_passes import (
    GROUPS,
    group_equal_passes,
    iterate_passes,
    list_live_passes,
)
from tests.planner.counts.memory.walk import walk

SCHEDULES: tuple[tuple[ScheduleName, int, int, int], ...] = (
    ("gpipe", 4, 1, 6),
    ("1f1b", 4, 1, 4),
    ("1f1b", 4, 1, 9),
    ("interleaved", 2, 3, 6),
    ("interleaved", 4, 2, 10),
    ("zb1p", 4, 1, 8),
    ("zb2p", 4, 1, 8),
    ("zbv", 2, 2, 6),
    ("dualpipe", 4, 1, 8),
    ("dualpipev", 2, 2, 5),
)


def test_live_passes_of_1f1b_equal_those_by_hand() -> None:
    """Rank 0 of two, three micro-batches: F0 F1 BW0 F2 BW1 BW2."""
    order = list(iterate_passes(schedule("1f1b", pp=2, v=1, micro_batches=3), 0, PassOptions("each")))
    assert [live_pass.pass_kind[:4] for live_pass in order] == [
        ("F", 0, True, False),
        ("F", 0, False, False),
        ("BW", 0, True, False),
        ("F", 0, False, False),
        ("BW", 0, False, False),
        ("BW", 0, False, True),
    ]
    # until B, until W, sums allocated, those of W, reduced by B, all reduced, weights held, and streams that stay here
    assert [live_pass.counts[:8] for live_pass in order] == [
        (0, 0, 0, 0, 0, 0, 0, 0),
        (1, 0, 0, 0, 0, 0, 0, 0),
        (1, 0, 0, 0, 0, 0, 0, 0),
        (1, 0, 1, 1, 0, 0, 0, 0),
        (1, 0, 1, 1, 0, 0, 0, 0),
        (0, 0, 1, 1, 0, 0, 0, 0),
    ]
    backward, end = PreviousPass("BW", 0, False), PreviousPass("BW", 0, True)
    assert [live_pass.pass_kind.previous for live_pass in order] == [None, None, None, backward, None, backward]
    once = list(iterate_passes(schedule("interleaved", pp=2, v=2, micro_batches=2), 0, PassOptions("last")))
    assert [live_pass.pass_kind.previous for live_pass in once[-3:]] == [None, PreviousPass("BW", 2, True), None]
    assert end not in [live_pass.pass_kind.previous for live_pass in order]  # nothing comes after the last
    # F1 sees F0's rows on their way, and waits for the first gradient; BW0 both rows; F2 the gradient after next
    assert [live_pass.counts[8] for live_pass in order][:2] == [0, 2]


def test_gradients_of_b_alone_are_reduced_after_the_last_b() -> None:
    """A backward that is not split may follow those that are: in DualPipe a stage begins and ends so."""
    zero_bubble = iterate_passes(schedule("zb1p", pp=2, v=1, micro_batches=3), 1, PassOptions("last"))
    assert [(live_pass.pass_kind.kind, live_pass.pass_kind.last, live_pass.counts[4]) for live_pass in zero_bubble][
        -3:
    ] == [
        ("B", True, 0),
        ("W", False, 1),
        ("W", True, 1),
    ]
    both_ways = list(iterate_passes(schedule("dualpipe", pp=4, v=1, micro_batches=8), 0, PassOptions("last")))
    ends = [
        (item.pass_kind.kind, item.pass_kind.last)
        for item in both_ways
        if item.pass_kind.stage == 3 and item.pass_kind.kind != "F"
    ]
    assert ends == [("B", False), ("W", False), ("BW", False), ("BW", False), ("BW", True)]


def test_weights_that_a_forward_leaves_gathered_are_freed_by_the_next_backward() -> None:
    """F0 F1 BW0 F2 BW1 BW2: the last backward finds none. Rank 0 of two with two stages each: with the other's."""
    table = schedule("1f1b", pp=2, v=1, micro_batches=3)
    assert [
        live_pass.pass_kind.is_gathered for live_pass in iterate_passes(table, 0, PassOptions(keeps_gathered=True))
    ] == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
    several = list(
        iterate_passes(schedule("interleaved", pp=2, v=2, micro_batches=2), 0, PassOptions(keeps_gathered=True))
    )
    assert [
        (item.pass_kind.kind, item.pass_kind.stage, item.pass_kind.is_gathered, item.counts[12:14])
        for item in several[:5]
    ] == [
        ("F", 0, False, (0, 0)),
        ("F", 0, True, (0, 0)),
        ("F", 2, False, (1, 0)),
        ("F", 2, True, (1, 0)),
        ("BW", 2, True, (1, 0)),
    ]
    assert not any(
        live_pass.pass_kind.is_gathered or any(live_pass.counts[12:14])
        for live_pass in iterate_passes(schedule("interleaved", pp=2, v=2, micro_batches=2), 0, PassOptions())
    )


@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_messages_in_flight_equal_those_of_the_trainer(case: tuple[ScheduleName, int, int, int]) -> None:
    """Posted before an action and not its own, or sent and not settled, as ``p2p.py`` has it."""
    name, pp, v, micro_batches = case
    table = schedule(name, pp=pp, v=v, micro_batches=micro_batches)
    if v > 1 or name == "dualpipe":
        return  # streams that stay on a rank are counted with them
    for rank in range(pp):
        coming = gone = 0
        for (action, post_receives, wait_sends), live_pass in zip(
            list_p2p_steps(table, rank=rank), iterate_passes(table, rank, PassOptions()), strict=True
        ):
            coming, gone = coming + len(post_receives), gone - len(wait_sends)
            coming -= sum(
                kind != "W" and stage >= 0 for kind, stage, _ in list_dependencies(action, stages=pp) if stage != rank
            )
            assert live_pass.counts[-1] == coming + gone, action
            gone += (action.kind == "F" and rank < pp - 1) + (action.kind in ("B", "BW") and rank > 0)


@pytest.mark.parametrize("reduced", ["never", "last", "each"])
@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_the_listed_passes_include_the_peak(
    case: tuple[ScheduleName, int, int, int], reduced: PendingReductions
) -> None:
    """Whatever a micro-batch, the sums, a stream and what is under way weigh, while reduced gradients weigh no more
    than their sums.
    """
    name, pp, v, micro_batches = case
    table = schedule(name, pp=pp, v=v, micro_batches=micro_batches)
    rules = PassOptions(reduced, keeps_gathered=reduced == "each")
    listed = list_live_passes(name, pp, v, micro_batches, rules)
    some = np.random.default_rng(3)
    for rank, held in enumerate(map(len, table.rank_stages)):
        row, every = list(listed.iterate_rank(rank)), list(walk(table, rank, rules))
        assert len(row) <= len(every)
        for _ in range(20):
            kept, late, sums, made, left, whole = some.integers(0, 1000, (6, held))
            by_b = np.minimum(sums, left) // 3
            freed = [*-by_b, *(by_b - np.minimum(sums, left))]
            weights = [*kept, *late, *sums, *made, *freed, *whole, 0, some.integers(0, 50)]
            walks: dict[object, int] = {kind: int(some.integers(0, 2000)) for kind in ("F", "B", "BW", "W")}
            walks |= {item.pass_kind[4:]: int(some.integers(0, 500)) for item in every}

            def count_live(live_pass: LivePass, weights: list[int] = weights, walks: dict[object, int] = walks) -> int:
                return (
                    int(np.dot(live_pass.counts, weights))
                    + walks[live_pass.pass_kind.kind]
                    + walks[live_pass.pass_kind[4:]]
                )

            assert max(map(count_live, row)) == max(map(count_live, every))


def is_larger(one: LivePass, other: LivePass) -> bool:
    """Return whether a pass allocates the same or less; and no count is below, of reduced ones none above."""
    held = len(one.counts) // GROUPS
    signs = [-1 if 4 * held <= place < 6 * held else 1 for place in range(len(one.counts))]
    plain = one.pass_kind.kind != "F" and not (one.pass_kind.first or one.pass_kind.last or other.pass_kind.last)
    return (
        (one.pass_kind[2:4] == other.pass_kind[2:4] or plain)
        and one.pass_kind[4:] == other.pass_kind[4:]
        and all(s * a >= s * b for s, a, b in zip(signs, one.counts, other.counts, strict=True))
    )


def draw_schedule(some: random.Random) -> tuple[ScheduleName, int, int, int, PassOptions]:
    """A schedule that exists, and any rules."""
    while True:
        name: ScheduleName = some.choice(SCHEDULE_NAMES)
        v = 2 if PIPELINE_SCHEDULES[name].is_v_shaped else some.choice((2, 3, 5)) if name == "interleaved" else 1
        pp, micro_batches = some.choice((2, 3, 4, 6)), some.randint(1, 20)
        heads: tuple[GatheredHeads, ...] = ("", "own", "tied")
        reduced: tuple[PendingReductions, ...] = ("never", "last", "each")
        rules = PassOptions(some.choice(reduced), some.random() < 0.5, some.random() < 0.3, some.choice(heads))
        try:
            schedule(name, pp=pp, v=v, micro_batches=micro_batches)
        except UserError:
            continue
        return name, pp, v, micro_batches, rules


@pytest.mark.slow
def test_live_passes_counted_at_once_equal_those_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drawn schedules and rules, however many ranks are counted at once; those that another exceeds are left out."""
    some = random.Random(2)
    for _ in range(40):
        *case, rules = draw_schedule(some)
        name, pp, v, micro_batches = case
        table = schedule(name, pp=pp, v=v, micro_batches=micro_batches)
        monkeypatch.setattr(pipelined_passes, "COUNTED_AT_ONCE", some.choice((1, 100, 2**19)))
        listed = list_live_passes.__wrapped__(name, pp, v, micro_batches, rules)
        for rank in range(pp):
            every = list(walk(table, rank, rules))
            assert list(iterate_passes(table, rank, rules)) == every, (case, rules, rank)
            passes_by_stage: dict[object, dict[LivePass, None]] = {}
            for item in every:
                passes_by_stage.setdefault((item.pass_kind.stage, item.pass_kind.kind), {})[item] = None
            wanted = [
                one
                for _, some_of in sorted(passes_by_stage.items())
                for one in some_of
                if not any(other is not one and is_larger(other, one) for other in some_of)
            ]
            assert list(listed.iterate_rank(rank)) == wanted, (case, rules, rank)


def test_passes_of_equal_stages_are_grouped() -> None:
    """Of 1F1B over five ranks, the three in the middle equal: as many kinds as if there were one of them, and every
    pass has the kind of one of an equal stage.
    """
    asked = ("1f1b", 5, 1, 20, PassOptions("each"))
    kinds, result = (0, 1, 1, 1, 4), list_live_passes(*asked)
    some, place = group_equal_passes(*asked, kinds)
    assert len(some) < len(result.distinct)
    for mine, own in zip(place, result.kind_index, strict=True):
        one, other = result.distinct[some[mine]], result.distinct[own]
        assert (one.kind, one.first, one.last, one.is_gathered) == (
            other.kind,
            other.first,
            other.last,
            other.is_gathered,
        )
        assert kinds[one.stage] == kinds[other.stage]
        assert (one.previous and one.previous[::2]) == (other.previous and other.previous[::2])
    assert len({result.distinct[at] for at in some if result.distinct[at].stage in (1, 2, 3)}) == len(
        {
            item._replace(stage=1, previous=item.previous and item.previous._replace(stage=1))
            for item in result.distinct
            if item.stage in (1, 2, 3)
        }
    )
