"""The lists of operations against closed forms and published FLOPs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model, list_names
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.flops import work
from fivefold.planner.counts.operations.attention.windows import count_attended_pairs
from fivefold.planner.counts.operations.layer import list_block, list_embedding
from fivefold.planner.counts.operations.local_shapes import Local, LocalDegrees, get_local_degrees
from fivefold.planner.counts.operations.mtp import build_head_unit
from fivefold.planner.counts.operations.op import Op
from tests.agree.drawn import Drawn, draw_cases
from tests.planner.counts.operations.test_altup import GEMMA
from tests.selection import mark_share

LLAMA = Model(name="llama", layers=2, width=128, heads=4, kv_heads=2, head_dim=32, ffn=344, vocab=1000)


def unit_lists(local: Local) -> Iterator[tuple[int, list[Op]]]:
    """Return the distinct lists of operations of the full model, each with how often it occurs."""
    yield 1, list_embedding(local)
    counts = Counts(local.model, local.job)
    for kind, times in Counter(counts.kinds).items():
        yield times, list_block(local, layer=counts.example[kind])
    yield 1, list(build_head_unit(local).ops)


def saved_bytes(model: Model, job: Job, *, sequences: int, tp: int = 1, sp: bool = True) -> int:
    """Bytes kept by one block, statistics of the norms and log-sum-exp aside."""
    sp = sp and tp > 1
    ops = list_block(Local(model, job, LocalDegrees(sequences, tp=tp, sp=sp)), layer=0)
    sizes = {"x": sequences * job.sequence * model.width * 2 // (tp if sp else 1)} | {
        n: s for op in ops for n, s in op.writes.items()
    }
    names = {name for op in ops for name in op.keeps if not name.endswith(".stat") and name != "lse"}
    return sum(sizes[name] for name in names)


def test_flash_attention_saves_no_scores() -> None:
    job = Job(sequence=64, attention="flash", precision=get_recipe("bf16"))
    B, T, D, F, H, N, K = 1, 64, 128, 344, 32, 4, 2
    expected = 2 * B * T * (D + D + (2 * N + 2 * K) * H + D + D + 3 * F)  # x, norm, q k v o, y, norm, gate up product
    assert saved_bytes(LLAMA, job, sequences=1) == expected


def test_merged_projections_have_the_same_flops_and_saved_tensors() -> None:
    """One matmul for q, k, v and one for gate, up: as many FLOPs, parameters and kept bytes, in fewer operations."""
    apart, joint = (
        list_block(Local(LLAMA, Job(sequence=64, merged_projections=item), LocalDegrees(2, tp=2, sp=True)), layer=0)
        for item in (False, True)
    )
    for field in ("flops", "causal_flops", "parameters"):
        assert sum(getattr(op, field) for op in joint) == sum(getattr(op, field) for op in apart)
    assert saved_bytes(LLAMA, Job(sequence=64), sequences=2) == saved_bytes(
        LLAMA, Job(sequence=64, merged_projections=True), sequences=2
    )
    shapes = {op.name: op.shape for op in joint if op.kind == "matmul"}
    assert shapes["attention.qkv"] == (2 * 64, (4 + 2 * 2) * 32 // 2, 128)
    assert shapes["mlp.gate_up"] == (2 * 64, 2 * 344 // 2, 128)


def test_gathered_inputs_are_saved_where_autograd_saves_them() -> None:
    """The full inputs [B·T, D] of attention and MLP instead of this rank's part of them; nothing is gathered again."""
    B, T, D = 3, 64, LLAMA.width
    again, whole = (Job(sequence=T, linears="separate", column_inputs=item) for item in ("regathered", "saved"))
    for tp in (2, 4):
        parts = saved_bytes(LLAMA, whole, sequences=B, tp=tp) - saved_bytes(LLAMA, again, sequences=B, tp=tp)
        assert parts == 2 * 2 * (B * T * D - B * T * D // tp)
    messages = [
        [(op.message.forward, op.message.backward, op.message.regather) for op in ops if op.message]
        for ops in (list_block(Local(LLAMA, job, LocalDegrees(B, tp=2, sp=True)), layer=0) for job in (again, whole))
    ]
    assert messages[0].count(("all_gather", "reduce_scatter", "all_gather")) == 2
    assert messages[1] == [(ahead, back, "") for ahead, back, _ in messages[0]]
    assert saved_bytes(LLAMA, again, sequences=B) == saved_bytes(LLAMA, whole, sequences=B)


@pytest.mark.parametrize("layers", [(1, 1), (3, 2)])
def test_each_layer_saves_its_copy_of_the_input_without_sequence_parallelism(layers: tuple[int, int]) -> None:
    """PaddlePaddle's c_identity; the copy takes the place of the norm's output, which no layer saves then."""
    B, T, D = 3, 64, LLAMA.width
    saved, copied = (
        Job(sequence=T, linears="separate", column_inputs=item, input_grad_all_reduces=layers)
        for item in ("saved", "copied")
    )
    local = LocalDegrees(B, tp=2, sp=False)
    copies = [op for op in list_block(Local(LLAMA, copied, local), layer=0) if op.name.endswith(".copies")]
    assert [op.writes[op.name] for op in copies] == [2 * B * T * D * number for number in layers]
    assert [op.moved_bytes for op in copies] == [2 * 2 * B * T * D * number for number in layers]
    bytes_more = saved_bytes(LLAMA, copied, sequences=B, tp=2, sp=False) - saved_bytes(
        LLAMA, saved, sequences=B, tp=2, sp=False
    )
    assert bytes_more == 2 * B * T * D * (sum(layers) - 2)
    assert saved_bytes(LLAMA, copied, sequences=B, tp=2) == saved_bytes(LLAMA, saved, sequences=B, tp=2)


def test_pytorchs_own_kernels_keep_more() -> None:
    """A norm keeps its input in fp32 and the normal before the weight, an activation silu(gate); compiled, neither."""
    job = Job(sequence=64)
    B, T, D, F = 1, 64, LLAMA.width, LLAMA.ffn
    fused = saved_bytes(LLAMA, job, sequences=B)
    plain = saved_bytes(LLAMA, job.replace(kernels="plain"), sequences=B)
    assert plain - fused == B * T * (2 * (4 * D + 2 * D - 2 * D) + 2 * F)
    assert saved_bytes(LLAMA, job.replace(kernels="plain", compile=True), sequences=B) == fused
    for joint in (False, True):  # in addition to gate and up, in one tensor or in two
        assert (
            saved_bytes(LLAMA, job.replace(kernels="norms", merged_projections=joint), sequences=B) - fused
            == B * T * 2 * F
        )


def test_forward_is_two_flops_per_parameter_and_token() -> None:
    model = build_model("llama3-8b")
    job = Job(sequence=8192, global_batch=1)
    done = work(model, layout=Layout(), job=job)
    norms = (2 * model.layers + 1) * model.width
    matmul = 6 * (model.parameters - model.vocab * model.width - norms) * 8192
    attention = 12 * model.layers * model.heads * model.head_dim * 8192**2
    assert done.model_flops_non_causal == matmul + attention


@pytest.mark.parametrize(
    ("name", "kind", "per_token", "sequence"),
    [
        ("llama3-8b", "model_flops_non_causal", 5.79e10, 8192),  # NeMo 24.x, full attention
        ("llama3-8b", "model_flops_causal", 5.15e10, 8192),  # Megatron-Bridge, causal
        ("llama3-70b", "model_flops_causal", 4.49e11, 8192),
        ("llama3-405b", "model_flops_causal", 2.52e12, 8192),
    ],
)
def test_published_flops_per_token(name: str, kind: str, per_token: float, sequence: int) -> None:
    job = Job(sequence=sequence, global_batch=2)
    done = work(build_model(name), layout=Layout(), job=job)
    assert getattr(done, kind) / job.tokens_per_step == pytest.approx(per_token, rel=0.005)


@given(tokens=st.integers(1, 60), window=st.integers(1, 80))
def test_attention_pairs_are_those_within_mask_and_window(tokens: int, window: int) -> None:
    model = LLAMA.replace(window=window)
    visible = sum(1 for query in range(tokens) for key in range(query + 1) if query - key < window)
    assert count_attended_pairs(model, Job(sequence=tokens), layer=0, causal=True) == visible
    assert count_attended_pairs(model, Job(sequence=tokens), layer=0, causal=False) == tokens**2


@pytest.mark.parametrize(
    ("name", "per_token"),
    [("deepseek-v3", 2.497e11), ("qwen3-30b-a3b", 2.296e10), ("qwen3-235b-a22b", 1.481e11)],
)
def test_published_flops_per_token_of_experts_and_latent_attention(name: str, per_token: float) -> None:
    """Megatron-Bridge at 4096 tokens, causal, active experts; its token rates are rounded, so to one percent.

    Its gpt-oss rows (2.717e10 at 4096, 3.08e10 at 8192) count two matrices an expert and no window: left out.
    """
    job = Job(sequence=4096, global_batch=1)
    done = work(build_model(name), layout=Layout(), job=job)
    assert done.model_flops_causal / job.tokens_per_step == pytest.approx(per_token, rel=0.01)


@pytest.mark.parametrize("name", mark_share(4, list_names()))
def test_matmul_flops_are_twice_the_active_matmul_parameters(name: str) -> None:
    model, tokens = build_model(name), 8
    job = Job(sequence=tokens, global_batch=1)
    matmuls = sum(
        times * sum(op.flops for op in ops if op.kind == "matmul")
        for times, ops in unit_lists(Local(model, job, LocalDegrees(1)))
    )
    kinds = ("column", "row", "router", "head")
    active = sum(weight.numel for weight in list_weights(model) if weight.kind in kinds and len(weight.shape) == 2)
    if model.moe:
        if model.moe.shared_gate:  # one number of each token, in the operation that multiplies by it
            active -= model.layers * model.width
        routed = sum(
            weight.numel
            for weight in list_weights(model)
            if weight.kind.startswith("expert") and len(weight.shape) == 3
        )
        active += routed * model.moe.topk // model.moe.choices
    if model.mamba:  # its core multiplies by these, between the convolution and the scan
        inner = (".mixer.select.weight", ".mixer.step.weight")
        active -= sum(weight.numel for weight in list_weights(model) if weight.name.endswith(inner))
    if model.hyper_connections:  # products in operations of their own, and biases
        active -= sum(
            weight.numel
            for weight in list_weights(model)
            if ("hyper" in weight.name and len(weight.shape) == 2) or weight.name.endswith(".position_bias")
        )
    if model.altup:  # its router chooses before and after a layer
        active += model.layers * model.altup.streams * model.width
    active += (model.tied_embeddings + model.mtp_depth) * model.vocab * model.width  # each further loss projects too
    assert matmuls == 2 * active * tokens


@pytest.mark.parametrize("name", list_names())
def test_gradients_of_every_parameter_are_counted_once(name: str) -> None:
    model = build_model(name)
    counted = sum(
        times * sum(sum(op.wgrad_numels) + op.bias_wgrad_numel for op in ops)
        for times, ops in unit_lists(Local(model, Job(sequence=8), LocalDegrees(1)))
    )
    # an indexer runs without gradients; its own loss, which would make them, is not counted
    indexers = sum(weight.numel for weight in list_weights(model) if ".indexer." in weight.name)
    # each further token predicted is a use of the embedding, and of the head: a gradient each
    again = (model.tied_embeddings + 2 * model.mtp_depth) * model.vocab * model.width
    if model.altup:  # its router and the scale before it run before and after a layer
        again += model.layers * (model.altup.streams + 1) * model.width
    assert counted - again + indexers == model.parameters


def assert_written_names_differ(case: Drawn) -> None:
    counts, part = Counts(case.model, case.job), get_local_degrees(case.layout)
    for name in ("embed", *counts.example, "head"):
        written = Counter(tensor for op in counts.unit(part, name).ops for tensor in op.writes)
        assert [tensor for tensor, times in written.items() if times > 1] == [], case


def test_each_tensor_of_a_unit_has_a_name_of_its_own() -> None:
    job = Job(sequence=8, stack="megatron-lm")
    assert_written_names_differ(Drawn(0, GEMMA.replace(attention_dropout=0.1), Layout(), job))


@pytest.mark.slow
@pytest.mark.parametrize("first", mark_share(2, [0, 50]))
def test_each_tensor_of_a_drawn_unit_has_a_name_of_its_own(first: int) -> None:
    for case in itertools.islice(draw_cases(5, first=first), 50):
        assert_written_names_differ(case)
