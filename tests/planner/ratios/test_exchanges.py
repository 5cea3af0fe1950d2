from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.job import RECIPES, Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.machine.spec import Chip, Link, Machine
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.flops import work
from fivefold.planner.counts.operations.layer import Kind
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.ratios import compute_ratios
from fivefold.planner.ratios.exchanges import (
    build_context_exchange,
    build_expert_exchange,
    build_expert_layer_exchange,
    build_last_gradient_exchange,
    build_pipeline_exchange,
    build_step_gradient_exchange,
    build_tensor_exchange,
    build_zero3_backward_exchange,
    build_zero3_forward_exchange,
    find_most_common_layer,
    get_gathered_width,
)

# The worked example of the notes: D = 32768 on a chip of 4 PFLOP/s.
WIDE = Model(
    name="wide", layers=1, width=32_768, heads=256, kv_heads=256, head_dim=128, ffn=98_304, vocab=256, norm="rmsnorm"
)
FP8 = Job(sequence=8192, precision=RECIPES["fp8-deepseek"])
FAST = Machine(
    name="fast",
    chip=Chip(name="fast", peak_flops={"fp8": 4e15}, memory_bytes=1, memory_bandwidth=1, source="test"),
    ranks=64,
    ranks_per_node=4,
    links=(
        Link(name="near", span=4, bandwidth=2e12, latency_seconds=0, source="test"),
        Link(name="far", span=64, bandwidth=1e12, latency_seconds=0, source="test"),
    ),
)


def test_flops_per_byte_of_tensor_parallelism_equal_those_by_hand() -> None:
    result = build_tensor_exchange(WIDE, FP8, Layout(tp=16))
    assert result.flops_per_byte == pytest.approx(32_768 / 15, rel=1e-12)  # 2184.5, printed as 2,185
    assert 4e15 / result.flops_per_byte == pytest.approx(1.83e12, rel=1e-3)  # bytes/s, printed as 1.8 TB/s
    assert build_tensor_exchange(WIDE, Job(precision=RECIPES["fp32"]), Layout(tp=16)).flops_per_byte == pytest.approx(
        32_768 / 30
    )


def test_flops_per_byte_of_2d_tensor_parallelism_equal_those_by_hand() -> None:
    result = build_tensor_exchange(WIDE, FP8, Layout(tp=16, tp_inner=4))
    assert result.flops_per_byte == pytest.approx(2 * 32_768 / (3 + 2 * 3), rel=1e-12)  # 7282
    in_16_bits = build_tensor_exchange(WIDE, Job(), Layout(tp=16, tp_inner=4))
    assert in_16_bits.flops_per_byte == pytest.approx(2 * 32_768 / (2 * 3 + 2 * 3), rel=1e-12)


def test_each_dimension_of_2d_tensor_parallelism_uses_its_own_link() -> None:
    """4x4: three bytes of nine gathered within four ranks at 2 TB/s, six scattered over sixteen at 1 TB/s."""
    result = build_tensor_exchange(WIDE, FP8, Layout(tp=16, tp_inner=4))
    assert result.balance(FAST) == pytest.approx(4e15 * (3 / 2e12 + 6 / 1e12) / 9, rel=1e-12)


@pytest.mark.parametrize("degrees", [{"dp": 8}, {"dp": 2, "cp": 4}, {"dp": 8, "tp": 2}, {"dp": 4, "mbs": 3}])
def test_flops_per_byte_of_zero3_gathers_follow_the_formula(degrees: dict[str, int]) -> None:
    """msl·(2·P + 2·T·D)/(P·w), times n/(n−1) on a ring of n; the norms, which do no products, are 1 in 7000."""
    model, job = build_model("llama2-7b"), Job(sequence=4096, global_batch=192)
    layout = Layout(zero=3, **degrees)
    n, msl = layout.dp * layout.cp, layout.mbs * job.sequence / layout.cp
    weights = 4 * 4096**2 + 3 * 4096 * 11_008
    formula = msl * (2 * weights + 2 * job.sequence * 4096) / (weights * 2) * n / (n - 1)
    assert build_zero3_forward_exchange(model, job, layout).flops_per_byte == pytest.approx(formula, rel=3e-4)
    # Twice the FLOPs, three times the bytes: 2 gathered and 4 scattered.
    assert build_zero3_backward_exchange(model, job, layout).flops_per_byte == pytest.approx(formula * 2 / 3, rel=3e-4)
    narrow = job.replace(precision=RECIPES["fp8-wire"])  # half gathered, and as much scattered
    assert build_zero3_forward_exchange(model, narrow, layout).flops_per_byte == pytest.approx(formula * 2, rel=3e-4)
    assert build_zero3_backward_exchange(model, narrow, layout).flops_per_byte == pytest.approx(
        formula * 2 * 2 / 5, rel=3e-4
    )


