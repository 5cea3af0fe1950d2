"""Multimodal models: as many parameters of the text model as transformers builds, tied as there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.initialization import no_init_weights

from fivefold.model.huggingface.families import WRAPPERS
from fivefold.model.huggingface.read import from_config
from fivefold.record import UserError
from tests.model.judged import quiet
from tests.model.mutations import FAMILIES as SMALL
from tests.model.mutations import PLAIN
from tests.selection import one_in

# Text models that transformers builds within a multimodal one alone, each with the family whose small config it takes.
LIKE = {
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "granite_docling_text": "granite",
    "granite4_vision_text": "granite",
}
# What the class of a wrapper needs beside its text model.
NEEDED: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "hidden_size": 16, "num_attention_heads": 2}},
    "granite_docling": {"vision_config": {"out_hidden_size": PLAIN["hidden_size"]}},
    "granite4_vision": {"deepstack_layer_map": [], "spatial_target_layers": [], "downsample_rate": "4/8"},
    "ovis2": {"hidden_size": PLAIN["hidden_size"], "vocab_size": PLAIN["vocab_size"]},
}
OF_TIMM = ("fast_vlm", "perception_lm")  # whose towers are of timm, which the tests do not install
OF_TEXT = ("language_model.", "text_model.", "lm_head.")


def count_text(config: dict[str, Any]) -> int:
    """Count the parameters of the text model that transformers builds."""
    keys = {key: value for key, value in config.items() if key != "model_type"}
    with quiet(), torch.device("meta"), no_init_weights():  # type: ignore[no-untyped-call]
        theirs = AutoConfig.for_model(config["model_type"], **keys)
        module = AutoModelForImageTextToText.from_config(theirs)  # type: ignore[no-untyped-call]
        module.tie_weights()
    return sum(weight.numel() for name, weight in module.named_parameters() if any(part in name for part in OF_TEXT))


@pytest.mark.parametrize("kind", one_in(6, [kind for kind in WRAPPERS if kind not in OF_TIMM]))
def test_the_text_model_has_as_many_parameters_as_in_transformers(kind: str) -> None:
    wrapper = WRAPPERS[kind]
    small = SMALL[LIKE.get(wrapper.text, wrapper.text)]
    text = {key: value for key, value in small.items() if key != "tie_word_embeddings"}
    text |= {"model_type": wrapper.text, "pad_token_id": 0}
    for outer in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}):
        config = {"model_type": kind, "text_config": text, **NEEDED.get(kind, {}), **outer}
        assert from_config(config, name="x").parameters == count_text(config), outer


def test_any_family_may_be_the_text_model_of_a_wrapper_that_says_so() -> None:
    text = {"model_type": "qwen3_moe", **SMALL["qwen3_moe"]}
    model = from_config({"model_type": "internvl", "text_config": text}, name="x")
    assert model.replace(tied_embeddings=False, source="") == from_config(text, name="x").replace(source="")
    with pytest.raises(UserError, match=r"its text model is 'opt', which needs ReLU.*any family that is read may be"):
        from_config({"model_type": "llava", "text_config": {"model_type": "opt"}}, name="x")
    with pytest.raises(UserError, match=r"its text model is 'llama'; of Gemma3ForConditionalGeneration gemma3_text is"):
        from_config({"model_type": "gemma3", "text_config": {"model_type": "llama"}}, name="x")
