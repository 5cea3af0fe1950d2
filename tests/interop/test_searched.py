"""Whatever the search proposes for a stack, its config is written and read back as the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fivefold.interop.format import ConfigPlan
from fivefold.interop.registry import find_stack_format
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.search import search
from fivefold.stack.catalog import build_stack as stack_named
from tests.selection import mark_share

DENSE, EXPERTS = ("llama3-8b", "llama2-7b", "llama3.2-1b", "tiny"), ("qwen3-30b-a3b", "mixtral-8x7b")
PRECISIONS = {"fsdp2": "bf16-grad16"}  # as accelerate's FSDP2 reduces
STACKS = ("torchtitan", "megatron-core", "megatron-bridge", "nanotron", "fsdp2", "deepspeed")


def check(stack: str, some: random.Random, *, model: str, ranks: int) -> int:
    """Search a drawn question, and write all that is proposed, how many; ``write`` reads each back, and compares."""
    if stack == "torchtitan" and model == "tiny":
        model = "llama3.2-1b"  # whose head it ties as torchtitan does
    if stack == "torchtitan" and model == "mixtral-8x7b":
        model = "qwen3-30b-a3b"  # torchtitan has no Mixtral
    job = Job(
        stack=stack_named(stack),
        precision=PRECISIONS.get(stack, "bf16"),
        sequence=some.choice((2048, 4096)),
        global_batch=some.choice((16, 32)),
    )
    machine = resolve(f"h200:{ranks}", local=Path())
    result = search(model=build_model(model), machine=machine, job=job, top=20, within=0.1)
    layouts = [ranked.step.layout for ranked in result.best]
    layouts += [result.proposal.layout] if result.proposal else []
    for layout in dict.fromkeys(layouts):
        write(ConfigPlan(build_model(model), Layout.parse(layout), job), to=find_stack_format(job))
    return len(layouts)


@pytest.mark.long  # tests/cli/test_software.py searches and writes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stack", "model"),
    mark_share(7, [("torchtitan", "qwen3-30b-a3b"), *((stack, "") for stack in STACKS)]),
)
def test_searched_layout_is_written(stack: str, model: str) -> None:
    some = random.Random(stack)
    assert check(stack, some, model=model or some.choice(DENSE), ranks=8)
