"""What lives beside each pass: a small pipeline by hand, and that what is left out is never the fullest."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from fivefold.layout.names import ScheduleName
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.action import needs
from fivefold.layout.schedule.p2p import p2p_steps
from fivefold.plan.count.memory.in_flight import Before, LivePass, Reduced, _unexceeded, in_order, live_passes

SCHEDULES: tuple[tuple[ScheduleName, int, int, int], ...] = (
    ("gpipe", 4, 1, 6), ("1f1b", 4, 1, 4), ("1f1b", 4, 1, 9), ("interleaved", 2, 3, 6), ("interleaved", 4, 2, 10),
    ("zb1p", 4, 1, 8), ("zb2p", 4, 1, 8), ("zbv", 2, 2, 6), ("dualpipe", 4, 1, 8), ("dualpipev", 2, 2, 5),
)  # fmt: skip


def test_one_forward_one_backward_by_hand() -> None:
    """Rank 0 of two, three micro-batches: F0 F1 BW0 F2 BW1 BW2."""
    found = list(in_order(schedule("1f1b", pp=2, v=1, micro_batches=3), 0, "each"))
    assert [live_pass[:4] for live_pass in found] == [
        ("F", 0, True, False), ("F", 0, False, False), ("BW", 0, True, False), ("F", 0, False, False),
        ("BW", 0, False, False), ("BW", 0, False, True),
    ]  # fmt: skip
    # others until B, until W, sums born, those of W, reduced, weights held, and streams that stay here: none in a line
    assert [live_pass.counts[:7] for live_pass in found] == [
        (0, 0, 0, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0, 0), (1, 0, 1, 1, 0, 0, 0),
        (1, 0, 1, 1, 0, 0, 0), (0, 0, 1, 1, 0, 0, 0),
    ]  # fmt: skip
    backward, end = Before("BW", 0, False), Before("BW", 0, True)
    assert [live_pass.before for live_pass in found] == [None, None, None, backward, None, backward]
    once = list(in_order(schedule("interleaved", pp=2, v=2, micro_batches=2), 0, "last"))
    assert [live_pass.before for live_pass in once[-3:]] == [None, Before("BW", 2, True), None]
    assert end not in [live_pass.before for live_pass in found]  # nothing comes after the last
    # F1 sees F0's rows on their way, and waits for the first gradient; BW0 both rows; F2 the gradient after next
    assert [live_pass.counts[7] for live_pass in found][:2] == [0, 2]


def test_weights_that_a_forward_leaves_gathered_are_let_go_by_the_next_backward() -> None:
    """F0 F1 BW0 F2 BW1 BW2: the last backward finds none. Rank 0 of two with two stages each: beside the other's."""
    table = schedule("1f1b", pp=2, v=1, micro_batches=3)
    assert [live_pass.held for live_pass in in_order(table, 0, "never", keeps=True)] == [
        False, True, True, False, True, False,
    ]  # fmt: skip
    several = list(in_order(schedule("interleaved", pp=2, v=2, micro_batches=2), 0, "never", keeps=True))
    assert [(each.kind, each.stage, each.held, each.counts[10:12]) for each in several[:5]] == [
        ("F", 0, False, (0, 0)), ("F", 0, True, (0, 0)), ("F", 2, False, (1, 0)), ("F", 2, True, (1, 0)),
        ("BW", 2, True, (1, 0)),
    ]  # fmt: skip
    assert not any(live_pass.held or any(live_pass.counts[10:12]) for live_pass in in_order(
        schedule("interleaved", pp=2, v=2, micro_batches=2), 0, "never"
    ))  # fmt: skip


