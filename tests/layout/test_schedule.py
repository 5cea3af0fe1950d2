"""Every schedule is legal, plays without deadlock, and has the published bubble and memory."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fivefold.errors import RunFailure, UserError
from fivefold.layout.schedule import PIPELINE_SCHEDULES, order, schedule
from fivefold.layout.schedule.action import Action, list_dependencies, list_parts, parse
from fivefold.layout.schedule.csv_file import read_table, write_table
from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.p2p import list_links, list_p2p_steps
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES, ScheduleName
from fivefold.layout.schedule.simulation import (
    SimulatedSchedule,
    divide_into_waves,
    simulate_schedule,
    simulate_schedules,
)
from fivefold.layout.schedule.table import Table, check
from tests.layout.live import peaks

some = settings(derandomize=True, deadline=None, max_examples=50)
RANKS, MICRO_BATCHES, UNITS = st.integers(1, 8), st.integers(1, 24), st.integers(1, 9)


def measure_longest_rank(simulated: SimulatedSchedule) -> float:
    """The longest time of a rank from its first start to its last end: the step time without a barrier."""
    return max(spans[-1].end - spans[0].start for spans in simulated.spans)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    name = draw(st.sampled_from(SCHEDULES))
    pp, m = draw(RANKS), draw(MICRO_BATCHES)
    v = draw(st.integers(1, 4)) if name == "interleaved" else 2 if PIPELINE_SCHEDULES[name].is_v_shaped else 1
    if name == "dualpipe":
        pp, m = pp + pp % 2, m + m % 2
    return schedule(name, pp=pp, v=v, micro_batches=max(m, 2 * pp) if name.startswith("dualpipe") else m)


def take(f: float, b: float, w: float, *, both: float | None = None) -> Callable[[Task], float]:
    seconds = {"F": f, "B": b, "W": w, "BW": b + w, "FB": f + b + w if both is None else both}
    return lambda task: seconds[task.kind]


def count_peaks(table: Table) -> tuple[int, ...]:
    """Peaks in micro-batches per rank if W needs as much as B does, the most there can be."""
    return peaks(table, until_backward=[1] * table.stages, until_weight=[1] * table.stages)


# ---- legality


def test_every_schedule_has_a_generator() -> None:
    assert tuple(PIPELINE_SCHEDULES) == SCHEDULES
    for name in SCHEDULES:
        v = 2 if PIPELINE_SCHEDULES[name].stages_per_rank != 1 else 1
        assert schedule(name, pp=2, v=v, micro_batches=4).name == name


@some
@given(tables())
def test_every_action_runs_once_on_its_rank_after_its_dependencies(table: Table) -> None:
    """Written without ``check`` and without ``table.order``: by sets and by the times of a simulation."""
    check(table)
    done = [(part, rank) for rank, row in enumerate(table.rows) for action in row for part in list_parts(action)]
    places = {
        ((kind, stage, i), table.paths[i][stage])
        for kind in "FBW"
        for stage in range(table.stages)
        for i in range(table.micro_batches)
    }
    assert len(done) == len(places)
    assert set(done) == places
    spans = simulate_schedule(table, seconds=take(3, 2, 1)).spans
    end = {part: span.end for row in spans for span in row for part in list_parts(span.action)}
    for row in spans:
        assert all(before.end <= after.start for before, after in pairwise(row))
        for span in row:
            for need in list_dependencies(span.action, stages=table.stages):
                assert end[need] <= span.start


def test_dependencies_of_an_action_are_its_former_passes() -> None:
    assert list_dependencies(Action("F", 0, 3), stages=4) == ()
    assert list_dependencies(Action("F", 2, 3), stages=4) == (("F", 1, 3),)
    assert list_dependencies(Action("B", 3, 1), stages=4) == (("F", 3, 1),)
    assert list_dependencies(Action("BW", 2, 1), stages=4) == (("F", 2, 1), ("B", 3, 1))
    assert list_dependencies(Action("W", 2, 1), stages=4) == (("B", 2, 1),)
    assert list_dependencies(Action("FB", 2, 3, 1, 0), stages=4) == (("F", 1, 3), ("F", 1, 0), ("B", 2, 0))


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("1f1b", ((0,), (1,), (2,), (3,))),
        ("interleaved", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("zbv", ((0, 7), (1, 6), (2, 5), (3, 4))),
        ("dualpipev", ((0, 7), (1, 6), (2, 5), (3, 4))),
        ("dualpipe", ((0, 3), (1, 2), (1, 2), (0, 3))),  # every stage twice
    ],
)
def test_every_schedule_places_stages_on_the_expected_ranks(
    name: ScheduleName, held: tuple[tuple[int, ...], ...]
) -> None:
    v = len(held[0]) if name != "dualpipe" else 1
    assert schedule(name, pp=4, v=v, micro_batches=8).rank_stages == held


def test_dualpipe_enters_from_both_ends() -> None:
    paths = schedule("dualpipe", pp=4, v=1, micro_batches=8).paths
    assert paths == ((0, 1, 2, 3),) * 4 + ((3, 2, 1, 0),) * 4


# ---- bubbles, in units of time: exact


@some
@given(RANKS, MICRO_BATCHES, UNITS, UNITS, UNITS)
def test_bubbles_of_gpipe_and_1f1b_follow_the_formula(pp: int, m: int, f: int, b: int, w: int) -> None:
    for name in ("gpipe", "1f1b"):
        simulated = simulate_schedule(schedule(name, pp=pp, v=1, micro_batches=m), seconds=take(f, b, w))
        assert simulated.busy_seconds == (m * (f + b + w),) * pp
        assert (
            simulated.seconds - simulated.busy_seconds[0]
            == measure_longest_rank(simulated) - simulated.busy_seconds[0]
            == (pp - 1) * (f + b + w)
        )


@some
@given(RANKS, st.integers(1, 4), MICRO_BATCHES, UNITS, UNITS)
@example(5, 3, 11, 1, 2)
def test_the_bubble_of_interleaved_is_that_of_1f1b_divided_by_v(pp: int, v: int, m: int, f: int, b: int) -> None:
    """Per chunk: a rank's F is v·f. Also where pp does not divide the micro-batches."""
    m = max(m, pp)
    simulated = simulate_schedule(schedule("interleaved", pp=pp, v=v, micro_batches=m), seconds=take(f, b, 0))
    assert simulated.seconds == m * v * (f + b) + (pp - 1) * (f + b)


