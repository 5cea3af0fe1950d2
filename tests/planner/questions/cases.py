"""A model, a node and a job about which questions are asked."""

from __future__ import annotations

from pathlib import Path

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner

NODE = resolve("h100:8", local=Path("/nowhere"))
LLAMA = build_model("llama3-8b")
JOB = Job(sequence=4096, global_batch=512)
SMALL = Model(name="small", layers=8, width=1024, heads=8, kv_heads=4, head_dim=128, ffn=4096, vocab=32_000)


def peak(layout: Layout, job: Job = JOB) -> int:
    return Planner(model=LLAMA, machine=NODE, job=job).estimate(layout).peak_bytes


def fits(layout: Layout, job: Job = JOB) -> bool:
    return Planner(model=LLAMA, machine=NODE, job=job).fits(layout)
