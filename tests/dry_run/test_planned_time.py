"""The planner's seconds equal the dry run's: it prices the trainer's kernels, and predicts the same step."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from fivefold.dry_run import DryRun, dryrun
from fivefold.dry_run.record.tape import KERNEL
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.counts.counts import get_group_degrees
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.predict import Planner
from tests.selection import mark_share

CASES = {  # model, machine, layers, layout, sequence, global batch
    "experts": ("qwen3-30b-a3b", "h200:8", 8, "dp8 zero3 mbs1 ac=full", 512, 8),
    "narrow": ("llama3.2-1b", "h200:8", 16, "dp8 zero3 mbs1 ac=full", 512, 8),
    "narrow long": ("llama3.2-1b", "h100:8", 16, "dp8 mbs1", 8192, 8),
    "wide": ("llama3-8b", "h100:8", 4, "dp8 zero3 mbs1", 8192, 8),
}
# dW of experts is computed in the all_to_all's wait; messages of data parallelism run while stages wait for each other
OVERLAPPED = {
    "experts of other ranks": ("mixtral-8x7b", "h100:8", 2, "dp8 ep8 zero1 mbs1", 4096, 16),
    "stages": ("llama3-405b", "h100:4096", 16, "dp128 tp8 pp4 zero1 mbs1", 8192, 512),
}


@cache
def plan_and_dry_run(case: str) -> tuple[Planner, Layout, DryRun]:
    name, text, layers, words, sequence, batch = (CASES | OVERLAPPED)[case]
    model, machine = build_model(name).replace(layers=layers), resolve(text, local=Path())
    job, layout = Job(sequence=sequence, global_batch=batch), Layout.parse(words)
    planner = Planner(model=model, machine=machine, job=job)
    return planner, layout, dryrun(model=model, machine=machine, layout=layout, job=job)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*mark_share(4, CASES), *OVERLAPPED])
def test_a_step_is_planned_as_it_is_dry_run(case: str) -> None:
    planner, layout, dry_run = plan_and_dry_run(case)
    assert dry_run.step is not None
    assert dry_run.step.time is not None
    planned = planner.estimate(layout).step_time.seconds
    tolerance = 0.15 if case == "experts" else 0.1  # the planner has Megatron's launches around the experts
    assert planned == pytest.approx(dry_run.step.time.step_seconds, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("case", mark_share(2, CASES))
def test_planned_kernel_count_equals_executed_count(case: str) -> None:
    """Of matrix products, of all experts one, and sums that weights' gradients are added to, one each."""
    planner, layout, dry_run = plan_and_dry_run(case)
    tape, ran = dry_run.tapes[0].steady, Counter[str]()
    for kind, place, _, _ in tape:
        if kind == KERNEL:
            kernel = tape.kernels[place]
            ran["matmul" if kernel.kind == "matmul" else tape.sites[kernel.site].line.rpartition(" ")[2]] += 1
    sums = products = 0
    for run, times in planner.counts.stage_work(layout)[0]:
        for op in planner.counts.unit(get_group_degrees(get_local_degrees(layout), run), run.name).ops:
            sums += times * len(op.wgrad_numels)
            if op.kind == "matmul":
                time = planner.units.prices(layout).operation(op)
                products += times * (time.kernels * (1 + op.recomputed) + time.backward_kernels - 1)  # less the sum
    assert (sums, products) == (ran["Gradients.accumulate"], ran["matmul"])
