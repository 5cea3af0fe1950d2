"""Layers that a quantized checkpoint keeps in 16 bits, against the modules that transformers does not convert."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.quantizers_utils import should_convert_module

from fivefold.errors import UserError
from fivefold.model.huggingface.quantization import find_quantization
from fivefold.model.huggingface.read import from_config
from fivefold.model.huggingface.tensors import list_tensors
from fivefold.model.spec import Model
from tests.model.mutations import FAMILIES

# As published: unsloth's dynamic folders, Qwen3's and MiniMax's in fp8, gpt-oss, and bitsandbytes' own forms of names
SKIPPED = [
    ["lm_head", "multi_modal_projector", "model.layers.1.mlp", "model.layers.0.self_attn.o_proj"],
    ["lm_head", "model.layers.0.input_layernorm", "model.layers.1.mlp.gate", "model.layers.1.self_attn"],
    ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    ["gate", "e_score_correction_bias", "lm_head"],
    ["down_proj", "model.layers.0.mlp.up"],
    ["model.layers.1.mlp.experts"],
    ["model.layers.1"],
    [],
]
TABLES = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
KEYS = {"nf4": "llm_int8_skip_modules", "fp8": "modules_to_not_convert"}


def read(kind: str, method: str, skipped: object) -> Model:
    table = TABLES[method] | {KEYS[method]: skipped}
    return from_config({"model_type": kind, **FAMILIES[kind], "quantization_config": table}, name="x")


@pytest.mark.parametrize("kind", ["llama", "phi3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("method", TABLES)
@pytest.mark.parametrize("skipped", SKIPPED, ids=lambda names: names[-1] if names else "none")
def test_layers_in_16_bits_are_those_that_transformers_does_not_convert(
    kind: str, method: str, skipped: list[str]
) -> None:
    model = read(kind, method, skipped)
    assert find_quantization({"quantization_config": TABLES[method]}) == model.quantization == method
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **FAMILIES[kind]))
    kinds = (torch.nn.Linear,) if method == "nf4" else (torch.nn.Linear, type(_find_experts(theirs)))
    converted = {name for name, module in theirs.named_modules() if isinstance(module, kinds)}
    kept = {name for name in converted if not should_convert_module(name, skipped)}
    for part in list_tensors(model, family=kind, stacked=True):
        module, ours = part.name.rpartition(".")[0], part.ours.removesuffix(".weight")
        if part.ours.startswith("blocks.") and module in converted and ".router" not in ours:
            assert (ours in model.unquantized) == (module in kept), part.name
    assert {ours.split(".")[0] for ours in model.unquantized} <= {"blocks"}


def _find_experts(model: torch.nn.Module) -> torch.nn.Module:
    """Return a module of stacked experts; the model itself if it has none."""
    return next((module for name, module in model.named_modules() if name.endswith(".experts")), model)


def test_names_of_a_multimodal_model_are_those_of_its_text_model() -> None:
    for prefix in ("language_model.model.", "model.language_model.", "model."):
        model = read("llama", "nf4", [f"{prefix}layers.1.mlp", "vision_tower"])
        assert model.unquantized == ("blocks.1.mlp.gate", "blocks.1.mlp.up", "blocks.1.mlp.down")


@pytest.mark.parametrize("skipped", ["lm_head", [1], ["(a+)+$"], ["a*b*c*d*e"]])
def test_a_list_that_names_no_modules_is_an_error(skipped: object) -> None:
    with pytest.raises(UserError, match=r"quantization_config.llm_int8_skip_modules (is no list|has )"):
        read("llama", "nf4", skipped)
