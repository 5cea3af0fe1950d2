"""The lists of operations against closed forms and published FLOPs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.job import Job, recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import named
from fivefold.model.spec import Model
from fivefold.plan.count.layer import attended_pairs, block
from fivefold.plan.count.work import work
from fivefold.record import Mistake

GPT = Model(
    name="gpt", layers=2, width=128, heads=4, kv_heads=4, head_dim=32, ffn=512, vocab=1000, norm="layernorm",
    mlp="plain", activation="gelu", position="learned", dropout=0.1, qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
LLAMA = Model(name="llama", layers=2, width=128, heads=4, kv_heads=2, head_dim=32, ffn=344, vocab=1000)


def kept(model: Model, job: Job, *, sequences: int) -> int:
    """Bytes kept by one block, statistics of the norms and log-sum-exp aside."""
    ops = block(model, job, layer=0, sequences=sequences)
    sizes = {"x": sequences * job.sequence * model.width * 2} | {n: s for op in ops for n, s in op.writes.items()}
    names = {name for op in ops for name in op.keeps if not name.endswith(".stat") and name != "lse"}
    return sum(sizes[name] for name in names)


@given(sequences=st.integers(1, 4), sequence=st.integers(1, 64))
def test_a_gpt_block_keeps_what_korthikanti_counts(sequences: int, sequence: int) -> None:
    job = Job(sequence=sequence, attention="unfused", precision=recipe("bf16"))
    B, T, D, N = sequences, sequence, GPT.width, GPT.heads
    assert kept(GPT, job, sequences=sequences) == 34 * B * T * D + 5 * N * T * T * B


def test_flash_attention_keeps_no_squares() -> None:
    job = Job(sequence=64, attention="flash", precision=recipe("bf16"))
    dropped = GPT.replace(dropout=0.0)
    assert kept(dropped, job, sequences=1) == (34 - 2 + 0) * 64 * 128  # without the two masks on the residual
    B, T, D, F, H, N, K = 1, 64, 128, 344, 32, 4, 2
    expected = 2 * B * T * (D + D + (2 * N + 2 * K) * H + D + D + 3 * F)  # x, norm, q k v o, y, norm, gate up product
    assert kept(LLAMA, job, sequences=1) == expected


def test_forward_is_two_flops_per_parameter_and_token() -> None:
    model = named("llama3-8b")
    job = Job(sequence=8192, global_batch=1)
    done = work(model, layout=Layout(), job=job)
    norms = (2 * model.layers + 1) * model.width
    matmul = 6 * (model.parameters - model.vocab * model.width - norms) * 8192
    attention = 12 * model.layers * model.heads * model.head_dim * 8192**2
    assert done.model_flops_full == matmul + attention


@pytest.mark.parametrize(
    ("name", "kind", "per_token", "sequence"),
    [
        ("llama3-8b", "model_flops_full", 5.79e10, 8192),  # NeMo 24.x, full attention
        ("llama3-8b", "model_flops_causal", 5.15e10, 8192),  # Megatron-Bridge, causal
        ("llama3-70b", "model_flops_causal", 4.49e11, 8192),
        ("llama3-405b", "model_flops_causal", 2.52e12, 8192),
    ],
)
def test_published_flops_per_token(name: str, kind: str, per_token: float, sequence: int) -> None:
    job = Job(sequence=sequence, global_batch=2)
    done = work(named(name), layout=Layout(), job=job)
    assert getattr(done, kind) / job.tokens_per_step == pytest.approx(per_token, rel=0.005)


@given(tokens=st.integers(1, 60), window=st.integers(1, 80))
def test_pairs_are_those_that_mask_and_window_let_through(tokens: int, window: int) -> None:
    model = LLAMA.replace(window=window)
    visible = sum(1 for query in range(tokens) for key in range(query + 1) if query - key < window)
    assert attended_pairs(model, Job(sequence=tokens), layer=0, causal=True) == visible
    assert attended_pairs(model, Job(sequence=tokens), layer=0, causal=False) == tokens**2


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "gpt-neox-20b"])
def test_what_cannot_be_counted_is_refused_by_name(name: str) -> None:
    with pytest.raises(Mistake, match="cannot count"):
        work(named(name), layout=Layout(), job=Job())
