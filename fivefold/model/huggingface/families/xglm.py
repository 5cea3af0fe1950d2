"""XGLM and CTRL: LayerNorms, biases everywhere, and a table of sines and cosines that is added to the embedding."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.decoder import GPT_FIELDS, GPT_KEYS, GPT_PLACES, drop_keys, expand_names
from fivefold.model.huggingface.families.opt import TENSORS, WHOLE, build_scaled, write_scaled
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model

FIELDS = GPT_FIELDS | {"position": "sinusoidal"}


# XGLM, whose positions begin at 2.
XGLM = Family(
    model_type="xglm",
    architecture="XGLMForCausalLM",
    keys=drop_keys(decoder.SIZES, "intermediate_size")
    | {
        "d_model": "hidden_size",
        "ffn_dim": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "attention_heads": "num_attention_heads",
        "activation_function": "hidden_act",
        "dropout": "hidden_dropout",
        "scale_embedding": "mup_enabled",
    },
    defaults={
        **expand_names(vocab=256_008, width=1024, ffn=4096, layers=24, heads=16),
        "hidden_act": "gelu",
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "tie_word_embeddings": True,
        "mup_enabled": True,
    },
    supported={
        **WHOLE,
        "activation_dropout": Supported((0,), "dropout within the MLP"),
        "add_cross_attention": Supported((False,), "cross-attention"),
        "pad_token_id": Supported((1, 0, None), "a table of positions with a row of zeros that texts reach"),
    },
    to_model=lambda config: build_scaled(
        config, **FIELDS, norm_epsilon=1e-5, position_offset=2, sinusoid_endpoint=True
    ),
    write=write_scaled,
    tensors=TENSORS
    | {"blocks": "model.layers.{}", "embed.tokens": "model.embed_tokens", "head.norm": "model.layer_norm"},
)
# CTRL: the embedding is multiplied by the root of its width, and the head has a bias.
CTRL = Family(
    model_type="ctrl",
    architecture="CTRLLMHeadModel",
    keys=drop_keys(GPT_KEYS, "n_inner", "activation_function", "attn_pdrop", "layer_norm_epsilon")
    | {"dff": "intermediate_size"},
    defaults={
        **expand_names(vocab=246_534, width=1280, ffn=8192, layers=48, heads=16, positions=256),
        "hidden_act": "relu",
        "hidden_dropout": 0.1,
        "embedding_dropout": 0.1,
        "tie_word_embeddings": True,
    },
    supported={"layer_norm_epsilon": Supported((1e-6,), "an epsilon only for the last norm")},
    to_model=lambda config: build_model(config, **FIELDS, embedding_scale=config.hidden_size**0.5, head_bias=True),
    tensors={
        **GPT_PLACES,
        "embed.tokens": "transformer.w",
        "head.norm": "transformer.layernorm",
        "norm1": "layernorm1",
        "norm2": "layernorm2",
        "attention.q": "multi_head_attention.Wq",
        "attention.k": "multi_head_attention.Wk",
        "attention.v": "multi_head_attention.Wv",
        "attention.out": "multi_head_attention.dense",
        "mlp.up": "ffn.0",
        "mlp.down": "ffn.2",
    },
    base_prefix="transformer.",
)