@some
@given(RANKS, MICRO_BATCHES, UNITS, UNITS, UNITS)
def test_bubbles_of_zero_bubble_schedules_follow_the_formula(pp: int, m: int, f: int, b: int, w: int) -> None:
    """Qi et al., table 2; as published they hold where W is the shortest of the three."""
    w = min(f, b, w)
    work = f + b + w
    m = max(m, pp)
    h1 = simulate_schedule(schedule("zb1p", pp=pp, v=1, micro_batches=m), seconds=take(f, b, w))
    assert measure_longest_rank(h1) == h1.seconds == m * work + (pp - 1) * (f + b - w)
    m = max(m, 2 * pp - 1)
    h2 = simulate_schedule(schedule("zb2p", pp=pp, v=1, micro_batches=m), seconds=take(f, b, w))
    assert measure_longest_rank(h2) == m * work + (pp - 1) * (f + b - 2 * w)


@some
@given(RANKS, MICRO_BATCHES, UNITS)
def test_zero_bubble_is_zero_for_equal_durations(pp: int, m: int, unit: int) -> None:
    m = max(m, 2 * pp - 1)
    for name, v in (("zb2p", 1), ("zbv", 2)):
        table = schedule(name, pp=pp, v=v, micro_batches=m)  # type: ignore[arg-type]
        simulated = simulate_schedule(table, seconds=take(unit, unit, unit))
        assert measure_longest_rank(simulated) == simulated.busy_seconds[0] == 3 * unit * m * v
        assert (
            simulated.seconds == measure_longest_rank(simulated) + (pp - 1) * unit
        )  # the last rank starts after pp - 1 forwards


@some
@given(st.integers(1, 4), MICRO_BATCHES, UNITS, UNITS)
def test_the_bubble_of_dualpipe_follows_the_formula(half: int, m: int, f: int, w: int) -> None:
    """DualPipe's (pp/2-1)(F&B + B - 3W) with B the full backward and no gain from overlap; F equals B without W."""
    w = min(f, w)
    dual = simulate_schedule(
        schedule("dualpipe", pp=2 * half, v=1, micro_batches=max(4 * half, 2 * m)), seconds=take(f, f, w)
    )
    folded = simulate_schedule(
        schedule("dualpipev", pp=half, v=2, micro_batches=max(2 * half, m)), seconds=take(f, f, w)
    )
    for simulated in (dual, folded):
        assert set(simulated.busy_seconds) == {simulated.busy_seconds[0]}
        assert simulated.seconds - simulated.busy_seconds[0] == (half - 1) * ((f + f + w) + (f + w) - 3 * w)


