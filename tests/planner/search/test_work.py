"""The work of searches: ordinary ones stay as cheap as they are, and estimates of long schedules count as more."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.predict import Planner
from fivefold.planner.search import UNLIMITED_BYTES, search
from fivefold.planner.search.incumbents import Incumbents
from fivefold.planner.search.neighbours import list_neighbours
from fivefold.planner.search.space import Space
from fivefold.planner.search.work import UNITS_PER_ESTIMATE, SearchWork

pytestmark = pytest.mark.slow

MARGIN = 1.05  # of units, which do not depend on the computer
SEARCHES = [  # model, machine, sequence, batch: units, and seconds of a step of the best layout; None: none fits
    ("llama3.2-1b", "h100:8", 4096, 64, 508_499, 0.56118),
    ("gemma3-4b", "h100:16", 8192, 64, 665_935, 1.68818),
    ("llama3-70b", "h200:8", 4096, 8, 316_693, None),
    ("deepseek-v3", "h200:64", 4096, 64, 78_706, None),
]
LONG_SEARCHES = [
    ("llama3-8b", "h100:8", 8192, 64, 444_696, 6.72612),
    ("llama3-8b", "h200:16", 8192, 64, 509_891, 3.16291),
    ("llama3-8b", "h100:64", 8192, 256, 507_986, 3.32677),
    ("qwen3-8b", "a100:16", 4096, 256, 551_877, 16.59458),
    ("qwen3-8b", "h200:8", 4096, 64, 499_793, 2.98167),
    ("lfm2-1.2b", "a100:8", 4096, 64, 686_430, 1.22026),
]


@pytest.mark.parametrize(
    ("model", "machine", "sequence", "batch", "units", "seconds"),
    [*SEARCHES, *(pytest.param(*search, marks=pytest.mark.long) for search in LONG_SEARCHES)],
)
def test_an_ordinary_search_takes_no_more_work(
    model: str, machine: str, sequence: int, batch: int, units: int, seconds: float | None
) -> None:
    work, job = SearchWork(), Job(sequence=sequence, global_batch=batch)
    result = search(
        model=build_model(model),
        machine=resolve(machine, local=Path("/nowhere")),
        job=job,
        top=1,
        within=0.02,
        work=work,
    )
    assert 0.8 * units < work.units < MARGIN * units, work.units
    best_seconds = [ranked.step.time.step_seconds for ranked in result.best]
    assert best_seconds == ([] if seconds is None else [pytest.approx(seconds, rel=1e-3)])


def test_once_the_work_is_spent_the_best_layout_alone_is_enough() -> None:
    """Where few layouts fit, a search that waited for ten of them expanded all the others after its limit."""
    model, machine, job = build_model("nano"), resolve("h100:2", local=Path("/nowhere")), Job(global_batch=8)
    work = SearchWork(exact_units=2 * UNITS_PER_ESTIMATE)
    incumbents = Incumbents(UNLIMITED_BYTES, by="time", top=10, levels=1, best_only=True, work=work)
    incumbents.evaluate(Planner(model=model, machine=machine, job=job), Layout.parse("dp2"))
    assert incumbents.threshold == float("inf")
    work.add(2 * UNITS_PER_ESTIMATE)
    assert incumbents.threshold == incumbents.best[0].score


def test_a_long_schedule_is_counted_once_and_its_simulation_each_time() -> None:
    work, job = SearchWork(), Job(global_batch=4096)
    layout = Layout.parse("pp64 v4 interleaved mbs1")
    actions = 2 * 64 * 4 * 4 * 64  # of four rounds of pp micro-batches
    work.add_estimate(layout, job)
    each = UNITS_PER_ESTIMATE + actions // 4 + actions * 4 // 1000
    assert work.units == each + 4 * actions + actions * 4 // 16
    assert work.price_estimate(layout, job) == each
    assert work.price_estimate(Layout.parse("dp64"), job) == UNITS_PER_ESTIMATE


def test_stages_of_a_rank_count_twice_as_its_passes_are_compared_over_all_of_them() -> None:
    """The peak of pp4 v183, which ``ask model`` came to, took 0.8 s and was counted as the 30th part of it."""
    few, many = Layout.parse("pp4 v4 interleaved mbs1"), Layout.parse("pp4 v183 interleaved mbs1")
    price = {layout.v: SearchWork().price_estimate(layout, Job(global_batch=256)) for layout in (few, many)}
    assert price[183] > 15 * (183 / 4) * (price[4] - UNITS_PER_ESTIMATE) / 10


def test_a_space_finds_its_neighbours_and_no_others() -> None:
    model, job, hosts = build_model("mixtral-8x7b"), Job(global_batch=32), resolve("h100:16", local=Path("/nowhere"))
    space, planner = Space(model, job, world=16), Planner(model=model, machine=hosts, job=job)
    start = Layout.parse("dp2 tp2 pp2 cp2 ep4 zero1 mbs1")
    changed = list(list_neighbours(start, planner, uneven=False))
    assert len(changed) > 30
    assert all(str(found) == str(layout) for layout in changed if (found := space.find(layout)) is not None)
    assert sum(space.find(layout) is not None for layout in changed) > 0.9 * len(changed)
    without_tp = Space(model, job, world=16, axes=("cp", "pp", "ep"))
    assert all(without_tp.find(layout) is None for layout in changed if layout.tp > 1)
