"""Which kernels a job gets: by the device, by what is installed, by what it asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.model.experts import MoE
from fivefold.model.mixers.chunk_groups import CPU_TEMPORARY_BYTES, GPU_TEMPORARY_BYTES
from fivefold.model.mixers.mamba import Mamba
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.model.kernels import choice
from fivefold.trainer.model.kernels.choice import check_kernels, resolve_kernels
from fivefold.trainer.model.kernels.fused.kernels import TRITON
from fivefold.trainer.model.mixers.mamba import MambaMixer

Fork = Callable[..., list[Any]]
MODEL = Model(
    name="mixed",
    layers=2,
    width=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn=50,
    vocab=83,
    qk_norm="head",
    moe=MoE(experts=4, topk=2, ffn=9, dense_layers=1),
)
JOB = Job(sequence=32, global_batch=2, precision="fp32", steps=9)


def test_the_fused_kernels_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "explain_unavailability", lambda: "")
    names = [
        resolve_kernels(job, gpu=gpu).stack.kernels for job in (JOB, JOB.replace(compile=True)) for gpu in (True, False)
    ]
    assert names == ["triton", "eager", "compiled", "compiled"]
    assert resolve_kernels(JOB.replace(kernels="eager"), gpu=True).stack.kernels == "eager"
    assert resolve_kernels(JOB.replace(stack="megatron-core"), gpu=True).stack.kernels == "fused"


SCANS = MODEL.replace(moe=None, mixers=("mamba",), mamba=Mamba(inner=48, rank=2))


def list_limits(job: Job) -> set[int]:
    """Return the limits of temporaries that the mixers of a job are built with."""
    built = build(model=SCANS, layout=Layout(), job=job, device=torch.device("cpu"))
    return {module.temporary_bytes for module in built.module.modules() if isinstance(module, MambaMixer)}


@pytest.mark.parametrize(("backend", "default"), [("nccl", GPU_TEMPORARY_BYTES), ("gloo", CPU_TEMPORARY_BYTES)])
def test_trainer_and_planner_limit_the_temporaries_of_scans_to_the_same_bytes(
    forked: Fork, backend: str, default: int
) -> None:
    machine = resolve("h100:1", local=Path("/nowhere")).replace(backend=backend)
    for job, limit in ((JOB, default), (JOB.replace(scan_temporary_bytes=2**20), 2**20)):
        planned_job = Planner(model=SCANS, machine=machine, job=job).job
        assert planned_job.stack.scan_temporary_bytes == limit
        assert forked(1, list_limits, resolve_kernels(job, gpu=machine.has_gpus)) == [{limit}]


def test_without_triton_a_gpu_runs_eager_kernels_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "explain_unavailability", lambda: "the package triton is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result, remark = check_kernels(JOB)
    assert result.stack.kernels == resolve_kernels(JOB, gpu=True).stack.kernels == "eager"
    assert remark.startswith("kernels='eager': the package triton is not installed")
    assert check_kernels(result) == (result, "")
    assert check_kernels(JOB.replace(compile=True))[1] == ""
    with pytest.raises(UserError, match="kernels='triton' cannot run: the package triton is not installed"):
        check_kernels(JOB.replace(kernels="triton"))


def test_compiled_and_eager_kernels_exclude_each_other() -> None:
    assert JOB.replace(kernels="compiled").stack.is_compiled
    with pytest.raises(ValueError, match="drop either"):
        JOB.replace(compile=True, kernels="eager")


def test_the_planner_predicts_time_and_memory_of_each_kind_of_kernels() -> None:
    """8B, 8 GPUs: eager norms pass four to twelve times over memory, and hold fp32 copies; Triton's do neither."""
    machine, layout = resolve("h100:8", local=Path()), Layout.parse("dp8 zero3 mbs1")
    steps = {}
    for kernels in ("fused", "triton", "eager", "compiled"):
        job = Job(sequence=8192, global_batch=8, kernels=kernels)
        planner = Planner(model=build_model("llama3-8b"), machine=machine, job=job)
        result = planner.estimate(layout)
        steps[kernels] = result.step_time.seconds, result.peak_bytes, planner.step(layout).memory.stages[0]
    assert steps["fused"] == steps["triton"]
    assert steps["eager"][0] > 1.05 * steps["triton"][0]
    assert steps["eager"][0] > steps["compiled"][0]
    assert steps["eager"][1] >= steps["triton"][1]
    assert steps["eager"][2].activations_bytes == steps["triton"][2].activations_bytes


def train(kernels: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of a step."""
    job, layout = JOB.replace(kernels=kernels, sequence=8, global_batch=1), Layout.parse("dp1 mbs1")
    built = build(model=MODEL, layout=layout, job=job, device=torch.device("cpu"))
    assert (built.module.head.kernels is TRITON) == (kernels == "triton")
    engine, results = Engine(built, model=MODEL, layout=layout, job=job), []
    for number in range(1):
        drawn = torch.Generator().manual_seed(number)
        done = engine.step(torch.randint(MODEL.vocab, (1, 1, 9), generator=drawn))
        engine.zero_grad()
        results.append((done.loss, done.norm))
    return results


def test_a_step_in_tritons_kernels_is_the_eager_step(forked: Fork) -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux on x86-64")
    (ours,), (theirs,) = (forked(1, train, kernels) for kernels in ("triton", "eager"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
