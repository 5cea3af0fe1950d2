"""Adapters of models with token mixers other than attention against peft's around transformers, and its folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.adapter import Adapter
from fivefold.model.huggingface.read import from_config
from fivefold.model.weights import count_adapters
from tests.selection import mark_share

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from tests.third_party.test_adapters import job_of, train, train_with_peft  # noqa: E402 - which peft's absence skips

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

SIZES: dict[str, Any] = {
    "vocab_size": 251, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "router_aux_loss_coef": 0.0,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": SIZES | DELTA,
    "qwen3_next": SIZES | DELTA | EXPERTS,
    "qwen3_5_moe_text": {key: value for key, value in (SIZES | DELTA | EXPERTS).items() if key != "intermediate_size"},
    "olmo_hybrid": SIZES | DELTA | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "granitemoehybrid": SIZES
    | MAMBA
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0, "shared_intermediate_size": 24}
    | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bamba": SIZES | MAMBA | {"attn_layer_indices": [1, 3]},
    "nemotron_h": SIZES
    | {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16,
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
    },
    "lfm2": SIZES | {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


def base_of(path: Path, family: str) -> Path:
    """A small model with random weights, as transformers saves it."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


CASES = [
    ("qwen3_5_text", Adapter(rank=4, alpha=12)),
    *mark_share(
        3,
        [
            ("qwen3_5_text", Adapter(rank=3, targets=("q_proj", "v_proj"))),  # of no layer but the last
            ("qwen3_5_text", Adapter(kind="dora", rank=4, alpha=12)),
            ("qwen3_5_text", Adapter(rank=4, base="nf4")),
            ("qwen3_5_text", Adapter(rank=4, targets=("in_proj_qkv", "out_proj"), rank_pattern={"in_proj_qkv": 6})),
            ("qwen3_next", Adapter(rank=4, targets=(*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"))),
            ("qwen3_5_moe_text", Adapter(rank=4, targets=(*ATTENTION, *DELTA_NET))),
            ("olmo_hybrid", Adapter(rank=4, rank_stabilized=True)),
            ("granitemoehybrid", Adapter(rank=4, targets=(*ATTENTION, "in_proj", "out_proj"))),
            ("bamba", Adapter(rank=4)),
            ("nemotron_h", Adapter(rank=4, targets=(*ATTENTION, "in_proj", "up_proj", "down_proj"))),
            ("lfm2", Adapter(rank=4, targets=("q_proj", "k_proj", "v_proj", "in_proj", "out_proj"))),
            ("lfm2", Adapter(kind="dora", rank=4, targets=("in_proj", "out_proj"))),
        ],
    ),
]


def name_case(value: object) -> str:
    return value if isinstance(value, str) else f"{value.name} of {','.join(value.targets)}"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("family", "adapter"), CASES, ids=name_case)
def test_five_steps_equal_those_of_peft(forked, tmp_path: Path, family: str, adapter: Adapter) -> None:
    """Gradients to 1e-5 of their norm, or of a hundredth of the largest: those of decays are as small as rounding."""
    if adapter.base is not None:
        pytest.importorskip("bitsandbytes")
    base, job = base_of(tmp_path / "base", family), job_of(adapter, epsilon=1e-3)
    ((losses, gradients, start, finals),) = forked(1, train, base, "dp1 mbs4", job)
    theirs, their_gradients, final = train_with_peft(base, job, start)
    assert losses == pytest.approx(theirs, rel=1e-6)
    for step, (mine, there) in enumerate(zip(gradients, their_gradients, strict=True)):
        least = max(float(gradient.norm()) for gradient in there.values()) / 100
        for name in there:
            assert (mine[name] - there[name]).norm() <= 1e-5 * max(there[name].norm(), least), (step, name)
    least = max(float(weight.norm()) for weight in final.values()) / 100
    for name, weight in finals.items():
        assert (weight - final[name]).norm() <= 1e-5 * max(final[name].norm(), least), name


@pytest.mark.parametrize(("family", "adapter"), CASES, ids=name_case)
def test_parameters_of_adapters_are_those_of_peft(family: str, adapter: Adapter) -> None:
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    with torch.device("meta"):
        plain = transformers.AutoModelForCausalLM.from_config(config)
        targets: Any = "all-linear" if adapter.targets == ("all-linear",) else list(adapter.targets)
        model = peft.get_peft_model(
            plain,
            peft.LoraConfig(r=adapter.rank, target_modules=targets, rank_pattern=adapter.ranks),
        )
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    ours = from_config(config.to_dict(), name=family)
    assert count_adapters(ours, adapter.replace(kind="lora")) == trained
