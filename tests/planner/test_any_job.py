"""Any job with any model, machine and layout that is legal with it: numbers that hold together, or one line.

The long form of this draw is ``python -m tests.endure.plans``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from fivefold.job import Job
from fivefold.layout.schedule import PIPELINE_SCHEDULES
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve, with_ranks
from fivefold.model.catalog import build_model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.liveness import GradientSums
from fivefold.planner.counts.memory.peak import RankMemory, count_rank_memory
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.predict import predict
from fivefold.planner.questions.changes import list_changes
from fivefold.planner.ratios import compute_ratios
from fivefold.planner.search import search
from fivefold.stack.catalog import STACKS
from fivefold.stack.spec import Stack
from tests.planner.checks import check_engine, check_pictures, check_questions, check_single_shard, check_step
from tests.planner.draws import LABELS, TABLES, case
from tests.selection import mark_share

SPLIT = tuple(name for name, pipeline_schedule in PIPELINE_SCHEDULES.items() if pipeline_schedule.splits_backward)
H100 = resolve("h100:8", local=Path("/nowhere"))


@pytest.mark.parametrize("record", TABLES, ids=lambda record: record.__name__)
def test_random_jobs_vary_every_field(record: type[BaseModel]) -> None:
    apart = {Job: {"stack"}, Stack: {*LABELS}}.get(record, set())
    assert TABLES[record].keys() == record.model_fields.keys() - apart


@pytest.mark.slow
@pytest.mark.parametrize("start", mark_share(4, range(0, 160, 40)))
def test_predictions_of_random_jobs_are_consistent(start: int) -> None:
    for seed in range(start, start + 40):
        drawn = case(seed)
        check_step(drawn)
        check_single_shard(drawn)
        check_pictures(drawn)
        check_engine(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1006))
def test_answers_about_random_jobs_are_consistent(seed: int) -> None:
    check_questions(case(seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_share(8, STACKS))
def test_every_stack_can_be_searched_for_random_jobs(name: str) -> None:
    """Over every schedule that it runs: 4 layers on 8 ranks for two of them, on 4 for the others."""
    model, ranks = build_model("llama3.2-1b").replace(layers=4), 8 if name in ("megatron-core", "torchtitan") else 4
    machine, job = with_ranks(H100, ranks), Job(sequence=1024, global_batch=32, stack=STACKS[name])
    result = search(model=model, machine=machine, job=job, top=3)
    assert result.best
    least = 100 if {"tp", "pp"} <= {*job.stack.runs.axes} else 10  # layouts that can be told to it
    assert result.tried > {8: 900, 4: least}[ranks]


@pytest.mark.parametrize("schedule", SPLIT)
def test_deferred_weight_gradients_accumulate_in_place(schedule: str) -> None:
    """``summed`` keeps for W what ``apart`` keeps for it, and has none of the gradients in addition to its sums."""
    model, layout = build_model("llama3-8b").replace(layers=8), Layout.parse(f"dp2 pp2 {schedule} zero1")

    def count_memory(**fields: object) -> list[RankMemory]:
        return count_rank_memory(
            Counts(model, Job.read({"sequence": 1024, "global_batch": 32, **fields}, origin="test")), layout
        )

    for apart, summed in zip(count_memory(), count_memory(wgrad_accumulation="fused"), strict=True):
        assert (apart.gradients_bytes, apart.activations_bytes) == (summed.gradients_bytes, summed.activations_bytes)
        states = summed.parameters_bytes + summed.gradients_bytes + summed.optimizer_bytes
        assert summed.passes_bytes > states + summed.activations_bytes


def test_deferred_wgrad_keeps_its_inputs() -> None:
    part, block = get_local_degrees(Layout.parse("tp2 pp2 zb1p")), Counts(build_model("llama3-8b"), Job()).kinds[0]
    apart, summed = (
        Counts(build_model("llama3-8b"), Job.read({"wgrad_accumulation": item}, origin="test")).profile_deferred_wgrad(
            part, block
        )
        for item in ("separate", "fused")
    )
    D, F, kv = 4096, 14336, 1024
    assert apart.deferred_bytes == summed.deferred_bytes > 0
    assert (apart.wgrad_bytes, summed.wgrad_bytes) == (2 * (2 * D * D + 2 * kv * D + 3 * F * D) // 2, 0)
    assert apart.weights_peak_bytes > summed.weights_peak_bytes == summed.deferred_bytes  # nothing is made in addition


def test_fused_accumulation_buffers_are_allocated_beforehand() -> None:
    """Under ZeRO-2 they are allocated in a unit's backward: with its last product, not with the norm before it."""
    counts = Counts(build_model("llama3-8b"), Job(wgrad_accumulation="fused"))
    part, block = get_local_degrees(Layout(dp=8, zero=2)), counts.kinds[0]
    born, none = (counts.profile(part, block, sums) for sums in (GradientSums(dense=10**9), GradientSums()))
    assert born.backward_peak_bytes == none.backward_peak_bytes + 10**9