@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_messages_on_their_way_are_those_of_the_engine(case: tuple[ScheduleName, int, int, int]) -> None:
    """Posted before an action and not its own, or sent and not settled, as ``p2p.py`` has it."""
    name, pp, v, micro_batches = case
    table = schedule(name, pp=pp, v=v, micro_batches=micro_batches)
    if v > 1 or name == "dualpipe":
        return  # streams that stay on a rank are counted with them
    for rank in range(pp):
        coming = gone = 0
        for (action, post_receives, wait_sends), live_pass in zip(
            p2p_steps(table, rank=rank), in_order(table, rank, "never"), strict=True
        ):
            coming, gone = coming + len(post_receives), gone - len(wait_sends)
            coming -= sum(kind != "W" and stage >= 0 for kind, stage, _ in needs(action, stages=pp) if stage != rank)
            assert live_pass.counts[-1] == coming + gone, action
            gone += (action.kind == "F" and rank < pp - 1) + (action.kind in ("B", "BW") and rank > 0)


@pytest.mark.parametrize("reduced", ["never", "last", "each"])
@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_the_fullest_is_among_those_listed(case: tuple[ScheduleName, int, int, int], reduced: Reduced) -> None:
    """Whatever a micro-batch, the sums, a stream and what is under way weigh, while reduced gradients weigh no more
    than their sums.
    """
    name, pp, v, micro_batches = case
    table = schedule(name, pp=pp, v=v, micro_batches=micro_batches)
    listed = live_passes(name, pp, v, micro_batches, reduced, keeps=reduced == "each")
    some = np.random.default_rng(3)
    for rank, row in enumerate(listed.rows):
        every, held = list(in_order(table, rank, reduced, keeps=reduced == "each")), len(table.rank_stages[rank])
        assert len(row) <= len(every)
        for _ in range(20):
            kept, late, sums, made, left, whole = some.integers(0, 1000, (6, held))
            weights = [*kept, *late, *sums, *made, *-np.minimum(sums, left), *whole, 0, some.integers(0, 50)]
            walks: dict[object, int] = {kind: int(some.integers(0, 2000)) for kind in ("F", "B", "BW", "W")}
            walks |= {(each.before, each.held): int(some.integers(0, 500)) for each in every}

            def live(live_pass: LivePass, weights: list[int] = weights, walks: dict[object, int] = walks) -> int:
                return int(np.dot(live_pass.counts, weights)) + walks[live_pass.kind] + walks[live_pass[4:6]]

            assert max(map(live, row)) == max(map(live, every))
    assert [list(live_pass.counts) for row in listed.rows for live_pass in row] == listed.counts.tolist()
    assert [listed.distinct[at] for at in listed.place] == [live_pass[:6] for row in listed.rows for live_pass in row]


def exceeds(one: LivePass, other: LivePass) -> bool:
    """Alike in what it brings to life, or the plainer; and no count below, of what is reduced none above."""
    held = len(one.counts) // 6
    signs = [-1 if 4 * held <= place < 5 * held else 1 for place in range(len(one.counts))]
    plain = one.kind != "F" and not (one.first or one.last or other.last)
    alike = (one.first, one.last) == (other.first, other.last) or plain
    return (
        alike
        and one[4:6] == other[4:6]
        and all(s * a >= s * b for s, a, b in zip(signs, one.counts, other.counts, strict=True))
    )


def drawn(rng: random.Random) -> Iterator[LivePass]:
    kind, places = rng.choice(("F", "B", "W", "BW")), rng.choice((8, 14))
    for _ in range(rng.randint(1, 40)):
        counts = tuple(rng.randint(0, 2) for _ in range(places))
        before = rng.choice((None, Before("BW", 0, False)))
        yield LivePass(kind, 0, rng.random() < 0.3, rng.random() < 0.3, before, rng.random() < 0.5, counts)


def test_those_that_another_exceeds_are_left_out() -> None:
    rng = random.Random(1)
    for _ in range(200):
        alike = list(dict.fromkeys(drawn(rng)))
        wanted = [one for one in alike if not any(other is not one and exceeds(other, one) for other in alike)]
        assert list(_unexceeded(alike)) == wanted
