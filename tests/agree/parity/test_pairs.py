"""Pairs of model features that once died in training, or were left out without a word, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.adapter import EXPERT_TARGETS, Adapter
from fivefold.layout.spec import Layout
from fivefold.model.altup import AltUp
from fivefold.model.experts import MoE
from fivefold.model.factors import Temperature
from fivefold.model.hyper_connections import HyperConnections
from fivefold.model.indexer import Indexer
from fivefold.model.mixers.compressed_attention import CompressedAttention
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.model.multi_token_prediction import MTP
from fivefold.model.per_layer_inputs import PerLayerInputs
from fivefold.model.spec import Model
from tests.agree.drawn import Drawn
from tests.agree.parity.cases import DENSE, LATENT, job_for
from tests.agree.parity.drawn import FP64_TOLERANCE, run, run_in_fp64
from tests.selection import mark_share

SMALL = DENSE.replace(layers=2)
LATENT_SINKS = SMALL.replace(name="latent, sinks", kv_heads=8, mla=LATENT, attention_sinks=True)
# Of two modules of multi-token prediction one has experts: the planner counted the balance of both.
MIXED = SMALL.replace(
    name="a pattern of experts ahead",
    layers=2,
    mtp=MTP(depth=2),
    moe=MoE(experts=4, topk=2, ffn=14, balance="free", score="sigmoid", pattern=(True, False)),
)
LENT = SMALL.replace(
    name="lent keys", layers=4, shared_kv_layers=2, shared_kv_ffn=24, window=7, window_pattern=(True, False)
)
INPUTS = LENT.replace(name="inputs of layers", per_layer_inputs=PerLayerInputs(width=6, vocab=251), value_norm=True)
ALTUP = INPUTS.replace(
    name="altup, sparse gates",
    block="sandwich",
    altup=AltUp(streams=3),
    laurel_rank=5,
    shared_kv_ffn=None,
    gate_sparsity=(0.9, 0.5, 0.0, 0.0),
)
CHOSEN = SMALL.replace(
    name="indexers",
    kv_heads=8,
    attention_sinks=True,
    mla=LATENT.replace(q_rank=22, indexer=Indexer(heads=5, head_dim=7, topk=5, pattern=(True, False))),
)
WINDOWED = CompressedAttention(heads=6, head_dim=8, rope_dim=4, q_rank=12, window=5, out_groups=3, out_rank=10)
COMPRESSED_KEYS = SMALL.replace(
    name="compressed keys",
    layers=4,
    position="none",
    mixers=("heavily_compressed_attention", "compressed_sparse_attention", "shared_key_attention"),
    shared_key_attention=WINDOWED,
    heavily_compressed_attention=WINDOWED.replace(rate=5, rope_theta=500.0),
    compressed_sparse_attention=WINDOWED.replace(
        rate=2, overlaps=True, rope_theta=500.0, indexer=Indexer(heads=2, head_dim=4, topk=3)
    ),
)
HASHED = SMALL.replace(
    name="hashed experts",
    layers=4,
    moe=MoE(experts=4, topk=2, ffn=14, hashed_layers=3, dense_layers=1, score="sqrtsoftplus", balance="free"),
)
COMPRESSED_AND_HASHED = COMPRESSED_KEYS.replace(
    name="compressed keys, streams and hashed experts",
    hyper_connections=HyperConnections(streams=2, iterations=3),
    moe=MoE(experts=4, topk=2, ffn=14, hashed_layers=2, clamp=0.02, score="sqrtsoftplus", balance="free"),
    mlp_clamp=0.02,
)
STREAMS = SMALL.replace(name="streams", hyper_connections=HyperConnections(streams=3, iterations=4))
INDEPENDENT = CHOSEN.replace(
    name="independent streams, clamped experts",
    hyper_connections=HyperConnections(streams=2, mixes=False),
    moe=MoE(experts=4, topk=2, ffn=14, shared_experts=1, clamp=0.02, score="sqrtsoftplus", dense_layers=1),
    mlp_clamp=0.02,
    output_gate=True,
)
# The factors of experts that are drawn were left out, and had no gradient.
SCALED_DRAWS = SMALL.replace(
    name="factors of drawn experts",
    block="sandwich",
    moe=MoE(
        experts=4,
        topk=2,
        ffn=14,
        balance="none",
        score="sparsemixer",
        normalized=False,
        joins_mlp=True,
        joined_norms=True,
    ),
)
LATENT_SHORTCUT = SMALL.replace(
    name="latent experts and their shortcut",
    layers=4,
    moe=MoE(experts=4, topk=2, ffn=14, shared_experts=1, latent_width=20).replace(
        joins_mlp=True, shortcut=True, pattern=(True, False)
    ),
)
CASES = (
    (CHOSEN, "tp2 mbs1 nosp"),
    (LATENT_SHORTCUT, "pp2 v2 zbv mbs1"),
    (HASHED, "tp2 pp2 ep2 mbs2 ac=router"),
    (HASHED, "dp2 cp2 ep2 zero3 mbs1"),
    (COMPRESSED_KEYS, "pp2 zb1p mbs1 ac=core+rope+norm"),
    (COMPRESSED_KEYS, "dp2 zero3 mbs1 ac=full"),
    # its latents and keys have RMSNorms in any model, and were built with biases
    (COMPRESSED_KEYS.replace(name="compressed keys, layernorm", norm="layernorm"), "dp2 mbs1"),
    (CHOSEN, "tp2 mbs2 ac=full"),
    (LENT, "dp2 tp2 zero3 mbs1 ac=full"),
    (LENT.replace(layers=6), "pp3 mbs1"),
    (CHOSEN.replace(name="indexers, six layers", layers=6), "dp2 pp2 zero1 zb1p mbs1"),
    (INPUTS, "dp2 cp2 zero2 mbs1 ac=full"),
    (ALTUP, "dp2 zero1 mbs1 ac=norm+act"),
    (ALTUP, "cp2 cp=ulysses mbs1"),
    (MIXED, "dp2 zero1"),
    (LATENT_SINKS.replace(window=7, window_pattern=(True, False), rope_theta_sliding=50.0), "dp2 tp2 zero3"),
    (SCALED_DRAWS, "dp2 zero1 mbs1 ac=full"),
    (LATENT_SINKS.replace(attention_softcap=0.5, attention_dropout=0.1), "cp2 cp=ulysses"),
    (SMALL.replace(name="odd heads", head_dim=5, position="learned", positions=64), "tp2"),
    (SMALL.replace(name="odd latent", kv_heads=8, head_dim=5, mla=LATENT.replace(nope_dim=5)), "dp2 zero1"),
    (SMALL.replace(name="no positions", position="none", temperature=Temperature(floor=4, scale=0.5)), "cp2"),
    (SMALL.replace(name="unweighted, clipped", norm="layernorm", norm_weight=False, qkv_clip=0.3), "tp2 pp2 zero1"),
    (
        SMALL.replace(name="bias by distance", position="alibi", norm="layernorm", embedding_norm="weighted"),
        "tp2 pp2 zero1",
    ),
    (SMALL.replace(name="bias by distance within windows", position="alibi", window=7), "cp2 cp=ulysses"),
    (
        SMALL.replace(
            name="normed after rope",
            qk_norm="head",
            qk_norm_after_rope=True,
            norm_weight=True,
            embedding_norm="unit",
            temperature=Temperature(rotated=True, first=0, floor=4, scale=0.5),
        ),
        "dp2 tp2 zero3",
    ),
    (
        SMALL.replace(
            name="sinusoids from position 2",
            position="sinusoidal",
            position_offset=2,
            sinusoid_endpoint=True,
            embedding_scale=3.0,
            last_out_bias=True,
        ),
        "tp2 pp2",
    ),
    (
        SMALL.replace(
            name="first layer, last layer and head of their own",
            layers=4,
            first_norm=False,
            last_out_bias=True,
            head_transform="gelu",
            head_transform_bias=True,
        ),
        "pp2 v2 zbv mbs1 ac=full",
    ),
    (
        SMALL.replace(name="matrix before the head", norm="layernorm", head_transform="gelu", head_transform_bias=True),
        "dp2 tp2 zero3",
    ),
    (
        SMALL.replace(
            name="latent, temperature",
            kv_heads=8,
            mla=LATENT,
            temperature=Temperature(rotated=True, first=0, floor=4, scale=0.5),
        ),
        "tp2 pp2",
    ),
)


@pytest.mark.parametrize(
    ("model", "text"), mark_share(16, CASES), ids=lambda value: value if isinstance(value, str) else value.name
)
def test_a_pair_of_features_equals_one_process(model: Model, text: str) -> None:
    layout = Layout.parse(text)
    verdict = run(Drawn(0, model, layout, job_for(layout)))
    assert verdict.is_equal, verdict
    assert verdict.said == ()


@pytest.mark.parametrize(
    ("model", "text"),
    mark_share(
        6,
        [
            (COMPRESSED_AND_HASHED.replace(layers=3), "dp2 ep2 zero1 mbs1"),
            (STREAMS, "tp2 mbs2 ac=full"),
            (STREAMS, "pp2 zb1p mbs1"),
            (INDEPENDENT, "dp2 ep2 zero3 mbs1"),
            (STREAMS, "dp2 cp2 zero3 mbs1"),
            (INDEPENDENT, "tp2 mbs1 ac=norm+act"),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_hyper_connections_equal_one_process(model: Model, text: str) -> None:
    """In fp64: streams that began as copies are nearly equal, so that the gradients of their weights nearly cancel."""
    layout = Layout.parse(text)
    verdict = run_in_fp64(Drawn(0, model, layout, job_for(layout)))
    assert verdict.gradient_error < FP64_TOLERANCE, verdict


@pytest.mark.parametrize("text", mark_share(2, ["tp2", "tp2 cp2"]))
def test_adapters_of_latents_drop_the_same_inputs_on_a_rank_with_some_of_the_rows(text: str) -> None:
    layout = Layout.parse(text)
    job = job_for(layout).replace(adapter=Adapter(rank=3, targets=("q_a_proj", "kv_a_proj_with_mqa"), dropout=0.25))
    verdict = run(Drawn(0, SMALL.replace(name="latent", kv_heads=8, mla=LATENT), layout, job))
    assert verdict.is_equal, verdict


@pytest.mark.parametrize("text", mark_share(2, ["tp2 ep2 zero1 mbs2 ac=full", "dp2 ep2 zero3 mbs2"]))
def test_adapters_of_routed_experts_equal_one_process(text: str) -> None:
    layout = Layout.parse(text)
    targets = ("all-linear", *EXPERT_TARGETS)
    job = job_for(layout).replace(adapter=Adapter(rank=3, targets=targets, rank_pattern={targets[1]: 5}))
    moe = MoE(experts=4, topk=2, ffn=14, balance="free", score="sigmoid", shared_experts=1)
    verdict = run(Drawn(0, SMALL.replace(name="mixture", moe=moe), layout, job))
    assert verdict.is_equal, verdict


HYBRIDS: dict[str, dict[str, Any]] = {
    "kimi delta": {"mixers": ("kimi_delta", "attention"), "kimi_delta": KimiDelta(heads=4, dim=5, rank=3)},
    "mamba2": {"mixers": ("mamba2", "attention"), "mamba2": Mamba2(heads=8, head_dim=5, state=6, groups=2, chunk=16)},
}


@pytest.mark.parametrize("name", mark_share(2, HYBRIDS))
def test_adapters_of_replicated_and_of_joint_projections_equal_one_process(name: str) -> None:
    """Without sequence parallelism too, factors that every rank holds see the gradients of its heads alone."""
    layout = Layout.parse("tp2 nosp mbs1")
    model = SMALL.replace(name="hybrid", layers=2, norm_epsilon=1e-4, **HYBRIDS[name])
    verdict = run(Drawn(0, model, layout, job_for(layout).replace(adapter=Adapter(rank=3))))
    assert verdict.is_equal, verdict
