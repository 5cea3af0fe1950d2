"""The parts of a predicted step: they add up to it, and are its operations, messages, bubble and update."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve as machine_of
from fivefold.model.catalog import resolve
from fivefold.planner.predict import predict

NONE = Path("none.toml")
CASES = [
    ("tiny", "h100:1", "mbs2"), ("llama3-8b", "h100:8", "dp8 zero3 mbs1"), ("llama3-8b", "h100:8", "dp2 tp4 mbs2"),
    ("llama3-8b", "h100:8", "pp8 v4 interleaved mbs1"), ("llama3-8b", "h100:8", "pp4 dp2 zb1p mbs1 ac=full"),
    ("llama3-8b", "h100:8", "cp8 mbs1"), ("mixtral-8x7b", "h100:8", "dp8 ep8 zero1 mbs1"),
    ("llama3-8b", "h100:8", "pp4 dp2 dualpipe mbs1"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "machine", "layout"), CASES)
def test_parts_of_the_time_breakdown_add_up_to_the_step(model: str, machine: str, layout: str) -> None:
    job = Job(sequence=2048, global_batch=64)
    step = predict(model=resolve(model), machine=machine_of(machine, local=NONE), layout=Layout.parse(layout), job=job)
    time, parts = step.time, step.time.parts
    assert sum(parts.values()) == pytest.approx(time.step_seconds, rel=1e-9)
    names = {op.name for op in step.operations}
    ways = ("forward", "backward", "recomputed")
    operations = {name: item for name, item in parts.items() if name.rpartition(" ")[2] in ways}
    assert {name.rpartition(" ")[0] for name in operations} <= names
    work = sum(operations.values()) + parts.get("other compute", 0.0)
    assert work == pytest.approx(time.compute_seconds, rel=1e-9)
    assert sum(operations.values()) <= time.compute_seconds * (1 + 1e-9)
    for axis, seconds in time.exposed_seconds.items():
        results = [item for name, item in parts.items() if name.split()[0] == axis]
        assert sum(results) == pytest.approx(seconds, rel=1e-9)
    assert parts.get("bubble", 0.0) == time.bubble_seconds
    assert parts["optimizer"] == time.optimizer_seconds


def test_without_a_pipeline_parts_of_the_time_are_operations_of_all_micro_batches() -> None:
    layout, job = Layout.parse("mbs2"), Job(sequence=256, global_batch=8)
    step = predict(model=resolve("tiny"), machine=machine_of("h100:1", local=NONE), layout=layout, job=job)
    for op in step.operations:
        assert step.time.parts.get(f"{op.name} forward", 0.0) == pytest.approx(4 * op.times * op.forward_seconds)
        assert step.time.parts.get(f"{op.name} backward", 0.0) == pytest.approx(4 * op.times * op.backward_seconds)
