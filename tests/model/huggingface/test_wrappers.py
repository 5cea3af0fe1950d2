"""Multimodal models: as many parameters of the text model as transformers builds, tied as there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT

from fivefold.errors import UserError
from fivefold.model.huggingface.families import WRAPPERS
from fivefold.model.huggingface.read import describe_remark, from_config
from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder
from tests.model.judged import silence_transformers
from tests.model.mutations import FAMILIES as SMALL
from tests.model.mutations import PLAIN
from tests.selection import mark_share
from tests.trainer.checkpoint.test_huggingface_import import decoder

# Text models that transformers builds within a multimodal one alone, each with the family whose small config it takes.
LIKE = {
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "granite_docling_text": "granite",
    "glm4v_text": "glm4",
    "glm_ocr_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "paddleocr_vl_text": "ernie4_5",
    "emu3_text_model": "llama",
    "cosmos3_edge_text": "llama",
    "deepseek_ocr2_text": "deepseek_v2",
    "granite4_vision_text": "granite",
}
# What the class of a wrapper needs in addition to its text model.
NEEDED: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "hidden_size": 16, "num_attention_heads": 2}},
    "granite_docling": {"vision_config": {"out_hidden_size": PLAIN["hidden_size"]}},
    "granite4_vision": {"deepstack_layer_map": [], "spatial_target_layers": [], "downsample_rate": "4/8"},
    "emu3": {"vocabulary_map": {"<image>": 1}},
    "ovis2": {"hidden_size": PLAIN["hidden_size"], "vocab_size": PLAIN["vocab_size"]},
}
# What the small text model of a wrapper needs in addition to the keys of its family.
TEXT_NEEDED: dict[str, dict[str, Any]] = {
    "cosmos3_edge_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
}
OF_MODEL = ("phi4_multimodal",)  # whose text model is not a module of its own: a test below
OF_TIMM = ("fast_vlm", "gemma3n", "perception_lm")  # whose towers are of timm, which the tests do not install
OF_TEXT = ("language_model.", "text_model.", "lm_head.")


def count_text(config: dict[str, Any]) -> int:
    """Count the parameters of the text model that transformers builds."""
    keys = {key: value for key, value in config.items() if key != "model_type"}
    auto = AutoModelForImageTextToText if config["model_type"] in IMAGE_TEXT else AutoModelForCausalLM
    with silence_transformers(), torch.device("meta"), no_init_weights():  # type: ignore[no-untyped-call]
        theirs = AutoConfig.for_model(config["model_type"], **keys)
        module = auto.from_config(theirs)  # type: ignore[no-untyped-call]
        module.tie_weights()
    return sum(weight.numel() for name, weight in module.named_parameters() if any(part in name for part in OF_TEXT))


@pytest.mark.parametrize("kind", mark_share(6, [kind for kind in WRAPPERS if kind not in (*OF_TIMM, *OF_MODEL)]))
def test_the_text_model_has_as_many_parameters_as_in_transformers(kind: str) -> None:
    wrapper = WRAPPERS[kind]
    small = SMALL[LIKE.get(wrapper.text, wrapper.text)]
    text = {key: value for key, value in small.items() if key != "tie_word_embeddings"}
    text |= {"model_type": wrapper.text, "pad_token_id": 0} | TEXT_NEEDED.get(wrapper.text, {})
    for outer in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}):
        config = {"model_type": kind, "text_config": text, **NEEDED.get(kind, {}), **outer}
        assert from_config(config, name="x").parameters == count_text(config), outer


def test_a_wrapper_with_any_text_model_accepts_every_supported_family() -> None:
    text = {"model_type": "qwen3_moe", **SMALL["qwen3_moe"]}
    model = from_config({"model_type": "internvl", "text_config": text}, name="x")
    assert model.replace(tied_embeddings=False, vision=None, source="") == from_config(text, name="x").replace(
        source=""
    )
    with pytest.raises(
        UserError, match=r"the text model 'reformer', which needs attention.* is not supported.*any supported family"
    ):
        from_config({"model_type": "llava", "text_config": {"model_type": "reformer"}}, name="x")
    with pytest.raises(
        UserError,
        match=r"the text model 'llama' is not supported; .* Gemma3ForConditionalGeneration may be gemma3_text",
    ):
        from_config({"model_type": "gemma3", "text_config": {"model_type": "llama"}}, name="x")


TOWERS: dict[str, dict[str, Any]] = {
    "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "audio_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2, "nemo_conv_channels": 16,
        "ext_pw_out_channel": 16, "bias_max_distance": 4,
    },
}  # fmt: skip


def test_phi4_multimodal_is_phi4_without_its_towers(tmp_path: Path) -> None:
    """Parameters by default and of a small model, whose text gives the logits of transformers."""
    keys = {**SMALL["phi3"], **TOWERS}
    for small in ({}, keys):
        with silence_transformers(), torch.device("meta"), no_init_weights():  # type: ignore[no-untyped-call]
            theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi4_multimodal", **small))  # type: ignore[no-untyped-call]
        towers = sum(weight.numel() for weight in theirs.model.embed_tokens_extend.parameters())
        numel = sum(weight.numel() for weight in theirs.parameters()) - towers
        assert from_config({"model_type": "phi4_multimodal", **small}, name="x").parameters == numel
    with silence_transformers():
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi4_multimodal", **keys)).eval()  # type: ignore[no-untyped-call]
    text = torch.arange(12)[None]
    with torch.no_grad():
        wanted = theirs(text, use_cache=False).logits
        theirs.save_pretrained(tmp_path)
        opened = HuggingFaceFolder.open(tmp_path)
        torch.testing.assert_close(decoder(opened)(text), wanted, rtol=0, atol=1e-5)
    assert opened.ignored
    assert all(name.startswith("model.embed_tokens_extend.") for name in opened.ignored)


def test_a_head_that_only_a_default_ties_is_a_remark() -> None:
    """transformers' Mistral3Config ties it, but the weights of Mistral Small 3.2 have a head of their own."""
    text = {"model_type": "mistral", **SMALL["mistral"]}
    del text["tie_word_embeddings"]
    config = {"model_type": "mistral3", "text_config": text}
    apart = from_config(config | {"tie_word_embeddings": False}, name="x")
    assert from_config(config, name="x").parameters < apart.parameters
    remark = describe_remark(config, name="x")
    assert remark is not None
    assert "tie_word_embeddings is missing, so the head is the embedding" in remark
    assert f"{apart.parameters / 1e9:.1f} B parameters" in remark
    for tied in (True, False):
        assert "tie_word_embeddings" not in str(describe_remark(config | {"tie_word_embeddings": tied}, name="x"))
    text = {"model_type": "gemma3_text", **SMALL["gemma3_text"], "tie_word_embeddings": True}
    remark = describe_remark({"model_type": "gemma3", "text_config": text}, name="x")
    assert "tie_word_embeddings" not in str(remark)
