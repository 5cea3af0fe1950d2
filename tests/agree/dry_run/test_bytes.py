"""The planned peak against the dry run's by bytes, at sizes at which a ratio hides a table or a norm."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.dry_run import dryrun
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.predict import Planner
from fivefold.units import MIB
from tests.selection import mark_share

SCALARS_BYTES = 16  # losses, their sums, and the gradients that backward begins with


@pytest.mark.parametrize(
    ("name", "text", "sequence"),
    mark_share(
        3,
        [
            ("gemma3-4b", "mbs1", 2048),  # a tied table, and rotary tables of sliding layers
            ("gemma3-4b", "mbs1 ac=full", 32_768),
            ("llama3-8b", "dp2 zero2 mbs1 ac=selective", 4096),
            ("gemma3-4b", "dp4 zero1 mbs2", 2048),
            ("qwen3-4b", "tp2 mbs1", 4096),
            ("llama3-8b", "zero3 mbs1 ac=full offload=optimizer", 2048),
            ("llama3-8b", "dp4 zero3 mbs1 ac=full offload=optimizer", 2048),
            ("llama3-8b", "dp2 zero1 mbs1 ac=full offload=optimizer", 2048),
        ],
    ),
)
def test_planned_peak_is_that_of_the_dry_run_to_the_byte(name: str, text: str, sequence: int) -> None:
    model, layout = build_model(name).replace(layers=6), Layout.parse(text)
    machine = resolve(f"h200:{layout.world}", local=Path())
    job = Job(sequence=sequence, global_batch=2 * layout.dp * layout.mbs)
    step = dryrun(model=model, machine=machine, layout=layout, job=job).step
    assert step is not None
    planned = Planner(model=model, machine=machine, job=job).step(layout).memory
    assert planned.peak_bytes > 1000 * MIB
    assert 0 <= step.memory.peak_bytes - planned.peak_bytes <= SCALARS_BYTES
    assert step.memory.host_bytes == planned.host_bytes
