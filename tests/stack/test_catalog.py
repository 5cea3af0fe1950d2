"""Named stacks: every fact has a source, and none restates a default."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.model.catalog import build_model as model
from fivefold.spelling import find_spelling
from fivefold.stack.catalog import ENTRIES, OTHER_NAMES, SOURCES, STACKS, TRAINS_WITH, build_stack
from fivefold.stack.entry import StackEntry
from fivefold.stack.spec import Stack, SupportedLayouts

NAMES = ("name", "version", "family", "runs")
REPOSITORY = r"[\w.-]+/[\w.-]+(@[0-9a-f]{7})?[:,; ]"  # NVIDIA/Megatron-LM@960c06b:
WRITTEN = re.compile(rf"{REPOSITORY}|arXiv:\d{{4}}\.\d{{5}} §|PyTorch")


def list_changed(entry: StackEntry) -> set[str]:
    """The fields in which a stack differs from the record's defaults."""
    stack, usual, usual_runs = STACKS[entry.name], Stack(), SupportedLayouts()
    fields = {field for field in Stack.model_fields if field not in NAMES}
    results = {field for field in fields if getattr(stack, field) != getattr(usual, field)}
    return results | {
        f"runs.{field}"
        for field in SupportedLayouts.model_fields
        if getattr(stack.runs, field) != getattr(usual_runs, field)
    }


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_exactly_the_facts_that_differ_from_defaults_have_sources(entry: StackEntry) -> None:
    assert SOURCES[entry.name].keys() == list_changed(entry)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_source_is_a_repository_or_a_paper(entry: StackEntry) -> None:
    assert [source for source in SOURCES[entry.name].values() if not WRITTEN.search(source)] == []


def test_stack_names_are_unique_and_fivefold_is_the_default() -> None:
    assert max(Counter(entry.name for entry in ENTRIES).values()) == 1
    assert build_stack("fivefold") == Stack()
    assert all(entry.version and entry.family for entry in ENTRIES if entry.name != "fivefold")


def test_an_unknown_stack_is_a_one_line_error() -> None:
    with pytest.raises(UserError, match="unknown stack 'megatron-cor'; did you mean megatron-core"):
        build_stack("megatron-cor")
    with pytest.raises(UserError, match="unknown stack 'axolotl': it trains with ddp, fsdp2 or deepspeed"):
        build_stack("axolotl")
    with pytest.raises(UserError, match="unknown stack 'pytorch': it trains with ddp or fsdp2; use one of them"):
        build_stack("PyTorch")
    with pytest.raises(UserError, match="unknown stack 'hf': it trains with ddp, fsdp2 or deepspeed"):
        build_stack("hf")


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("TorchTitan", "torchtitan"),
        ("FSDP2", "fsdp2"),
        ("Megatron", "megatron-core"),
        ("Megatron Core", "megatron-core"),
        ("Megatron_Bridge", "megatron-bridge"),
        ("DeepSpeed", "deepspeed"),
    ],
)
def test_a_stack_may_be_named_in_any_case_and_with_spaces(spelled: str, name: str) -> None:
    assert build_stack(spelled) == build_stack(name) == Job(stack=spelled).stack


def test_no_two_stacks_differ_only_in_case_and_dashes() -> None:
    names = (*STACKS, *OTHER_NAMES, *TRAINS_WITH)
    assert [find_spelling(name.upper().replace("-", " "), names) for name in names] == list(names)
    with pytest.raises(UserError, match="unknown stack 'axolotl': it trains with ddp, fsdp2 or deepspeed"):
        build_stack("Axolotl")


def test_the_stacks_that_other_software_trains_with_are_in_the_catalog() -> None:
    assert {stack for wrapped in TRAINS_WITH.values() for stack in wrapped} <= set(STACKS)
    assert not set(TRAINS_WITH) & set(STACKS)


@pytest.mark.parametrize("name", STACKS)
def test_every_stack_supports_data_parallelism_and_its_stated_features(name: str) -> None:
    stack, llama = STACKS[name], model("llama3-8b")
    job = Job(global_batch=64, stack=stack)
    words = [f"dp4 zero{zero}" for zero in stack.runs.zero]
    if "pp" in stack.runs.axes:
        assert "1f1b" in stack.runs.schedules
        words += [f"dp2 pp2 1f1b zero{zero}" for zero in stack.runs.zero_with(2)]
        assert stack.runs.zero_with(2)
    for text in words:
        refuse(Layout.parse(text), model=llama, job=job)


@pytest.mark.parametrize(
    ("name", "layout", "reason"),
    [
        ("megatron-core", "dp2 pp4 dualpipev", "megatron-core does not support dualpipev; use 1f1b or interleaved"),
        ("megatron-core", "dp8 zero3", "megatron-core does not support zero3; use zero0 or zero1"),
        ("deepspeed", "dp2 pp2 zero2", "deepspeed does not support zero2 with pipelines; use zero0 or zero1"),
        ("deepspeed", "cp2", "deepspeed does not support cp=ring; use cp=ulysses"),
        ("torchtitan", "dp8 zero1", "torchtitan does not support zero1; use zero0 or zero2 or zero3"),
        ("torchtitan", "tp2 nosp", "torchtitan does not support tensor parallelism without sequence parallelism"),
        ("torchtitan", "dp2 tp2 order=dp-cp-tp-pp", "torchtitan does not support other orders of the ranks"),
        ("nanotron", "dp8 zero1/4", "nanotron does not support shard groups"),
        ("fsdp2", "pp2", "fsdp2 does not support pp; use pp1"),
        ("deepseek", "tp2", "deepseek does not support tp; use tp1"),
        ("deepseek", "pp2 v2", "deepseek does not support interleaved; use 1f1b or zb1p or dualpipe"),
    ],
)
def test_feature_missing_from_a_stack_is_an_error_by_name(name: str, layout: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        refuse(Layout.parse(layout), model=model("llama3-8b"), job=Job(global_batch=64, stack=build_stack(name)))


def test_the_stack_decides_the_gradient_precision_of_a_recipe() -> None:
    """Megatron-Bridge reduces gradients in 16 bits, Megatron-Core in 32."""
    assert Job(stack="megatron-bridge", precision="bf16").precision.summed_bytes == 2
    assert Job(stack="megatron-core", precision="bf16").precision.summed_bytes == 4


def test_the_name_megatron_means_megatron_core() -> None:
    assert build_stack("megatron") == STACKS["megatron-core"]
    assert Job(stack="megatron").stack.name == "megatron-core"
