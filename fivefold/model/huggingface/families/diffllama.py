"""DiffLlama: Llama with differential attention (arXiv:2410.05258)."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model

LAMBDAS = ("q1", "k1", "q2", "k2")


DIFFLLAMA = Family(
    model_type="diffllama",
    architecture="DiffLlamaForCausalLM",
    keys=drop_keys(decoder.KEYS, "attention_dropout") | map_same_names("attention_bias"),
    defaults={**expand_names(width=2048, ffn=8192, layers=16), "norm_epsilon": 1e-5},
    supported={"attention_dropout": Supported((0,), "dropout of a difference of two softmaxes")},
    to_model=lambda config: build_model(config, differential=True),
    tensors=decoder.TENSORS | {f"attention.lambda_{name}": f"self_attn.lambda_{name}" for name in LAMBDAS},
)
