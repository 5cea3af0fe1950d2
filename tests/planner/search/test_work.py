"""The work of searches: ordinary ones stay as cheap as they are, and estimates of long schedules count as more."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.predict import Planner
from fivefold.planner.search import search
from fivefold.planner.search.neighbours import neighbours
from fivefold.planner.search.space import Space
from fivefold.planner.search.work import UNITS_PER_ESTIMATE, SearchWork

pytestmark = pytest.mark.slow

MARGIN = 1.05  # of units, which do not depend on the computer


@pytest.mark.parametrize(
    ("model", "ranks", "batch", "units"),
    [("llama3-8b", 64, 256, 1_510_128)],
)
def test_an_ordinary_search_takes_no_more_work(model: str, ranks: int, batch: int, units: int) -> None:
    work, job = SearchWork(), Job(sequence=8192, global_batch=batch)
    search(
        model=build_model(model),
        machine=resolve(f"h100:{ranks}", local=Path("/nowhere")),
        job=job,
        top=1,
        within=0.02,
        work=work,
    )
    assert 0.8 * units < work.units < MARGIN * units, work.units


def test_a_long_schedule_is_counted_once_and_its_simulation_each_time() -> None:
    work, job = SearchWork(), Job(global_batch=4096)
    layout = Layout.parse("pp64 v4 interleaved mbs1")
    actions = 2 * 64 * 4 * 4 * 64  # of four rounds of pp micro-batches
    work.add_estimate(layout, job)
    assert work.units == UNITS_PER_ESTIMATE + 4 * actions + actions // 4
    assert work.price_estimate(layout, job) == UNITS_PER_ESTIMATE + actions // 4
    assert work.price_estimate(Layout.parse("dp64"), job) == UNITS_PER_ESTIMATE


def test_a_space_finds_its_neighbours_and_no_others() -> None:
    model, job, hosts = build_model("mixtral-8x7b"), Job(global_batch=32), resolve("h100:16", local=Path("/nowhere"))
    space, planner = Space(model, job, world=16), Planner(model=model, machine=hosts, job=job)
    start = Layout.parse("dp2 tp2 pp2 cp2 ep4 zero1 mbs1")
    changed = list(neighbours(start, planner, uneven=False))
    assert len(changed) > 30
    assert all(str(found) == str(layout) for layout in changed if (found := space.find(layout)) is not None)
    assert sum(space.find(layout) is not None for layout in changed) > 0.9 * len(changed)
    without_tp = Space(model, job, world=16, axes=("cp", "pp", "ep"))
    assert all(without_tp.find(layout) is None for layout in changed if layout.tp > 1)
