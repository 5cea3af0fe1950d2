"""Compare the dry run with a GPU: what 25 jobs of 100 M to 8 B parameters allocate and reserve.

    python -m tests.gpu.test_dryrun --rows runs/gpu.jsonl        a markdown table; finished jobs are not run again

Each job runs in a process of its own: real build, three steps, ``torch.cuda.max_memory_*``. Jobs that the dry run
finds too large for the GPU are left out. Without a GPU only the list of jobs is checked.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch

from fivefold.dry_run.memory.reserved import Reserved, replay_allocator
from fivefold.dry_run.rank_tapes import run_rank
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.model.catalog import build_model
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.model.weights import Weight
from fivefold.planner.counts.memory.allocator import PUBLISHED
from fivefold.trainer import build as building
from fivefold.trainer.engine import Engine
from fivefold.trainer.measure.measured_step import list_live_tensors
from fivefold.trainer.measure.meter import Meter
from fivefold.trainer.process import Process
from fivefold.trainer.supported import check_supported
from fivefold.units import GIB, MIB, ceil_div
from tests.gpu.harness import LATER, is_gpu_missing, parse_options, rows_of, run_apart

STEPS = 3  # the first makes the moments, the others are steady
ALLOCATED, RESERVED = 0.01, 0.04  # mean errors
MIN_CASES = 20
DRAWN = 2**20  # numbers that are repeated in all weights: memory does not depend on them, and 8 B take minutes to draw

SMALL = Model(name="llama-130m", layers=12, width=768, heads=12, kv_heads=12, head_dim=64, ffn=2048, vocab=32_000)
GROUPED = SMALL.replace(name="gqa-340m", layers=24, width=1024, heads=16, kv_heads=4, ffn=2816)
LATENT = GROUPED.replace(
    name="mla-340m", kv_heads=16, mla=MLA(q_rank=None, kv_rank=256, nope_dim=64, rope_dim=32, v_dim=64)
)
OWN = {
    model.name: model
    for model in (
        SMALL,
        GROUPED,
        LATENT,
        GROUPED.replace(name="moe-930m", layers=12, moe=MoE(experts=16, topk=2, ffn=1408)),
        GROUPED.replace(
            name="moe-2b",
            layers=15,
            width=2048,
            head_dim=128,
            ffn=5632,
            moe=MoE(experts=32, topk=4, ffn=768, dense_layers=1, shared_experts=1),
        ),
        build_model("deepseek-v2-lite").replace(name="mla-moe-3b", layers=6),
    )
}


class Case(NamedTuple):
    """One job on one GPU."""

    name: str
    layout: str
    sequence: int
    global_batch: int
    precision: str = "bf16"
    expandable: bool = False

    def __str__(self) -> str:
        words = (self.name, self.layout, f"{self.sequence} x {self.global_batch}", self.precision)
        return " · ".join((*words, "expandable") if self.expandable else words)

    @property
    def model(self) -> Model:
        return OWN.get(self.name) or build_model(self.name)

    @property
    def job(self) -> Job:
        return Job(
            sequence=self.sequence,
            global_batch=self.global_batch,
            precision=get_recipe(self.precision),
            steps=STEPS,
            expandable_segments=self.expandable,
        )


CASES = (
    Case("llama-130m", "mbs8 ac=none", 1024, 8),
    Case("llama-130m", "mbs2 ac=full", 8192, 4),
    Case("llama-130m", "mbs4 ac=none", 4096, 16, "bf16-grad16"),
    Case("gqa-340m", "mbs4 ac=none", 2048, 8),
    Case("gqa-340m", "mbs4 ac=selective", 4096, 4),
    Case("gqa-340m", "mbs2 ac=full", 8192, 4, "bf16-grad16"),
    Case("mla-340m", "mbs4 ac=none", 2048, 4),
    Case("mla-340m", "mbs2 ac=full", 4096, 4),
    Case("qwen3-0.6b", "mbs2 ac=none", 4096, 4),
    Case("qwen3-0.6b", "mbs1 ac=full", 8192, 2, expandable=True),
    Case("moe-930m", "mbs4 ac=none", 2048, 8),
    Case("moe-930m", "mbs2 ac=full", 4096, 4),
    Case("moe-930m", "mbs4 ac=selective", 1024, 4, "bf16-grad16"),
    Case("llama3.2-1b", "mbs2 ac=none", 2048, 4),
    Case("llama3.2-1b", "mbs1 ac=selective", 8192, 2),
    Case("llama3.2-1b", "mbs4 ac=full", 4096, 8, "bf16-grad16"),
    Case("qwen3-1.7b", "mbs1 ac=selective", 4096, 2),
    Case("moe-2b", "mbs2 ac=none", 2048, 4),
    Case("moe-2b", "mbs1 ac=full", 8192, 2, expandable=True),
    Case("mla-moe-3b", "mbs2 ac=selective", 2048, 2),
    Case("llama3.2-3b", "mbs1 ac=none", 4096, 2),
    Case("llama3.2-3b", "mbs1 ac=full", 8192, 2, "bf16-grad16"),
    Case("qwen3-4b", "mbs1 ac=selective", 4096, 2),
    Case("llama2-7b", "mbs1 ac=full", 4096, 2),
    Case("llama3-8b", "mbs1 ac=full", 1024, 1),
)


TINY = (Case("nano", "mbs2 ac=none", 512, 4),)  # --small
ROOM = 4 * GIB  # of a CPU, where it plays the GPU


class Row(NamedTuple):
    """One case, dry-run and measured."""

    case: str
    parameters: int
    allocated_bytes: int
    dry_run_allocated_bytes: int
    reserved_bytes: int
    dry_run_reserved_bytes: int
    cause: str  # of the dry run's last segment

    @property
    def allocated_error(self) -> float:
        return self.dry_run_allocated_bytes / self.allocated_bytes - 1

    @property
    def reserved_error(self) -> float:
        return self.dry_run_reserved_bytes / self.reserved_bytes - 1


def run_case(case: Case, *, workspace_bytes: int = 0, capacity_bytes: int | None = None, gpu: bool = True) -> Reserved:
    """What PyTorch's allocator would hold. Two threads multiply, forward and backward, each with a workspace."""
    tapes = run_rank(model=case.model, layout=Layout.parse(case.layout), job=case.job, rank=0, streams=gpu)
    step_tapes = [tapes.first, *[tapes.steady] * (STEPS - 1)]
    workspaces = [workspace_bytes] * 2 if workspace_bytes else []
    return replay_allocator(
        step_tapes, expandable=case.expandable, capacity_bytes=capacity_bytes, workspaces=workspaces
    )


