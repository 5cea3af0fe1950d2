"""Every family against its reference class in transformers, built at full size on the meta device."""

import json
from math import log
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fivefold.model.catalog import build_model
from fivefold.model.huggingface.families import FAMILIES, WRAPPERS
from fivefold.model.huggingface.read import from_config
from fivefold.model.published import CATALOG
from fivefold.model.rope import RopeScaling
from fivefold.model.spec import Model
from fivefold.model.vision_weights import count_vision
from tests.model.judged import UNLISTED, count_mtp_parameters


def reference(config: dict[str, Any]) -> Any:
    """The configuration as transformers reads it; it knows Kimi K2 only as DeepSeek-V3."""
    kind = config["model_type"]
    keys = {key: value for key, value in config.items() if key != "model_type"}
    return AutoConfig.for_model("deepseek_v3" if kind == "kimi_k2" else kind, **keys)


def build_on_meta(config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        if config.model_type in UNLISTED:
            module: torch.nn.Module = getattr(transformers, UNLISTED[config.model_type])._from_config(config)
        else:
            auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
            module = auto.from_config(config)  # type: ignore[no-untyped-call]
    return module


def size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def scale_of(model: Model, layer: int) -> float:
    return model.attention_scale or model.attention(layer).head_dim ** -0.5


LAST = {entry.config["model_type"]: name for name, entry in CATALOG.items()}  # of each architecture
COMPARED = [*LAST.values()][::4]  # `make endure` compares all; each family has cases of its own in test_keys.py
# A padding token beyond the vocabulary of the class's checkpoint; identity experts that the class gives matrices.
UNLIKE_CLASS = ("chatglm3-6b", "longcat-flash-560b-a27b")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in COMPARED else pytest.mark.long)
        for name in CATALOG
        if name not in UNLIKE_CLASS
    ],
)
def test_catalog_models_equal_their_reference_class(name: str) -> None:
    config = reference(CATALOG[name].config)
    model, module = from_config(config.to_dict(), name=name), build_on_meta(config)
    tower = count_vision(model.vision) if model.vision is not None else 0
    assert model.parameters + tower == size(module) + (count_mtp_parameters(module) if model.mtp else 0)
    if tower:
        config, module = config.text_config, module.get_submodule("model.language_model")
    assert model.replace(source="") == build_model(name).replace(source="")  # the old keys and those of transformers 5
    scales = [part.scaling for part in module.modules() if hasattr(part, "scaling")]
    attentions = [layer for layer in range(model.layers) if "attention" in model.mixer_name(layer)]
    if scales:  # the modules of older families have no such attribute
        assert scales == pytest.approx([scale_of(model, layer) for layer in attentions], rel=1e-12)
    # that of an indexer is a constant of its own
    norms = [part for name, part in module.named_modules() if "Norm" in type(part).__name__ and "indexer" not in name]
    epsilons = {getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms}
    assert epsilons - {None} == {  # None: a gated norm, whose inner norm has it
        model.norm_epsilon,
        model.mla.norm_epsilon if model.mla else model.norm_epsilon,
        model.lightning.norm_epsilon if model.lightning else model.norm_epsilon,
    }
    if getattr(config, "layer_types", None):
        slides = [kind in ("sliding_attention", "chunked_attention") for kind in config.layer_types]
        assert [model.has_window(layer) for layer in range(model.layers)] == slides


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in (*FAMILIES, *WRAPPERS) if kind != "kimi_k2"])
def test_missing_keys_have_the_defaults_of_transformers(kind: str) -> None:
    needed: dict[str, dict[str, Any]] = {
        "deepseek_v2": {"num_experts_per_tok": 6},
        "glm4_moe": {"head_dim": 128},
        "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2},
        "ministral": {"head_dim": 128},
        "glm4v_moe_text": {"head_dim": 128},
        "qwen3_omni_moe_text": {"head_dim": 128},
        "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 30, "num_experts_per_tok": 6},
    }
    if kind in WRAPPERS and not WRAPPERS[kind].flat:
        text = WRAPPERS[kind].text
        needed[kind] = {"text_config": {"model_type": text, **needed.get(text, {})}}
    bare = {"model_type": kind, **needed.get(kind, {})}
    theirs = from_config(reference(bare).to_dict(), name="x").replace(mtp=None)  # of which they build none
    assert from_config(bare, name="x") == theirs