def test_overlapping_passes_shorten_dualpipe_by_the_formula() -> None:
    """Where F&B takes 2 instead of 3, the least busy rank idles (pp/2-1)(2 + 2 - 3)."""
    table = schedule("dualpipe", pp=8, v=1, micro_batches=20)
    apart, over = (simulate_schedule(table, seconds=take(1, 1, 1, both=both)) for both in (3, 2))
    assert over.seconds < apart.seconds
    assert over.seconds - min(over.busy_seconds) == 3 * (2 + 2 - 3)


PUBLISHED = [  # pp, micro-batches; F, B, W, communication in ms; bubble rates of 1F1B, ZB-H1, ZB-H2
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    (8, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698)),
    (8, 32, (29.802, 29.428, 19.530, 0.577), (0.1898, 0.1045, 0.0559)),
    (8, 64, (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0554, 0.0294)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
    (16, 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516)),
    (16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266)),
    (32, 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641)),
    (32, 128, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1106, 0.0490)),
    (32, 256, (10.402, 10.248, 7.698, 0.460), (0.1352, 0.0594, 0.0257)),
]


@pytest.mark.parametrize(("pp", "m", "times", "rates"), PUBLISHED)
def test_bubbles_equal_the_published_rates(pp: int, m: int, times: tuple[float, ...], rates: tuple[float, ...]) -> None:
    """Qi et al., arXiv:2401.10241, tables 5 and 9: their durations simulated with our tables give their rates."""
    f, b, w, hop = times
    for name, rate in zip(("1f1b", "zb1p", "zb2p"), rates, strict=True):
        table = schedule(name, pp=pp, v=1, micro_batches=m)  # type: ignore[arg-type]
        cost = measure_longest_rank(simulate_schedule(table, seconds=take(f, b, w), hop_seconds=lambda *_: hop))
        assert (cost - m * (f + b + w)) / cost == pytest.approx(rate, abs=6e-5)


# ---- memory


@some
@given(RANKS, MICRO_BATCHES)
def test_live_micro_batches_of_each_schedule_follow_the_formula(pp: int, m: int) -> None:
    ranks = range(pp)
    assert count_peaks(schedule("gpipe", pp=pp, v=1, micro_batches=m)) == (m,) * pp
    assert count_peaks(schedule("1f1b", pp=pp, v=1, micro_batches=m)) == tuple(min(m, pp - r) for r in ranks)
    assert count_peaks(schedule("zb1p", pp=pp, v=1, micro_batches=m)) == (min(m, pp),) * pp
    assert count_peaks(schedule("zb2p", pp=pp, v=1, micro_batches=m)) == (min(m, 2 * pp - 1),) * pp
    assert max(count_peaks(schedule("zbv", pp=pp, v=2, micro_batches=m))) <= 2 * pp  # halves: pp full ones
    assert count_peaks(schedule("zbv", pp=pp, v=2, micro_batches=2 * pp)) == (2 * pp,) * pp
    assert count_peaks(schedule("dualpipev", pp=pp, v=2, micro_batches=2 * pp + m)) == (2 * pp + 1,) * pp
    even = 2 * pp
    assert count_peaks(schedule("dualpipe", pp=even, v=1, micro_batches=2 * (even + m))) == (even + 1,) * even


@some
@given(RANKS, st.integers(2, 4), st.integers(1, 4))
def test_live_stages_of_the_interleaved_schedule_follow_megatrons_formula(pp: int, v: int, groups: int) -> None:
    """Megatron's warm-up, and one; the first rank has pp(1 + (pp-1)/(pp·v)) micro-batches: arXiv:2205.05198."""
    m = groups * pp
    chunks = tuple(min(v * m, (v - 1) * pp + 2 * (pp - rank) - 1) for rank in range(pp))
    assert count_peaks(schedule("interleaved", pp=pp, v=v, micro_batches=m)) == chunks