def workspace_bytes() -> int:
    """Of cuBLAS, which PyTorch's allocator gives it: pytorch/pytorch, aten/src/ATen/cuda/CublasHandlePool.cpp."""
    return 32 * MIB if torch.cuda.get_device_capability() == (9, 0) else 8 * MIB + 128 * 1024


def repeat_weight(weight: Weight, *, model: Model, seed: int) -> torch.Tensor:
    """Weights that are drawn at once; in the place of ``fivefold.trainer.build.draw_initial_weight``."""
    if weight.kind == "norm":
        return torch.ones(weight.shape)
    drawn = torch.randn(DRAWN, generator=torch.Generator().manual_seed(seed)) * 0.02
    return drawn.repeat(ceil_div(weight.numel, DRAWN))[: weight.numel].view(weight.shape)


def measure(case: Case) -> dict[str, int]:
    """In this process, which must be a fresh one: build, train, ask the allocator; on CPU our own meter of it."""
    building.draw_initial_weight = repeat_weight
    layout, job = Layout.parse(case.layout), case.job
    device = Process().start()
    built = building.build(model=case.model, layout=layout, job=job, device=device)
    engine = Engine(built, model=case.model, layout=layout, job=job)
    shape = (layout.micro_batches(job), layout.mbs, job.sequence + 1)
    for step in range(STEPS):
        meter = Meter(list_live_tensors(built), axis=built.ranks.axis) if device.type == "cpu" else None
        engine.meter = meter
        with meter or nullcontext():
            engine.step(torch.randint(case.model.vocab, shape, generator=torch.Generator().manual_seed(step)))
        engine.zero_grad()
    if meter is not None:
        Process.end()
        return {"allocated": meter.peak_bytes, "reserved": meter.peak_bytes}
    torch.cuda.synchronize()
    result = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    Process.end()
    return result


