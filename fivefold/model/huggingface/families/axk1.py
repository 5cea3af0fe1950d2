"""A.X K1: DeepSeek-V3 with a norm after the experts."""

from __future__ import annotations

from dataclasses import replace

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.families import deepseek
from fivefold.model.huggingface.mapping import build_model, read_biased_experts, read_latent, read_mlp_layer_types
from fivefold.model.spec import Model


def _build_axk1(config: Config) -> Model:
    moe = read_biased_experts(config) | read_mlp_layer_types(config, dense=config.first_k_dense_replace)
    fields = read_latent(config)
    return build_model(config, **fields, moe=moe | {"post_norm": True})


AXK1 = replace(
    deepseek.V3,
    model_type="axk1",
    architecture="AXK1ForCausalLM",
    keys=drop_keys(deepseek.V3.keys, *decoder.MTP_KEYS, "topk_method", "scoring_func", "aux_loss_alpha")
    | map_same_names("mlp_layer_types"),
    defaults={
        **deepseek.V3.defaults,
        **expand_names(vocab=163_840, heads=64, kv_heads=64, positions=32_768),
        "num_experts": 192,
        "first_k_dense_replace": 1,
    },
    to_model=_build_axk1,
    write=decoder.write_latent,
    tensors={**deepseek.V3.tensors, "norm2_post": "post_mlp_layernorm"},
    stacked_tensors=decoder.name_stacked_experts() | {"norm2_post": "mlp.post_mlp_layernorm"},
)
