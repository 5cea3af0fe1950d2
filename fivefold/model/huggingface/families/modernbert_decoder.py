"""ModernBERT as a decoder: LayerNorms, the embedding normed, sliding layers with a rotary base of their own."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import FusedTensor, drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model, list_sliding_layers, read_activation, read_windows
from fivefold.model.huggingface.rope import LAYERS, read_gemma3_rope
from fivefold.model.spec import Model

NO_DROPOUT = Supported((0,), "dropout within the MLP, or only of attention's output")


def _build_modernbert(config: Config) -> Model:
    """Build ModernBERT, whose first layer and every third after it are full, with a window of half the given one."""
    layers, period = config.num_hidden_layers, config.sliding_window_pattern
    if config.sliding_window is None:
        raise config.mistake("local_attention=None makes transformers' code fail; give a number of tokens")
    config = config.replace(sliding_window=config.sliding_window // 2)
    if (given := config.rope_parameters) and not any(kind in given for kind in LAYERS):
        raise config.mistake(f"rope_parameters gives no table of {LAYERS[0]} or {LAYERS[1]}; give both")
    transform = config.replace(hidden_act=config.head_activation)
    return build_model(
        config,
        **read_gemma3_rope(config),
        **read_windows(config, default=list_sliding_layers(layers, period=period, full=0)),
        kv_heads=config.num_attention_heads,
        norm="layernorm",
        norm_bias=config.norm_bias,
        embedding_norm="weighted",
        first_norm=False,
        head_bias=config.head_bias,
        head_transform=read_activation(transform),
        head_transform_bias=config.head_transform_bias,
    )


def _write_modernbert(model: Model) -> dict[str, Any]:
    return {
        **decoder.write_rope_by_layers(model),
        "local_attention": 2 * (model.window or 64),
        "norm_bias": model.norm_bias,
        "classifier_bias": model.head_transform_bias,
        "classifier_activation": model.head_transform,
    }


MODERNBERT_DECODER = Family(
    model_type="modernbert-decoder",
    architecture="ModernBertDecoderForCausalLM",
    keys=drop_keys(decoder.SIZES, "attention_dropout")
    | {
        "hidden_activation": "hidden_act",
        "norm_eps": "norm_epsilon",
        "decoder_bias": "head_bias",
        "classifier_bias": "head_transform_bias",
        "classifier_activation": "head_activation",
        "local_attention": "sliding_window",
        "global_attn_every_n_layers": "sliding_window_pattern",
        "global_rope_theta": "rope_theta",
        "local_rope_theta": "rope_local_base_freq",
    }
    | map_same_names("norm_bias attention_bias mlp_bias embedding_dropout layer_types rope_parameters"),
    defaults={
        **expand_names(vocab=50_368, width=768, ffn=1152, layers=22, heads=12, positions=8192),
        "hidden_act": "gelu",
        "norm_epsilon": 1e-5,
        "norm_bias": False,
        "head_bias": True,
        "head_activation": "gelu",
        "sliding_window": 128,
        "sliding_window_pattern": 3,
        "rope_theta": 160_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
    overwritten=("sliding_window",),
    supported={
        "attention_dropout": NO_DROPOUT,
        "mlp_dropout": NO_DROPOUT,
        "rope_scaling": Supported((None, {}), "a rotary scaling of both kinds of layers"),
    },
    to_model=_build_modernbert,
    write=_write_modernbert,
    tensors=decoder.TENSORS
    | {
        "embed.tokens": "model.embeddings.tok_embeddings",
        "embed.norm": "model.embeddings.norm",
        "head.norm": "model.final_norm",
        "head.transform": "lm_head.dense",
        "head.transform_norm": "lm_head.norm",
        "head.out": "decoder",
        "norm1": "attn_norm",
        "norm2": "mlp_norm",
        "attention.q": "attn.q_proj",
        "attention.k": "attn.k_proj",
        "attention.v": "attn.v_proj",
        "attention.out": "attn.Wo",
        **dict.fromkeys(decoder.GATE_UP, FusedTensor("mlp.Wi", decoder.GATE_UP)),
        "mlp.down": "mlp.Wo",
    },
)
