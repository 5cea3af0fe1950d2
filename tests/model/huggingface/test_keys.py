"""Every key of every family, changed: as many parameters as the reference's, and read exactly where it reads it."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fivefold.base_format import BITSANDBYTES_BASES, FOUR_BIT_BASES
from fivefold.errors import UsageWarning, UserError
from fivefold.model.catalog import resolve
from fivefold.model.huggingface.families import FAMILIES as REGISTRY
from fivefold.model.huggingface.keys import EVERY_FAMILY
from fivefold.model.huggingface.read import describe_remark, from_config
from tests.model.judged import build_reference, count_mtp_parameters, judge, silence_transformers
from tests.model.mutations import FAMILIES, MUTATIONS, mutations
from tests.selection import mark_share

# Of each family, by a seed; `python -m tests.endure.families` judges them all.
PICKED = 1
COUNTED = 2
UNCOUNTED = ("rope_scaling", "rope_parameters", "hidden_act", "hidden_activation", "activation_function")


@pytest.mark.slow
@pytest.mark.parametrize("kind", mark_share(2, list(FAMILIES)[::-1]))
def test_every_changed_key_counts_as_in_the_reference(kind: str) -> None:
    compared = 0
    with silence_transformers(), warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        counted = [(key, value) for key, value in mutations(kind) if key not in UNCOUNTED]
        for key, value in random.Random(kind).sample(counted, COUNTED):
            config = FAMILIES[kind] | {key: value}
            try:
                model = from_config({"model_type": kind, **config}, name="x")
                theirs = build_reference(kind, config)
            except UserError as refusal:
                assert "\n" not in str(refusal)  # noqa: PT017
                continue
            except Exception:
                continue
            numel = sum(weight.numel() for weight in theirs.parameters() if weight.requires_grad)
            assert model.parameters == numel + (count_mtp_parameters(theirs) if model.mtp else 0), (key, value)
            compared += 1
    assert compared > COUNTED / 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", mark_share(2, FAMILIES))
def test_a_key_changes_our_model_where_it_changes_the_reference(kind: str) -> None:
    picked = random.Random(f"{kind} 1").sample(list(mutations(kind)), PICKED)
    with silence_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key, value in picked:
            verdict, why = judge(kind, FAMILIES[kind] | {key: value}, keys=(key,))
            assert not verdict, f"{key}={value!r}: {verdict} {why}"


FOUND: list[tuple[str, str, Any]] = [  # what this test has found, once
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "rope_scaling", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ("llama", "rope_scaling", {"rope_type": "linear", "factor": 3.0, "attention_factor": 1.7}),
    ("llama", "norm_eps", 0.05),
    ("llama", "is_causal", False),
    ("gpt_neox", "rope_theta", 300.0),
    ("mistral", "layer_types", ["full_attention"] * 2),
    ("mixtral", "n_routed_experts", 16),
    ("gemma2", "use_sliding_window", False),
    ("gemma3_text", "rope_parameters", {"rope_type": "linear", "factor": 3.0}),
    ("gpt_oss", "rope_parameters", None),
    ("gpt2", "num_attention_heads", 2),
    ("granitemoehybrid", "num_local_experts", 0),
    ("deepseek_v3", "mlp_bias", True),
    ("deepseek_v3", "topk_group", 3),
    ("cohere2_moe", "rope_scaling", {"rope_type": "linear", "factor": 3.0}),
]


@pytest.mark.parametrize(("kind", "key", "value"), FOUND, ids=[f"{kind}-{key}" for kind, key, _ in FOUND])
def test_keys_read_differently_from_the_reference(kind: str, key: str, value: Any) -> None:
    with silence_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert judge(kind, FAMILIES[kind] | {key: value}, keys=(key,))[0] == ""


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def test_granite_4_without_experts_is_the_dense_model_of_the_reference() -> None:
    dense = FAMILIES["granitemoehybrid"] | {"num_local_experts": 0, "num_experts_per_tok": 0}
    with silence_transformers(), torch.device("meta"):
        theirs = build_reference("granitemoehybrid", dense)
    model = from_config({"model_type": "granitemoehybrid", **dense}, name="x")
    assert model.moe is None
    assert model.parameters == sum(weight.numel() for weight in theirs.parameters())
    with pytest.raises(
        UserError, match=r"^x: it has 0 experts \(num_experts, num_local_experts or n_routed_experts\): give 1 or more"
    ):
        from_config({"model_type": "mixtral", **FAMILIES["mixtral"], "num_local_experts": 0}, name="x")


@pytest.mark.parametrize(
    ("kind", "key", "value", "words"),
    [
        ("gpt2", "n_embd", 0, "n_embd must be 1 or more, not 0"),
        ("mixtral", "num_local_experts", -1, "num_local_experts must be 0 or more, not -1"),
        ("llama", "hidden_size", "wide", "hidden_size must be a whole number, not 'wide'"),
        ("hunyuan_v1_moe", "moe_topk", 0, "moe_topk must be 1 or more, not 0; moe_topk must be a list, not 0"),
    ],
)
def test_an_error_names_the_key_of_the_file(kind: str, key: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"^x: {words}$"):
        from_config({"model_type": kind, **FAMILIES[kind], key: value}, name="x")


@pytest.mark.parametrize("outer", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}], ids=str)
@pytest.mark.parametrize("inner", [True, False])
def test_a_multimodal_config_is_tied_by_its_own_key(outer: dict[str, Any], inner: bool) -> None:
    text = FAMILIES["gemma3_text"] | {"tie_word_embeddings": inner}
    with silence_transformers(), torch.device("meta"):
        theirs = build_reference("gemma3", {"text_config": text, "vision_config": VISION, **outer})
    numel = sum(
        weight.numel() for name, weight in theirs.named_parameters() if "vision" not in name and "projector" not in name
    )
    assert from_config({"model_type": "gemma3", "text_config": text, **outer}, name="x").parameters == numel


@pytest.mark.parametrize(
    "keys",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},  # the layers of GLM-5.2
        {"index_topk_freq": 2},
        {"index_topk_pattern": "FSSFFSSS", "index_topk_freq": 4},
        {"indexer_types": ["full", "shared"] * 4, "index_topk_pattern": "FFFFFFFF", "index_topk_freq": 4},
    ],
)
def test_older_keys_name_the_layers_with_an_indexer_as_in_the_reference(keys: dict[str, Any]) -> None:
    shape = {"num_hidden_layers": 8, **keys}
    model = from_config({"model_type": "glm_moe_dsa", **shape}, name="x")
    kinds = transformers.GlmMoeDsaConfig(**shape).indexer_types
    assert ["full" if model.has_indexer(layer) else "shared" for layer in range(8)] == kinds


def test_a_null_is_the_default_of_its_family_where_the_reference_reads_it_so() -> None:
    given = {"model_type": "mimo_v2_flash", "routed_scaling_factor": None}
    model = from_config(given, name="x")
    assert model.moe is not None
    assert model.moe.scaling == transformers.MiMoV2FlashConfig(routed_scaling_factor=None).routed_scaling_factor


def test_a_class_may_be_spelled_otherwise_than_in_transformers() -> None:
    """As in the published files of Kimi K2.5; of a class of another type or kind the name alone is not enough."""
    text = {"model_type": "deepseek_v3"}
    given = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    theirs = given | {"architectures": ["Kimi_K25ForConditionalGeneration"]}
    assert from_config(given, name="x") == from_config(theirs, name="x")
    for name in ("KimiK25ForSequenceClassification", "KimiK3ForConditionalGeneration"):
        with pytest.raises(UserError, match=f"architecture '{name}' is not one of"):
            from_config(given | {"architectures": [name]}, name="x")


def test_a_key_that_no_family_reads_is_reported_in_one_line(tmp_path: Path) -> None:
    config = {"model_type": "llama", **FAMILIES["llama"]}
    harmless = {"pad_token_id": 3, "torch_dtype": "bfloat16", "pretraining_tp": 2, "qk_norm": False, "clip_qkv": None}
    assert describe_remark(config | harmless, name="x") is None
    odd = {"partial_rotary_factor": 0.5, "use_qk_norm": True, "residual_multiplier": 0.5}
    line = "keys without effect, as in transformers' LlamaForCausalLM: " + ", ".join(f"{key}={odd[key]}" for key in odd)
    assert describe_remark(config | harmless | odd, name="x") == f"x: {line}"
    (tmp_path / "config.json").write_text(json.dumps(config | odd))
    with pytest.warns(UsageWarning, match=line):
        assert resolve(str(tmp_path)).rope_fraction == 1


def test_a_key_of_another_family_is_reported_unless_it_has_the_same_value() -> None:
    gemma = {"model_type": "gemma2", **FAMILIES["gemma2"], "hidden_activation": "gelu_pytorch_tanh"}
    assert describe_remark(gemma | {"hidden_act": "gelu_pytorch_tanh"}, name="x") is None
    said = describe_remark(gemma | {"hidden_act": "silu", "n_routed_experts": 8}, name="x")
    assert (
        said == "x: keys without effect, as in transformers' Gemma2ForCausalLM: hidden_act='silu', n_routed_experts=8"
    )


@pytest.mark.parametrize("kind", FAMILIES)
def test_configs_written_by_transformers_are_read_without_a_remark(kind: str) -> None:
    with torch.device("meta"):
        written = build_reference(kind, FAMILIES[kind]).config.to_dict()
    assert describe_remark(written, name="x") is None


PUBLISHED = {  # what the files of these models hold in addition to what their families read
    "qwen3_moe": {"max_window_layers": 48, "transformers_version": "4.51.0", "rope_scaling": None},
    "deepseek_v3": {
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "ep_size": 1, "seq_aux": True,
        "aux_loss_alpha": 0.001, "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "pretraining_tp": 1,
    },
    "gpt2": {"n_ctx": 1024, "summary_type": "cls_index", "task_specific_params": {"text-generation": {}}},
    "gpt_oss": {"initial_context_length": 4096, "experts_per_token": 4, "swiglu_limit": 7.0, "hidden_act": "silu"},
    "phi3": {"embd_pdrop": 0.0, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "_name_or_path": "x"},
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configs_are_read_without_a_remark(kind: str) -> None:
    assert describe_remark({"model_type": kind, **FAMILIES[kind], **PUBLISHED[kind]}, name="x") is None


@pytest.mark.parametrize(
    ("table", "quantization"),
    [
        (None, ""),
        ({}, ""),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "fp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "fp4"),  # transformers' default
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
    ],
)
def test_the_quantization_of_a_checkpoint_is_read(table: dict[str, object] | None, quantization: str) -> None:
    config = {"model_type": "qwen3_moe", **FAMILIES["qwen3_moe"]}
    model = from_config(config | {"quantization_config": table}, name="x")
    is_double = quantization not in FOUR_BIT_BASES or bool((table or {}).get("bnb_4bit_use_double_quant"))
    assert model == from_config(config, name="x").replace(quantization=quantization, double_quantization=is_double)
    if table and quantization in BITSANDBYTES_BASES:
        theirs = transformers.BitsAndBytesConfig.from_dict(
            {key: value for key, value in table.items() if key != "quant_method"}
        )
        assert theirs.quantization_method() == ("llm_int8" if quantization == "int8" else quantization)
        assert is_double == (theirs.bnb_4bit_use_double_quant if quantization in FOUR_BIT_BASES else True)


def test_the_mutated_keys_of_the_tests_are_all_keys_that_are_read() -> None:
    known = {key.partition(".")[0] for family in REGISTRY.values() for key in (*family.keys, *family.supported)}
    assert known | EVERY_FAMILY.keys() <= MUTATIONS.keys()