@pytest.mark.parametrize(("name", "factor"), [("zb1p", 1), ("zb2p", 2)])
def test_memory_of_zero_bubble_schedules_by_rank_follows_the_paper(name: ScheduleName, factor: int) -> None:
    """Qi et al. §2.3: (pp-r)·M_B + r·M_W for ZB-H1 and (2(pp-r)-1)·M_B + 2r·M_W for ZB-H2, r from 0."""
    pp, bytes_b, bytes_w = 6, 340, 320
    table = schedule(name, pp=pp, v=1, micro_batches=16)
    expected = tuple((factor * (pp - rank) - factor + 1) * bytes_b + factor * rank * bytes_w for rank in range(pp))
    assert peaks(table, until_backward=[bytes_b] * pp, until_weight=[bytes_w] * pp) == expected


# ---- simulation


def wait_sends(table: Table, seconds: Callable[[Task], float], hop: Callable[[int, int], float]) -> dict[Any, float]:
    """When each part ends by repeated relaxation: slow, and unlike ``simulate_schedule``."""
    end = {part: 0.0 for row in table.rows for action in row for part in list_parts(action)}
    while True:
        before = dict(end)
        for rank, row in enumerate(table.rows):
            free = 0.0
            for action in row:
                for kind, stage, i in list_dependencies(action, stages=table.stages):
                    home = table.paths[i][stage]
                    free = max(free, end[kind, stage, i] + (hop(home, rank) if home != rank else 0))
                free += seconds(Task(action.kind, action.stage, action.backward_stage))
                end.update(dict.fromkeys(list_parts(action), free))
        if end == before:
            return end


@settings(some, max_examples=25)
@given(tables(), st.integers(0, 10**6))
@example(schedule("dualpipe", pp=6, v=1, micro_batches=14), 1)
@example(schedule("dualpipev", pp=3, v=2, micro_batches=8), 2)
def test_the_simulated_schedule_starts_every_pass_as_early_as_its_dependencies_allow(table: Table, seed: int) -> None:
    """With another duration for every task and another hop for every pair of ranks."""

    def seconds(task: Task) -> float:
        return 1 + hash((seed, len(task.kind), ord(task.kind[0]), task.stage, task.backward_stage)) % 9

    def hop(source: int, target: int) -> float:
        return hash((seed, source, target)) % 19

    spans = simulate_schedule(table, seconds=seconds, hop_seconds=hop).spans
    ends = {part: span.end for row in spans for span in row for part in list_parts(span.action)}
    assert ends == wait_sends(table, seconds, hop)


@some
@given(tables(), st.randoms(use_true_random=False))
def test_simulating_many_durations_at_once_equals_one_by_one(table: Table, random: Any) -> None:
    """In waves of arrays as one by one, event by event."""
    tasks, many = table.order.tasks, range(3)
    seconds = np.array([[random.uniform(0, 9) for _ in many] for _ in tasks])
    hops = np.array([random.uniform(0, 5) for _ in many])
    ends = simulate_schedules(divide_into_waves(table.order, pp=table.pp), seconds, hops, pp=table.pp)
    for at in many:
        item = dict(zip(tasks, seconds[:, at], strict=True))
        alone = simulate_schedule(table, seconds=item.__getitem__, hop_seconds=lambda *_, at=at: hops[at])
        assert ends[:, at] == pytest.approx(alone.rank_ends, rel=1e-12)


def test_simulating_many_durations_keeps_few_ends() -> None:
    """As many as messages are on their way, in blocks of a wave, not those of all 16,384 actions."""
    table = schedule("interleaved", pp=16, v=8, micro_batches=64)
    waves = divide_into_waves(table.order, pp=table.pp)
    assert (len(waves.rank), waves.rows) == (16_384, 1 + 12 * table.pp)


