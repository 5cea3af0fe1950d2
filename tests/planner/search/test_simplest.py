"""The proposal of a search, and constraints on what it may find, against brute force over every layout."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

import fivefold as ff
from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.layout.where import ANY_LAYOUT, Where
from fivefold.model.spec import Model
from fivefold.planner.predict import Estimate, Planner
from fivefold.planner.search import search
from fivefold.planner.search.constraints import describe_uneven_batch
from fivefold.planner.search.layout_changes import rank_moves
from fivefold.planner.search.simplest import Evaluated, Simplest, score_complexity
from fivefold.planner.time.timeline import StepTime
from fivefold.rendering.search import render_page
from fivefold.results.search_result import Alternative
from fivefold.stack.catalog import build_stack
from tests.planner.search.test_search import EXPERTS, FEW, NODE, SMALL, make_tight_machine, search_by_brute_force
from tests.printed import to_text
from tests.selection import mark_share

TERMS = (
    "tp<=2", "pp=1", "cp=1", "zero<=1", "zero=3", "ac=none,full", "ac!=none", "mbs>1", "schedule=1f1b,gpipe",
    "order=default", "dp!=4", "kind=ring", "v<2", "shards<=2", "sp=yes",
)  # fmt: skip
SHALLOW, SPARSE, SHORT = SMALL.replace(layers=2), EXPERTS.replace(layers=2), FEW.replace(global_batch=4)


@cache
def list_layouts(model: Model, where: Where = ANY_LAYOUT) -> list[Estimate]:
    """Every layout of four tight ranks, estimated, that fits."""
    return search_by_brute_force(model, make_tight_machine(4, gib=1.0), SHORT, where=where)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "where"), mark_share(2, [(SHALLOW, "ac=none,full"), (SPARSE, "ac=none,full")]), ids=["dense", "moe"]
)
def test_the_proposal_is_the_simplest_of_all_layouts_within_the_margin(model: Model, where: str) -> None:
    machine, job, only = make_tight_machine(4, gib=1.0), SHORT, Where.parse(where)
    every = list_layouts(model, only)
    assert len(every) > 500
    best = min(item.step_time.seconds for item in every)
    for within in (0.01, 0.3):
        whole = search(model=model, machine=machine, job=job, within=within, where=only)
        listed = [(item.step.time.step_seconds, item.step.memory.peak_bytes) for item in whole.best]
        assert len(listed) == 10  # as many as were asked for, the best of all first
        assert listed == sorted(listed)
        assert listed[0] == min((item.step_time.seconds, item.peak_bytes) for item in every)
        proposal = whole.proposal
        assert proposal is not None
        assert proposal.choice.step.time.step_seconds <= best * (1 + within)
        least = min(
            score_complexity(e.layout, ranks_per_node=2) for e in every if e.step_time.seconds <= best * (1 + within)
        )
        assert score_complexity(Layout.parse(proposal.layout), ranks_per_node=2) == least
        assert proposal.faster is None or proposal.faster.step_seconds == best
        assert proposal.faster is None or proposal.faster.slower < 0
        assert proposal.simpler is None or proposal.simpler.slower > 0
        assert proposal.why


def test_an_estimate_does_not_depend_on_earlier_estimates() -> None:
    names = (
        "dp1 tp4 mbs4 nosp",
        "dp1 tp4 mbs4",
        "dp2 tp2 mbs1",
        "dp2 tp2 mbs1 nosp",
        "dp2 cp2 zero1 mbs1",
        "dp4 zero2 mbs1",
        "dp2 cp2 zero1 mbs1 cp=ulysses",
        "dp2 pp2 mbs1 zb1p",
        "tp2 pp2 mbs1 nosp",
    )
    layouts = [Layout.parse(name) for name in names]
    one = Planner(model=SHALLOW, machine=make_tight_machine(4, gib=1.0), job=SHORT)
    for layout in random.Random(2).sample(layouts, len(layouts)):
        fresh = Planner(model=SHALLOW, machine=make_tight_machine(4, gib=1.0), job=SHORT)
        assert one.estimate(layout) == fresh.estimate(layout), str(layout)


@pytest.mark.slow
def test_both_reduction_frequencies_are_searched() -> None:
    """Against brute force under both, where the best reduces once a step; no ZeRO below 2 is said to."""
    machine = make_tight_machine(4, gib=4)
    job = FEW.replace(sequence=8192, stack=build_stack("torchtitan"))
    only: dict[str, Any] = {"axes": (), "placements": False, "recomputations": ("none", "full")}
    every = [
        (
            item.step_time.seconds,
            score_complexity(item.layout, ranks_per_node=2, default_reduction=usual),
            item.layout,
            usual,
        )
        for usual in (True, False)
        for item in search_by_brute_force(SMALL, machine, job if usual else job.replace(reduce="step"), **only)
        if usual or item.layout.zero > 1
    ]
    best = min(every, key=lambda item: item[0])
    assert not best[3]
    for within in (0.0, 0.02, 0.2):
        proposal = search(model=SMALL, machine=machine, job=job, reduces=("step",), within=within, **only).proposal
        assert proposal is not None
        close_items = [item for item in every if item[0] <= best[0] * (1 + within)]
        usual = proposal.choice.reduce != "step"
        chosen = Layout.parse(proposal.layout)
        assert score_complexity(chosen, ranks_per_node=2, default_reduction=usual) == min(
            item[1] for item in close_items
        ), within
        assert usual or chosen.zero > 1
    assert usual  # at 20 % there are simpler ones


def test_no_more_layouts_are_estimated_than_allowed() -> None:
    planner = Planner(model=SMALL, machine=NODE, job=FEW)
    start = Layout.parse("dp1 tp2 pp4 v1 zero0 zb1p mbs1")
    known = [Evaluated(start, StepTime(1.0, 1.0, 0.0, {}, 0.0, ""), 1, planner)]
    simplest = Simplest([planner], known, max_seconds=1e-9 + 1.0, largest_peak=2**60)
    simplest.left = 3
    simplest.find()
    assert len(simplest.evaluated) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("first", mark_share(5, range(5)))
def test_a_constrained_search_finds_the_best_of_those_that_meet_the_constraints(first: int) -> None:
    """Return each term once, together with two others."""
    machine, job, every = make_tight_machine(4, gib=1.0), SHORT, list_layouts(SHALLOW, Where.parse("ac=none,full"))
    terms = random.Random(5).sample(TERMS, len(TERMS))
    where = Where.parse(" ".join(("ac=none,full", *terms[first::5])))
    left = [item for item in every if where.is_satisfied_by(item.layout)]
    assert len(left) > 100, str(where)
    result = search(model=SHALLOW, machine=machine, job=job, top=1, within=0.1, where=where)
    assert result.best[0].step.time.step_seconds == min(item.step_time.seconds for item in left), str(where)
    assert result.proposal is not None
    assert where.is_satisfied_by(Layout.parse(result.proposal.layout)), str(where)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("tp", "'tp' is not a constraint; write a name, one of <, <=, >, >=, = and !=, and a value"),
        (
            "tp < 8 ac = none, full",
            "spaces separate constraints, so there is none within one; write 'tp<8 ac=none,full'",
        ),
        ("tpp=2", "unknown constraint 'tpp'"),
        ("tp=two", "compares with 'two', which is not a number; write tp=4"),
        ("ac<full", "ac supports only = and !=; write ac=full or ac!=full"),
        ("ac=fulll", "unknown recomputation 'ac=fulll'"),
        ("schedule=1f2b", "1f2b"),
        ("tp<2 tp>4", "no tp is tp<2 and tp>4; drop one"),
        ("ac=none ac=full", "no ac is ac=none and ac=full; drop one"),
    ],
)
def test_a_constraint_that_cannot_be_met_is_a_one_line_error(text: str, line: str) -> None:
    with pytest.raises(UserError, match=line.replace("?", r"\?")) as told:
        Where.parse(text)
    assert "\n" not in str(told.value)


def test_the_constraint_under_which_no_layout_is_left_is_reported() -> None:
    with pytest.raises(
        UserError, match=r"meets 'pp=1 tp=3' with gbs \d+; relax the constraint tp=3: with tp=4 there is"
    ):
        search(model=SMALL, machine=NODE, job=FEW, where=Where.parse("pp=1 tp=3"))


def test_the_fewest_constraints_to_relax_are_reported_with_the_closest_layout() -> None:
    """Also where each alone, and any two, leave nothing."""
    for text, line in (
        ("tp=3 pp=5", r"relax the constraints tp=3 and pp=5: with tp=2 pp=4 there is '"),
        ("tp=3 pp=5 cp=7", r"relax the constraints tp=3 and pp=5 and cp=7: with .* there is '"),
        ("tp=3 pp=5 cp=7 zero=0", r"relax the constraints tp=3 and pp=5 and cp=7: with .* there is '.*zero0"),
    ):
        with pytest.raises(UserError, match=line) as told:
            search(model=SMALL, machine=NODE, job=FEW, where=Where.parse(text))
        layout = Layout.parse(str(told.value).rpartition("there is '")[2].rstrip("'"))
        assert is_legal(layout, model=SMALL, job=FEW, machine=NODE)
        said = Where.parse(str(told.value).rpartition(": with ")[2].partition(" there is")[0])
        assert said.is_satisfied_by(layout)


@pytest.mark.parametrize(
    ("layout", "batch", "line"),
    [
        ("dp4 cp16", 500, "gbs 500 and 64 ranks allow no more than dp4; gbs 512 would allow dp64"),
        ("dp1 tp8", 7, "gbs 7 and 8 ranks allow no more than dp1; gbs 8 would allow dp8"),
        ("dp2 cp32", 500, ""),  # it is not the batch that holds dp down
        ("dp64", 512, ""),
        ("dp16 tp3", 512, ""),  # 48 ranks: dp48 would be no more than three times as much
        ("dp768 tp8", 2304, ""),
    ],
)
def test_a_batch_that_limits_dp_is_reported(layout: str, batch: int, line: str) -> None:
    assert describe_uneven_batch(Layout.parse(layout), batch=batch) == line


def test_the_proposal_remarks_on_a_batch_that_limits_dp() -> None:
    job = FEW.replace(global_batch=7)
    result = search(model=SHALLOW, machine=NODE, job=job, top=1, within=0.02, where=Where.parse("pp=1 ac=none"))
    assert result.proposal is not None
    assert result.proposal.remark == "gbs 7 and 8 ranks allow no more than dp1; gbs 8 would allow dp8"
    assert result.proposal.remark in to_text(render_page(result))


@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_a_smaller_degree_takes_along_what_depends_on_it(axis: str) -> None:
    """Experts cut over more ranks than tensor parallelism has left, or a schedule without a pipeline, are no layout."""
    layout = Layout.parse("dp2 tp4 cp2 pp2 ep2 etp4 v2 interleaved cp=ulysses zero1 mbs1")
    for start in (layout, layout.replace(etp=2)):
        smaller = [rank_move for rank_move in rank_moves(start, give=(axis,), take=("dp",)) if rank_move]
        assert [getattr(item, axis) for item in smaller] == ([2, 1] if axis == "tp" else [1])
        assert all(item.world == layout.world and item.tp % item.etp == 0 for item in smaller)
        assert smaller[0].etp == (start.etp if axis != "tp" or start.etp == 2 else 1)


def test_when_gradients_are_reduced_is_a_choice_from_zero_2_on() -> None:
    planners = [
        Planner(model=SMALL, machine=NODE, job=FEW.replace(reduce=reduce)) for reduce in ("step", "micro_batch")
    ]
    simplest = Simplest(planners, [], max_seconds=1.0, largest_peak=2**60)
    results = [len(simplest._list_planners(Layout(dp=4, zero=zero))) for zero in range(4)]
    assert results == [1, 1, 2, 2]


@pytest.mark.long  # two searches of 64 GPUs
def test_the_fastest_layout_does_not_depend_on_the_length_of_the_table() -> None:
    """It has uneven stages, and with even ones it is not among the four fastest."""
    question: dict[str, Any] = {"seq": 8192, "gbs": 512, "stack": "torchtitan", "where": "tp=1 cp=1 pp=2,4,8"}
    short, long = (ff.search("llama3-8b", "h100:64", top=top, **question) for top in (1, 10))
    assert (len(short.best), len(long.best)) == (1, 10)
    assert short.best == long.best[:1]
    assert Layout.parse(short.best[0].step.layout).stages
    assert short.proposal == long.proposal
    assert (short.tried, short.evaluated) == (long.tried, long.evaluated)


@pytest.mark.parametrize(
    ("model", "machine", "batch", "uncertain"),
    mark_share(2, [("llama3-8b", "a100-40gb:16", 64, {True}), ("qwen3-32b", "h100:32", 128, {False})]),
)
def test_an_alternative_says_whether_its_time_is_within_the_uncertainty(
    model: str, machine: str, batch: int, uncertain: set[bool]
) -> None:
    """The record and its line say what ``compare`` says of the same two layouts."""
    sizes = {"seq": 8192, "gbs": batch}
    result = ff.search(model, machine, where="cp=1 order=default", within=0.005, **sizes)
    proposal = result.proposal
    assert proposal is not None
    alternatives = [other for other in (proposal.simpler, proposal.faster) if other is not None]
    assert {other.within_uncertainty for other in alternatives} == uncertain
    for other in alternatives:
        pair = ff.compare(model, machine, [proposal.layout, other.layout], **sizes).ratio("B", "A")
        assert pair is not None
        assert other.within_uncertainty == (pair.verdict == "not distinguishable")
        line = f"{other.layout}: {other.describe_difference()}"
        assert line.endswith(", within the uncertainty") == other.within_uncertainty
        assert line in to_text(render_page(result, precision="bf16"), width=200)
        assert line in result._repr_html_()


def test_an_alternative_that_takes_about_as_long_has_no_difference_of_zero() -> None:
    facts = {"layout": "dp8", "precision": "bf16", "memory_bytes": 1, "step_seconds": 1.0}
    lines = [Alternative(slower=slower, **facts).describe_difference() for slower in (-4e-4, 6e-4)]
    assert lines == ["step time less than 0.1% shorter", "step time 0.1% longer"]
