"""States of a unit: degrees divide them, optimizers differ as they should."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.job import Job, Optimizer, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.model.weights import Weight
from fivefold.optimizers.cost import find_cost
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.stack.catalog import build_stack

MODEL = Model(name="m", layers=8, width=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, vocab=32768)


def states_bytes(layout: Layout, job: Job, model: Model = MODEL) -> int:
    return max(
        rank.parameters_bytes + rank.gradients_bytes + rank.optimizer_bytes
        for rank in count_rank_memory(Counts(model, job), layout)
    )


@given(tp=st.sampled_from([1, 2, 4, 8, 16]), zero=st.integers(0, 3), dp=st.sampled_from([1, 4]))
def test_tp_divides_all_but_the_norms(tp: int, zero: int, dp: int) -> None:
    job = Job(sequence=128, global_batch=4)
    whole = states_bytes(Layout(dp=dp, zero=zero), job)
    part = states_bytes(Layout(dp=dp, tp=tp, zero=zero), job)
    norms = 20 * (2 * MODEL.layers + 1) * MODEL.width + 4 * 10 * MODEL.layers  # and the step counts
    assert whole / tp <= part <= whole / tp + norms


@given(pp=st.sampled_from([2, 4, 8]))
def test_pp_divides_the_layers(pp: int) -> None:
    job = Job(sequence=128, global_batch=8)
    ranks = count_rank_memory(Counts(MODEL, job), Layout(pp=pp))
    item = [rank.parameters_bytes + rank.gradients_bytes + rank.optimizer_bytes for rank in ranks]
    assert sum(item) == states_bytes(Layout(), job)
    assert item[0] > item[-2] if pp > 2 else True  # the embedding


@given(dp=st.sampled_from([2, 4, 8]), pp=st.sampled_from([1, 2]), tp=st.sampled_from([1, 2]))
def test_higher_zero_stages_never_raise_states_or_peak(dp: int, pp: int, tp: int) -> None:
    counts = Counts(MODEL, Job(sequence=4096, global_batch=16, overlap=()))
    ranks = [count_rank_memory(counts, Layout(dp=dp, tp=tp, pp=pp, zero=zero))[0] for zero in range(4)]
    states = [rank.parameters_bytes + rank.gradients_bytes + rank.optimizer_bytes for rank in ranks]
    assert states == sorted(states, reverse=True)
    peaks = [rank.peak_bytes for rank in ranks]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(("kind", "per_parameter"), [("adamw", 8), ("adamw8bit", 2 + 8 / 256), ("sgd", 4)])
def test_optimizers_keep_the_expected_moment_bytes_per_parameter(
    kind: Literal["adamw", "adamw8bit", "sgd"], per_parameter: float
) -> None:
    job = Job(sequence=16, global_batch=1, optimizer=Optimizer(kind=kind))
    result = count_rank_memory(Counts(MODEL, job), Layout())[0].optimizer_bytes
    rel = 3e-4 if kind == "adamw8bit" else 1e-4  # its vectors keep fp32
    assert result == pytest.approx(per_parameter * MODEL.parameters, rel=rel)


def test_4_bit_moments_are_those_of_torchao() -> None:
    """Bytes of the states that torchao 0.15's AdamW4bit makes with blocks of 256, measured by hand."""
    shapes = [(64, 64), (4096,), (16, 100), (50, 100), (16, 4096)]
    recipes = ["bf16-autocast", "bf16-pure", "bf16-autocast", "bf16-pure", "bf16-autocast"]
    for shape, precision, taken in zip(shapes, recipes, (4356, 4356, 12804, 20004, 67716), strict=True):
        job = Job(precision=precision, optimizer=Optimizer(kind="adamw4bit"))
        weight = Weight("w", shape, "column" if len(shape) == 2 else "norm")
        cost = find_cost("adamw4bit").state_bytes([weight], shards=1, quantised=frozenset(), job=job)
        assert cost == taken, shape


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_flat_shard_has_one_step_count(zero: int) -> None:
    """DeepSpeed updates a rank's shard of all weights as one tensor, and AdamW counts steps per tensor."""
    shard = MODEL.parameters // 2
    flat = torch.nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.AdamW([flat])
    flat.grad = torch.ones_like(flat)
    optimizer.step()
    states = sum(state.numel() * state.element_size() for state in optimizer.state[flat].values())
    job = Job(sequence=16, global_batch=4, stack=build_stack("deepspeed"))
    found = count_rank_memory(Counts(MODEL, job), Layout(dp=2, zero=zero))[0].optimizer_bytes
    assert found == states + 8 * (shard - 64)