@some
@given(tables(), st.randoms(use_true_random=False))
def test_many_ranks_are_simulated_wave_by_wave_with_equal_results(table: Table, random: Any) -> None:
    durations = {task: random.uniform(0, 9) for task in table.order.tasks}
    hops = {(source, target): random.uniform(0, 5) for source in range(table.pp) for target in range(table.pp)}
    simulated = []
    for ranks in (1, table.pp + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(order, "MIN_WAVE_RANKS", ranks)
            copy = Table.from_rows(table.name, table.rows, table.paths)
            assert (copy.order.wave_starts is None) == (ranks > table.pp)
            simulated.append(
                simulate_schedule(copy, seconds=durations.__getitem__, hop_seconds=lambda *link: hops[link])
            )
    assert simulated[0].spans == simulated[1].spans
    assert simulated[0].rank_ends == simulated[1].rank_ends
    assert sorted(simulated[0].table.order.tasks) == sorted(simulated[1].table.order.tasks)


def test_a_rank_without_actions_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "MIN_WAVE_RANKS", 1)
    table = Table.from_rows("mine", [(), ONE.rows[0], (), ONE.rows[1], ()], ONE.paths)
    assert [[span.end for span in row] for row in simulate_schedule(table, seconds=take(1, 1, 1)).spans] == [
        [],
        [1, 2, 6, 9],
        [],
        [2, 4, 5, 7],
        [],
    ]


def test_the_error_of_a_deadlock_lists_the_waiting_ranks() -> None:
    ranks = 2 * order.MIN_WAVE_RANKS
    table = schedule("1f1b", pp=ranks, v=1, micro_batches=2)
    rows = [*table.rows[:-1], table.rows[-1][::-1]]
    with pytest.raises(UserError, match=r"deadlock: rank 0 at BW0\.0 waits for B1\.0, .* and 29 more"):
        check(Table.from_rows("mine", rows, table.paths))


@pytest.mark.parametrize(("name", "factor"), [("zb1p", 1), ("zb2p", 2)])
@pytest.mark.parametrize(("pp", "m"), [(1, 1), (3, 2), (4, 4), (4, 9), (20, 50)])
def test_zero_bubble_ranks_run_w_as_many_backwards_late_as_their_number(
    name: ScheduleName, factor: int, pp: int, m: int
) -> None:
    """As arXiv:2401.10241 figures 2 and 3 draw each rank, one action after the other."""
    for rank, row in enumerate(schedule(name, pp=pp, v=1, micro_batches=m).rows):
        ahead, late = factor * (pp - rank) - (factor - 1), factor * rank
        expected = [f"F{rank}.{i}" for i in range(min(ahead, m))]
        for i in range(m):
            expected += [f"B{rank}.{i}"]
            expected += [f"W{rank}.{i - late}"] if i >= late else []
            expected += [f"F{rank}.{i + ahead}"] if i + ahead < m else []
        expected += [f"W{rank}.{i}" for i in range(max(0, m - late), m)]
        assert [*map(str, row)] == expected


def test_the_simulation_of_1f1b_equals_times_by_hand() -> None:
    """1F1B on two ranks, F 1, backward 2, hop 1: worked on paper."""
    table = schedule("1f1b", pp=2, v=1, micro_batches=2)
    simulated = simulate_schedule(table, seconds=take(1, 1, 1), hop_seconds=lambda *_: 1)
    times = [[(str(action), start, end) for action, start, end in row] for row in simulated.spans]
    assert times == [
        [("F0.0", 0, 1), ("F0.1", 1, 2), ("BW0.0", 6, 8), ("BW0.1", 9, 11)],
        [("F1.0", 2, 3), ("BW1.0", 3, 5), ("F1.1", 5, 6), ("BW1.1", 6, 8)],
    ]
    assert (simulated.seconds, simulated.busy_seconds, measure_longest_rank(simulated)) == (11, (6, 6), 11)
    assert isinstance(simulated, SimulatedSchedule)


def test_a_slow_link_carries_one_message_after_another() -> None:
    """GPipe on two ranks, F 1, backward 2, hop 3: worked on paper. Received is what was asked for an action ahead."""
    table = schedule("gpipe", pp=2, v=1, micro_batches=3)
    simulated = simulate_schedule(table, seconds=take(1, 1, 1), hop_seconds=lambda *_: 3, queues=True)
    times = [[(str(action), start, end) for action, start, end in row] for row in simulated.spans]
    assert times[1][:3] == [("F1.0", 4, 5), ("F1.1", 7, 8), ("F1.2", 10, 11)]
    assert [start for name, start, _ in times[1] if name.startswith("BW")] == [11, 13, 15]
    # backwards end at 13, 15 and 17, and come 3 later, one at a time
    assert [start for name, start, _ in times[0] if name.startswith("BW")] == [16, 19, 22]
    quick = simulate_schedule(table, seconds=take(1, 1, 1), hop_seconds=lambda *_: 1, queues=True)
    assert quick == simulate_schedule(table, seconds=take(1, 1, 1), hop_seconds=lambda *_: 1)


