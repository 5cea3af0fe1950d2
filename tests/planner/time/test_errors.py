from __future__ import annotations

from math import exp, log
from pathlib import Path
from random import Random
from statistics import variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine import catalog as machines
from fivefold.model import catalog as models
from fivefold.planner.time.errors import (
    MIN_SOURCES,
    ErrorCell,
    ErrorDistribution,
    Quantity,
    RunClass,
    estimate_distribution,
    estimate_interval,
    estimate_run_interval,
    read,
    run_class,
    select_cells,
)
from fivefold.stack.catalog import build_stack

HERE = RunClass("hopper", "many", "dense", "16 bits", "megatron", "nothing")
STEADY = (0.98, 1.0, 1.02)


def cell(source: str, ratios: tuple[float, ...], of: RunClass = HERE, *, rows: int = 3, ranks: int = 64) -> ErrorCell:
    return ErrorCell("time", source, of, rows, ranks, ratios)


def test_runs_are_classified_by_chip_scale_model_precision_software_and_recomputation() -> None:
    job = Job(stack=build_stack("torchtitan"))
    run = {"model": models.resolve("mixtral-8x7b"), "machine": machines.resolve("gb200:144", local=Path()), "job": job}
    result = run_class(layout=Layout.parse("dp144 ac=full"), **run)  # type: ignore[arg-type]
    assert result == ("blackwell", "many", "experts", "16 bits", "torch", "all")
    assert run_class(layout=Layout.parse("dp8 ac=norm"), **run)[1::4] == ("one", "some")  # type: ignore[arg-type]


def test_every_chip_of_the_catalog_has_a_generation() -> None:
    assert {
        name: run_class(
            model=models.resolve("tiny"), machine=machines.resolve(name, local=Path()), layout=Layout(), job=Job()
        ).generation
        for name in machines.list_names()
    } == {
        name: generation
        for generation, chips in {
            "volta": "v100 v100-16",
            "turing": "t4",
            "ampere": "a100 a100-40 a100-pcie a800 rtx3060 rtx3090 a6000 a10 a10g a30 a40",
            "hopper": "h100 h100-pcie h100-nvl h200 h800 h20 gh200",
            "blackwell": "b200 b300 gb200 gb300",
            "blackwell-rtx": "rtx5090 rtxpro6000",
            "ada": "l4 l40s l40 l20 rtx4090 rtx6000-ada",
            "cdna": "mi250x mi300x mi325x mi350x mi355x",
        }.items()
        for name in chips.split()
    }


def test_the_bias_of_the_nearest_runs_is_in_the_interval() -> None:
    """Runs of the same class took 1.3 times as long, those of other chips as long as predicted."""
    other = HERE._replace(generation="ampere", software="torch", nodes="one")
    cells = [cell("a", (1.28, 1.3, 1.32)), cell("b", (1.27, 1.31, 1.35)), cell("c", STEADY, other)]
    near, far = (estimate_interval(10.0, of=of, ranks=8, cells=cells) for of in (HERE, other))
    assert near is not None
    assert far is not None
    assert 12.0 < near.middle < 13.1
    assert (near.sources, near.runs, far.sources, far.runs) == (2, 6, 1, 3)
    assert far.middle < near.middle
    assert far.low_50 < near.low_50


def test_a_source_of_many_rows_counts_once() -> None:
    few = estimate_interval(1.0, of=HERE, ranks=8, cells=[cell("a", STEADY), cell("b", (1.5,), rows=1)])
    many = estimate_interval(1.0, of=HERE, ranks=8, cells=[cell("a", STEADY, rows=900), cell("b", (1.5,), rows=1)])
    assert few == many.replace(runs=4) if many else None


@pytest.mark.parametrize(
    ("freedom", "quantiles"),
    [
        (3, {0.75: 0.765, 0.95: 2.353, 0.975: 3.182}),
        (6, {0.75: 0.718, 0.95: 1.943, 0.975: 2.447}),
        (10, {0.75: 0.700, 0.95: 1.812, 0.975: 2.228}),
        (30, {0.75: 0.683, 0.95: 1.697, 0.975: 2.042}),
    ],
)
def test_quantiles_are_those_of_tables_of_students_t(freedom: float, quantiles: dict[float, float]) -> None:
    distribution = ErrorDistribution(1.0, 2.0, freedom)
    for level, quantile in quantiles.items():
        assert distribution.find_quantile(level) == pytest.approx(1 + 2 * quantile, rel=0.01)
        assert distribution.find_quantile(1 - level) == pytest.approx(1 - 2 * quantile, rel=0.02)
    assert distribution.find_quantile(0.5) == 1.0


def test_a_new_source_is_expected_within_the_prediction_interval_of_random_effects() -> None:
    """Against the formula for sources of equal weight: middle ± t · √(between · (1 + 1/k) + within)."""
    means, spread = (0.0, 0.1, 0.2, 0.3), 0.05
    cells = [cell(str(mean), (exp(mean - spread), exp(mean + spread)), rows=2) for mean in means]
    distribution = estimate_distribution(HERE, cells)
    assert distribution is not None
    assert distribution.freedom == pytest.approx(3)
    assert distribution.middle == pytest.approx(0.15)
    assert distribution.scale == pytest.approx((variance(means) * (1 + 1 / 4) + spread**2) ** 0.5)


