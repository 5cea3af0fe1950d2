"""The uncertainty of a ratio: what two runs differ in, and how wide the interval of their speeds is."""

from __future__ import annotations

from math import hypot, log
from pathlib import Path

import pytest

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.compare import ComparedCase, compare
from fivefold.planner.time.ratio_errors import (
    DOUBT,
    KindErrors,
    RunFacts,
    describe_run,
    estimate_ratio_errors,
    estimate_speed_ratio,
    find_differences,
    read_errors,
)
from fivefold.rendering.comparison import describe_comparison, describe_ratios
from fivefold.stack.catalog import build_stack as stack

HERE = Path("none")


def facts(
    layout: str = "dp64 zero3", chip: str = "h100:64", model: str = "llama3-8b", job: Job | None = None
) -> RunFacts:
    return describe_run(build_model(model), resolve(chip, local=HERE), Layout.parse(layout), job or Job())


@pytest.mark.parametrize(
    ("other", "kinds"),
    [
        (facts(), set()),
        (facts("dp32 tp2 zero3"), {"layout"}),
        (facts("dp32 tp2 zero3 mbs2 ac=full"), {"layout"}),
        (facts("dp64 zero3 mbs2"), {"micro-batch"}),
        (facts("dp64 zero3 ac=full"), {"recomputation"}),
        (facts("dp128 zero3", "h100:128", job=Job(global_batch=16)), {"ranks"}),
        (facts(job=Job(global_batch=16)), {"batch"}),
        (facts(job=Job(sequence=8192, global_batch=4)), {"sequence"}),
        (facts(job=Job(precision=get_recipe("fp8"))), {"precision"}),
        (facts(job=Job(stack=stack("torchtitan"))), {"software"}),
        (facts(job=Job(adapter="lora:16")), {"adapter"}),
        (facts(job=Job().replace(attention="unfused")), {"settings"}),
        (facts(chip="b200:64"), {"chip"}),
        (facts("dp64 zero3 mbs4", chip="b200:64"), {"chip and layout"}),
        (facts(model="llama3-70b"), {"model"}),
        (facts("dp32 tp2 zero3", job=Job(precision=get_recipe("fp8"))), {"layout", "precision"}),
    ],
)
def test_differences_between_two_runs_are_found(other: RunFacts, kinds: set[str]) -> None:
    assert find_differences(facts(), other) == kinds
    assert find_differences(other, facts()) == kinds


def test_interval_widths_are_means_over_sources_and_two_pseudo_sources() -> None:
    errors = [
        KindErrors("layout", "a", 900, 0.02, 0.10),
        KindErrors("layout", "b", 1, 0.04, 0.20),
        KindErrors("precision", "c", 5, 0.06, 0.30),
    ]
    of_layout = (0.02 + 0.04 + DOUBT * 0.04) / (2 + DOUBT), (0.10 + 0.20 + DOUBT * 0.20) / (2 + DOUBT)
    assert estimate_ratio_errors(["layout"], errors) == pytest.approx(of_layout)
    of_precision = (0.06 + DOUBT * 0.04) / (1 + DOUBT), (0.30 + DOUBT * 0.20) / (1 + DOUBT)
    both = tuple(hypot(*pair) for pair in zip(of_layout, of_precision, strict=True))
    assert estimate_ratio_errors(["layout", "precision"], errors) == pytest.approx(both)
    assert estimate_ratio_errors([], errors) == (0.0, 0.0)
    assert estimate_ratio_errors(["chip"], errors) is None  # never measured is not zero


def test_a_ratio_and_its_inverse() -> None:
    ratio = estimate_speed_ratio(facts("dp64 zero3 ac=full"), facts(), (0.8, 1.0))
    assert ratio is not None
    assert ratio.ratio == pytest.approx(0.8)
    assert ratio.low_90 < ratio.low_50 < ratio.ratio < ratio.high_50 < ratio.high_90
    assert log(ratio.high_90 / ratio.ratio) == pytest.approx(log(ratio.ratio / ratio.low_90))
    assert ratio.verdict == "clear"
    inverse = estimate_speed_ratio(facts(), facts("dp64 zero3 ac=full"), (1.0, 0.8))
    assert inverse is not None
    for field in ("ratio", "low_90", "low_50", "high_50", "high_90"):
        assert getattr(inverse, field) == pytest.approx(getattr(ratio.invert(), field), rel=1e-12)
    close = estimate_speed_ratio(facts("dp32 tp2 zero3"), facts(), (0.99, 1.0))
    assert close is not None
    assert close.verdict == "not distinguishable"


def test_no_interval_without_published_pairs() -> None:
    assert estimate_speed_ratio(facts(job=Job(stack=stack("torchtitan"))), facts(), (1.0, 1.0)) is None
    machine = resolve("h100:8", local=HERE).replace(backend="gloo")
    here = describe_run(build_model("tiny"), machine, Layout.parse("dp8"), Job())
    assert estimate_speed_ratio(here, here, (1.0, 1.0)) is None


def test_the_table_has_every_kind_that_compare_may_print() -> None:
    rows = read_errors()
    assert {"layout", "micro-batch", "recomputation", "precision", "ranks", "chip"} <= {row.kind for row in rows}
    assert all(0 <= row.half <= row.most < 1 and row.pairs > 0 for row in rows)


def test_compare_prints_the_uncertainty_of_a_ratio() -> None:
    """Full recomputation is clearly slower; a tensor-parallel degree of two may not be."""
    model, machine, job = build_model("llama3-8b"), resolve("h100:64", local=HERE), Job(sequence=8192, global_batch=256)
    layouts = "dp64 zero3", "dp64 zero3 ac=full", "dp32 tp2 zero3"
    result = compare([ComparedCase(model, machine, Layout.parse(layout), job) for layout in layouts])
    slower, unsure = result.ratio("B", "A"), result.ratio("C", "A")
    assert slower is not None
    assert unsure is not None
    assert (slower.verdict, unsure.low_90 < 1 < unsure.high_90) == ("clear", True)
    assert "90 % interval" in describe_comparison(result)
    first, second = describe_ratios(result)
    assert first.startswith(f"B against A: {slower.ratio:.2f} times the tokens per second; 50 % interval ")
    assert second.endswith("(published pairs that differ in layout)")
    by_software = compare(
        [
            ComparedCase(model, machine, Layout.parse("dp64 zero3"), job.replace(stack=stack(name)))
            for name in ("fivefold", "torchtitan")
        ]
    )
    assert by_software.ratios == ()
    (unknown,) = describe_ratios(by_software)
    assert unknown.startswith("B against A: no published runs differ as these do, so the uncertainty ")
