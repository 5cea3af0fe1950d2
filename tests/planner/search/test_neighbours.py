"""One change at a time, against every layout there is; and which constraint leaves nothing."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.layout.where import Where
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.planner.search import search
from fivefold.planner.search.layout_changes import list_changed_keywords
from fivefold.planner.search.neighbours import list_neighbours, shrink, walk
from fivefold.planner.search.work import SearchWork
from tests.planner.search.test_search import EXPERTS, FEW, SMALL, make_tight_machine
from tests.planner.search.test_space import list_layouts

SHALLOW = SMALL.replace(layers=2)


def differ(one: Layout, other: Layout) -> int:
    """In how many choices ``other`` differs from ``one``; what its other degrees rule out must be the default."""
    alone = other.dp * other.cp == 1
    result = sum(getattr(one, axis) != getattr(other, axis) for axis in ("dp", "tp", "cp", "pp"))
    result = {0: 0, 2: 1}.get(result, 9)  # ranks go from one axis to another
    group = one.shard_group if other.zero and not alone else None
    if group and (other.dp * other.cp % group or group == other.dp * other.cp):
        group = None
    for mine, its in (
        (one.mbs, other.mbs),
        (one.ep, other.ep),
        (1 if other.tp % one.etp else one.etp, other.etp),
        (0 if alone else one.zero, other.zero),
        (group, other.shard_group),
        (("1f1b", 1) if other.pp == 1 else (one.schedule, one.v), (other.schedule, other.v)),
        ("ring" if other.cp == 1 else one.cp_kind, other.cp_kind),
        (other.tp == 1 or one.sp, other.sp),
    ):
        result += mine != its
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "world", "sampled"),
    [
        pytest.param(SMALL, 4, 12, marks=pytest.mark.long),
        (EXPERTS, 2, 40),
        pytest.param(EXPERTS, 4, 12, marks=pytest.mark.long),
    ],
    ids=["dense", "moe-2", "moe-4"],
)
def test_neighbours_are_all_layouts_that_differ_in_one_choice(model: Model, world: int, sampled: int) -> None:
    planner = Planner(model=model, machine=make_tight_machine(4, gib=1.0), job=FEW)
    every = list_layouts(model, FEW, world=world)
    for layout in random.Random(5).sample(sorted(every, key=str), sampled):
        plain = {
            neighbour
            for neighbour in list_neighbours(layout, planner)
            if (neighbour.ac, neighbour.order) == (layout.ac, layout.order)
        }
        expected = {item for item in every if differ(layout, item) == 1}
        known = {item for item in plain if item in every}
        assert known == expected, str(layout)
        assert all(is_legal(item, model=model, job=FEW, machine=planner.machine) for item in plain)


@pytest.mark.slow
def test_a_walk_takes_the_best_change_each_time_and_ends_where_none_helps() -> None:
    planner = Planner(model=SHALLOW, machine=make_tight_machine(4, gib=0.8), job=FEW)
    start = Layout.parse("pp2 tp2 mbs1 zero0")
    result = walk(planner, start)
    before = (result.start, *result.path)
    assert len(result.path) >= 2
    for here, after in pairwise(before):
        options = [planner.estimate(neighbour) for neighbour in list_neighbours(Layout.parse(here.layout), planner)]
        fastest = min(option.step_time.seconds for option in options if planner.fits(option.layout, option.ranks))
        assert after.step_seconds == fastest
        assert after.faster == here.step_seconds / after.step_seconds
    assert [change.fits for change in result.changes] == sorted(
        (change.fits for change in result.changes), reverse=True
    )
    only = walk(planner, start, where=Where.parse("pp=2"))
    assert {Layout.parse(change.layout).pp for change in only.changes} == {2}


def test_a_walk_from_what_does_not_fit_first_makes_it_fit() -> None:
    planner = Planner(model=SMALL, machine=make_tight_machine(4, gib=1.0), job=FEW)
    result = walk(planner, Layout.parse("dp4 mbs4"))
    assert not result.start.fits
    fits = [item.fits for item in result.path]
    assert fits[-1]
    assert fits == sorted(fits)


def test_a_change_of_layout_is_described_by_its_keywords() -> None:
    before = Layout.parse("dp4 pp4 v2 zero1 mbs1")
    assert list_changed_keywords(before, Layout.parse("dp16 zero1 mbs1")) == "dp16 without pp4 v2 interleaved"
    assert list_changed_keywords(before, before.replace(schedule="zb1p", v=1)) == "zb1p without v2"
    assert list_changed_keywords(before, before.replace(zero=2, shard_group=2)) == "zero2/2"
    assert len(SCHEDULES) > 3


@pytest.mark.parametrize(
    ("where", "term", "passes"),
    [
        ("tp=3 pp<=2", "tp=3", "tp=4"),  # by the least ratio: 3 → 4
        ("dp=8 cp=2 tp=1", "cp=2", "cp=1"),  # half the ranks of one axis
        ("tp=3 pp=3", "tp=3 and pp=3", ""),
        ("schedule=zbv pp=1", "pp=1", "pp=2"),
    ],
)
def test_the_binding_constraint_is_reported_with_a_layout(where: str, term: str, passes: str) -> None:
    machine, job = make_tight_machine(8, gib=4.0), Job(sequence=2048, global_batch=16)
    with pytest.raises(UserError, match="no layout of small on 8 ranks") as raised:
        search(model=SMALL, machine=machine, job=job, where=Where.parse(where))
    line = str(raised.value)
    constraint = "constraints" if " and " in term else "constraint"
    assert f"relax the {constraint} {term}: with {passes}" in line
    layout = Layout.parse(line.rpartition("there is '")[2].rstrip("'"))
    assert is_legal(layout, model=SMALL, job=job, machine=machine)
    kept = " ".join(item for item in where.split() if item not in term)
    assert Where.parse(f"{kept} {passes}").is_satisfied_by(layout)


@pytest.mark.slow
def test_the_binding_constraint_is_reported_if_nothing_fits() -> None:
    machine = make_tight_machine(4, gib=1.0)
    result = search(model=SMALL, machine=machine, job=FEW, where=Where.parse("zero=0 cp=1 dp>=2 pp=1"))
    assert not result.best
    assert result.misses
    assert result.binding_constraint.startswith(
        "nothing that meets 'zero=0 cp=1 dp>=2 pp=1' fits; relax the constraint dp>=2: with dp=1 "
    )
    layout = Layout.parse(result.binding_constraint.rpartition("there is '")[2].rstrip("'"))
    assert Planner(model=SMALL, machine=machine, job=FEW).fits(layout)


def test_a_layout_is_shrunk_by_single_changes_until_it_fits() -> None:
    machine, job = make_tight_machine(4, gib=1.5), FEW.replace(global_batch=4)
    planner, large = Planner(model=EXPERTS, machine=machine, job=job), Layout.parse("dp4 mbs1")
    assert not planner.fits(large)
    work = SearchWork()
    small = shrink(planner, large, work=work)
    assert small is not None
    assert planner.fits(small)
    assert work.units > 0
    assert shrink(planner, large, work=SearchWork(exact_units=0)) is None
    assert shrink(planner, small, work=SearchWork(exact_units=0)) == small