SMALL = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
LATENT = {**SMALL, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
VARIANTS: list[dict[str, Any]] = [
    {**SMALL, "model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 20},
    {**SMALL, "model_type": "llama", "tie_word_embeddings": True},
    {**SMALL, "model_type": "qwen3", "attention_bias": True},
    {**SMALL, "model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [1, 0], "attention_bias": True},
    {**SMALL, "model_type": "gemma2", "attention_bias": True, "tie_word_embeddings": False},
    {**SMALL, "model_type": "gemma3_text", "attention_bias": True},
    {**SMALL, "model_type": "olmo2", "attention_bias": True},
    {**SMALL, "model_type": "nemotron", "attention_bias": True, "mlp_bias": True},
    {**SMALL, "model_type": "gpt_oss", "attention_bias": False, "num_local_experts": 4},
    {**SMALL, "model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False},
    {"model_type": "gpt2", "n_embd": 96, "n_layer": 3, "n_head": 6, "n_inner": 100, "tie_word_embeddings": False},
    {**LATENT, **EXPERTS, "model_type": "deepseek_v2", "attention_bias": True, "mlp_bias": True},
    {**LATENT, **EXPERTS, "model_type": "deepseek_v3", "attention_bias": True, "n_routed_experts": 16},
    {**LATENT, **EXPERTS, "model_type": "deepseek_v3", "q_lora_rank": None, "attention_bias": True},
]


@pytest.mark.parametrize("config", VARIANTS, ids=[f"{i}-{c['model_type']}" for i, c in enumerate(VARIANTS)])
def test_configs_with_biases_tied_heads_and_odd_shapes_have_the_reference_parameters(config: dict[str, Any]) -> None:
    assert from_config(config, name="x").parameters == size(build_on_meta(reference(config)))


PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 200_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "sliding_window": 262_144,
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [float(n) for n in range(1, 49)]},
}


def test_phi4_mini_has_longrope_on_three_quarters_of_the_head() -> None:
    model = from_config(PHI4_MINI, name="phi4-mini")
    assert model.parameters == size(build_on_meta(reference(PHI4_MINI))) == 3_836_021_760
    assert (model.rope_dim, model.window, model.tied_embeddings) == (96, 262_144, True)
    assert model.rope_scaling is not None
    assert (model.rope_scaling.kind, model.rope_scaling.factor) == ("longrope", 32.0)
    assert len(model.rope_scaling.short_factors) == len(model.rope_scaling.long_factors) == 48


@pytest.mark.parametrize("config", [PHI4_MINI, *(CATALOG[n].config for n in ("gpt-oss-20b", "deepseek-v2", "kimi-k2"))])
def test_rotary_attention_factor_is_the_reference_one(config: dict[str, Any]) -> None:
    scaling, theirs = from_config(config, name="x").rope_scaling, reference(config)
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(ROPE_INIT_FUNCTIONS[scaling.kind](theirs, "cpu")[1], rel=1e-12)


def test_yarn_sharpens_deepseek_attention() -> None:
    sharper = 0.1 * log(40) + 1
    assert build_model("deepseek-v3").attention_scale == pytest.approx(sharper**2 / 192**0.5, rel=1e-12)


LLAMA31_8B = """{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
  "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
  "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 128256
}"""


def test_the_published_config_of_llama_3_1_is_read() -> None:
    model = from_config(json.loads(LLAMA31_8B), name="llama3.1-8b")
    assert model == Model(
        name="llama3.1-8b",
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14_336,
        vocab=128_256,
        positions=131_072,
        norm_epsilon=1e-5,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(
            kind="llama3", factor=8.0, original_positions=8192, low_frequency_factor=1.0, high_frequency_factor=4.0
        ),
        source="Hugging Face config.json, LlamaForCausalLM",
    )
    assert model.parameters == 8_030_261_248


def test_gemma3_takes_the_text_of_a_multimodal_config() -> None:
    published = CATALOG["gemma3-4b"].config
    text = {key: value for key, value in published["text_config"].items() if key != "vocab_size"}
    wrapper = published | {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    model = from_config(wrapper, name="gemma3-4b")
    assert model.replace(source="") == build_model("gemma3-4b").replace(source="")
    assert (model.rope_theta, model.rope_theta_sliding, model.window) == (1e6, 1e4, 1024)
    assert model.window_pattern == (True,) * 5 + (False,)
    assert model.rope_scaling is not None
    assert (model.rope_scaling.kind, model.rope_scaling.factor) == ("linear", 8.0)


def test_gemma2_has_its_softcaps_sandwich_norms_and_windows() -> None:
    model = build_model("gemma2-9b")
    assert (model.block, model.norm_plus_one, model.activation) == ("sandwich", True, "gelu_tanh")
    assert (model.attention_softcap, model.logit_softcap, model.embedding_scale) == (50.0, 30.0, 3584**0.5)
    assert (model.window, model.window_pattern) == (4096, (True, False))


def test_qwen_slides_from_max_window_layers_on() -> None:
    config = {**SMALL, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    model = from_config(config, name="x")
    assert [model.has_window(layer) for layer in range(4)] == [False, False, False, True]
    assert from_config({**config, "use_sliding_window": False}, name="x").window is None
    assert from_config({**config, "max_window_layers": 0}, name="x").window_pattern == ()


def test_neox_gpt2_and_olmo2_have_their_blocks_norms_and_dropout() -> None:
    neox, gpt2, olmo = build_model("gpt-neox-20b"), build_model("gpt2"), build_model("olmo2-7b")
    assert (neox.block, neox.norm, neox.mlp) == ("parallel", "layernorm", "plain")
    assert (neox.rope_dim, neox.activation) == (24, "gelu_fast")
    assert (gpt2.position, gpt2.dropout, gpt2.tied_embeddings, gpt2.qkv_bias) == ("learned", 0.1, True, True)
    assert (olmo.block, olmo.qk_norm, olmo.norm_epsilon) == ("post", "full", 1e-6)


def test_routing_fields_of_mixtures_are_read() -> None:
    names = ("deepseek-v2", "deepseek-v3", "gpt-oss-20b", "mixtral-8x7b")
    v2, v3, oss, mixtral = (moe for moe in (build_model(name).moe for name in names) if moe)
    assert (v2.score, v2.balance, v2.normalized, v2.scaling, v2.groups) == ("softmax", "aux", False, 16.0, 8)
    assert (v3.score, v3.balance, v3.normalized, v3.scaling, v3.topk_groups) == ("sigmoid", "free", True, 2.5, 4)
    assert (v3.dense_layers, v3.shared_experts, v3.topk) == (3, 1, 8)
    assert (oss.router_bias, oss.expert_bias, oss.aux_coefficient, oss.normalized) == (True, True, 0.9, True)
    assert mixtral.aux_coefficient == 0.02
