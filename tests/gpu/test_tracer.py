"""On a GPU: a traced step's spans, read from events of its stream, add up to the step. Skipped where there is none."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.data.prepare import prepare
from fivefold.trainer.data.shards import Shards
from fivefold.trainer.logs.run_log import NoLogs
from fivefold.trainer.loop import Loop
from fivefold.trainer.process import Process
from fivefold.trainer.run import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
MODEL = Model(name="wide", layers=8, width=1024, heads=8, kv_heads=8, head_dim=128, ffn=2816, vocab=256)
STEPS = 16


def test_spans_of_a_stream_add_up_to_its_step(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number}: " + "no play. " * 6000)
    prepare(str(tmp_path / "text"), directory=tmp_path / "data", holdout=0.2)
    job, layout = Job(sequence=1024, global_batch=8, steps=STEPS), Layout.parse("mbs4")
    run = Run(folder=tmp_path, job=job, evaluate_sequences=8, trace_steps=6)
    device = Process().start()
    try:
        built, shards = build(model=MODEL, layout=layout, job=job, device=device), Shards.open(tmp_path / "data")
        loop = Loop(run, model=MODEL, layout=layout, built=built, shards=shards, logs=NoLogs(), ideal_seconds=1.0)
        trace = loop.train().trace
    finally:
        Process.end()
    for step in trace.steps:
        assert sum(span.own for span in step.spans) == pytest.approx(step.seconds, rel=1e-6)
        assert all(span.start <= span.end for span in step.spans)
        ways = {
            way: Counter(s.name for s in step.spans if (s.kind, s.way) == ("op", way))
            for way in ("forward", "backward")
        }
        added = {name for name in ways["forward"] if name.endswith(".add")}  # its gradient is passed on as it is
        assert {name: n for name, n in ways["forward"].items() if name not in added} == ways["backward"]
        work = sum(span.own for span in step.spans if span.kind in ("op", "update"))
        assert work > 0.8 * step.seconds, "kernels of this size keep the stream busy"
    traced = statistics.median(step.seconds for step in trace.steps)
    assert traced == pytest.approx(statistics.median(loop.seconds), rel=0.05)