def test_one_source_says_nothing_of_the_next() -> None:
    assert estimate_interval(1.0, of=HERE, ranks=8, cells=[cell("a", STEADY)]) is None


def test_a_new_source_lies_inside_nine_times_of_ten() -> None:
    """Sources drawn from a normal distribution, a few of them known: the share of new runs inside is the stated one."""
    random = Random(5)

    def draw_source(name: str) -> ErrorCell:
        mean = random.gauss(0.05, 0.06)
        return cell(name, tuple(exp(random.gauss(mean, 0.03)) for _ in range(9)), rows=9)

    inside = {0.5: 0, 0.9: 0}
    for _ in range(400):
        *known, new = (draw_source(str(at)) for at in range(7))
        distribution = estimate_distribution(HERE, known)
        assert distribution is not None
        for level in inside:
            low, high = (distribution.find_quantile(0.5 + side * level / 2) for side in (-1, 1))
            inside[level] += sum(low <= log(ratio) <= high for ratio in new.ratios)
    assert inside[0.5] / 3600 == pytest.approx(0.5, abs=0.06)
    assert inside[0.9] / 3600 == pytest.approx(0.9, abs=0.03)


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6), st.floats(0.1, 10))
def test_bounds_are_in_order_and_scale_with_the_prediction(ratios: list[float], predicted: float) -> None:
    cells = [cell(str(at), (ratio,)) for at, ratio in enumerate(ratios)]
    one, other = (estimate_interval(size, of=HERE, ranks=8, cells=cells) for size in (1.0, predicted))
    assert one is not None
    assert other is not None
    assert one.low_90 <= one.low_50 <= one.middle <= one.high_50 <= one.high_90
    assert min(ratios) * 0.9999 <= one.middle <= max(ratios) * 1.0001
    assert other.high_90 == pytest.approx(predicted * one.high_90)
    assert other.error == pytest.approx(one.error)


def test_a_class_of_runs_without_published_runs_is_reported() -> None:
    cells = [cell("a", STEADY), cell("b", STEADY, HERE._replace(kind="experts", precision="fp8"))]

    def list_outside(of: RunClass, ranks: int = 64) -> tuple[str, ...]:
        result = estimate_interval(1.0, of=of, ranks=ranks, cells=cells)
        assert result is not None
        return result.outside

    assert list_outside(HERE) == ()
    assert list_outside(HERE._replace(generation="cdna")) == ("GPUs of the cdna generation",)
    assert list_outside(HERE, 128) == ("128 GPUs of the hopper generation, where at most 64 were measured",)
    assert list_outside(HERE._replace(kind="experts")) == ("experts in 16 bits on GPUs of the hopper generation",)
    assert list_outside(HERE._replace(software="fivefold")) == ("software fivefold",)


def test_no_interval_is_given_for_cpus_or_without_the_table(tmp_path: Path) -> None:
    gpus = machines.resolve("h100:8", local=tmp_path)
    assert estimate_run_interval(1.0, "time", of=HERE, machine=gpus, ranks=8) is not None
    assert estimate_run_interval(1.0, "time", of=HERE, machine=gpus.replace(backend="gloo"), ranks=8) is None
    assert estimate_run_interval(1.0, "time", of=HERE, machine=gpus, ranks=8, path=tmp_path / "no") is None
    assert read("allocated", tmp_path / "no") == ()


def test_a_counter_with_few_sources_has_those_of_what_it_contains() -> None:
    """One source of the driver's bytes and two of reserved bytes take all below them; three of their own suffice."""

    def make_cells(**counts: int) -> list[ErrorCell]:
        return [
            cell(f"{quantity}{at}", STEADY)._replace(quantity=quantity)  # type: ignore[arg-type]
            for quantity, count in counts.items()
            for at in range(count)
        ]

    def list_quantities(quantity: Quantity, cells: list[ErrorCell]) -> list[str]:
        return sorted({cell.quantity for cell in select_cells(quantity, cells)})

    few = make_cells(time=5, allocated=4, reserved=MIN_SOURCES - 1, driver=1)
    assert list_quantities("driver", few) == ["allocated", "driver", "reserved"]
    assert list_quantities("reserved", few) == ["allocated", "reserved"]
    enough = make_cells(time=5, allocated=4, reserved=MIN_SOURCES, driver=1)
    assert list_quantities("driver", enough) == ["driver", "reserved"]
    assert list_quantities("reserved", enough) == ["reserved"]
    assert list_quantities("driver", make_cells(allocated=4, reserved=3, driver=MIN_SOURCES)) == ["driver"]
    for quantity in ("allocated", "time"):
        assert list_quantities(quantity, make_cells(time=1, allocated=1, reserved=9)) == [quantity]  # type: ignore[arg-type]
