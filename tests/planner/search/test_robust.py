"""What loses least if the run is otherwise than predicted, against brute force over every layout and scenario."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.where import Where
from fivefold.machine.perturbation import with_kernels, with_network
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.planner.search import search
from fivefold.planner.search.robust import EvaluatedRegret, list_scenarios
from fivefold.planner.search.space import Space
from tests.planner.search.test_search import EXPERTS, FEW, SMALL, make_tight_machine
from tests.selection import mark_share

SHALLOW, SPARSE = SMALL.replace(layers=2), EXPERTS.replace(layers=2)
SHORT = FEW.replace(global_batch=4)
NARROW = Where.parse("ac=none,full sp=yes order=default kind=ring v=1 zero!=2 schedule=1f1b,gpipe,zb1p")


def list_layouts(model: Model, machine: Machine, job: Job, **narrowed: Any) -> list[Layout]:
    space = Space(model, job, world=machine.ranks, **narrowed)
    candidates = space.expand(space.partials, space.partials.dp.nonzero()[0])
    candidates = space.shard(space.partials, space.place(space.partials, candidates))
    return [space.layout(space.partials, candidates, at) for at in range(len(candidates.partial))]


def seconds(planner: Planner, layout: Layout) -> float:
    ranks = planner.memory(layout)
    return planner.estimate(layout, ranks=ranks).step_time.seconds if planner.fits(layout, ranks) else inf


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "axes"), mark_share(2, [(SPARSE, ("ep",)), (SHALLOW, ("tp", "cp", "pp"))]), ids=["moe", "dense"]
)
def test_the_most_robust_is_that_of_brute_force(model: Model, axes: tuple[str, ...]) -> None:
    machine, job = make_tight_machine(4, gib=1.0), SHORT
    narrowed: dict[str, Any] = {"where": NARROW, "axes": axes}
    layouts = list_layouts(model, machine, job, **narrowed)
    assert len(layouts) > 25
    told = list_scenarios(model=model, machine=machine, job=job)
    assert len(told) == (7 if model.moe else 6)
    planners = [Planner(model=model, machine=e.machine, job=e.job, straggler=e.straggler) for e in told]
    table = {layout: [seconds(planner, layout) for planner in planners] for layout in layouts}
    best = [min(row[at] for row in table.values()) for at in range(len(told))]
    regrets = {layout: [own / least - 1 for own, least in zip(row, best, strict=True)] for layout, row in table.items()}
    key = min((max(regret), sum(regret) / len(regret)) for regret in regrets.values())

    result = search(model=model, machine=machine, job=job, by="robust", within=0.02, top=3, **narrowed)
    assert result.robust is not None
    assert [scenario.best_seconds for scenario in result.robust.scenarios] == best
    first = result.robust.rows[0]
    assert (first.worst, first.expected) == key
    assert result.best[0].step.layout == first.layout
    for row in result.robust.rows:  # whatever is shown is correct
        mine = regrets[Layout.parse(row.layout)]
        assert row.worst == (None if max(mine) == inf else max(mine))
        assert row.worst_scenario == told[mine.index(max(mine))].name
        assert row.step_seconds == table[Layout.parse(row.layout)][0]
    worsts = [inf if row.worst is None else row.worst for row in result.robust.rows]
    assert worsts == sorted(worsts)
    notes = {row.note for row in result.robust.rows}
    assert any(note.startswith("the ") for note in notes)


def test_a_straggler_holds_up_its_stage_and_nothing_speeds_up() -> None:
    """Without a pipeline all wait as if all were slower; in one, no more than that, and less where it hides."""
    machine = make_tight_machine(8, gib=64)
    machine = machine.replace(chip=machine.chip.replace(launch_seconds=1e-9))  # the host is no slower
    plain, late = (Planner(model=SMALL, machine=machine, job=FEW, straggler=item) for item in (1.0, 1.5))
    slow = Planner(model=SMALL, machine=with_kernels(machine, speed=1 / 1.5), job=FEW)
    for text in (
        "dp8 zero1",
        "dp2 tp2 pp2",
        "dp2 pp4 gpipe",
        "dp4 pp2 v2 zbv",
        "dp2 pp4 zb1p",
        "dp4 pp2 v3",
        "dp4 pp2 dualpipev",
        "dp4 pp2 stages=5-1",
    ):
        layout = Layout.parse(f"{text} mbs1")
        one, few, all_ranks = (item.estimate(layout).step_time.seconds for item in (plain, late, slow))
        assert one < few <= all_ranks * (1 + 1e-12), text
        assert layout.pp > 1 or few == all_ranks, text
    uneven = Layout.parse("dp4 pp2 stages=5-1 mbs1")
    alone = plain.estimate(uneven).step_time.compute
    assert late.estimate(uneven).step_time.compute == pytest.approx(1.5 * alone, rel=0.1)  # of the fuller stage


def test_a_machine_with_a_slower_network_is_otherwise_unchanged() -> None:
    machine = make_tight_machine(8, gib=64)
    near, far = with_network(machine, bandwidth=0.5, latency=2.0).links
    assert near == machine.links[0]
    assert (far.bandwidth, far.latency_seconds) == (
        machine.links[1].bandwidth / 2,
        machine.links[1].latency_seconds * 2,
    )
    quick = with_kernels(machine, speed=2.0)
    assert quick.chip.sustained_flops("bf16") == 2 * machine.chip.sustained_flops("bf16")
    assert quick.chip.memory_bandwidth == 2 * machine.chip.memory_bandwidth
    assert quick.links == machine.links
    one_node = list_scenarios(model=SMALL, machine=machine.replace(ranks=2), job=FEW)
    assert not [item.name for item in one_node if "network" in item.name or "nodes" in item.name]
    assert all(item.source for item in one_node[1:])


def test_the_most_robust_loses_least_at_worst_and_then_on_average() -> None:
    """Regrets in three scenarios: a best case of 0 counts nothing against a worst case of 30 %."""
    risky, even, evener = (
        EvaluatedRegret(Layout(dp=dp), regrets)
        for dp, regrets in (
            (1, (0.0, 0.1, 0.3)),
            (2, (0.2, 0.2, 0.2)),
            (4, (0.2, 0.1, 0.2)),
        )
    )
    assert sorted((risky, even, evener), key=lambda judged: judged.key) == [evener, even, risky]
