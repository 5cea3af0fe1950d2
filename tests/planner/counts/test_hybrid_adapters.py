"""Adapters of models with token mixers other than attention: their parameters, what has a backward, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fivefold.adapter import Adapter
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons
from fivefold.model.catalog import build_model
from fivefold.model.huggingface.read import from_config
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.spec import Model
from fivefold.model.weights import count_adapters, list_targets
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.flops import work
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.planner.counts.operations.layer import Kind
from tests.model.judged import silence_transformers

SIZES: dict[str, Any] = {
    "vocab_size": 251, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": SIZES | DELTA,
    "olmo_hybrid": SIZES | DELTA | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bamba": SIZES | MAMBA | {"attn_layer_indices": [1, 3]},
    "falcon_h1": SIZES | MAMBA | {"mamba_d_ssm": 128},
    "nemotron_h": SIZES
    | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
    | {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
    "lfm2": SIZES | {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
}
RANK = 3
QWEN = build_model("qwen3.5-9b")


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("targets", ["all-linear", "out_proj,in_proj,in_proj_qkv,in_proj_a", "q_proj,v_proj"])
def test_factors_are_those_of_the_linear_layers_of_transformers(family: str, targets: str) -> None:
    """peft adapts every ``nn.Linear`` of these names, or all but the head; each factor has the width of one side."""
    config = AutoConfig.for_model(family, **CONFIGS[family])
    with silence_transformers(), torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    linears = {name: part for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)}
    names = targets.split(",")
    adapted = [
        linear
        for name, linear in linears.items()
        if (targets == "all-linear" and name != "lm_head") or name.rpartition(".")[2] in names
    ]
    model = from_config(config.to_dict(), name=family)
    known = list_targets(model, Adapter())
    chosen = tuple(name for name in names if name == "all-linear" or name in known)
    expected = sum(RANK * (linear.in_features + linear.out_features) for linear in adapted)
    assert (count_adapters(model, Adapter(rank=RANK, targets=chosen)) if chosen else 0) == expected


def job(adapter: Adapter | str, **changed: Any) -> Job:
    return Job.read({"sequence": 512, "global_batch": 1, "adapter": adapter, **changed}, origin="test")


def count_flops(layout: Layout, chosen: Job) -> int:
    return work(model=QWEN, layout=layout, job=chosen).hardware_flops


def test_layers_below_the_first_adapter_have_no_backward() -> None:
    """Three of four layers of Qwen3.5 do not attend; with all layers adapted, the first has a backward too."""
    some, every = job(Adapter(targets=("q_proj", "v_proj"))), job(Adapter())
    below = [kind.is_below for kind in Counts(QWEN, some).kinds]
    assert below == [True] * 3 + [False] * (QWEN.layers - 3)
    assert not any(kind.is_below for kind in Counts(QWEN, every).kinds)
    layout = Layout.parse("dp1 mbs1")
    kept = [count_rank_memory(Counts(QWEN, chosen), layout)[0].activations_bytes for chosen in (some, every)]
    assert kept[0] < kept[1]
    flops = [count_flops(layout, chosen) for chosen in (some, every)]
    assert flops[0] < flops[1]


def test_pytorch_s_checkpoints_give_all_layers_a_backward() -> None:
    """peft lets the embedding's output have a gradient, so that the reentrant ones run at all."""
    chosen = job(Adapter(targets=("q_proj", "v_proj")), stack="ddp")
    kinds = Counts(QWEN, chosen).kinds
    assert isinstance(kinds[0], Kind)
    assert not kinds[0].is_below
    plain, recomputed = (count_flops(Layout.parse(text), chosen) for text in ("mbs1", "mbs1 ac=full"))
    ours = count_flops(Layout.parse("mbs1 ac=full"), job(chosen.adapter))  # type: ignore[arg-type]
    assert plain < ours < recomputed


LIGHTNING = QWEN.replace(
    gated_delta_net=None, mixers=("lightning", "attention"), lightning=Lightning(heads=16, dim=128), layers=4
)


@pytest.mark.parametrize(
    ("model", "layout", "changed", "words"),
    [
        (LIGHTNING, "dp1", {}, "adapters are not modelled with lightning layers; use a model that only attends"),
        (
            QWEN,
            "dp1",
            {"stack": "megatron-bridge"},
            "adapters are not modelled with gated_delta_net layers and the stack megatron-bridge",
        ),
        (QWEN, "dp1", {"adapter": None, "freeze": ("embed_tokens",)}, "freeze is not modelled with gated_delta_net"),
        (QWEN, "dp2 zero3", {"stack": "deepspeed"}, "adapters of gated_delta_net layers are not modelled with ZeRO-3"),
        (QWEN, "dp1", {"adapter": Adapter(targets=("in_proj",))}, "no such layer in a block of qwen3.5-9b"),
    ],
)
def test_what_is_not_modelled_is_named(model: Model, layout: str, changed: dict[str, Any], words: str) -> None:
    chosen = job(**{"adapter": "lora:8", "global_batch": 2, **changed})
    reasons = list(list_reasons(Layout.parse(layout), model=model, job=chosen, machine=None))
    assert any(words in reason for reason in reasons), reasons
