"""Variants side by side: each is the step that ``predict`` makes, told by the words in which it differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.job import RECIPES, Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.compare import ComparedCase, compare, with_precision, with_stack
from fivefold.rendering.comparison import describe_comparison
from fivefold.stack.catalog import STACKS

LLAMA, NODE = build_model("llama3-8b"), resolve("h100:8 price=2", local=Path("/nowhere"))
JOB = Job(sequence=8192, global_batch=64)


def case(text: str, job: Job = JOB) -> ComparedCase:
    return ComparedCase(LLAMA, NODE, Layout.parse(text), job)


def test_variants_are_labelled_by_their_differing_keywords() -> None:
    result = compare([case("dp8 zero3 mbs1"), case("dp4 tp2 zero3 mbs1"), case("dp8 zero3 mbs1", JOB.replace(seed=3))])
    assert [variant.facts for variant in result.variants] == [
        ("seed=0", "dp8"),
        ("seed=0", "dp4", "tp2"),
        ("seed=3", "dp8"),
    ]
    assert result.common == ("llama3-8b", "h100:8 price=2", "fivefold", "bf16", "seq 8192", "gbs 64", "zero3", "mbs1")


def test_a_ratio_of_speeds_is_of_all_gpus() -> None:
    """Both train the same tokens per step, so that it is the inverse ratio of their steps' seconds."""
    larger = case("dp16 zero3 mbs1")._replace(machine=resolve("h100:16 price=2", local=Path("/nowhere")))
    result = compare([case("dp8 zero3 mbs1"), larger])
    (ratio,) = result.ratios
    seconds = [variant.step.time.step_seconds for variant in result.variants if variant.step is not None]
    assert ratio.speed.ratio == pytest.approx(seconds[1] / seconds[0])
    assert ratio.speed.ratio < 0.7


def test_hours_and_dollars_are_of_a_trillion_tokens() -> None:
    result = compare([case("dp8 zero3 mbs1"), case("dp8 zero3 mbs2")])
    rows = {row.name: row.values for row in result.rows}
    for seconds, hours, dollars in zip(
        rows["step time"], rows["GPU hours of 1 T tokens"], rows["cost of 1 T tokens"], strict=True
    ):
        assert isinstance(seconds, float)
        assert hours == pytest.approx(seconds * 8 / 3600 * 1e12 / (64 * 8192))
        assert dollars == pytest.approx(2 * seconds * 8 / 3600 * 1e12 / (64 * 8192))


def test_the_best_value_of_a_row_is_its_lowest_or_highest_as_its_quantity_demands() -> None:
    result = compare([case("dp8 zero3 mbs1"), case("dp8 zero3 mbs1 ac=full")])
    rows = {row.name: row for row in result.rows}
    assert rows["step time"].is_best == (True, False)
    assert rows["activations"].is_best == (False, True)
    assert rows["free memory"].is_best == (False, True)
    assert rows["most time in"].is_best == (False, False)
    assert rows["parameter state"].is_best == (False, False)  # equal
    step = rows["step time"]
    assert step.relative_values[0] == 0.0
    assert 0.2 < (step.relative_values[1] or 0) < 0.4  # a forward again: a third of the work
    messages = {row.name: row for row in compare([case("dp8 zero3 mbs1"), case("tp8 mbs1")]).rows}
    assert messages["exposed tp communication"].is_best == (True, False)  # it sends none


def test_impossible_variant_keeps_its_reason() -> None:
    result = compare([case("dp16 zero3"), case("dp8 zero3")])
    assert result.variants[0].error.startswith("layout 'dp16 zero3 mbs1': needs 16 ranks, but h100 price=2 has 8")
    assert [item.name for item in result.predicted_variants] == ["B"]
    assert len(result.rows[0].values) == 1


def test_comparing_one_variant_or_only_invalid_ones_is_an_error() -> None:
    with pytest.raises(UserError, match="compare takes 2 to 12 different steps, not 1; add"):
        compare([case("dp8"), case("dp8 mbs1")])
    with pytest.raises(UserError, match="needs 16 ranks"):
        compare([case("dp16"), case("dp32")])


