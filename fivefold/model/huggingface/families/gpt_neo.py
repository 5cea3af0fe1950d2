"""GPT-Neo."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import GPT_FIELDS, GPT_PLACES, SIZES, drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, find_period
from fivefold.model.spec import Model

KINDS = {"global": False, "local": True}


def _build_gpt_neo(config: Config) -> Model:
    """Build GPT-Neo: learned positions, scores that are not scaled, and a sliding window in every other layer."""
    listed = [kind for kinds, repeats in config.attention_types or () for kind in kinds * repeats]
    if unknown := sorted(set(listed) - set(KINDS)):
        raise config.mistake(f"attention {unknown[0]!r} is not supported; supported: {', '.join(KINDS)}")
    if len(listed) != config.num_hidden_layers:
        raise config.mistake(
            f"attention_types names {len(listed)} layers, num_layers is {config.num_hidden_layers}; change one"
        )
    slides = tuple(KINDS[kind] for kind in listed)
    fields: dict[str, Any] = {}
    if any(slides):
        fields = {"window": config.sliding_window, "window_pattern": () if all(slides) else find_period(slides)}
    return build_model(
        config,
        **GPT_FIELDS | {"qkv_bias": False},
        ffn=config.intermediate_size or 4 * config.hidden_size,
        position="learned",
        attention_scale=1.0,
        **fields,
    )


def _write_gpt_neo(model: Model) -> dict[str, Any]:
    kinds = ["local" if model.has_window(layer) else "global" for layer in range(model.layers)]
    return {
        "attention_types": [[[kind], len(list(repeats))] for kind, repeats in groupby(kinds)],
        "window_size": model.window or 256,
    }


GPT_NEO = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    keys=drop_keys(SIZES, "num_hidden_layers", "num_attention_heads")
    | {
        "num_hidden_layers": "num_hidden_layers",
        "num_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "num_heads": "num_attention_heads",
        "window_size": "sliding_window",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "norm_epsilon",
        "resid_dropout": "hidden_dropout",
        "embed_dropout": "embedding_dropout",
    }
    | map_same_names("attention_types"),
    defaults={
        **expand_names(vocab=50_257, width=2048, layers=24, heads=16, positions=2048),
        "intermediate_size": None,
        "hidden_act": "gelu_new",
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "attention_types": ((("global", "local"), 12),),
        "sliding_window": 256,
    },
    overwritten=("attention_layers",),
    to_model=_build_gpt_neo,
    write=_write_gpt_neo,
    tensors={
        **GPT_PLACES,
        "attention.q": "attn.attention.q_proj",
        "attention.k": "attn.attention.k_proj",
        "attention.v": "attn.attention.v_proj",
        "attention.out": "attn.attention.out_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    base_prefix="transformer.",
)
