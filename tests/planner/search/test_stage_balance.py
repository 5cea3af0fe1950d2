"""Stages of even work, against every way to cut the layers."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from fivefold.adapter import Adapter
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.layout.where import Where
from fivefold.machine.spec import Machine
from fivefold.model.experts import MoE
from fivefold.planner.predict import Planner
from fivefold.planner.search import search
from fivefold.planner.search.alternatives import explain_choices
from fivefold.planner.search.neighbours import walk
from fivefold.planner.search.simplest import Evaluated
from fivefold.planner.search.stage_balance import balance, bound_gain, reduce_recomputation
from fivefold.stack.spec import Stack, SupportedLayouts
from tests.planner.search.test_search import FEW, NODE, SMALL, make_tight_machine

LAYERS = 8
HEAVY = SMALL.replace(layers=LAYERS, vocab=128_000)  # a head as large as several layers
MACHINE = make_tight_machine(4, gib=64)


def list_splits(layout: Layout) -> list[Layout]:
    """The layout with every number of layers on every stage, of which the first and the last may have none."""
    stages = layout.pp * layout.v
    cuts = [(0, *item, LAYERS) for item in combinations(range(LAYERS + 1), stages - 1)]
    return [layout.replace(stages=tuple(b - a for a, b in pairwise(cut))) for cut in cuts]


def seconds(planner: Planner, layout: Layout) -> float:
    return planner.estimate(layout).step_time.seconds


@pytest.mark.parametrize(
    "words", ["pp4", "pp4 gpipe", "pp4 zb1p", "dp2 pp2 zero1", "dp2 pp2 v2", "dp2 pp2 zbv", "pp4 v2"]
)
def test_balanced_stages_are_close_to_the_best_split(words: str) -> None:
    planner = Planner(model=HEAVY, machine=MACHINE, job=FEW)
    even = Layout.parse(f"{words} mbs1")
    result = balance(even, planner)
    assert result is not None
    assert sum(result.stages) == LAYERS
    best = min(seconds(planner, item) for item in list_splits(even))
    assert best <= seconds(planner, result) <= best * 1.02, str(result)
    assert seconds(planner, result) < seconds(planner, even)
    assert best >= seconds(planner, even) * (1 - bound_gain(even, planner)) * (1 - 1e-9)
    assert balance(result, planner) is None  # no further


def test_stages_that_cannot_be_balanced_are_unchanged() -> None:
    planner = Planner(model=HEAVY, machine=MACHINE, job=FEW)
    assert balance(Layout.parse("dp4"), planner) is None
    adapted = Planner(model=HEAVY, machine=MACHINE, job=FEW.replace(adapter=Adapter(rank=16)))  # of layers alone
    assert balance(Layout.parse("pp4 v2"), adapted) is None  # a layer each
    job = FEW.replace(stack=Stack(name="mine", runs=SupportedLayouts(uneven_stages=False)))
    assert balance(Layout.parse("pp4"), Planner(model=HEAVY, machine=MACHINE, job=job)) is None


def test_pipelines_are_cut_between_pairs_of_layers() -> None:
    """A layer that adds what the experts of the one before return is in one stage with it (LongCat-Flash)."""
    moe = MoE(experts=4, topk=1, ffn=16, joins_mlp=True, shortcut=True, pattern=(True, False))
    model = HEAVY.replace(layers=16, vocab=512_000, moe=moe)
    balanced = balance(Layout.parse("pp4 mbs1"), Planner(model=model, machine=MACHINE, job=FEW))
    assert balanced is not None
    assert {size % 2 for size in balanced.stages} == {0}
    result = search(model=model, machine=MACHINE, job=FEW, where=Where.parse("pp=4"), uneven=True)
    layouts = [Layout.parse(row.step.layout) for row in result.best]
    assert len(layouts) > 1
    assert not any(stage.start % 2 for layout in layouts for stage in list_stage_layers(model, layout))


def test_a_search_moves_layers_with_those_whose_keys_they_read() -> None:
    model = HEAVY.replace(layers=16, vocab=512_000, shared_kv_layers=4)
    result = search(model=model, machine=MACHINE, job=FEW, where=Where.parse("pp=4"), uneven=True)
    layouts = [Layout.parse(row.step.layout) for row in result.best]
    assert any(layout.stages for layout in layouts)
    starts = {stage.start for layout in layouts for stage in list_stage_layers(model, layout)}
    assert not starts.intersection(range(12, 16))


@pytest.mark.slow
def test_a_search_proposes_balanced_stages_where_the_head_slows_the_last_stage() -> None:
    where = Where.parse("pp=4 schedule=1f1b mbs=1 ac=none")
    result = search(model=HEAVY, machine=MACHINE, job=FEW, where=where, within=0.02)
    assert result.proposal is not None
    chosen = Layout.parse(result.proposal.layout)
    assert chosen.stages[-1] == min(chosen.stages) < max(chosen.stages)
    planner = Planner(model=HEAVY, machine=MACHINE, job=FEW)
    best = min(seconds(planner, item) for item in list_splits(chosen))
    assert result.proposal.choice.step.time.step_seconds <= best * 1.02
    exact = search(model=HEAVY, machine=MACHINE, job=FEW, where=where)
    assert not any("stages" in item.step.layout for item in exact.best)


@pytest.mark.parametrize("words", ["pp4 ac=full", "pp4 v2 ac=selective", "dp2 pp2 zb1p zero1 ac=norm+act"])
def test_only_as_many_pipeline_ranks_recompute_as_memory_needs(words: str) -> None:
    planner = Planner(model=HEAVY, machine=MACHINE, job=FEW)
    layout = Layout.parse(f"{words} mbs1")
    fewer = [layout.replace(ac=f"{layout.ac}@{ranks}") for ranks in range(1, layout.pp)]
    peaks = [planner.peak_bytes(item) for item in (*fewer, layout)]
    for memory in (min(peaks), *(2 * peak for peak in peaks), 4 * max(peaks)):
        chip = planner.machine.chip.replace(memory_bytes=memory)
        small = Planner(model=planner.model, machine=planner.machine.replace(chip=chip), job=planner.job)
        fitting = [item for item in fewer if small.fits(item)]
        assert reduce_recomputation(layout, small) == (fitting[0] if fitting else None)
    assert reduce_recomputation(layout.replace(ac="none"), small) is None


def make_too_small_machine(layouts: list[Layout], planner: Planner) -> Machine:
    """The machine with the most memory, in steps of 16 MiB, with which none of ``layouts`` fits."""
    for memory in range(8 * 2**30, 2**30, -(2**24)):
        machine = MACHINE.replace(chip=MACHINE.chip.replace(memory_bytes=memory))
        small = Planner(model=planner.model, machine=machine, job=planner.job, counts=planner.counts)
        if not any(map(small.fits, layouts)):
            return machine
    raise AssertionError("the layouts fit in 1 GiB")


@pytest.mark.slow
def test_a_search_finds_what_brute_force_finds_where_only_some_ranks_must_recompute() -> None:
    model, job, base = (
        SMALL.replace(layers=LAYERS),
        FEW.replace(global_batch=32, sequence=4096),
        Layout.parse("pp4 mbs1"),
    )
    planner = Planner(model=model, machine=MACHINE, job=job)
    machine = make_too_small_machine(list_splits(base), planner)  # none goes without
    small = Planner(model=model, machine=machine, job=job)
    where = Where.parse("pp=4 v=1 schedule=1f1b mbs=1 ac=none,full")
    result = search(model=model, machine=machine, job=job, where=where, within=0.0)
    assert result.proposal is not None
    others = [item.replace(ac=f"full{at}") for item in list_splits(base) for at in ("", "@1", "@2", "@3")]
    best = min((seconds(planner, item), str(item)) for item in others if small.fits(item))
    assert result.proposal.choice.step.time.step_seconds == pytest.approx(best[0])
    assert Layout.parse(best[1]).recompute_ranks == Layout.parse(result.proposal.layout).recompute_ranks == 1
    assert best[0] < 0.85 * seconds(planner, base.replace(ac="full"))


@pytest.mark.slow
def test_balancing_the_stages_is_a_single_change_of_a_layout() -> None:
    planner = Planner(model=HEAVY, machine=NODE, job=FEW)
    start = Layout.parse("dp2 pp4 zero1 mbs1")
    split = balance(start, planner)
    assert split is not None
    words = {change.change for change in walk(planner, start).changes}
    assert str(split).split()[-1] in words
    assert f"without {str(split).split()[-1]}" in {change.change for change in walk(planner, split).changes}


def test_a_schedule_is_compared_with_its_even_stages_by_name() -> None:
    """The same schedule with as many layers on each stage is called so."""
    planner = Planner(model=HEAVY, machine=MACHINE, job=FEW)
    layout = Layout.parse("pp4 mbs1 stages=3-2-2-1")
    estimate = planner.estimate(layout)
    chosen = Evaluated(layout, estimate.step_time, estimate.peak_bytes, planner)
    why = next(why for why in explain_choices(chosen) if why.choice.startswith("1f1b"))
    assert why.choice == "1f1b v1 stages=3-2-2-1"
    assert why.line.startswith("an even split takes")
