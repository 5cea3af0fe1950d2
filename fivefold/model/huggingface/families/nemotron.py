"""Nemotron-4 and Minitron."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Wrapper
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model


def _build_nemotron(config: Config) -> Model:
    """Build Nemotron-4: squared ReLU, and a LayerNorm whose weight is the factor minus one."""
    fields = {"norm": "layernorm", "norm_plus_one": True, "mlp": "plain"}
    return build_model(config, **read_rope(config, has_partial_rotary=True), **fields)


NEMOTRON = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    keys=decoder.LAYER_NORM_KEYS
    | {"norm_eps": "norm_epsilon"}
    | map_same_names("partial_rotary_factor attention_bias mlp_bias"),
    defaults={
        **expand_names(vocab=256_000, width=6144, ffn=24_576, heads=48, positions=4096),
        "hidden_act": "relu2",
        "norm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    to_model=_build_nemotron,
)

# The text model of Cosmos 3 Edge: Llama with an MLP without a gate, of squared ReLU.
COSMOS3_EDGE_TEXT = Family(
    model_type="cosmos3_edge_text",
    architecture="Cosmos3EdgeTextModel",
    keys=decoder.KEYS | map_same_names("attention_bias mlp_bias"),
    defaults={
        **expand_names(vocab=131_072, width=2048, ffn=9216, layers=28, heads=16, kv_heads=8, positions=131_072),
        "head_dim": 128,
        "hidden_act": "relu2",
        "norm_epsilon": 1e-5,
        "rope_theta": 100_000_000.0,
    },
    to_model=lambda config: build_model(config, mlp="plain"),
    has_mrope=True,
    tensors=decoder.TENSORS | {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"},
)
WRAPPERS = (
    Wrapper("cosmos3_edge", "Cosmos3EdgeForConditionalGeneration", text="cosmos3_edge_text", tied=False, ties=False),
)
