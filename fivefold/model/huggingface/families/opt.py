"""OPT and BioGPT: LayerNorms, biases everywhere, and learned positions that begin at row 2 of their table."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported, Wrapper
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.spec import Model

FIELDS = decoder.GPT_FIELDS | {"norm_epsilon": 1e-5, "position": "learned", "position_offset": 2}
WHOLE = {"layerdrop": Supported((0,), "layers that are left out at random")}
TENSORS = decoder.TENSORS | {
    "norm1": "self_attn_layer_norm",
    "norm2": "final_layer_norm",
    "attention.out": "self_attn.out_proj",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
}


def _build_opt(config: Config) -> Model:
    """Build OPT: GPT with ReLU."""
    if config.embedding_width not in (None, config.hidden_size):
        raise config.mistake(
            f"word_embed_proj_dim={config.embedding_width} is not hidden_size={config.hidden_size} and needs "
            "projections of the embedding, which are not supported"
        )
    return build_model(config, **FIELDS)


def build_scaled(config: Config, **fields: Any) -> Model:
    """Build a model whose embedding is multiplied by the root of its width, and dropped as hidden values are."""
    scale = config.hidden_size**0.5 if config.mup_enabled else 1.0
    dropout = config.hidden_dropout
    return build_model(config.replace(embedding_dropout=dropout), **fields, embedding_scale=scale)


def write_scaled(model: Model) -> dict[str, Any]:
    """Return the key that says whether the embedding is multiplied."""
    return {"scale_embedding": model.embedding_scale != 1}


OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    keys=drop_keys(decoder.SIZES, "intermediate_size")
    | {
        "ffn_dim": "intermediate_size",
        "activation_function": "hidden_act",
        "dropout": "hidden_dropout",
        "word_embed_proj_dim": "embedding_width",
    },
    defaults={
        **expand_names(vocab=50_272, width=768, ffn=3072, layers=12, heads=12),
        "hidden_act": "relu",
        "hidden_dropout": 0.1,
        "tie_word_embeddings": True,
    },
    supported={
        **WHOLE,
        "do_layer_norm_before": Supported((True,), "norms after each sum of the residual stream"),
        "_remove_final_layer_norm": Supported((False,), "a head without a norm"),
        "enable_bias": Supported((True,), "matrices without biases"),
        "layer_norm_elementwise_affine": Supported((True,), "LayerNorms without weights next to biases"),
    },
    to_model=_build_opt,
    tensors=TENSORS
    | {
        "blocks": "model.decoder.layers.{}",
        "embed.tokens": "model.decoder.embed_tokens",
        "embed.positions": "model.decoder.embed_positions",
        "head.norm": "model.decoder.final_layer_norm",
    },
)
BIOGPT = Family(
    model_type="biogpt",
    architecture="BioGptForCausalLM",
    keys=drop_keys(decoder.SIZES, "attention_dropout")
    | map_same_names("hidden_act")
    | {
        "hidden_dropout_prob": "hidden_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "scale_embedding": "mup_enabled",
    },
    defaults={
        **expand_names(vocab=42_384, width=1024, ffn=4096, layers=24, heads=16, positions=1024),
        "hidden_act": "gelu",
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "tie_word_embeddings": True,
        "mup_enabled": True,
    },
    overwritten=("layer_norm_eps",),
    supported={**WHOLE, "activation_dropout": Supported((0,), "dropout within the MLP")},
    to_model=lambda config: build_scaled(config, **FIELDS),
    write=write_scaled,
    tensors=TENSORS
    | {
        "blocks": "biogpt.layers.{}",
        "embed.tokens": "biogpt.embed_tokens",
        "embed.positions": "biogpt.embed_positions",
        "head.norm": "biogpt.layer_norm",
        "head.out": "output_projection",
    },
)
WRAPPERS = (
    Wrapper("blip-2", "Blip2ForConditionalGeneration", text="opt", tied=None),
    Wrapper("instructblip", "InstructBlipForConditionalGeneration", text="opt", tied=None),
    Wrapper("instructblipvideo", "InstructBlipVideoForConditionalGeneration", text="opt", tied=None),
)