def compare(case: Case, *, small: bool = False) -> Row | None:
    """Dry-run here and run in a process of its own; None if it does not fit."""
    room = ROOM if small else torch.cuda.get_device_properties(0).total_memory - PUBLISHED.context_bytes
    workspace = 0 if small else workspace_bytes()
    model = run_case(case, workspace_bytes=workspace, capacity_bytes=room, gpu=not small)
    if model.shortage is not None:
        print(f"{case}: left out, {model.shortage}", file=sys.stderr)
        return None
    settings = f"expandable_segments:{case.expandable}"
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    place = (TINY if small else CASES).index(case)
    result = run_apart("tests.gpu.test_dryrun", place, env=env, small=small)
    return Row(
        str(case),
        case.model.parameters,
        result["allocated"],
        model.allocated_bytes,
        result["reserved"],
        model.reserved_bytes,
        str(model.site),
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table, errors last."""
    head = "| job | parameters | allocated, GiB | dry-run | error | reserved, GiB | dry-run | error |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        numbers = (row.allocated_bytes, row.dry_run_allocated_bytes, row.reserved_bytes, row.dry_run_reserved_bytes)
        first, second, third, fourth = (f"{number / GIB:.3f}" for number in numbers)
        lines.append(
            f"| {row.case} | {row.parameters / 1e9:.2f} B | {first} | {second} | {row.allocated_error:+.2%} "
            f"| {third} | {fourth} | {row.reserved_error:+.2%} |"
        )
    allocated, total = mean_errors(rows)
    worst = [
        max((abs(error) for error in errors), default=0.0)
        for errors in ([row.allocated_error for row in rows], [row.reserved_error for row in rows])
    ]
    lines += [
        "",
        f"{len(rows)} jobs, mean error (worst): allocated {allocated:.2%} ({worst[0]:.2%}), "
        f"reserved {total:.2%} ({worst[1]:.2%})",
    ]
    return "\n".join(lines)


def mean_errors(rows: Sequence[Row]) -> tuple[float, float]:
    """Of allocated and of reserved."""
    count = max(1, len(rows))
    return (
        sum(abs(row.allocated_error) for row in rows) / count,
        sum(abs(row.reserved_error) for row in rows) / count,
    )


# Tests


def test_the_gpu_jobs_are_enough_different_and_valid() -> None:
    assert len(CASES) >= MIN_CASES
    assert len({str(case) for case in CASES}) == len(CASES)
    for case in CASES:
        layout = Layout.parse(case.layout)
        refuse(layout, model=case.model, job=case.job)
        check_supported(layout, case.job, model=case.model)
        assert layout.world == 1
        assert 1e8 <= case.model.parameters <= 8.1e9
        assert 1024 <= case.sequence <= 8192
    assert {Layout.parse(case.layout).ac for case in CASES} == {"none", "selective", "full"}
    assert {case.precision for case in CASES} == {"bf16", "bf16-grad16"}
    assert any(case.model.moe for case in CASES)
    assert any(case.model.mla for case in CASES)


@pytest.mark.slow
def test_workspaces_and_rounding_are_added() -> None:
    case = Case("nano", "mbs2 ac=none", 512, 4)
    bare, held = run_case(case), run_case(case, workspace_bytes=32 * MIB)
    assert held.allocated_bytes - bare.allocated_bytes == 64 * MIB
    assert bare.allocated_bytes >= bare.requested_bytes > 18 * case.model.parameters  # 2 + 4 + 4 + 8 bytes


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_on_a_gpu_equals_the_dry_run() -> None:
    rows = [row for case in CASES if (row := compare(case)) is not None]
    table = markdown(rows)
    allocated, total = mean_errors(rows)
    assert rows, "no job fits"
    assert allocated <= ALLOCATED, table
    assert total <= RESERVED, table


def main() -> int:
    """Print the table of all cases, or of those whose names hold all of the words."""
    options = parse_options("the dry run's memory against that of a GPU")
    if is_gpu_missing(small=options.small):
        return 2
    cases = TINY if options.small else CASES
    if options.measure is not None:
        print(json.dumps(measure(cases[options.measure])))
        return 0
    rows = rows_of(
        cases,
        options,
        row=Row,
        compare=partial(compare, small=options.small),
        tell=lambda row: f"allocated {row.allocated_error:+.2%}, reserved {row.reserved_error:+.2%}",
    )
    print(markdown(rows))
    allocated, total = mean_errors(rows)
    if options.left:
        return LATER
    return 0 if options.small or (rows and allocated <= ALLOCATED and total <= RESERVED) else 1


if __name__ == "__main__":
    sys.exit(main())
