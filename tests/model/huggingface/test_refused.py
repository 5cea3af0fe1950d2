"""Configs that are refused: in one line that names the key, whatever stands in the file."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.model.huggingface.families import FAMILIES, WRAPPERS
from fivefold.model.huggingface.read import from_config
from fivefold.model.published import CATALOG
from tests.model.huggingface.test_families import reference
from tests.model.mutations import FAMILIES as SMALL

NESTED = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "yarn", "factor": 2.0}}
BARE: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "zamba2"},
        "x: architecture 'zamba2' is not supported: its state-space layers (Mamba 1 or 2) share one attention block",
    ),
    (
        {"architectures": ["BertModel"], "model_type": "llama"},
        f"architecture 'BertModel' is not one of the {len(FAMILIES) + len(WRAPPERS)} supported ones",
    ),
    ({}, "architecture 'None' is not one of"),
    (
        {"architectures": ["Step3VLForConditionalGeneration"]},
        "architecture 'Step3VLForConditionalGeneration' is not one",
    ),
    ({"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [2] * 31 + [1]}, "32 layers, which may not differ"),
    ({"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [2]}, "moe_topk=[2] has 1 entries for 32 layers"),
    (
        {"model_type": "llama4_text", "attention_chunk_size": None},
        "attention_chunk_size=None makes transformers'",
    ),
    (
        {"model_type": "llama4_text", "rope_scaling": {"type": "yarn", "factor": 4.0}},
        "rope scaling 'yarn', which makes rotated queries longer, with use_qk_norm",
    ),
    ({"model_type": "llama", "hidden_act": "mish"}, "activation 'mish' is not supported; supported: silu"),
    ({"model_type": "llama", "attention_dropout": 1.5}, "attention_dropout"),
    ({"model_type": "falcon", "hidden_dropout": 0.1}, "hidden_dropout=0.1 needs one mask of dropout over what"),
    ({"model_type": "llama", "hidden_size": 100}, "hidden_size=100 is not divisible by num_attention_heads=32"),
    ({"model_type": "llama", "num_key_value_heads": 5}, "heads=32 is not divisible by kv_heads=5"),
    ({"model_type": "llama", "rope_scaling": {"type": "mrope"}}, "rope scaling 'mrope' is not supported"),
    ({"model_type": "llama", "rope_scaling": {"type": "linear"}}, "rope scaling 'linear' has no factor"),
    ({"model_type": "phi3", "rope_scaling": {"type": "su", "long_factor": [1.0]}}, "longrope needs 48 short and long"),
    ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "needs noise on the router's input"),
    ({"model_type": "qwen3_moe", "mlp_only_layers": [3]}, "mlp_only_layers=[3] needs dense layers after experts"),
    ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step=2 needs experts in every n-th"),
    ({"model_type": "gemma2", "use_bidirectional_attention": True}, "needs attention that is not causal"),
    ({"model_type": "gemma2", "layer_types": ["linear_attention"] * 26}, "layer type 'linear_attention'"),
    ({"model_type": "gemma2", "layer_types": ["full_attention"] * 3}, "layer_types names 3 layers"),
    ({"model_type": "gemma3"}, "a multimodal config without a text_config"),
    ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
    ({"model_type": "gemma3_text", "rope_parameters": NESTED}, "rope scaling 'yarn' of the sliding layers"),
    ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "needs an attention scale per layer"),
    ({"model_type": "gpt2", "add_cross_attention": True}, "needs cross-attention"),
    ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, "swiglu_limit=5.0 needs another limit"),
    ({"model_type": "deepseek_v2"}, "moe.topk"),
    ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
    ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob=true"),
    ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
    ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, "moe_layer_freq=2 needs"),
]
CHANGED: list[tuple[str, dict[str, Any], str]] = [  # of a small config of the family
    ("llama", {"is_causal": False}, "x: is_causal=False needs attention that is not causal, which is not supported; "),
    ("llama", {"per_layer_config": {"0": {}}}, "needs layers that differ from each other"),
    (
        "llama",
        {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "x: partial_rotary_factor=0.5 with rope scaling 'linear': the family's code rotates full heads and fails",
    ),
    ("mixtral", {"num_experts": 8}, "num_experts=8 and num_local_experts=4 are one key of mixtral; give one"),
    ("gpt2", {"hidden_size": 96}, "hidden_size=96 and n_embd=48 are one key of gpt2"),
    ("gpt_neox", {"head_dim": 12}, "head_dim=12 is not hidden_size / num_attention_heads = 8"),
    ("deepseek_v3", {"head_dim": 12}, "head_dim=12 is not qk_rope_head_dim=4"),
    ("deepseek_v4", {"n_shared_experts": 2}, "n_shared_experts=2: the family has one shared expert; give 1"),
    ("deepseek_v3", {"topk_group": 3}, "topk_groups=3 is more than groups=2"),
    ("deepseek_v3", {"num_experts_per_tok": 7}, "topk=7 is more than the 4 experts of topk_groups=1"),
    ("deepseek_v2", {"rope_interleave": False}, "rope_interleave=False needs rotary pairs that lie half a head apart"),
    ("gemma2", {"sliding_window": None}, "sliding-window layers, but sliding_window is missing"),
    ("gemma2", {"rope_parameters": {"full_attention": {}}}, "rotary parameters of full_attention only are not read"),
    ("gemma3_text", {"rope_parameters": {"factor": 2.0}}, "rope_parameters gives factor, which this family does not"),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling has the key type, which this"),
    ("llama", {"rope_scaling": {"type": "su"}}, "rope scaling 'su' is not supported; supported: linear, dynamic"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported; supported: longrope, su"),
    (
        "llama",
        {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 5.0, "high_freq_factor": 4.0}},
        "low_freq_factor=5 is more than high_freq_factor=4",
    ),
    (
        "mistral",
        {"architectures": ["LlamaForCausalLM"]},
        "says LlamaForCausalLM, but model_type 'mistral' is",
    ),
]
CONFIGS = BARE + [({"model_type": kind, **SMALL[kind], **keys}, says) for kind, keys, says in CHANGED]


@pytest.mark.parametrize(("config", "says"), CONFIGS, ids=[says[:40] for _, says in CONFIGS])
def test_unsupported_config_is_a_one_line_error(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refusal:
        from_config(config, name="x")
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("junk", [None, -1, 0, "many", [], [7], {}, {"factor": "x"}, float("nan")], ids=repr)
@pytest.mark.parametrize(
    "name", ["llama3-405b", "gemma3-1b", "gemma3-4b", "gpt2", "deepseek-v2", "kimi-k2", "gpt-oss-20b"]
)
def test_random_values_in_any_key_build_a_model_or_are_one_line_errors(name: str, junk: object) -> None:
    published = reference(CATALOG[name].config).to_dict() | CATALOG[name].config
    for key in published:
        for broken in ({**published, key: junk}, {**published, "rope_scaling": {"rope_type": "yarn", key: junk}}):
            try:
                from_config(broken, name=name)
            except UserError as refusal:
                assert "\n" not in str(refusal)  # noqa: PT017 (both outcomes are right, a traceback is not)
    for key in ("factor", "beta_fast", "mscale", "original_max_position_embeddings", "short_factor", "rope_theta"):
        try:
            from_config({**published, "rope_scaling": {"type": "longrope", "factor": 8.0, key: junk}}, name=name)
        except UserError as refusal:
            assert "\n" not in str(refusal)  # noqa: PT017
