"""Cases on which planner and dry run are compared: models of the catalog, with all or few layers, under every axis.

    llama3-8b/6 · dp2 tp4 zero3 mbs1 · 2048 x 16 · bf16 · nccl        six layers, sequences of 2048 tokens, 16 of them

Most are drawn (always the same ones), each value of each factor often; what may go together is asked of ``refuse``
and ``check_supported``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES, SCHEDULES
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.machine.catalog import resolve
from fivefold.machine.spec import Chip, Link, Machine
from fivefold.model.attention import Sliding
from fivefold.model.catalog import build_model
from fivefold.model.experts import MoE
from fivefold.model.factors import Multipliers, ResidualFactors, Temperature
from fivefold.model.indexer import Indexer
from fivefold.model.latent_attention import MLA
from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.mixers.mamba import Mamba
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.model.mixers.rg_lru import RGLRU
from fivefold.model.mixers.rwkv import RWKV
from fivefold.model.mixers.short_conv import ShortConv
from fivefold.model.multi_token_prediction import MTP
from fivefold.model.spec import Model
from fivefold.trainer.supported import check_supported

DRAWN = 300
TINY = Model(name="tiny", layers=4, width=64, heads=8, kv_heads=4, head_dim=8, ffn=176, vocab=500)
DOTS = MLA(q_rank=24, kv_rank=16, nope_dim=6, rope_dim=4, v_dim=10, key_norm=True, scaled="latents")
OWN: Mapping[str, Model] = {
    "grouped": TINY,
    "biased": TINY.replace(kv_heads=8, qkv_bias=True, out_bias=True, mlp_bias=True, head_bias=True, qk_norm="head"),
    "clamped": TINY.replace(
        activation="clamped_swiglu", moe=MoE(experts=8, topk=2, ffn=96, router_bias=True, expert_bias=True)
    ),
    "windows": TINY.replace(
        window=24,
        window_pattern=(True, False),
        rope_theta_sliding=50.0,
        rope_pattern=(True, True, False),
        attention_sinks=True,
        qk_norm="head",
        attention_dropout=0.1,
    ),
    "softcap": TINY.replace(window=20, window_pattern=(False, True), attention_softcap=5.0),
    "dropped": TINY.replace(
        kv_heads=8,
        norm="layernorm",
        mlp="plain",
        activation="gelu",
        position="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        dropout=0.1,
    ),
    "further": TINY.replace(
        mtp=MTP(), moe=MoE(experts=8, topk=2, ffn=96, dense_layers=1, score="sigmoid", balance="free")
    ),
    "ahead": TINY.replace(vocab=6000, mtp=MTP()),  # a table that outweighs all else
    "ahead, tied": TINY.replace(vocab=6000, mtp=MTP(depth=2), tied_embeddings=True),
    "odd": TINY.replace(width=52, heads=6, kv_heads=6, head_dim=10, ffn=84, vocab=251, tied_embeddings=True),
    "neox": TINY.replace(block="parallel", norm="layernorm", mlp="plain", activation="gelu", mlp_bias=True),
    "command": TINY.replace(block="parallel_shared", norm="layernorm", norm_bias=False, logit_scale=0.1),
    "gemma": TINY.replace(
        block="sandwich",
        norm_plus_one=True,
        activation="gelu_tanh",
        embedding_scale=8.0,
        logit_softcap=3.0,
        tied_embeddings=True,
    ),
    "gpt": TINY.replace(
        norm="layernorm",
        mlp="plain",
        activation="gelu_tanh",
        mlp_bias=True,
        qkv_bias=True,
        out_bias=True,
        position="learned",
        positions=300,
        tied_embeddings=True,
        kv_heads=8,
    ),
    "gpt, norms of sums": TINY.replace(
        block="post_sum", final_norm=False, norm="layernorm", mlp="plain", activation="gelu_new", dropout=0.1
    ),
    "olmo": TINY.replace(block="post", qk_norm="full"),
    "plus": TINY.replace(block="parallel_shared", norm="layernorm", norm_bias=False, qk_norm="heads"),
    "centred": TINY.replace(norm="layernorm", qk_norm="full", kv_heads=2),
    "llama4": TINY.replace(
        window=48,
        window_kind="chunks",
        window_pattern=(True, True, False),
        rope_pattern=(True, True, False),
        qk_norm="unit",
        temperature=Temperature(floor=16),
        moe=MoE(
            experts=8,
            topk=1,
            ffn=96,
            shared_experts=1,
            pattern=(False, True),
            score="sigmoid",
            normalized=False,
            router_weight_on="inputs",
        ),
    ),
    "hunyuan": TINY.replace(qk_norm="head", qk_norm_after_rope=True, temperature=Temperature(rotated=True, floor=16)),
    "nanochat": TINY.replace(
        norm_weight=False,
        embedding_norm="unit",
        qk_norm="unit",
        qk_norm_after_rope=True,
        mlp="plain",
        activation="relu2",
    ),
    "bloom": TINY.replace(
        position="alibi", heads=6, kv_heads=2, head_dim=10, norm="layernorm", embedding_norm="weighted", mlp="plain"
    ),
    "gemma4": TINY.replace(
        block="sandwich",
        qk_norm="head",
        value_norm=True,
        tied_values=True,
        window=48,
        window_pattern=(True, True, False),
        rope_theta_sliding=50.0,
        sliding=Sliding(head_dim=6, tied_values=False),
    ),
    "sub-norms": TINY.replace(sub_norm=True, activation="relu2"),
    "olmo hybrid": TINY.replace(
        block="post",
        pre_norm_mixers=True,
        qk_norm="full",
        mixers=("gated_delta_net", "attention"),
        gated_delta_net=GatedDeltaNet(
            key_heads=2, value_heads=4, key_dim=6, value_dim=10, negative_eigenvalues=True, norm_epsilon=1e-5
        ),
    ),
    "clipped": TINY.replace(norm="layernorm", norm_weight=False, qkv_clip=0.5),
    "latent, temperature": TINY.replace(
        kv_heads=8,
        temperature=Temperature(rotated=True, floor=16),
        mla=MLA(q_rank=24, kv_rank=16, nope_dim=6, rope_dim=4, v_dim=6),
    ),
    "latent, sinks": TINY.replace(
        kv_heads=8, attention_sinks=True, mla=MLA(q_rank=24, kv_rank=16, nope_dim=6, rope_dim=4, v_dim=6)
    ),
    "convolution": TINY.replace(mixers=("short_conv", "attention"), short_conv=ShortConv(bias=True)),
    "delta": TINY.replace(
        mixers=("gated_delta_net", "attention"),
        gated_delta_net=GatedDeltaNet(key_heads=2, value_heads=4, key_dim=6, value_dim=10),
        output_gate=True,
        moe=MoE(experts=8, topk=2, ffn=96, shared_experts=1, shared_gate=True, dense_layers=1),
    ),
    "mamba2": TINY.replace(
        mixers=("mamba2", "attention"), mamba2=Mamba2(heads=4, head_dim=16, state=10, groups=2, chunk=64)
    ),
    "joined": TINY.replace(
        joins_mamba2=True,
        mamba2=Mamba2(heads=4, head_dim=16, state=10, groups=4, chunk=64),
        multipliers=Multipliers(
            attention_in=0.8,
            attention_out=1.2,
            key=0.7,
            mixer_in=1.1,
            mixer_out=0.9,
            mixer_parts=(0.5, 1.0, 1.5, 2.0, 0.8),
            gate=0.7,
            down=1.3,
        ),
    ),
    "joined, without factors": TINY.replace(
        joins_mamba2=True, mamba2=Mamba2(heads=4, head_dim=16, state=10, groups=4, chunk=64, norm="none")
    ),
    "differential": TINY.replace(differential=True, window=24, window_pattern=(True, False)),
    "drawn experts": TINY.replace(
        moe=MoE(experts=8, topk=2, ffn=96, score="sparsemixer", normalized=False, shared_experts=1, dense_layers=1)
    ),
    "experts next to an mlp": TINY.replace(
        moe=MoE(experts=8, topk=2, ffn=96, balance="none", joins_mlp=True, joined_norms=True),
        block="sandwich",
        activation="gelu_tanh",
    ),
    "beam": TINY.replace(
        output_gate=True,
        gate_bias=True,
        residual_by_depth=True,
        block="sandwich",
        qk_norm="head",
        window=40,
        window_pattern=(True, False),
        rope_pattern=(True, False),
        temperature=Temperature(form="power", floor=16),
    ),
    "shortcut": TINY.replace(
        kv_heads=8,
        mla=MLA(q_rank=40, kv_rank=32, nope_dim=8, rope_dim=4, v_dim=10, scaled="queries"),
        moe=MoE(
            experts=8,
            topk=3,
            identity_experts=4,
            ffn=96,
            balance="free",
            normalized=False,
            joins_mlp=True,
            shortcut=True,
            pattern=(True, False),
        ),
    ),
    "dots": TINY.replace(
        kv_heads=8,
        mla=DOTS.replace(indexer=Indexer(heads=4, head_dim=8, topk=24, pattern=(True, False))),
        sliding_mla=DOTS.replace(q_rank=20, kv_rank=12, nope_dim=10, v_dim=6),
        sliding=Sliding(heads=4),
        window=40,
        window_pattern=(False, True),
        rope_theta_sliding=50.0,
        output_gate=True,
        gate_per_head=True,
    ),
    "axk2": TINY.replace(
        kv_heads=8,
        mla=MLA(q_rank=24, kv_rank=16, nope_dim=6, rope_dim=4, v_dim=6, gates_queries=True).replace(
            indexer=Indexer(heads=4, head_dim=8, topk=24)
        ),
        output_gate=True,
        norm_gate_rank=12,
        moe=MoE(experts=8, topk=2, ffn=96, dense_layers=1),
    ),
    "rwkv": TINY.replace(
        mixers=("rwkv",),
        rwkv=RWKV(inner=80),
        mlp="receptance",
        activation="relu2",
        norm="layernorm",
        position="none",
        embedding_norm="weighted",
    ),
    "masks from values": TINY.replace(dynamic_mask=40, residual_weights=True, qk_norm="head", qkv_bias=True),
    "gated mamba2": TINY.replace(
        mixers=("mamba2",), mamba2=Mamba2(heads=6, head_dim=10, state=32, chunk=32, conv_bias=False, norm="none")
    ),
    "mamba": TINY.replace(
        mixers=("mamba", "attention"),
        feed_forwards=(False, True),
        mamba=Mamba(inner=128, rank=4, norms="weighted"),
    ),
    "falcon mamba": TINY.replace(
        mixers=("mamba",), feed_forwards=(False,), mamba=Mamba(inner=96, state=8, rank=6, norms="unit", bias=True)
    ),
    "latent, no positions": TINY.replace(
        kv_heads=8, position="none", mla=MLA(q_rank=None, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8)
    ),
    "ling": TINY.replace(  # gates of heads on latent attention
        kv_heads=8,
        mla=MLA(q_rank=None, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=6),
        output_gate=True,
        gate_per_head=True,
    ),
    "gated latent": TINY.replace(
        kv_heads=8, mla=MLA(q_rank=24, kv_rank=16, nope_dim=6, rope_dim=4, v_dim=6), output_gate=True
    ),
    "kimi delta": TINY.replace(mixers=("kimi_delta", "attention"), kimi_delta=KimiDelta(heads=4, dim=12, rank=10)),
    "bounded kimi delta": TINY.replace(mixers=("kimi_delta",), kimi_delta=KimiDelta(heads=4, dim=12, lower_bound=-5.0)),
    "lightning": TINY.replace(
        mixers=("lightning", "attention"),
        lightning=Lightning(heads=4, dim=12, chunk=64),
        block="norm_stream",
        residual_factors=ResidualFactors(attention=(3.5, 1.0), mixer=(3.5, 1.0), feed_forward=(3.5, 0.8)),
    ),
    "recurrent gemma": TINY.replace(
        activation="gelu_tanh",
        out_bias=True,
        mlp_bias=True,
        window=24,
        mixers=("rg_lru", "attention"),
        rg_lru=RGLRU(inner=80, blocks=4),
    ),
    "nemotron": TINY.replace(
        mixers=("mamba2", "none", "attention", "none"),
        feed_forwards=(False, True),
        mamba2=Mamba2(heads=4, head_dim=16, state=10, groups=2, chunk=64),
        mlp="plain",
        activation="relu2",
        mlp_bias=True,
        moe=MoE(experts=8, topk=2, ffn=96, shared_experts=1, latent_width=40, pattern=(False, True, False, False)),
    ),
    "granite": TINY.replace(residual_scale=0.22, embedding_scale=12.0, logit_scale=0.2, tied_embeddings=True),
}

MODELS = (
    "grouped", "biased", "odd", "llama2-7b", "llama3-8b", "llama3-70b", "llama3-405b", "llama3.2-1b", "qwen3-0.6b",
    "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3",
)  # fmt: skip
RECOMPUTED = (
    "", "", "", "ac=selective", "ac=full", "ac=full/2", "ac=norm+act", "ac=qkv+up", "ac=core+mlp", "ac=rope+out",
    "ac=moe+norm", "ac=mlp",
)  # fmt: skip


class Case(NamedTuple):
    """One job under one layout. ``layers`` 0: as many as the model has."""

    name: str
    layers: int
    layout_text: str
    sequence: int
    global_batch: int
    precision: str = "bf16"
    backend: Literal["nccl", "gloo"] = "nccl"
    loss: Literal["fused", "chunked"] = "fused"
    attention: Literal["flash", "unfused"] = "flash"
    reduce: Literal["step", "micro_batch"] = "micro_batch"
    reshard: Literal["forward", "backward"] = "forward"

    def __str__(self) -> str:
        layers = f"/{self.layers}" if self.layers else ""
        job = f"{self.sequence} x {self.global_batch} · {self.precision} · {self.backend}"
        job += " · loss in chunks" * (self.loss == "chunked")
        job += " · unfused" * (self.attention == "unfused")
        job += " · reduced once a step" * (self.reduce == "step")
        job += " · resharded after the backward" * (self.reshard == "backward")
        return f"{self.name}{layers} · {self.layout_text} · {job}"

    @property
    def layout(self) -> Layout:
        return Layout.parse(self.layout_text)

    @property
    def model(self) -> Model:
        model = OWN.get(self.name) or build_model(self.name)
        if not self.layers:
            return model
        moe = model.moe and model.moe.replace(dense_layers=min(1, model.moe.dense_layers))
        return model.replace(layers=self.layers, moe=moe)

    @property
    def job(self) -> Job:
        precision = get_recipe(self.precision)
        return Job(
            sequence=self.sequence,
            global_batch=self.global_batch,
            precision=precision,
            loss=self.loss,
            attention=self.attention,
            reduce=self.reduce,
            reshard=self.reshard,
        )

    @property
    def machine(self) -> Machine:
        return machine(self.backend, self.layout.world)

    @property
    def streams(self) -> bool:
        """Return whether messages overlap with compute."""
        return self.backend == "nccl"


def machine(backend: str, ranks: int) -> Machine:
    """GPUs, or processes on one computer."""
    if backend == "nccl":
        return resolve(f"h100:{ranks}", local=Path("/nowhere"))
    chip = Chip(name="core", peak_flops={"fp32": 1e11}, memory_bytes=2**34, memory_bandwidth=1e10, source="test")
    link = Link(name="loopback", span=max(2, ranks), bandwidth=1e9, latency_seconds=1e-4, source="test")
    return Machine(name="here", ranks=ranks, ranks_per_node=ranks, backend="gloo", chip=chip, links=(link,))


WHOLE = (
    Case("llama3-8b", 0, "dp8 zero3 mbs1", 8192, 16),
    Case("llama3-8b", 0, "dp8 zero2 mbs1 ac=full", 8192, 16),
    Case("llama3-8b", 0, "dp4 tp2 zero1 mbs1 ac=selective", 8192, 8),
    Case("llama3-8b", 0, "dp2 tp2 pp2 zero1 mbs1", 8192, 8),
    Case("llama3.2-1b", 0, "dp8 zero0 mbs2", 4096, 32),
    Case("qwen3-0.6b", 0, "dp2 zero3 mbs1", 4096, 4),
    Case("llama2-7b", 0, "dp2 cp4 zero3 mbs1", 4096, 4),
    Case("llama3-70b", 0, "dp8 tp8 zero3 mbs1 ac=full", 8192, 8),
    Case("llama3-70b", 0, "dp4 tp8 pp4 v5 zero1 mbs1", 8192, 16),
    Case("llama3-405b", 18, "dp8 tp8 pp2 zero1 mbs1", 8192, 32),
    Case("llama3-405b", 0, "dp2 tp8 pp16 zero1 mbs1", 8192, 32),
    Case("qwen3-30b-a3b", 0, "dp8 ep8 zero1 mbs1 ac=full", 4096, 8),
    Case("deepseek-v3", 8, "dp16 pp2 ep16 zero1 zb1p mbs1", 4096, 64),
)


@cache
def list_cases() -> tuple[Case, ...]:
    """Without doubles, small ones first."""
    drawn: dict[Case, None] = {}
    cases = _draw_cases(random.Random(5))
    while len(drawn) < DRAWN:
        drawn[next(cases)] = None
    return (*sorted(drawn, key=lambda case: case.layout.pp), *WHOLE)


def _draw_cases(chance: random.Random) -> Iterator[Case]:
    number = 0
    while True:
        name = MODELS[number % len(MODELS)]
        for _ in range(200):
            case = _draw(name, chance)
            if case is not None and _is_legal(case):
                yield case
                break
        number += 1


def _draw(name: str, chance: random.Random) -> Case | None:
    pick = chance.choice
    moe = (OWN.get(name) or build_model(name)).moe is not None
    pp, tp, cp, dp = pick((1, 1, 2, 2, 4)), pick((1, 1, 2, 4, 8)), pick((1, 1, 1, 2, 4)), pick((1, 2, 2, 3, 4, 8))
    schedule, v = pick(SCHEDULES) if pp > 1 else "1f1b", 1
    if pp > 1 and PIPELINE_SCHEDULES[schedule].is_v_shaped:
        v = 2
    elif schedule == "interleaved":
        v = pick((2, 3))
    mbs, zero = pick((1, 1, 2, 3)), pick((0, 1, 2, 3))
    words = [f"dp{dp} tp{tp} cp{cp} pp{pp} v{v} mbs{mbs} zero{zero}", pick(RECOMPUTED)]
    words += [schedule] if pp > 1 else []
    words += [f"ep{pick((1, 2, 4, 8))} etp{pick((1, 1, 2))}"] if moe else []
    words += [pick(("", "cp=ulysses"))] if cp > 1 else []
    words += [pick(("", "", "nosp"))] if tp > 1 else []
    if zero and dp * cp > 2 and chance.random() < 0.25:
        words[0] = words[0].replace(f"zero{zero}", f"zero{zero}/{pick((2, 3, 4))}")
    try:
        layout = Layout.parse(" ".join(word for word in words if word))
    except UserError:
        return None
    fewest = max(1, layout.pipeline.min_rounds) * pp
    micro_batches = pick((fewest, fewest + 1, 2 * fewest, 3)) if schedule != "dualpipe" else pick((fewest, fewest + 2))
    layers = pp * v + pick((0, 1, 2, 3)) + (1 if pp == 1 else 0)
    sequence = pick((64, 96, 192)) if name in OWN else pick((768, 1536, 4096))
    precision = pick(("bf16", "bf16", "bf16-grad16", "fp32"))
    backend: Literal["nccl", "gloo"] = pick(("nccl", "nccl", "gloo"))
    return Case(name, layers, str(layout), sequence, dp * mbs * micro_batches, precision, backend)


def _is_legal(case: Case) -> bool:
    try:
        refuse(case.layout, model=case.model, job=case.job, machine=case.machine)
        check_supported(case.layout, case.job, model=case.model)
    except UserError:
        return False
    return case.layers <= 14
