"""MiniCPM3: latent attention, and factors on embedding, branches and logits that follow from depth and width."""

from __future__ import annotations

from math import sqrt
from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_latent
from fivefold.model.spec import Model


def _build_minicpm3(config: Config) -> Model:
    """Build MiniCPM3, whose rotary pairs lie half a rotary dim apart in the file."""
    depth = config.scale_depth
    return build_model(
        config,
        **read_latent(config),
        embedding_scale=config.embedding_multiplier,
        residual_scale=1.0 if depth is None else depth / sqrt(config.num_hidden_layers),
        logit_scale=(config.dim_model_base or config.hidden_size) / config.hidden_size,
    )


def _write_minicpm3(model: Model) -> dict[str, Any]:
    return decoder.write_latent(model) | {
        "scale_depth": model.residual_scale * sqrt(model.layers),
        "dim_model_base": round(model.logit_scale * model.width),
    }


MINICPM3 = Family(
    model_type="minicpm3",
    architecture="MiniCPM3ForCausalLM",
    keys=drop_keys(decoder.KEYS, "head_dim")
    | drop_keys(decoder.LATENT_KEYS, "rope_interleave")
    | {"scale_emb": "embedding_multiplier"}
    | map_same_names("mlp_bias scale_depth dim_model_base"),
    defaults={
        **expand_names(vocab=73_448, width=2560, ffn=6400, layers=62, heads=40, kv_heads=40, positions=32_768),
        **expand_names(kv_rank=256, q_rank=768, nope_dim=64, rope_dim=32, v_dim=None),
        "rope_interleave": False,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
    overwritten=("head_dim",),
    to_model=_build_minicpm3,
    write=_write_minicpm3,
    tensors=decoder.TENSORS | decoder.LATENT_TENSORS,
)