def test_adafactor_is_far_smaller_and_muon_keeps_one_moment_of_matrices() -> None:
    def moments(kind: Literal["adamw", "muon", "adafactor"]) -> int:
        job = Job(sequence=16, global_batch=1, optimizer=Optimizer(kind=kind))
        return count_rank_memory(Counts(MODEL, job), Layout())[0].optimizer_bytes

    tables = 2 * MODEL.vocab * MODEL.width
    assert moments("muon") == pytest.approx(4 * (MODEL.parameters - tables) + 8 * tables, rel=1e-3)
    assert moments("adafactor") < moments("adamw") / 500


def test_an_offloaded_optimizer_leaves_weights_and_gradients() -> None:
    job = Job(sequence=16, global_batch=1, precision=get_recipe("bf16"), offload=("optimizer",))
    stage = count_rank_memory(Counts(build_model("llama3-8b"), job), Layout())[0]
    P = build_model("llama3-8b").parameters
    assert (stage.parameters_bytes, stage.gradients_bytes, stage.optimizer_bytes) == (2 * P, 4 * P, 0)


@pytest.mark.parametrize("zero", [2, 3])
def test_fsdp_casts_each_reduced_shard_to_the_dtype_of_the_update(zero: int) -> None:
    """``foreach_reduce`` of torch 2.13 leaves gradients in orig_dtype, here fp32, also of a reduction in bf16."""
    job = Job(stack="fsdp2", sequence=128, global_batch=16, precision="bf16-grad16")
    layout = Layout(dp=4, zero=zero)
    (rank,) = count_rank_memory(Counts(MODEL, job), layout)
    assert rank.gradients_bytes == 4 * rank.updated_numel
    (own,) = count_rank_memory(Counts(MODEL, job.replace(reduced_gradients="summed")), layout)
    assert own.gradients_bytes == 2 * own.updated_numel


def test_an_update_in_host_memory_takes_none_of_the_device() -> None:
    job = Job(stack="fsdp2", sequence=128, global_batch=16, precision="bf16-grad16", offload=("parameters",))
    for changed in (job, job.replace(reduced_gradients="summed")):
        (rank,) = count_rank_memory(Counts(MODEL, changed), Layout(dp=4, zero=3))
        assert rank.peak_cause != "optimizer"


def test_deepspeed_has_the_shards_that_it_gathers_next_to_the_masters() -> None:
    """bf16: 2 bytes of what is gathered and 4 of what is updated; fp32: 4 of each, as DeepSpeed clones it."""
    model, layout = build_model("llama3.2-1b"), Layout.parse("dp8 zero3 mbs1")
    for precision, width in (("bf16-grad16", 6), ("fp32", 8)):
        job = Job(stack="deepspeed", sequence=128, global_batch=8, precision=precision)
        (rank,) = count_rank_memory(Counts(model, job), layout)
        assert rank.parameters_bytes == pytest.approx(width * model.parameters / 8, rel=1e-3)


@pytest.mark.parametrize("text", ["dp8 zero1 mbs1", "dp8 zero2 mbs1", "dp1 zero2 mbs1"])
def test_deepspeed_updates_a_clone_of_the_weights_of_a_rank_in_fp32_too(text: str) -> None:
    """4 bytes of every weight and 4 of this rank's share; under ZeRO-0 the weights themselves are updated."""
    model, layout = build_model("llama3.2-1b"), Layout.parse(text)
    counts = Counts(model, Job(stack="deepspeed", sequence=128, global_batch=8, precision="fp32"))
    (rank,) = count_rank_memory(counts, layout)
    assert rank.parameters_bytes == pytest.approx((4 + 4 / layout.dp) * model.parameters, rel=1e-3)
    (plain,) = count_rank_memory(counts, layout.replace(zero=0))
    assert plain.parameters_bytes == pytest.approx(4 * model.parameters, rel=1e-3)
