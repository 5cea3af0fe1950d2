"""Classes of remote code that compute the model of a family of transformers: read under its keys."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.model.huggingface.read import describe_remark, from_config
from fivefold.model.huggingface.remote_code import REMOTE_CLASSES

LING_1T: dict[str, Any] = {  # inclusionAI/Ling-1T:config.json
    "architectures": ["BailingMoeV2ForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"},
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 18_432,
    "first_k_dense_replace": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "model_type": "bailing_moe",
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_attention_heads": 64,
    "num_experts": 256,
    "num_key_value_heads": 8,
    "rope_theta": 600_000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_rmsnorm": True,
    "rms_norm_eps": 1e-6,
    "head_dim": 128,
    "num_shared_experts": 1,
    "use_cache": True,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "vocab_size": 157_184,
    "partial_rotary_factor": 0.5,
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "use_qk_norm": True,
    "score_function": "sigmoid",
    "moe_shared_expert_intermediate_size": 2048,
    "num_nextn_predict_layers": 0,
}


def test_ling_1t_has_its_published_parameters() -> None:
    """1000 billion, of which 50 are active (its model card, which rounds)."""
    model = from_config(LING_1T, name="ling-1t")
    assert model.parameters / 1e9 == pytest.approx(1000, rel=0.001)
    assert model.active_parameters / 1e9 == pytest.approx(50, rel=0.025)
    assert describe_remark(LING_1T, name="x") == "x: model_type 'bailing_moe' is not known: read as Glm4MoeForCausalLM"


def test_a_remote_class_is_read_as_its_family_under_the_keys_of_the_family() -> None:
    remote = REMOTE_CLASSES["BailingMoeV2ForCausalLM"]
    dropped = {*remote.supported, *remote.same, "auto_map", "model_type", "architectures"}
    plain = {remote.keys.get(key, key): value for key, value in LING_1T.items() if key not in dropped}
    family = {**plain, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
    assert from_config(LING_1T, name="x") == from_config(family, name="x")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"score_function": "softmax"}, "x: score_function='softmax' needs a router without sigmoid scores"),
        ({"use_bias": True}, "x: use_bias=True needs biases"),
        ({"output_dropout": 0.1}, "x: output_dropout=0.1 needs dropout of each branch"),
        ({"moe_shared_expert_intermediate_size": 4096}, "differs from moe_intermediate_size=2048"),
        ({"norm_head": True}, "has no norm_head=True"),
    ],
)
def test_what_the_family_does_not_compute_is_an_error(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        from_config(LING_1T | changed, name="x")
    assert message in str(refusal.value)


@pytest.mark.parametrize("key", ["num_experts", "num_shared_experts", "use_qkv_bias", "use_qk_norm", "head_dim"])
def test_a_missing_key_of_a_remote_class_is_an_error(key: str) -> None:
    """Its defaults are not those of the family."""
    with pytest.raises(UserError, match="nor what its missing keys mean"):
        from_config({other: value for other, value in LING_1T.items() if other != key}, name="x")