def test_a_simulation_of_equal_costs_is_computed_once() -> None:
    asked: list[Task] = []
    table = schedule("dualpipev", pp=2, v=2, micro_batches=9)
    simulate_schedule(table, seconds=lambda task: (asked.append(task), 1.0)[1])  # type: ignore[func-returns-value]
    assert len(asked) == len(set(asked))
    assert Task("FB", 0, 3) in asked
    assert Task("FB", 3, 0) in asked


def test_a_schedule_table_is_built_once() -> None:
    assert schedule("zbv", pp=4, v=2, micro_batches=8) is schedule("zbv", pp=4, v=2, micro_batches=8)


# ---- torch's own tables


@pytest.mark.parametrize(
    ("name", "theirs", "v"),
    [
        ("gpipe", "GPipe", 1),
        ("1f1b", "1F1B", 1),
        ("interleaved", "Interleaved1F1B", 2),
        ("interleaved", "Interleaved1F1B", 3),
        ("zbv", "ZBVZeroBubble", 2),
        ("dualpipev", "DualPipeV", 2),
    ],
)
def test_schedules_have_the_order_of_pytorchs_schedules(name: ScheduleName, theirs: str, v: int) -> None:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    for pp, m in ((2, 4), (4, 8), (4, 12)):
        native = visualizer.get_schedule_ops(theirs, pp, m, num_stages_per_rank=v)
        rows = [[action for action in map(from_torch, row) if action] for row in native]
        if name == "1f1b":  # torch numbers the forwards of the last rank from 1
            rows[-1] = [a._replace(micro_batch=a.micro_batch - 1) if a.kind == "F" else a for a in rows[-1]]
        ours = [list(row) for row in schedule(name, pp=pp, v=v, micro_batches=m).rows]
        if name == "zbv":  # the last W, of which all are late, come in another order
            rows, ours = ([[a for a in row if a.kind != "W"] for row in table] for table in (rows, ours))
        assert ours == rows


def from_torch(native: Any) -> Action | None:
    if native is None:
        return None
    kind = {"F": "F", "I": "B", "W": "W", "B": "BW", "OVERLAP_F_B": "FB"}.get(native.computation_type.value)
    if kind == "FB":
        forward, backward = native.sub_actions
        return Action("FB", *(n for a in (forward, backward) for n in (a.stage_index, a.microbatch_index)))
    return Action(kind, native.stage_index, native.microbatch_index) if kind else None  # type: ignore[arg-type]


# ---- what is refused

ONE = schedule("1f1b", pp=2, v=1, micro_batches=2)


def change_row(*, rank: int, row: str, name: str = "mine") -> Table:
    rows = list(ONE.rows)
    rows[rank] = tuple(map(parse, row.split()))
    return Table.from_rows(name, rows, ONE.paths)


@pytest.mark.parametrize(
    ("rank", "row", "says"),
    [
        (1, "F1.0 BW1.0 F1.1 B1.1", "W1.1 never runs; add it to rank 1"),
        (1, "F1.0 BW1.0 F1.1 BW1.1 W1.0", "W1.0 runs on rank 1 and again on rank 1; keep one"),
        (1, "F1.0 BW1.0 F1.1 BW1.1 F0.0", "F0.0 runs on rank 0 and again on rank 1; keep one"),
        (0, "F1.0", "F1.0 runs on rank 0, but rank 1 holds its stage; move it there"),
        (1, "F1.0 BW1.0 F1.2", "F1.2 on rank 1 is beyond 2 stages and 2 micro-batches, counted from 0; drop it"),
        (1, "F1.0 W1.0 B1.0 F1.1 BW1.1", "rank 1 at W1.0 waits for B1.0"),
        (1, "F1.0 BW1.1 F1.1 BW1.0", "rank 1 at BW1.1 waits for F1.1"),
        (
            0,
            "F0.0 BW0.0 BW0.1 F0.1",
            "deadlock: rank 0 at BW0.1 waits for F0.1, rank 1 at F1.1 waits for F0.1; reorder one of them",
        ),
        (1, "F1.1 F1.0 BW1.0 BW1.1", None),  # another order, but a legal one
    ],
)
def test_the_check_of_a_schedule_table_says_what_is_wrong(rank: int, row: str, says: str | None) -> None:
    table = change_row(rank=rank, row=row)
    if says is None:
        check(table)
        return
    with pytest.raises(UserError) as caught:
        check(table)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@some
