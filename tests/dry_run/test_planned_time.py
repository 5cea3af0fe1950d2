"""The planner's seconds equal the dry run's: it prices the trainer's kernels, and predicts the same step."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from fivefold.dry_run import DryRun, dryrun
from fivefold.dry_run.record.tape import KERNEL, SCOPE
from fivefold.dry_run.time.prices import Pricer
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.model.mixers.rg_lru import RGLRU
from fivefold.model.mixers.rwkv import RWKV
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import get_group_degrees
from fivefold.planner.counts.operations.launches import LAUNCHES_PER_GROUP, PASSES
from fivefold.planner.counts.operations.launches import count_launches as count_planned_launches
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.predict import Planner
from tests.agree.dry_run.cases import OWN
from tests.selection import mark_share

CASES = {  # model, machine, layers, layout, sequence, global batch
    "experts": ("qwen3-30b-a3b", "h200:8", 8, "dp8 zero3 mbs1 ac=full", 512, 8),
    "narrow": ("llama3.2-1b", "h200:8", 16, "dp8 zero3 mbs1 ac=full", 512, 8),
    "narrow long": ("llama3.2-1b", "h100:8", 16, "dp8 mbs1", 8192, 8),
    "wide": ("llama3-8b", "h100:8", 4, "dp8 zero3 mbs1", 8192, 8),
}
# each bias is one more kernel for its gradient and one for the sum, and the keys of a dropout are many kernels
SMALL_KERNELS = {
    "biases": ("qwen2.5-0.5b", "h100:8", 4, "dp8 zero1 mbs1", 1024, 8),
    "dropout": ("gpt2", "h100:8", 4, "dp8 zero1 mbs1", 1024, 16),
    "dropout of a part of the rows": ("gpt2", "h100:8", 4, "dp4 tp2 zero1 mbs8", 1024, 64),
}
# a vocabulary of 128,167 entries makes the rows of the logits start at odd elements, whose matmuls are slow
ODD_ROWS = {"odd vocabulary": ("hunyuan-a13b", "h100:8", 2, "dp8 zero3 mbs1", 4096, 16)}
# groups of chunks of a scan are launched one after another by the host
HYBRIDS = {
    "mamba in groups": ("nemotron3-nano-30b-a3b", "h100:8", 4, "dp8 ep8 zero1 mbs1", 16384, 8),
    "mamba": ("nemotron3-nano-30b-a3b", "h100:8", 4, "dp8 ep8 zero1 mbs1", 1024, 8),
    "gated delta": ("qwen3-next-80b-a3b", "h200:8", 2, "dp8 ep8 zero1 mbs1", 1024, 8),
}
# dW of experts is computed in the all_to_all's wait; messages of data parallelism run while stages wait for each other
OVERLAPPED = {
    "experts of other ranks": ("mixtral-8x7b", "h100:8", 2, "dp8 ep8 zero1 mbs1", 4096, 16),
    "stages": ("llama3-405b", "h100:4096", 16, "dp128 tp8 pp4 zero1 mbs1", 8192, 512),
}


@cache
def plan_and_dry_run(case: str) -> tuple[Planner, Layout, DryRun]:
    name, text, layers, words, sequence, batch = (CASES | SMALL_KERNELS | OVERLAPPED | HYBRIDS | ODD_ROWS)[case]
    model, machine = build_model(name).replace(layers=layers), resolve(text, local=Path())
    job, layout = Job(sequence=sequence, global_batch=batch), Layout.parse(words)
    planner = Planner(model=model, machine=machine, job=job)
    return planner, layout, dryrun(model=model, machine=machine, layout=layout, job=job)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*mark_share(4, CASES), *mark_share(3, SMALL_KERNELS), *OVERLAPPED, *mark_share(3, HYBRIDS), *ODD_ROWS]
)
def test_a_step_is_planned_as_it_is_dry_run(case: str) -> None:
    planner, layout, dry_run = plan_and_dry_run(case)
    assert dry_run.step is not None
    assert dry_run.step.time is not None
    planned = planner.estimate(layout).step_time.seconds
    # where the host takes about as long as the GPU, the planner takes longer than each of them
    tolerance = 0.15 if case in ("experts", "mamba in groups") else 0.1
    assert planned == pytest.approx(dry_run.step.time.step_seconds, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["wide", "experts of other ranks"])
def test_the_update_takes_as_long_as_it_is_dry_run(case: str) -> None:
    """Nothing zeroes or scales sums of gradients: the first micro-batch overwrites them, and the loss is scaled."""
    planner, layout, dry_run = plan_and_dry_run(case)
    assert dry_run.step is not None
    assert dry_run.step.time is not None
    planned = planner.step(layout).time.optimizer_seconds
    assert planned == pytest.approx(dry_run.step.time.optimizer_seconds, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*mark_share(4, CASES), "biases"])
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
                apart = len(op.wgrad_numels) + (len(op.wgrad_numels) > 1)  # the sums, and the gradient of a bias
                products += times * (time.kernels * (1 + op.recomputed) + time.backward_kernels - apart)
    assert (sums, products) == (ran["Gradients.accumulate"], ran["matmul"])


SCANS = {  # of one layer, chunks of a group, and tokens of a chunk
    "mamba2": (build_model("nemotron3-nano-30b-a3b"), 64, 128),
    "gated_delta_net": (build_model("qwen3-next-80b-a3b"), 128, 64),
    "kimi_delta": (build_model("kimi-linear-48b-a3b"), 128, 64),
    "lightning": (OWN["lightning"], 64, 64),
    "mamba": (build_model("jamba-v0.1"), 32, 16),
    "rg_lru": (OWN["recurrent gemma"].replace(rg_lru=RGLRU(inner=2**16, blocks=64)), 16, 64),
    "rwkv": (OWN["rwkv"].replace(rwkv=RWKV(inner=2**16)), 16, 64),
}


@cache
def count_launches(model: Model, text: str, words: str, tokens: int) -> dict[str, int]:
    """Return the kernels that the host launches in the passes of a micro-batch, by their scope."""
    machine, layout = resolve(text, local=Path()), Layout.parse(words)
    job = Job(sequence=tokens, global_batch=layout.dp)
    tape = dryrun(model=model, machine=machine, layout=layout, job=job).tapes[0].steady
    pricer = Pricer(machine=machine, job=job, world=layout.world)
    seconds, counted, scope = pricer.price_tape(tape).kernel_launches, Counter[str](), ""
    for kind, place, _, _ in tape:
        if kind == SCOPE:
            scope = str(tape.scopes[place]).partition(" of ")[0]
        elif kind == KERNEL:
            counted[scope] += round(seconds[place] / machine.chip.launch_seconds)
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("mixer", mark_share(7, SCANS))
def test_the_kernels_of_a_group_of_chunks_are_those_that_a_dry_run_counts(mixer: str) -> None:
    model, chunks, size = SCANS[mixer]
    groups = [[chunks * size] * n for n in (4, 8)]
    ran = [count_launches(model.replace(layers=1), "h100:1", "dp1 mbs1", sum(tokens)) for tokens in groups]
    planned = [count_planned_launches(mixer, tokens, size) for tokens in groups]  # type: ignore[arg-type]
    more = tuple(ran[1][scope] - ran[0][scope] for scope in ("forward", "backward"))
    assert more == tuple(many - few for few, many in zip(*planned, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["lightning", "rg_lru", "rwkv"])
def test_the_kernels_of_a_single_group_are_those_that_a_dry_run_counts(mixer: str) -> None:
    """Its backward computes no states again first."""
    model, chunks, size = SCANS[mixer]
    machine, layout, job = resolve("h100:1", local=Path()), Layout(), Job(sequence=chunks * size, global_batch=1)
    tape = dryrun(model=model.replace(layers=1), machine=machine, layout=layout, job=job).tapes[0].steady
    seconds = Pricer(machine=machine, job=job, world=1).price_tape(tape).kernel_launches
    ran = sum(
        round(seconds[place] / machine.chip.launch_seconds)
        for kind, place, _, _ in tape
        if kind == KERNEL and "model/mixers/" in tape.sites[tape.kernels[place].site].line
    )
    assert ran == sum(count_planned_launches(mixer, [chunks * size], size))  # type: ignore[arg-type]


def test_every_mixer_that_scans_in_chunks_is_counted() -> None:
    assert SCANS.keys() == LAUNCHES_PER_GROUP.keys() == PASSES.keys()


@pytest.mark.slow
def test_a_layer_of_experts_launches_as_many_kernels_as_are_planned() -> None:
    model, words = build_model("qwen3-30b-a3b"), "dp8 ep8 zero1 mbs1"
    few, many = (count_launches(model.replace(layers=n), "h200:8", words, 1024) for n in (2, 4))
    layout = Layout.parse(words)
    job = Job(sequence=1024, global_batch=8)
    planner = Planner(model=model.replace(layers=4), machine=resolve("h200:8", local=Path()), job=job)
    (run,) = (group for group, times in planner.counts.stage_work(layout)[0] if times == 4)
    times = planner.units.kernels(get_local_degrees(layout), run)
    planned = sum(time.kernels for time in times), sum(time.backward_kernels for time in times)
    ran = tuple((many[scope] - few[scope]) / 2 for scope in ("forward", "backward"))
    assert planned == pytest.approx(ran, rel=0.06)  # 3 more each way: casts and copies