def test_zero3_gathers_experts_among_ranks_with_the_same_experts() -> None:
    """16 ranks, ep8: a rank gathers half of an eighth of the experts, and 15/16 of all the rest."""
    model, job = build_model("qwen3-30b-a3b"), Job(sequence=4096, global_batch=64)
    layer = find_most_common_layer(model, job)
    dense, experts = build_zero3_forward_exchange(model, job, Layout(dp=16, ep=8, zero=3)).transfers
    assert dense.bytes == pytest.approx(layer.dense_weights * 2 * 15 / 16)
    assert experts.bytes == pytest.approx(layer.expert_weights / 8 * 2 * 1 / 2)
    # With dp nearest, replicas of the dense weights are neighbours; those of the experts lie across tp.
    layout = Layout(dp=4, tp=4, ep=2, zero=3, order=("dp", "tp", "cp", "pp"))
    assert [leg.span for leg in build_zero3_forward_exchange(model, job, layout).transfers] == [4, 16]


def test_flops_per_byte_of_the_last_gradient_reduction_follow_the_formula() -> None:
    """4·msl and 6·tokens per rank over the ring's bytes per parameter, where attention is small."""
    model, job = build_model("llama2-7b"), Job(sequence=64, global_batch=512)
    for zero, last, step in ((0, 8, 8), (1, 4, 6), (2, 4, 6)):
        layout, ring = Layout(dp=16, zero=zero, mbs=2), 15 / 16
        result = build_last_gradient_exchange(model, job, layout).flops_per_byte
        assert result == pytest.approx(4 * 2 * 64 / (last * ring), rel=2e-3)
        tokens_per_rank = job.tokens_per_step / 16
        result = build_step_gradient_exchange(model, job, layout).flops_per_byte
        assert result == pytest.approx(6 * tokens_per_rank / (step * ring), rel=2e-3)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_flops_per_byte_of_ring_attention_follow_the_formula(tp: int) -> None:
    """(N/K)·(T/cp)/w: fewer key heads than queries make context parallelism cheap, and tp does not matter."""
    job = Job(sequence=131_072)
    result = build_context_exchange(build_model("llama3-70b"), job, Layout(cp=16, tp=tp))
    assert result.flops_per_byte == pytest.approx(64 / 8 * 131_072 / 16 / 2, rel=1e-5)
    assert result.dtype == "bf16"
    if tp == 1:  # beyond kv_heads every rank holds a copy of one, and the advantage wears off
        result = build_context_exchange(build_model("llama3-70b"), job, Layout(cp=16, tp=32))
        assert result.flops_per_byte == pytest.approx(64 / 32 * 131_072 / 16 / 2, rel=1e-5)


def test_flops_per_byte_of_ulysses_follow_the_formula() -> None:
    """T·N/(w·(N+K))·n/(n−1) causal: independent of the degree but for the ring's share."""
    result = build_context_exchange(build_model("llama3-70b"), Job(sequence=131_072), Layout(cp=8, cp_kind="ulysses"))
    assert result.flops_per_byte == pytest.approx(131_072 * 64 / (2 * 72) * 8 / 7, rel=1e-5)


@pytest.mark.parametrize(("precision", "row"), [("bf16", 4), ("fp8-tiles", 4), ("fp8-deepseek", 3 + 4 / 128)])
def test_flops_per_byte_of_expert_parallelism_do_not_depend_on_topk(precision: str, row: float) -> None:
    model, job = build_model("deepseek-v3"), Job(precision=RECIPES[precision])
    for topk in (1, 8, 32):
        assert model.moe is not None
        sparse = model.replace(moe=model.moe.replace(topk=topk))
        result = build_expert_exchange(sparse, job, Layout(dp=64, ep=64))
        assert result.flops_per_byte == pytest.approx(6 * 2048 / row * 64 / 63, rel=1e-9)
    few, many = (model.replace(moe=model.moe.replace(topk=topk)) for topk in (4, 8))
    layout = Layout(dp=64, ep=64)
    assert (
        build_expert_layer_exchange(few, job, layout).flops_per_byte
        > build_expert_layer_exchange(many, job, layout).flops_per_byte
    )


def test_flops_per_byte_between_pipeline_stages_follow_the_formula() -> None:
    model, job = build_model("llama2-7b"), Job(sequence=4096)
    weights = 4 * 4096**2 + 3 * 4096 * 11_008
    for layout in (Layout(pp=4), Layout(pp=4, tp=8), Layout(pp=4, cp=2, mbs=4)):
        formula = 32 / 4 * (2 * weights + 2 * 4096 * 4096) / (4096 * 2)
        assert build_pipeline_exchange(model, job, layout).flops_per_byte == pytest.approx(formula, rel=1e-4)
    assert build_pipeline_exchange(model, job, Layout(pp=4, tp=8, sp=False)).flops_per_byte == pytest.approx(
        formula / 8, rel=1e-4
    )


