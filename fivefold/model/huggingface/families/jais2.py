"""Jais 2: Llama with LayerNorm, a plain MLP of squared ReLU, and biases."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model

JAIS2 = Family(
    model_type="jais2",
    architecture="Jais2ForCausalLM",
    keys=decoder.LAYER_NORM_KEYS | {"layer_norm_eps": "norm_epsilon"} | map_same_names("attention_bias mlp_bias"),
    defaults={
        **expand_names(vocab=150_272, width=3328, ffn=26_624, heads=26, positions=8192),
        "hidden_act": "relu2",
        "norm_epsilon": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    to_model=lambda config: build_model(config, norm="layernorm", mlp="plain"),
)
