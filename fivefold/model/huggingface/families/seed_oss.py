"""Seed-OSS: Llama with biases of q, k and v, and dropout of what attention and MLP add."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model

SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    keys=decoder.KEYS
    | map_same_names("attention_bias attention_out_bias mlp_bias")
    | {"residual_dropout": "hidden_dropout"},
    defaults={
        **expand_names(vocab=155_136, ffn=27_648, layers=64, heads=80, kv_heads=8, head_dim=128, positions=524_288),
        "attention_bias": True,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
    },
    to_model=lambda config: build_model(config, out_bias=config.attention_out_bias),
)
