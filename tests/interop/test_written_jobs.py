"""The optimizers and precisions that a stack's record names are those with which its configs are written."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fivefold.errors import UserError
from fivefold.interop.format import ConfigFormat, ConfigPlan
from fivefold.interop.registry import find_format, list_stack_formats
from fivefold.interop.torchtitan.to_job import FULL_BF16
from fivefold.interop.write import write
from fivefold.job import RECIPES, Job, Recipe
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.layout.validity.stack import list_unwritten
from fivefold.model import catalog
from fivefold.model.spec import Model
from fivefold.optimizers import KINDS
from fivefold.stack.catalog import STACKS
from fivefold.stack.spec import Stack
from tests.selection import mark_share

DENSE = catalog.resolve("llama3-8b")
MIXTURES = {"torchtitan": catalog.resolve("qwen3-30b-a3b")}  # a flavor of it
MIXTURE = catalog.resolve("mixtral-8x7b")
ALL_RECIPES = {
    recipe.name: recipe
    for recipe in (
        *RECIPES.values(),
        *(recipe.with_reduce_dtype(in_fp32=False) for recipe in RECIPES.values()),
        FULL_BF16,
    )
}
WITHOUT_CONFIGS = {
    "megatron-lm", "zero-bubble", "megatron-deepspeed", "nemo", "deepseek", "kempnerforge", "llm-foundry", "fms-fsdp",
    "nemo-automodel", "internevo", "paddlenlp",
}  # fmt: skip
WITHOUT_MIXTURES = {"torchtune", "nanotron"}  # whose configs are of dense models


def list_formats(stack: Stack) -> list[ConfigFormat]:
    formats = [find_format(name) for name in list_stack_formats(Job(stack=stack))]
    return [form for form in formats if form.parse is not None]  # others are of clusters


def list_layouts(stack: Stack) -> list[Layout]:
    stages = stack.runs.expressible_zero(1)
    return [Layout(dp=2, zero=zero) for zero in dict.fromkeys((stages[-1], stages[0]))]


def is_written(model: Model, job: Job) -> bool:
    """Tell whether any format writes the job under any of the layouts."""
    for form in list_formats(job.stack):
        for layout in list_layouts(job.stack):
            try:
                write(ConfigPlan(model, layout, job, 8, "h100:2"), to=form.name)
            except UserError:
                continue
            return True
    return False


def can_predict(model: Model, job: Job) -> bool:
    return any(is_legal(layout, model=model, job=job) for layout in list_layouts(job.stack))


def list_jobs(stack: Stack, recipes: Iterable[Recipe]) -> dict[str, Job]:
    base = Job(sequence=512, stack=stack)
    return {recipe.name: base.replace(precision=recipe) for recipe in recipes}


@pytest.mark.parametrize("name", mark_share(2, [name for name in STACKS if name not in WITHOUT_CONFIGS]))
def test_the_recorded_config_fields_of_a_stack_are_those_that_are_written(name: str) -> None:
    stack = STACKS[name]
    models = [DENSE] if name in WITHOUT_MIXTURES else [DENSE, MIXTURES.get(name, MIXTURE)]
    for model in models:
        jobs = list_jobs(stack, ALL_RECIPES.values())
        jobs = {name: job for name, job in jobs.items() if can_predict(model, job)}
        written = {name for name, job in jobs.items() if is_written(model, job)}
        told = {
            name for name, job in jobs.items() if not any("precision" in line for line in list_unwritten(model, job))
        }
        assert written == told, model.name
        known = stack.runs.list_config_precisions(experts=model.moe is not None)
        assert set(known) <= written, model.name
        base = jobs[next(name for name in (*known, "bf16") if name in written)]
        kinds = {kind: base.replace(optimizer={"kind": kind}) for kind in KINDS}
        assert {kind for kind, job in kinds.items() if is_written(model, job)} == {
            kind for kind, job in kinds.items() if not any(list_unwritten(model, job))
        }, model.name


@pytest.mark.parametrize("name", sorted(WITHOUT_CONFIGS))
def test_a_stack_without_configs_has_no_record_of_their_optimizers_and_precisions(name: str) -> None:
    with pytest.raises(UserError, match="no config is written"):
        list_stack_formats(Job(stack=STACKS[name]))
    runs = STACKS[name].runs
    assert (runs.config_optimizers, runs.config_precisions, runs.config_dense_precisions) == ((), (), ())
