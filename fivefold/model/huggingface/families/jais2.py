"""Jais 2: Llama with LayerNorm, a plain MLP of squared ReLU, and biases."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_attention_bias
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model


def _build_jais2(config: Config) -> Model:
    fields = {"norm": "layernorm", "mlp": "plain", "mlp_bias": config.mlp_bias}
    return build_model(config, **read_rope(config), **read_attention_bias(config), **fields)


JAIS2 = Family(
    model_type="jais2",
    architecture="Jais2ForCausalLM",
    keys=decoder.LAYER_NORM_KEYS | {"layer_norm_eps": "norm_epsilon"} | map_same_names("attention_bias mlp_bias"),
    defaults={
        "vocab_size": 150_272,
        "hidden_size": 3328,
        "intermediate_size": 26_624,
        "num_attention_heads": 26,
        "hidden_act": "relu2",
        "max_position_embeddings": 8192,
        "norm_epsilon": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    to_model=_build_jais2,
)
