"""Nemotron-4 and Minitron."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import same
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_attention_bias
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model


def _build_nemotron(config: Config) -> Model:
    """Build Nemotron-4: squared ReLU, and a LayerNorm whose weight is the factor minus one."""
    fields = {"norm": "layernorm", "norm_plus_one": True, "mlp": "plain", "mlp_bias": config.mlp_bias}
    return build_model(config, **read_rope(config, partly=True), **read_attention_bias(config), **fields)


NEMOTRON = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    keys=decoder.LAYER_NORM_KEYS | {"norm_eps": "norm_epsilon"} | same("partial_rotary_factor attention_bias mlp_bias"),
    defaults={
        **decoder.DEFAULTS,
        "vocab_size": 256_000,
        "hidden_size": 6144,
        "intermediate_size": 24_576,
        "num_attention_heads": 48,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    to_model=_build_nemotron,
    tensors=decoder.TENSORS,
)

FAMILIES = (NEMOTRON,)
