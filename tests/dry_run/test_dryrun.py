from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.adapter import Adapter
from fivefold.dry_run import DryRun, dryrun, rank_processes
from fivefold.dry_run.rank_tapes import RankTapes, run_rank
from fivefold.dry_run.record.tape import START, WAIT, Tape
from fivefold.dry_run.report import describe_peak
from fivefold.errors import RunFailure, UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.machine.spec import Machine
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.planner.predict import predict
from fivefold.results.step_comparison import compare
from fivefold.trainer.model import mlp
from tests.selection import mark_share

pytestmark = pytest.mark.slow

H100, JOB = resolve("h100:8", local=Path()), Job(sequence=64, global_batch=4)
TINY = build_model("tiny").replace(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=256)
QWEN = build_model("qwen3-30b-a3b")
assert QWEN.moe is not None
MOE = QWEN.replace(
    layers=2,
    width=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=96,
    vocab=256,
    moe=QWEN.moe.replace(experts=8, topk=2, ffn=32),
)


def run_dry(layout: str, *, model: Model = TINY, machine: Machine = H100, job: Job = JOB, **also: Any) -> DryRun:
    return dryrun(model=model, machine=machine, layout=Layout.parse(layout), job=job, **also)


@pytest.mark.parametrize(
    ("model", "layout"),
    mark_share(
        2,
        [
            (TINY, "dp2 tp2 pp2 zero1"),
            (TINY, "dp2 cp2 zero3 ac=full"),
            (TINY.replace(layers=4), "pp2 v2 zbv"),
            (MOE, "dp4 tp2 ep4 zero2"),
        ],
    ),
    ids=["tp-pp", "cp-zero3", "zbv", "moe"],
)
def test_planned_counts_equal_the_dry_run(model: Model, layout: str) -> None:
    step = run_dry(layout, model=model).step
    assert step is not None
    predicted = predict(model=model, machine=H100, layout=Layout.parse(layout), job=JOB)
    assert [row for row in compare(predicted, step) if row.is_wrong] == []
    assert step.memory.fits
    tokens = JOB.tokens_per_step / Layout.parse(layout).world
    assert step.tokens_per_second_per_gpu * step.time.step_seconds == pytest.approx(tokens)
    assert step.time.step_seconds == pytest.approx(
        step.time.compute_seconds
        + step.time.bubble_seconds
        + sum(step.time.exposed_seconds.values())
        + step.time.optimizer_seconds
    )


@pytest.mark.parametrize(("model", "layout"), mark_share(2, [(MOE, "dp2 pp2 ep2 zero3"), (TINY, "dp2 tp2 pp2 zero1")]))
def test_one_rank_represents_all_of_its_stage(model: Model, layout: str) -> None:
    some, every = (run_dry(layout, model=model, every_rank=item) for item in (False, True))
    assert [share.rank for share in every.rank_summaries] == list(range(Layout.parse(layout).world))
    assert some.step == every.step
    assert not every.findings


def test_parameters_of_uneven_shards_are_those_of_the_model() -> None:
    """257 rows of the vocabulary in eight shards: the first rank's are larger than the others'."""
    model = TINY.replace(vocab=257, tied_embeddings=False)
    step = run_dry("dp8 zero3", model=model, job=JOB.replace(global_batch=8)).step
    assert step is not None
    assert step.work.parameters == model.parameters


def test_parameters_under_adapters_are_those_of_the_base() -> None:
    job = JOB.replace(adapter=Adapter(rank=4, dropout=0.05))
    step = run_dry("dp2 pp2 zero1", job=job).step
    assert step is not None
    predicted = predict(model=TINY, machine=H100, layout=Layout.parse("dp2 pp2 zero1"), job=job)
    assert [row for row in compare(predicted, step) if row.is_wrong] == []


def test_live_tensors_add_up_to_the_peak() -> None:
    result = run_dry("dp2 mbs2")
    full = result.peak_rank
    told = describe_peak(result.tapes[full.rank], rows=10**6)
    assert sum(told.parts.values()) == sum(item.bytes for item in told.largest) == full.steady.peak_bytes
    assert full.first.peak_bytes < full.steady.peak_bytes  # without moments
    (gates,) = [item for item in told.largest if item.category == "activations" and "_FusedGated" in item.line]
    assert (gates.module, gates.allocated_in) == ("blocks.*.mlp", "forward of micro-batch 0")


