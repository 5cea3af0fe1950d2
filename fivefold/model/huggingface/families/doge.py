"""Doge: attention masks that are made from values, and trained factors on the residual stream."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model, read_windows

# Doge with an MLP in every layer.
DOGE = Family(
    model_type="doge",
    architecture="DogeForCausalLM",
    keys=decoder.KEYS
    | map_same_names("attention_bias mlp_bias hidden_dropout sliding_window")
    | {"keep_window_size": "index_topk"},
    defaults={**expand_names(vocab=32_768, width=1024, ffn=2048, heads=8), "index_topk": 2048},
    supported={"is_moe": Supported((False,), "experts that are found by keys")},
    overwritten=(
        "num_experts",
        "num_experts_per_tok",
        "norm_topk_prob",
        "router_aux_loss_coef",
    ),  # unread without is_moe
    to_model=lambda config: build_model(
        config,
        **read_windows(config),
        qk_norm="head",
        residual_weights=True,
        dynamic_mask=config.index_topk,
        embedding_dropout=0.0,
    ),
    write=lambda model: {"keep_window_size": model.dynamic_mask or 2048},
    tensors={
        **decoder.TENSORS,
        "attention.mask.a": "self_attn.A",
        "attention.mask": "self_attn.dt_proj",
        "stream1": "input_residual",
        "stream2": "post_attention_residual",
    },
)
