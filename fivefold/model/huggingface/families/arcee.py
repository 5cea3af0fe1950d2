"""AFM of Arcee: Llama with a plain MLP of squared ReLU."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model

ARCEE = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    keys=decoder.KEYS | map_same_names("attention_bias mlp_bias"),
    defaults={**expand_names(width=2560, ffn=18_432, positions=4096), "hidden_act": "relu2", "norm_epsilon": 1e-5},
    to_model=lambda config: build_model(config, mlp="plain"),
)
