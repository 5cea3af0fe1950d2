"""GPT, GPT-2, and GPT-BigCode (SantaCoder, StarCoder)."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import (
    GPT_FIELDS,
    GPT_KEYS,
    GPT_PLACES,
    QKV,
    FusedTensor,
    drop_keys,
    expand_names,
    map_same_names,
)
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import NAMES, build_model
from fivefold.model.spec import Model

KEYS = GPT_KEYS | map_same_names("scale_attn_weights")
DEFAULTS = {
    **expand_names(vocab=50_257, width=768, layers=12, heads=12, positions=1024),
    "intermediate_size": None,
    "hidden_act": "gelu_new",
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "embedding_dropout": 0.1,
}
CROSS_ATTENTION = {"add_cross_attention": Supported((False,), "cross-attention")}


ACTIVATIONS_OF_GPT = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}


def _build_gpt2(config: Config) -> Model:
    """Build GPT-2: learned positions, biases in all layers."""
    return build_model(
        config,
        **GPT_FIELDS,
        ffn=config.intermediate_size or 4 * config.hidden_size,
        position="learned",
        attention_scale=None if config.scale_attn_weights else 1.0,
    )


def _build_gpt(config: Config) -> Model:
    """Build GPT: GPT-2 with norms after each sum of the residual stream, and none before the head."""
    if config.hidden_act not in ACTIVATIONS_OF_GPT:
        raise config.mistake(f"afn {config.hidden_act!r} is not one of {', '.join(ACTIVATIONS_OF_GPT)}; use one")
    model = _build_gpt2(config.replace(hidden_act=ACTIVATIONS_OF_GPT[config.hidden_act]))
    return model.replace(block="post_sum", final_norm=False)


def _write_gpt(model: Model) -> dict[str, Any]:
    names = {NAMES[theirs]: ours for ours, theirs in ACTIVATIONS_OF_GPT.items() if ours != "swish"}
    return {"afn": names.get(model.activation, "gelu")}


def _transpose(name: str, *weights: str) -> dict[str, FusedTensor]:
    """Return the tensor of ``weights`` that are stored as [in, out], one after another."""
    return dict.fromkeys(weights, FusedTensor(name, weights, transposed=True))


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys=KEYS,
    defaults=DEFAULTS,
    supported=CROSS_ATTENTION
    | {"scale_attn_by_inverse_layer_idx": Supported((False,), "an attention scale per layer")},
    to_model=_build_gpt2,
    tensors={
        **GPT_PLACES,
        **_transpose("attn.c_attn", *QKV),
        **_transpose("attn.c_proj", "attention.out"),
        **_transpose("mlp.c_fc", "mlp.up"),
        **_transpose("mlp.c_proj", "mlp.down"),
    },
    base_prefix="transformer.",
)

GPT = Family(
    model_type="openai-gpt",
    architecture="OpenAIGPTLMHeadModel",
    keys=drop_keys(GPT_KEYS, "n_inner", "activation_function") | {"afn": "hidden_act"},
    defaults={**DEFAULTS, "vocab_size": 40_478, "hidden_act": "gelu", "max_position_embeddings": 512},
    to_model=_build_gpt,
    write=_write_gpt,
    tensors={
        **GPT2.tensors,
        "embed.tokens": "transformer.tokens_embed",
        "embed.positions": "transformer.positions_embed",
    },
    base_prefix="transformer.",
)

# GPT-BigCode: GPT-2 with one key head, unless ``multi_query`` is false.
GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    keys=KEYS | map_same_names("multi_query"),
    defaults={**DEFAULTS, "hidden_act": "gelu_pytorch_tanh", "multi_query": True},
    supported=CROSS_ATTENTION,
    to_model=lambda config: _build_gpt2(config).replace(
        kv_heads=1 if config.multi_query else config.num_attention_heads
    ),
    write=lambda model: {"multi_query": model.kv_heads == 1},
    tensors={
        **GPT_PLACES,
        **dict.fromkeys(QKV, FusedTensor("attn.c_attn", QKV, groups="kv_heads")),
        "attention.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    base_prefix="transformer.",
)
