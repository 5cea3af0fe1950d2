from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine import catalog as machines
from fivefold.model import catalog as models
from fivefold.planner.time.errors import ErrorCell, RunClass, estimate_interval, estimate_run_interval, read, run_class
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
            "volta": "v100",
            "ampere": "a100 a100-40 rtx3090 a6000",
            "hopper": "h100 h100-pcie h200 h800 gh200",
            "blackwell": "b200 b300 gb200 gb300",
            "ada": "l4 l40s rtx4090 rtx6000-ada",
            "cdna": "mi250x mi300x mi325x mi355x",
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
    assert 12.5 < near.middle < 13.1
    assert (near.sources, near.runs, far.sources, far.runs) == (2, 6, 1, 3)
    assert far.middle < near.middle
    assert far.low_50 < near.low_50


def test_a_source_of_many_rows_counts_once() -> None:
    few = estimate_interval(1.0, of=HERE, ranks=8, cells=[cell("a", STEADY), cell("b", (1.5,), rows=1)])
    many = estimate_interval(1.0, of=HERE, ranks=8, cells=[cell("a", STEADY, rows=900), cell("b", (1.5,), rows=1)])
    assert few == many.replace(runs=4) if many else None


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=6), st.floats(0.1, 10))
def test_bounds_are_in_order_and_scale_with_the_prediction(ratios: list[float], predicted: float) -> None:
    cells = [cell(str(at), (ratio,)) for at, ratio in enumerate(ratios)]
    one, other = (estimate_interval(size, of=HERE, ranks=8, cells=cells) for size in (1.0, predicted))
    assert one is not None
    assert other is not None
    assert one.low_90 <= one.low_50 <= one.middle <= one.high_50 <= one.high_90
    assert one.low_50 <= max(ratios) * 1.0001
    assert one.high_50 >= min(ratios) * 0.9999
    assert other.high_90 == pytest.approx(predicted * one.high_90)
    assert other.error == pytest.approx(one.error)


def test_unmeasured_class_is_reported() -> None:
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
    assert read("peak", tmp_path / "no") == ()
