"""GPT-NeoX and Pythia, and GPT-NeoX Japanese."""

from __future__ import annotations

from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import (
    PLAIN_MLP,
    QKV,
    ROTARY,
    SIZES,
    FusedTensor,
    drop_keys,
    expand_names,
    map_same_names,
)
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model


def _check_head_dim(config: Config) -> None:
    """Raise ``UserError`` for a head dim that differs from that of attention."""
    head_dim = config.hidden_size // config.num_attention_heads
    if config.head_dim not in (None, head_dim):
        raise config.mistake(
            f"head_dim={config.head_dim} is not hidden_size / num_attention_heads = {head_dim}: the family's code "
            "would use one in the rotary embedding and the other in attention; remove it"
        )


def _build_gpt_neox(config: Config) -> Model:
    """Build GPT-NeoX or Pythia; attention and MLP may be parallel."""
    _check_head_dim(config)
    fields = {"norm": "layernorm", "mlp": "plain", "mlp_bias": True}
    block = "parallel" if config.use_parallel_residual else "pre"
    # one key for embedding and branches, so embedding_dropout follows that of the branches
    fields |= {"block": block, "embedding_dropout": None}
    return build_model(config, **read_rope(config, has_partial_rotary=True), **fields)


def _build_japanese(config: Config) -> Model:
    """Build GPT-NeoX Japanese: no bias but that of attention's output in the last layer."""
    _check_head_dim(config)
    return build_model(
        config,
        **read_rope(config, has_partial_rotary=True),
        norm="layernorm",
        mlp="plain",
        ffn=config.width_multiple * config.hidden_size,
        last_out_bias=True,
    )


def _rename(tensor: str | FusedTensor) -> str | FusedTensor:
    return tensor.replace("gpt_neox.", "gpt_neox_japanese.") if isinstance(tensor, str) else tensor


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    keys=SIZES
    | drop_keys(ROTARY, "rope_theta")
    | {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor", "layer_norm_eps": "norm_epsilon"}
    | map_same_names("hidden_act head_dim attention_bias hidden_dropout use_parallel_residual"),
    defaults={
        **expand_names(vocab=50_432, width=6144, ffn=24_576, layers=44, heads=64, positions=2048),
        "hidden_act": "gelu",
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.25,
    },
    to_model=_build_gpt_neox,
    tensors={
        "blocks": "gpt_neox.layers.{}",
        "embed.tokens": "gpt_neox.embed_in",
        "head.norm": "gpt_neox.final_layer_norm",
        "head.out": "embed_out",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        **dict.fromkeys(QKV, FusedTensor("attention.query_key_value", QKV, groups="kv_heads")),
        "attention.out": "attention.dense",
        **PLAIN_MLP,
    },
)

GPT_NEOX_JAPANESE = Family(
    model_type="gpt_neox_japanese",
    architecture="GPTNeoXJapaneseForCausalLM",
    keys=drop_keys(SIZES, "intermediate_size")
    | drop_keys(ROTARY, "rope_theta")
    | {
        "rotary_emb_base": "rope_theta",
        "rotary_pct": "partial_rotary_factor",
        "layer_norm_eps": "norm_epsilon",
        "intermediate_multiple_size": "width_multiple",
    }
    | map_same_names("hidden_act head_dim hidden_dropout"),
    defaults={
        **expand_names(vocab=32_000, width=2560, layers=32, heads=32, positions=2048),
        "intermediate_size": None,
        "hidden_act": "gelu",
        "norm_epsilon": 1e-5,
        "attention_dropout": 0.1,
        "tie_word_embeddings": True,
    },
    to_model=_build_japanese,
    write=lambda model: {"intermediate_multiple_size": model.ffn // model.width},
    tensors={
        **{name: _rename(tensor) for name, tensor in GPT_NEOX.tensors.items()},
        "attention.out.bias": "attention.dense_bias",
        "head.out": "embed_out",
    },
)