@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "qwen3-30b-a3b", "deepseek-v3", "mistral-7b"])
def test_a_layer_has_the_flops_that_the_planner_counts(name: str, attention: str) -> None:
    model, job = build_model(name), Job(sequence=8192, global_batch=1, attention=attention)
    if model.moe:
        model = model.replace(moe=model.moe.replace(dense_layers=0))
    done = work(model, layout=Layout(), job=job)
    counted = done.model_flops_causal if attention == "flash" else done.model_flops_non_causal
    head = 2 * job.sequence * model.vocab * model.width
    assert 3 * (model.layers * find_most_common_layer(model, job).flops + head) == counted


def test_a_layer_has_the_weights_of_the_model() -> None:
    model = build_model("qwen3-30b-a3b")
    layer = find_most_common_layer(model, Job())
    ends = 2 * model.vocab * model.width + model.width
    assert model.layers * (layer.dense_weights + layer.expert_weights) + ends == model.parameters


@given(
    dp=st.sampled_from([2, 4, 16]), tp=st.sampled_from([1, 2, 8]), cp=st.sampled_from([1, 2, 4]), mbs=st.integers(1, 4)
)
def test_more_tokens_per_rank_raise_the_flops_per_byte(dp: int, tp: int, cp: int, mbs: int) -> None:
    model = build_model("llama3-8b")
    layout = Layout(dp=dp, tp=tp, cp=cp, zero=3, mbs=mbs)
    for exchange in (build_zero3_forward_exchange, build_zero3_backward_exchange, build_last_gradient_exchange):
        short = exchange(model, Job(sequence=4096), layout).flops_per_byte
        assert exchange(model, Job(sequence=8192), layout).flops_per_byte > 2 * short
        wider = exchange(model, Job(sequence=4096), layout.replace(mbs=2 * mbs)).flops_per_byte
        assert wider == pytest.approx(2 * short, rel=1e-12)


@pytest.mark.parametrize("name", ["bf16", "fp32", "fp8", "fp8-rowwise", "fp8-tiles", "mxfp8", "nvfp4", "fp8-deepseek"])
@pytest.mark.parametrize("stack", ["fivefold", "megatron-core"])
def test_ratios_and_predict_gather_in_the_same_precision(name: str, stack: str) -> None:
    """An element of a column-parallel layer's input in the first forward; what scales it is less than 7 % of it."""
    model, job = build_model("llama3-8b"), Job(sequence=4096, global_batch=8, precision=RECIPES[name], stack=stack)  # type: ignore[arg-type]
    ops = Counts(model, job).unit(get_local_degrees(Layout(tp=4)), Kind(slides=False, moe=False)).ops
    gathers = [op.message for op in ops if op.message and op.message.forward == "all_gather"]
    assert len(gathers) == 2
    for message in gathers:
        width = message.payload / (4096 * model.width)
        wide = get_gathered_width(job)
        assert wide <= width <= wide * (1.07 if stack != "fivefold" else 1) * (1.07 if name == "nvfp4" else 1)
        assert sum(size for _, size in message.scales) <= 0.13 * message.payload


@pytest.mark.parametrize("axis", ["zero3", "dp"])
@pytest.mark.parametrize("zero", [0, 1])
def test_the_printed_formulas_are_those_of_the_figures(axis: str, zero: int) -> None:
    """Without attention, whose causal half the formulas leave out; ``n/(n−1)`` was missing in them."""
    model, job = build_model("llama3-8b"), Job(sequence=512, global_batch=64)
    machine = resolve("h100:8", local=Path("/nowhere"))
    layout = Layout.parse(f"dp8 zero{zero} mbs1")
    layer = find_most_common_layer(model, job)
    g, w = job.precision.summed_bytes, job.precision.weights_bytes
    letters = {"P": layer.dense_weights, "T": 512, "D": model.width, "msl": 512, "w": w, "g": g}
    letters |= {"r": g if zero else 2 * g, "s": g + w if zero else 2 * g}
    rows = [row for row in compute_ratios(model, machine=machine, job=job, layout=layout).axes if row.axis == axis]
    assert len(rows) == 2
    for row in rows:
        for degree in row.degrees:
            n = int(re.findall(r"\d+", degree.token)[-1])
            formula = row.formula.replace("·", "*").replace("−", "-")
            formula = re.sub(r"(?<=\d)(?=[PTDmg(])", "*", formula)
            value = eval(formula, {}, letters | {"n": n, "m": 64 // n})
            assert degree.flops_per_byte == pytest.approx(value, rel=0.02)