@given(tables(), st.randoms(use_true_random=False))
def test_the_check_of_a_schedule_table_finds_a_missing_action(table: Table, random: Any) -> None:
    rank = random.randrange(table.pp)
    gap = random.randrange(len(table.rows[rank]))
    rows = [row[:gap] + row[gap + 1 :] if r == rank else row for r, row in enumerate(table.rows)]
    with pytest.raises(UserError, match="never runs; add it to rank"):
        check(Table.from_rows(table.name, rows, table.paths))


@pytest.mark.parametrize(
    ("name", "pp", "v", "m", "says"),
    [
        ("1f1b", 2, 1, 0, "1f1b needs one of each or more, not pp=2 v=1 and 0 micro-batches"),
        ("1f1b", 2, 2, 4, "1f1b runs 1 stages per rank, not v=2; write v1 or interleaved"),
        ("zbv", 2, 1, 4, "zbv runs 2 stages per rank, not v=1; write v2 or interleaved"),
        ("dualpipe", 3, 1, 6, "try pp4 and 6 micro-batches, or dualpipev"),
        ("dualpipe", 2, 1, 7, "try pp2 and 8 micro-batches, or dualpipev"),
        ("dualpipe", 4, 1, 6, "dualpipe needs 2·pp=8 micro-batches or more, not 6; raise gbs or lower dp·mbs"),
        ("dualpipev", 4, 2, 7, "dualpipev needs 2·pp=8 micro-batches or more, not 7; raise gbs or lower dp·mbs"),
    ],
)
def test_a_schedule_with_unsupported_sizes_is_an_error(name: ScheduleName, pp: int, v: int, m: int, says: str) -> None:
    with pytest.raises(UserError) as caught:
        schedule(name, pp=pp, v=v, micro_batches=m)
    assert says in str(caught.value)


# ---- text


@some
@given(table=tables())
def test_a_schedule_table_reads_back_from_csv(tmp_path_factory: pytest.TempPathFactory, table: Table) -> None:
    path = tmp_path_factory.getbasetemp() / f"{table.name}.csv"
    write_table(table, path)
    assert read_table(path) == table
    assert len(list(csv.reader(io.StringIO(path.read_text())))) == table.pp


