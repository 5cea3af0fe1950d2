"""The planner against the real run on CPU: counts equal to the last byte, peak memory within three percent."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from fivefold.dry_run import dryrun
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Chip, Link, Machine
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.planner.predict import predict
from fivefold.profiling.closed_loop import build_measured_step
from fivefold.results.step_comparison import compare
from fivefold.step import Step
from fivefold.trainer.build import build
from fivefold.trainer.data.prepare import prepare
from fivefold.trainer.data.shards import Shards
from fivefold.trainer.logs.run_log import NoLogs
from fivefold.trainer.loop import Loop
from fivefold.trainer.process import Process
from fivefold.trainer.run import Run
from fivefold.update import LearningRate, Optimizer, Ramp
from tests.selection import mark_share

MACHINE = Machine(
    name="here", ranks=4, ranks_per_node=4, backend="gloo",
    chip=Chip(name="core", peak_flops={"fp32": 1e11}, memory_bytes=2**34, memory_bandwidth=1e10, source="test"),
    links=(Link(name="loopback", span=4, bandwidth=1e9, latency_seconds=1e-4, source="test"),),
)  # fmt: skip

GROUPED = Model(name="grouped", layers=4, width=96, heads=6, kv_heads=2, head_dim=16, ffn=256, vocab=256)
SQUARE = Model(name="square", layers=2, width=128, heads=4, kv_heads=4, head_dim=32, ffn=512, vocab=500)
TIED = Model(
    name="tied", layers=3, width=80, heads=5, kv_heads=1, head_dim=16, ffn=250, vocab=307, tied_embeddings=True
)
WIDE_VOCAB = Model(name="wide", layers=1, width=64, heads=2, kv_heads=1, head_dim=32, ffn=128, vocab=6000)
BIASED = GROUPED.replace(name="biased", qkv_bias=True, out_bias=True, mlp_bias=True)

TRIPLES = [
    (GROUPED, "dp1 zero0 mbs8", "fp32", 8, 128),
    (GROUPED, "dp1 zero0 mbs2", "bf16", 8, 192),
    (SQUARE, "dp1 zero0 mbs4", "bf16-grad16", 4, 256),
    (WIDE_VOCAB, "dp1 zero0 mbs4", "bf16", 8, 100),
    (WIDE_VOCAB, "dp2 zero1 mbs2", "fp32", 8, 100),
    (BIASED, "dp2 zero0 mbs4", "bf16", 8, 128),
    (TIED, "dp2 zero1 mbs2", "bf16", 8, 128),
    (GROUPED, "dp2 zero2 mbs4", "fp32", 8, 128),
    (GROUPED, "cp2 mbs4 ac=full", "bf16", 8, 128),  # tokens are copied from both ends of sequences
    (TIED, "dp2 zero3 mbs2", "fp32", 8, 96),
    (SQUARE, "dp3 zero2 mbs1", "bf16", 6, 160),
    (BIASED, "dp4 zero3 mbs1", "bf16", 8, 160),
    (GROUPED, "dp4 zero3/2 mbs2", "bf16", 8, 128),
    (SQUARE, "dp4 zero1 mbs1", "bf16-grad16", 8, 200),
    (TIED, "dp4 zero2/2 mbs2", "fp32", 8, 128),
    (GROUPED, "dp1 zero0 mbs4", "bf16-pure", 8, 128),
    (SQUARE, "dp2 zero1 mbs2", "bf16-pure", 8, 128),
    (TIED, "dp3 zero2 mbs2", "bf16-pure", 6, 128),
    (BIASED, "dp2 zero3 mbs4", "bf16-pure", 8, 160),
    (GROUPED, "dp2 zero1 mbs4", "fp16", 8, 128),
    (TIED, "dp2 zero3 mbs2", "fp16", 8, 128),
]
SPARSE = GROUPED.replace(name="sparse", moe=MoE(experts=4, topk=2, ffn=50, dense_layers=1))
OPTIMIZERS: list[tuple[Literal["sgd", "adafactor", "muon", "adamw8bit"], Model, str, str]] = [
    ("muon", SPARSE, "dp2 ep2 zero1 mbs2", "fp32"),
    ("sgd", BIASED, "dp2 zero1 mbs2", "bf16"),
    ("adafactor", SPARSE, "dp2 tp2 ep2 zero1 mbs2", "bf16"),
    ("adafactor", BIASED, "dp3 zero2 mbs1", "fp32"),
    ("adamw8bit", WIDE_VOCAB, "dp2 tp2 zero2 mbs1", "bf16"),
    ("muon", BIASED, "dp3 zero3 mbs1", "bf16-pure"),
    ("muon", SPARSE, "dp2 tp2 ep2 zero1 mbs2", "fp32"),
]


def train(run: Run, model: Model, layout: Layout) -> Step | None:
    built = build(model=model, layout=layout, job=run.job, device=torch.device("cpu"))
    shards = Shards.open(run.folder / "data")
    outcome = Loop(
        run, model=model, layout=layout, built=built, shards=shards, logs=NoLogs(), ideal_seconds=1.0
    ).train()
    process = Process(rank=built.ranks.rank, world=layout.world)
    return build_measured_step(outcome, run=run, model=model, machine=MACHINE, layout=layout, process=process)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"document {number} says: " + "all work and no play. " * 150)
    return folder


@pytest.mark.parametrize(
    ("model", "text", "precision", "batch", "sequence"),
    mark_share(24, [pytest.param(*triple, id=f"{triple[0].name}-{triple[1]}-{triple[2]}") for triple in TRIPLES]),
)
def test_counts_are_equal_and_peak_memory_is_close(
    forked, corpus: Path, tmp_path: Path, model: Model, text: str, precision: str, batch: int, sequence: int
) -> None:
    job = Job(
        sequence=sequence,
        global_batch=batch,
        precision=get_recipe(precision),
        steps=5,
        learning_rate=LearningRate(peak=1e-3, warmup_steps=1),
    )
    run = Run(folder=tmp_path / "run", job=job, evaluate_sequences=4)
    prepare(str(corpus), directory=run.folder / "data", holdout=0.2)
    layout = Layout.parse(text)
    predicted = predict(model=model, machine=MACHINE, layout=layout, job=job)
    for measured in forked(layout.world, train, run, model, layout):
        assert measured is not None
        rows = compare(predicted, measured)
        assert [row for row in rows if row.is_wrong] == []
        memory = next(row for row in rows if row.quantity == "peak memory")
        assert memory.error == pytest.approx(0, abs=0.03), (predicted.memory, measured.memory)
        kept = (predicted.memory.stages[0].activations_bytes, measured.memory.stages[0].activations_bytes)
        assert kept[0] == pytest.approx(kept[1], rel=0.001)
        assert sum(measured.time.parts.values()) == pytest.approx(measured.time.step_seconds), "its last step is traced"


@pytest.mark.parametrize(
    ("model", "text", "batch"),
    mark_share(
        6,
        [
            # 1F1B: the first rank has two micro-batches in flight; all experts on each: no routing changes what is kept
            (SPARSE.replace(layers=2), "pp2 mbs2", 4),
            (GROUPED, "pp2 gpipe mbs1", 4),
            (TIED.replace(layers=4), "pp2 zb1p mbs2 ac=full", 8),  # what is deferred to W
            (GROUPED, "dp2 pp2 zero2 mbs1", 8),
            (GROUPED, "pp2 v2 zbv mbs1", 6),
        ],
    ),
    ids=lambda value: getattr(value, "name", value),
)
def test_activations_of_a_pipeline_are_those_of_all_micro_batches_in_flight(
    forked, corpus: Path, tmp_path: Path, model: Model, text: str, batch: int
) -> None:
    """Compare the most bytes kept between two passes, predicted, dry-run and measured, on each pipeline rank."""
    layout, job = Layout.parse(text), Job(sequence=96, global_batch=batch, steps=5)
    run = Run(folder=tmp_path / "run", job=job, evaluate_sequences=4)
    prepare(str(corpus), directory=run.folder / "data", holdout=0.2)
    results = [predict(model=model, machine=MACHINE, layout=layout, job=job)]
    results += [step for step in (dryrun(model=model, machine=MACHINE, layout=layout, job=job).step,) if step]
    measured = forked(layout.world, train, run, model, layout)[0]
    for step in results:
        rows = [row for row in compare(step, measured) if row.quantity.startswith("activations")]
        assert len(rows) == layout.pp
        assert all(row.predicted == row.measured for row in rows), (step.kind, rows)
    assert len(results) == 2
    one = measured.memory.stages[0]
    assert one.activations_bytes < one.peak_bytes - one.parameters_bytes - one.optimizer_bytes


@pytest.mark.parametrize(
    ("kind", "model", "text", "precision"), mark_share(7, OPTIMIZERS), ids=lambda value: getattr(value, "name", value)
)
def test_measured_memory_of_every_optimizer_equals_the_plan(
    forked,
    corpus: Path,
    tmp_path: Path,
    kind: Any,
    model: Model,
    text: str,
    precision: str,
) -> None:
    """Compare messages and products in the first step of the full batch: as many bytes as the first rank's."""
    layout = Layout.parse(text)
    half = layout.dp * layout.mbs
    job = Job(
        sequence=64,
        global_batch=2 * layout.dp * layout.mbs,
        precision=get_recipe(precision),
        steps=5,
        optimizer=Optimizer(kind=kind),
        ramp=Ramp(first=half, step=half, every=3),
    )
    run = Run(folder=tmp_path / "run", job=job, evaluate_sequences=4)
    prepare(str(corpus), directory=run.folder / "data", holdout=0.2)
    predicted = predict(model=model, machine=MACHINE, layout=layout, job=job)
    for measured in forked(layout.world, train, run, model, layout):
        assert measured is not None
        rows = compare(predicted, measured)
        uneven = [row for row in rows if row.is_wrong]
        assert [row for row in uneven if not row.quantity.endswith("all_to_all, sent")] == []
        assert all(abs(row.error or 0) < 0.3 for row in uneven)