@pytest.mark.parametrize("software", ["megatron-core", "torchtitan", "deepspeed"])
def test_a_job_compared_under_other_software_equals_the_job_of_its_config(software: str) -> None:
    for name in RECIPES:
        for before in ("fivefold", "torchtitan", "megatron-core"):
            job = Job.read({"stack": before, "precision": name}, origin="test")
            assert with_stack(job, software) == Job.read({"stack": software, "precision": name}, origin="test")


def test_parts_of_the_precision_stay_with_another_precision_or_software() -> None:
    job = Job.read({"precision": {"name": "bf16", "moments_bytes": [2, 2]}}, origin="test")
    assert with_precision(job, "fp8").precision == RECIPES["fp8"].replace(moments_bytes=(2, 2))
    narrow = with_stack(job, "megatron-bridge").precision
    assert (narrow.name, narrow.accumulated_bytes, narrow.moments_bytes) == ("bf16-grad16", 0, (2, 2))
    assert with_stack(job.replace(precision=narrow, stack=STACKS["megatron-bridge"]), "fivefold") == job
    wire = Job.read({"precision": {"name": "fp8", "gathers": "fp8"}}, origin="test")
    with pytest.raises(UserError, match="precision bf16: gathers='fp8' needs a master copy"):
        with_precision(wire, "bf16")


def test_changes_of_a_job_apply_to_another_stack() -> None:
    job = Job.read({"loss": "chunked"}, origin="test")
    assert with_stack(job, "torchtitan").stack == STACKS["torchtitan"].replace(loss="chunked")
    with pytest.raises(UserError, match="stack torchtitan: compile=true compiles what kernels='eager' runs one by one"):
        with_stack(Job.read({"kernels": "eager"}, origin="test"), "torchtitan")


def test_a_compared_step_fits_up_to_the_requested_risk() -> None:
    node = resolve("h100:8 memory=45GiB", local=Path("/nowhere"))
    job = Job(sequence=4096, global_batch=64)
    cases = [ComparedCase(LLAMA, node, Layout.parse(text), job) for text in ("dp8 zero3 mbs1", "dp4 tp2 zero3 mbs1")]
    assert describe_comparison(compare(cases)) == "only B fits; A is tight"
    assert describe_comparison(compare(cases, risk=0.3)).startswith(
        "A trains most tokens per second, 13.6% more than B"
    )
    larger = [item._replace(machine=resolve("h100:8 memory=49GiB", local=Path("/nowhere"))) for item in cases]
    assert describe_comparison(compare(larger)).startswith("A trains most")
    assert describe_comparison(compare(larger, risk=0.01)) == "only B fits; A has a risk above 1 %"


def test_image_tokens_and_vision_tower_are_rows_of_a_comparison() -> None:
    model, job = build_model("gemma3-4b"), JOB.replace(images=2)
    cases = [ComparedCase(model, NODE, Layout.parse(text), job) for text in ("dp8 zero3 mbs1", "dp4 tp2 zero3 mbs1")]
    rows = {row.name: row.values for row in compare([cases[0], cases[1]._replace(job=JOB)]).rows}
    assert rows["image tokens of a sequence"] == (512.0, 0.0)
    assert rows["parameters of the vision tower"] == (419_816_304.0, None)
    (images, none) = rows["FLOPs of images"]
    assert images is not None
    assert images > 0
    assert none is None
    words = {variant.name: variant.facts for variant in compare([cases[0], cases[1]]).variants}
    assert words == {"A": ("dp8",), "B": ("dp4", "tp2")}
    assert not {"FLOPs of images", "image tokens of a sequence"} & {
        row.name for row in compare([case("dp8 zero3 mbs1"), case("dp4 tp2 zero3 mbs1")]).rows
    }


def test_a_remark_says_that_a_split_backward_keeps_recomputed_activations() -> None:
    result = compare([case("pp8 1f1b ac=full"), case("pp8 zb1p ac=full"), case("pp8 zb1p")])
    steps = [variant.step for variant in result.variants if variant.step is not None]
    assert [bool(step.remarks) for step in steps] == [False, True, False]
    assert steps[1].remarks[0].endswith("the memory of ac=full is not that of 1f1b")
    last = [step.memory.stages[-1].activations_bytes for step in steps]
    assert last[1] > 2 * last[0]
    rows = {row.name: row.values for row in result.rows}
    shares = [step.time.bubble_seconds / step.time.step_seconds for step in steps]
    assert rows["bubble share"] == tuple(shares)
