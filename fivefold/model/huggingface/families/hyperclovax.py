"""HyperCLOVA X: Granite's factors, and norms after attention and MLP too."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_head_dim
from fivefold.model.spec import Model


def _build_hyperclovax(config: Config) -> Model:
    """Build HyperCLOVA X, whose logits are multiplied by ``logits_scaling``, by which Granite's are divided."""
    scale = config.attention_multiplier
    return build_model(
        config,
        block="sandwich" if config.use_post_norm else "pre",
        embedding_scale=config.embedding_multiplier,
        attention_scale=read_head_dim(config) ** -0.5 if scale is None else scale,
        residual_scale=config.residual_multiplier,
        logit_scale=config.logit_scale,
    )


HYPERCLOVAX = Family(
    model_type="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    keys=decoder.KEYS
    | {"logits_scaling": "logit_scale"}
    | map_same_names(
        "attention_bias mlp_bias embedding_multiplier attention_multiplier residual_multiplier use_post_norm"
    ),
    defaults={"intermediate_size": 11_008, "use_post_norm": True},
    to_model=_build_hyperclovax,
    tensors=decoder.TENSORS | {"norm1_post": "post_norm1", "norm2_post": "post_norm2"},
)
