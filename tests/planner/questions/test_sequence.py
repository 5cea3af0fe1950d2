"""The longest sequence is the last that fits a layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fivefold.adapter import Adapter
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.predict import predict
from fivefold.planner.questions.sequence import search_longest_sequence
from tests.planner.questions.cases import JOB, LLAMA, NODE, fits


@pytest.mark.slow
def test_a_sequence_is_not_shorter_than_its_images() -> None:
    about: dict[str, Any] = {"model": build_model("gemma3-4b"), "layout": Layout.parse("dp8 zero3 mbs1 ac=full")}
    job = Job(sequence=4096, global_batch=8, images=20, freeze_vision_tower=True)  # 5,120 tokens
    answer = search_longest_sequence(machine=NODE, job=job, **about)
    steps = [predict(machine=NODE, job=job.replace(sequence=int(answer.value) + more), **about) for more in (0, 2)]
    assert [step.memory.risk <= 0.05 for step in steps] == [True, False]
    assert answer.memory_bytes == steps[0].memory.peak_bytes
    small = NODE.replace(chip=NODE.chip.replace(memory_bytes=6 * 2**30))
    with pytest.raises(UserError, match="needs at least"):
        search_longest_sequence(machine=small, job=job, **about)


def test_the_longest_sequence_is_the_last_that_fits() -> None:
    layout = Layout.parse("dp2 cp4 zero3 mbs1")
    answer = search_longest_sequence(model=LLAMA, machine=NODE, job=JOB, layout=layout)
    longest = int(answer.value)
    assert longest % 8 == 0
    assert fits(layout, JOB.replace(sequence=longest))
    assert not fits(layout, JOB.replace(sequence=longest + 8))
    assert "beyond the model's 8192 positions" in answer.line


def test_the_error_is_about_the_invalid_layout_and_not_the_sequence_length() -> None:
    layout, hardware = Layout.parse("dp1 pp4 zbv zero0 mbs1"), resolve("h100:4", local=Path())
    with pytest.raises(UserError, match="pp·v=8 stages are more than layers=2, embedding and head"):
        search_longest_sequence(model=build_model("nano"), machine=hardware, job=Job(global_batch=256), layout=layout)


def test_a_layout_that_fits_at_no_length_is_not_advised_to_shorten_it() -> None:
    model, machine = build_model("qwen2.5-32b"), resolve("rtx4090:1", local=Path("/nowhere"))
    job, layout = Job(sequence=2048, adapter=Adapter(base="nf4")), Layout.parse("mbs1 ac=full")
    with pytest.raises(UserError) as error:
        search_longest_sequence(model=model, machine=machine, job=job, layout=layout)
    assert "even with the shortest sequence" in str(error.value)
    assert "shorten" not in str(error.value)
    risk = float(re.findall(r"accept the risk with --risk ([\d.]+)", str(error.value))[0])
    assert search_longest_sequence(model=model, machine=machine, job=job, layout=layout, risk=risk).value > 0