def test_empty_cells_are_only_spacing(tmp_path: Path) -> None:
    path = tmp_path / "1f1b.csv"
    path.write_text("F0.0, F0.1,       BW0.0, BW0.1,\n     , F1.0, BW1.0, F1.1, BW1.1\n")
    assert read_table(path) == ONE


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("F0.0,BW0.0,X0.1\n", "row 1, cell 3: 'X0.1' is not an action; write F0.3 (stage 0, micro-batch 3)"),
        ("F0.0,BW0.0\nF1.0,BW1\n", "row 2, cell 2: 'BW1' is not an action"),
        ("F0.0+B0.0\n", "row 1, cell 1: 'F0.0+B0.0' is not an action"),
        ("F0.0,BW0.0\n\nF1.0,BW1.0\n", "row 2 has no action; each row is a rank, drop it"),
        ("", "no row has a forward"),
        ("BW0.0\n", "no row has a forward"),
        ("F0.0,BW0.0\nF1.1,BW1.1\n", "F0.1 never runs, though other rows have 2 stages and 2 micro-batches; add it"),
        ("F0.0,F999999.999999\n", "F0.1 never runs, though other rows have 1000000 stages"),
        ("F0.0,B0.0\n", "W0.0 never runs; add it to rank 0"),
        ("BW0.0,F0.0\n", "deadlock: rank 0 at BW0.0 waits for F0.0"),
        ("F0.0,BW0.0,B7.0\n", "B7.0 on rank 0 is beyond 1 stages and 1 micro-batches"),
        ("\xff", "row 1, cell 1"),
    ],
)
def test_an_invalid_schedule_csv_is_a_one_line_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_table(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_schedule_file_that_is_missing_or_not_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read as UTF-8 text"):
        read_table(tmp_path / "bytes.csv")
    with pytest.raises(RunFailure, match="the schedule cannot be written: File exists"):
        write_table(ONE, tmp_path / "bytes.csv" / "such.csv")


# ---- messages


def crossings(table: Table) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Who makes and who takes each message, from the paths alone."""
    result = {}
    for i, path in enumerate(table.paths):
        for stage, (here, there) in enumerate(pairwise(path)):
            if here != there:
                result["F", stage, i] = here, there
                result["B", stage + 1, i] = there, here
    return result


@some
@given(tables())
@example(schedule("dualpipe", pp=6, v=1, micro_batches=14))
@example(schedule("interleaved", pp=2, v=4, micro_batches=5))
def test_each_message_is_expected_once_in_time_and_in_the_order_of_its_sender(table: Table) -> None:
    rows = [list_p2p_steps(table, rank=rank) for rank in range(table.pp)]
    made = crossings(table)
    assert sorted(part for row in rows for cue in row for part in cue.post_receives) == sorted(made)
    for rank, row in enumerate(rows):
        assert tuple(cue.action for cue in row) == table.rows[rank]
        posted = {part: index for index, cue in enumerate(row) for part in cue.post_receives}
        for index, cue in enumerate(row):
            needed = [
                part
                for part in list_dependencies(cue.action, stages=table.stages)
                if made.get(part, (0, -1))[1] == rank
            ]
            assert all(posted[part] <= max(0, index - 1) for part in needed)
        for source in range(table.pp):
            for kind in "FB":
                sent = [p for action in table.rows[source] for p in list_parts(action) if made.get(p) == (source, rank)]
                assert [p for p in posted if p in sent and p[0] == kind] == [p for p in sent if p[0] == kind]


@some
@given(tables())
@example(schedule("dualpipe", pp=6, v=1, micro_batches=14))
def test_waiting_for_sends_never_deadlocks(table: Table) -> None:
    """Played as the trainer plays it: a send that is waited for must have met a posted receive."""
    rows = [list_p2p_steps(table, rank=rank) for rank in range(table.pp)]
    done: set[Any] = set()
    posted: set[Any] = set()
    at, begun = [0] * table.pp, [False] * table.pp
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                action, post_receives, wait_sends = row[at[rank]]
                if not begun[rank]:
                    posted.update(post_receives)
                    begun[rank] = moved = True
                if not (
                    posted.issuperset(wait_sends) and done.issuperset(list_dependencies(action, stages=table.stages))
                ):
                    break
                done.update(list_parts(action))
                at[rank], begun[rank], moved = at[rank] + 1, False, True
    assert at == [len(row) for row in rows]


def test_each_send_is_waited_for_once_after_it_was_posted() -> None:
    for name in SCHEDULES:
        v = 2 if PIPELINE_SCHEDULES[name].stages_per_rank != 1 else 1
        table = schedule(name, pp=4, v=v, micro_batches=12)
        under_way = []
        for rank in range(table.pp):
            open_, most = set(), 0
            for action, _, wait_sends in list_p2p_steps(table, rank=rank):
                assert open_.issuperset(wait_sends)
                open_ -= set(wait_sends)
                open_ |= {part for part in list_parts(action) if crossings(table).get(part, (-1,))[0] == rank}
                most = max(most, len(open_))
            under_way.append(most)
        assert max(under_way) <= 5, (name, under_way)


def test_the_links_of_a_schedule_are_those_that_its_messages_use() -> None:
    wrap = schedule("interleaved", pp=3, v=2, micro_batches=3)
    assert list_links(wrap) == tuple(
        sorted([*(("F", r, (r + 1) % 3) for r in range(3)), *(("B", (r + 1) % 3, r) for r in range(3))])
    )
    assert list_links(schedule("zbv", pp=2, v=2, micro_batches=4)) == (
        ("B", 0, 1),
        ("B", 1, 0),
        ("F", 0, 1),
        ("F", 1, 0),
    )
    assert list_links(schedule("interleaved", pp=1, v=4, micro_batches=4)) == ()


def test_messages_of_1f1b_equal_those_by_hand() -> None:
    first, second = (list_p2p_steps(ONE, rank=rank) for rank in range(2))
    assert [(str(action), post_receives, wait_sends) for action, post_receives, wait_sends in first] == [
        ("F0.0", (), ()),
        ("F0.1", (("B", 1, 0),), ()),
        ("BW0.0", (("B", 1, 1),), (("F", 0, 0),)),
        ("BW0.1", (), (("F", 0, 1),)),
    ]
    assert [cue.post_receives for cue in second] == [(("F", 0, 0),), (("F", 0, 1),), (), ()]