def test_out_of_memory_is_a_finding_with_a_fix_that_fits() -> None:
    small = H100.replace(chip=H100.chip.replace(memory_bytes=5 * 2**30))
    job, large = (
        JOB.replace(sequence=1024, global_batch=8),
        TINY.replace(layers=4, width=2048, heads=16, kv_heads=16, head_dim=128, ffn=8192),
    )
    result = run_dry("dp8 zero0", model=large, machine=small, job=job)
    (line,) = result.findings
    assert result.step is not None
    assert result.step.memory.fits is False
    has = r"but h100 has 5.00 GiB, of which the driver takes \S+ GiB; try 'dp8 .*'"
    assert re.match(rf"rank 0 needs \S+ GiB at its peak, \w+.*, {has}", line)
    better = Layout.parse(line.split("'")[1])
    assert predict(model=large, machine=small, layout=better, job=job).memory.fits


def test_a_shape_that_does_not_fit_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp.Mlp, "forward", lambda _self, x, _keys: x @ torch.zeros(3, 3))
    result = run_dry("tp2 pp2")
    (line,) = result.findings
    assert result.step is None
    assert line.startswith("rank 0, forward of micro-batch 0, blocks.0.mlp: aten::mm: a and b must have same reduction")
    assert re.search(r"; fix .*test_dryrun.py:\d+ test_a_shape", line)


def test_operation_without_a_fake_is_a_run_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp.Mlp, "forward", lambda _self, x, _keys: x[x > 0])
    with pytest.raises(RunFailure, match=r"rank 0 cannot be dry-run at .*test_dryrun.py:\d+ .*aten.nonzero"):
        run_dry("dp1")


@pytest.mark.parametrize("every_rank", mark_share(2, [False, True]))
def test_a_message_that_never_comes_is_a_finding(monkeypatch: pytest.MonkeyPatch, every_rank: bool) -> None:
    def run_rank_without_hop(*, rank: int, **also: Any) -> RankTapes:
        outcome = run_rank(rank=rank, **also)
        return outcome._replace(steady=drop_last_hop(outcome.steady)) if rank == 0 else outcome

    monkeypatch.setattr(rank_processes, "run_rank", run_rank_without_hop)
    result = run_dry("pp2 dp2 zero1", every_rank=every_rank)
    assert result.step is None
    assert any(
        re.match(r"rank \d sends p2p of \d+ bfloat16 over pp .* never receives it", line)
        or re.match(r"rank \d receives p2p .* never sends it", line)
        for line in result.findings
    )


def drop_last_hop(tape: Tape) -> Tape:
    hops = [first for kind, first, place, _ in tape if kind == START and tape.messages[place].axis == "pp"]
    less = Tape(tape.rank)
    less.sites, less.scopes, less.kernels, less.messages = tape.sites, tape.scopes, tape.kernels, tape.messages
    for event in tape:
        if not (event[0] in (START, WAIT) and event[1] == hops[-1]):
            less.add(*event)
    return less


def test_a_computer_without_gpus_has_one_stream() -> None:
    here = H100.replace(backend="gloo")
    step = run_dry("dp2 zero1", machine=here).step
    assert step is not None
    assert step.memory.reserved_bytes is None
    assert step.time.exposed_seconds["dp"] > 0
    gpu = run_dry("dp2 zero1").step
    assert gpu is not None
    assert gpu.memory.reserved_bytes is not None
    assert gpu.memory.reserved_bytes > gpu.memory.peak_bytes


def test_invalid_layout_is_not_built() -> None:
    for layout, also, words in (
        ("dp2", {"ranks": (0, 2)}, "no rank 2 in layout .*; its ranks are 0 to 1"),
        ("tp3", {}, "not divisible by tp=3"),
        ("dp2", {"job": JOB.replace(loss="plain")}, "the trainer supports loss=fused"),
    ):
        with pytest.raises(UserError, match=words):
            run_dry(layout, **also)