def test_deferred_reductions_come_with_deferred_weight_gradients() -> None:
    """Added to the sums: at the end of W all of a rank's gradients, of 2 bytes; under B only those of its norms."""
    model = build_model("llama3-8b").replace(layers=8)
    layout, P = Layout.parse("pp2 zb1p"), 4 * build_model("llama3-8b").replace(layers=1).parameters
    job = Job(sequence=8, global_batch=8)
    for apart, late in zip(
        count_rank_memory(Counts(model, job.replace(wgrad_accumulation="fused")), layout),
        count_rank_memory(Counts(model, job.replace(wgrad_accumulation="deferred")), layout),
        strict=True,
    ):
        assert "weights" in late.peak_cause
        assert 0 < late.passes_bytes - apart.passes_bytes < 2 * P


def test_an_offloaded_optimizer_leaves_the_shards_that_are_gathered() -> None:
    """ZeRO-3: two bytes of each weight over the ranks, though the master copy and the moments are elsewhere."""
    model = build_model("llama3-8b")
    for zero, item in ((3, 2 / 8), (1, 2)):
        (rank,) = count_rank_memory(Counts(model, Job(offload=("optimizer",))), Layout(dp=8, zero=zero))
        assert rank.parameters_bytes == pytest.approx(item * model.parameters, rel=1e-3)
        assert rank.optimizer_bytes == 0


def test_changes_of_a_layout_with_uneven_stages_are_listed() -> None:
    layout = Layout.parse("dp4 pp2 stages=5-3")
    model = build_model("llama3-8b").replace(layers=8)
    result = list_changes(model=model, machine=H100, job=Job(sequence=512, global_batch=16), layout=layout)
    assert {item.change for item in result} >= {"zero bubble", "interleaved, twice the stages"}


def test_ratios_are_computed_for_layers_with_experts_if_there_are_any() -> None:
    """Where most have none, or all."""
    model = build_model("qwen3-30b-a3b").replace(layers=3)
    assert model.moe
    for dense, axes in ((2, True), (3, False)):
        few = model.replace(moe=model.moe.replace(dense_layers=dense))
        result = compute_ratios(few, machine=H100, job=Job(global_batch=8))
        assert (bool(result.sizing), "ep" in {axis.axis for axis in result.axes}) == (axes, axes)


def test_fused_gradient_accumulation_with_zero_bubble_fits() -> None:
    job = Job(global_batch=32, wgrad_accumulation="fused")
    step = predict(model=build_model("tiny"), machine=H100, layout=Layout.parse("dp2 pp2 zb1p"), job=job)
    assert step.memory.fits


@pytest.mark.slow
def test_random_jobs_have_every_schedule_and_stack() -> None:
    missing = {*SCHEDULES, *STACKS}
    for item in map(case, range(600)):
        missing -= {item.layout.schedule, item.job.stack.name}
        if not missing:
            break
    assert missing == set()
