"""The probability of running out of memory: what it is made of, its limits, and the runs that ran."""

from __future__ import annotations

from math import exp
from pathlib import Path

import pytest

from benchmarks.published import SOURCES, cases_of
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import list_names, resolve
from fivefold.model.catalog import build_model
from fivefold.planner.counts.memory.allocator import PUBLISHED, AllocatorTotals, count_driver_bytes
from fivefold.planner.predict import Planner, predict
from fivefold.planner.time.errors import estimate_distribution, read_comparable, run_class
from fivefold.planner.time.memory_risk import MemoryRisk
from fivefold.step import FITS_RISK, TIGHT_RISK, Memory
from fivefold.units import GIB

LLAMA, JOB = build_model("llama3-8b"), Job(sequence=8192, global_batch=64)
NODE = resolve("h100:8", local=Path("/nowhere"))
LAYOUT = Layout.parse("dp8 zero3 mbs1")
RISK = MemoryRisk(model=LLAMA, machine=NODE, job=JOB)


def totals(reserved: int) -> AllocatorTotals:
    return AllocatorTotals(reserved, reserved + count_driver_bytes(NODE, LAYOUT, JOB.stack))


def test_a_layout_whose_driver_memory_exceeds_the_chip_does_not_fit() -> None:
    """A peak of 77 GiB, 81 with the driver, on a chip of 79 GiB."""
    machine, job = resolve("h100:64", local=Path("/nowhere")), Job(sequence=8192, global_batch=256)
    layout = Layout.parse("dp16 tp4 zero3 mbs2 ac=norm+act")
    memory = predict(model=build_model("llama3-70b"), machine=machine, layout=layout, job=job).memory
    assert memory.driver_bytes is not None
    assert memory.driver_bytes > machine.chip.memory_bytes == memory.capacity_bytes
    assert (memory.verdict, memory.fits) == ("does not fit", False)


@pytest.mark.parametrize("peak", [40, 58, 64, 70, 76, 90])
def test_risk_is_the_share_of_comparable_runs_above_capacity(peak: int) -> None:
    size, reserved = peak * GIB, (peak + 2) * GIB
    kind = run_class(model=LLAMA, machine=NODE, layout=LAYOUT, job=JOB)
    distribution = estimate_distribution(kind, read_comparable("driver"))
    assert distribution is not None
    probability = RISK.probability(LAYOUT, peak_bytes=size, totals=totals(reserved))
    needed = size + PUBLISHED.unreclaimable * 2 * GIB + count_driver_bytes(NODE, LAYOUT, JOB.stack)
    capacity = NODE.chip.memory_bytes
    drawn = [exp(distribution.find_quantile((at + 0.5) / 2000)) * needed > capacity for at in range(2000)]
    assert probability == pytest.approx(sum(drawn) / 2000, abs=3e-3)


def test_risk_grows_with_peak_fragmentation_and_communicators() -> None:
    risks = [RISK.probability(LAYOUT, peak_bytes=peak * GIB, totals=totals((peak + 1) * GIB)) for peak in range(50, 90)]
    assert risks == sorted(risks)
    assert risks[0] < FITS_RISK < TIGHT_RISK < risks[-1]
    more = [RISK.probability(LAYOUT, peak_bytes=66 * GIB, totals=totals(size * GIB)) for size in (66, 70, 74)]
    assert more[0] < more[1] < more[2]
    busy = Layout.parse("dp2 tp2 cp2 zero3 mbs1")
    assert RISK.probability(busy, peak_bytes=66 * GIB, totals=totals(66 * GIB)) > more[0]


@pytest.mark.parametrize("risk", [0.0, 0.01, FITS_RISK, 0.2, TIGHT_RISK, 0.9])
@pytest.mark.parametrize("text", ["dp8 zero3 mbs1", "dp4 tp2 mbs1 ac=full", "dp2 tp2 pp2 mbs1 ac=selective"])
def test_the_limit_of_the_peak_is_where_the_risk_passes_its_limit(text: str, risk: float) -> None:
    layout = Layout.parse(text)
    limit = RISK.find_peak_limit(layout, peak_bytes=0, totals=totals(0), risk=risk)
    below, above = (
        RISK.probability(layout, peak_bytes=int(limit * by), totals=totals(int(limit * by))) for by in (0.9999, 1.0001)
    )
    assert below <= risk < above
    fragmented = totals(8 * GIB)  # 8 GiB of fragments
    assert RISK.find_peak_limit(layout, peak_bytes=0, totals=fragmented, risk=risk) < limit
    assert limit <= RISK.largest_peak(8, risk=risk), "a search may prune by it"


def test_on_a_cpu_the_peak_alone_decides_whether_a_layout_fits() -> None:
    machine = resolve("h100:8", local=Path("/nowhere")).replace(backend="gloo")
    risk = MemoryRisk(model=LLAMA, machine=machine, job=JOB)
    size = machine.chip.memory_bytes
    assert risk.probability(LAYOUT, peak_bytes=size, totals=None) == 0
    assert risk.probability(LAYOUT, peak_bytes=size + 1, totals=None) == 1
    assert risk.largest_peak(8, risk=FITS_RISK) >= size


@pytest.mark.parametrize("name", list_names())
def test_each_chip_has_one_capacity_that_is_printed_everywhere(name: str) -> None:
    machine = resolve(f"{name}:8", local=Path("/nowhere"))
    planner = Planner(model=build_model("llama3.2-1b"), machine=machine, job=JOB.replace(sequence=1024))
    assert planner.step(LAYOUT).memory.capacity_bytes == machine.chip.memory_bytes == planner.memory_risk.capacity_bytes


def test_a_verdict_follows_from_the_risk_and_old_records_have_one() -> None:
    results = [Memory(peak_bytes=1, stages=(), risk=risk) for risk in (0.0, 0.05, 0.051, 0.5, 0.51, 1.0)]
    assert [result.verdict for result in results] == ["fits", "fits", "tight", "tight", "does not fit", "does not fit"]
    assert [result.fits for result in results] == [True, True, False, False, False, False]
    old = Memory.model_validate({"peak_bytes": 1, "stages": [], "fits": False})
    assert (old.verdict, old.risk) == ("does not fit", None)
    assert Memory(peak_bytes=1, stages=()).verdict is None


@pytest.mark.long  # reads all published runs; intervals of their memory are in benchmarks/published
@pytest.mark.slow
def test_published_runs_are_seldom_predicted_not_to_fit() -> None:
    """Of published runs with a figure of memory, which all ran: one in ten at most is called worse than tight."""
    risks = []
    for case in cases_of(SOURCES):
        if case.memory_bytes is not None and case.machine.backend == "nccl":
            planner = Planner(model=case.model, machine=case.machine, job=case.job)
            risks.append(planner.out_of_memory_risk(case.layout))
    assert len(risks) > 100
    assert sum(risk > TIGHT_RISK for risk in risks) < 0.1 * len(risks)
