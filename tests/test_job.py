from __future__ import annotations

import pytest
from pydantic import ValidationError

from fivefold.errors import UserError
from fivefold.job import RECIPES, Job, get_recipe

# Published totals in bytes per parameter; the sources are given with the recipes.
TOTALS = {
    "fp8": 20,
    "fp8-delayed": 20,
    "fp8-rowwise": 20,
    "fp8-rowwise-gw": 20,
    "fp8-tiles": 20,
    "fp8-wire": 20,
    "fp8-tiles-wire": 20,
    "fp8-param": 19,
    "fp8-delayed-param": 19,
    "fp8-tiles-param": 19,
    "mxfp8": 20,
    "nvfp4": 20,
    "fp32": 16,
    "tf32": 16,
    "bf16": 20,
    "bf16-grad16": 16,
    "fp16": 16,
    "bf16-autocast": 16,
    "fp16-autocast": 16,
    "bf16-pure": 12,
    "bf16-full": 8,
    "fp8-te": 16,
    "fp8-deepseek": 15,
    "fp8-nanotron": 10,
    "fp8-lm": 9,
}


def test_recipes_add_up_to_the_published_totals() -> None:
    assert {name: recipe.total_bytes for name, recipe in RECIPES.items()} == TOTALS


def test_only_gradients_in_fp16_scale_their_loss() -> None:
    assert [name for name, recipe in RECIPES.items() if recipe.loss_scaling] == ["fp16", "fp16-autocast", "fp8-lm"]


@pytest.mark.parametrize(
    ("name", "summed", "updated"), [("bf16", 4, 4), ("bf16-grad16", 2, 4), ("bf16-pure", 2, 2), ("fp32", 4, 4)]
)
def test_recipes_have_the_expected_bytes_of_sums_and_updates(name: str, summed: int, updated: int) -> None:
    assert (get_recipe(name).summed_bytes, get_recipe(name).updated_bytes) == (summed, updated)


def test_a_precision_name_gives_its_recipe() -> None:
    assert Job.read({"precision": "bf16-pure"}, origin="job").precision == RECIPES["bf16-pure"]


def test_a_precision_or_an_adapter_may_be_named_in_any_case() -> None:
    assert [Job(precision=name).precision.name for name in ("BF16", "FP8", "FP8 DeepSeek", "NVFP4")] == [
        "bf16", "fp8", "fp8-deepseek", "nvfp4"
    ]  # fmt: skip
    assert [get_recipe(name.upper()) for name in RECIPES] == list(RECIPES.values())  # no two differ only in case
    assert Job(adapter="QLoRA:16").adapter == Job(adapter="qlora:16").adapter


def test_a_precision_table_changes_the_recipe_in_its_name() -> None:
    read = Job.read({"precision": {"name": "fp8", "gathers": "fp8"}}, origin="job").precision
    assert read == RECIPES["fp8"].replace(gathers="fp8") == RECIPES["fp8-wire"].replace(name="fp8")
    with pytest.raises(UserError, match=r"^job: unknown key 'precision.gather'; did you mean 'gathers'\?"):
        Job.read({"precision": {"name": "fp8", "gather": "fp8"}}, origin="job")
    with pytest.raises(UserError, match=r"^job: precision: dispatches='fp8' needs compute='fp8' and scaling='tiles'"):
        Job.read({"precision": {"name": "fp8", "dispatches": "fp8"}}, origin="job")


def test_the_error_of_an_unknown_precision_suggests_the_closest() -> None:
    with pytest.raises(UserError, match=r"^job\.toml: unknown precision 'bf61'; did you mean .*bf16"):
        Job.read({"precision": "bf61"}, origin="job.toml")


def test_tokens_per_step_are_batch_times_sequence() -> None:
    assert Job(sequence=4096, global_batch=1024).tokens_per_step == 4_194_304


def test_warmup_cannot_outlast_the_run() -> None:
    with pytest.raises(ValidationError, match=r"warmup_steps=11 exceeds steps=10"):
        Job.model_validate({"steps": 10, "learning_rate": {"warmup_steps": 11}})


@pytest.mark.parametrize(
    "values",
    [
        {"sequence": 0},
        {"global_batch": -1},
        {"optimizer": {"betas": (0.9, 1.0)}},
        {"learning_rate": {"peak": float("inf")}},
        {"learning_rate": {"floor": 1.5}},
        {"learning_rate": {"peak": float("nan")}},
    ],
)
def test_invalid_values_of_a_job_are_errors(values: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"^job: "):
        Job.read(values, origin="job")


def test_a_job_reads_back_from_json() -> None:
    job = Job.model_validate({"precision": "fp8-lm", "optimizer": {"kind": "sgd"}, "learning_rate": {"kind": "wsd"}})
    assert Job.model_validate_json(job.model_dump_json()) == job


@pytest.mark.parametrize(
    ("said", "name"), [("true", "bf16"), (True, "bf16"), ("false", "bf16-grad16"), (False, "bf16-grad16")]
)
def test_a_precision_name_gives_the_recipe_of_the_stack(said: object, name: str) -> None:
    """As text too, as the command line has it."""
    job = Job.read({"precision": "bf16", "reduce_in_fp32": said}, origin="test")
    assert (job.precision.name, job.stack.reduce_in_fp32) == (name, name == "bf16")
    changed = Job.read({"precision": {"name": "bf16", "master_bytes": 2}, "reduce_in_fp32": said}, origin="test")
    assert changed.precision == job.precision.replace(master_bytes=2)
    assert changed.precision.list_changes() == {"master_bytes": 2}


def test_gradients_that_are_given_in_fp32_are_kept_with_any_stack() -> None:
    table = {"name": "bf16", "accumulated_bytes": 4}
    job = Job.read({"precision": table, "stack": "megatron-core"}, origin="test")
    assert (job.precision.accumulated_bytes, job.precision.name) == (4, "bf16")
