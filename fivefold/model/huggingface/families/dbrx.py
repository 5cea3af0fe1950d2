"""DBRX: experts in every layer, LayerNorms without bias, clipped queries, keys and values."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import EXPERT_GATE_UP, QKV, FusedTensor, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model, read_experts
from fivefold.model.spec import Model


def _build_dbrx(config: Config) -> Model:
    """Build DBRX, whose rotary base published files have in ``attn_config``; transformers reads ``rope_parameters``."""
    if config.weight_norm not in (1, None):
        raise config.mistake(f"moe_normalize_expert_weights={config.weight_norm:g} is not supported; give 1, or null")
    moe = read_experts(config, normalized=config.weight_norm is not None)
    return build_model(config, norm="layernorm", norm_bias=False, qkv_clip=config.qkv_clip, moe=moe)


def _write_dbrx(model: Model) -> dict[str, Any]:
    assert model.moe is not None
    return {
        "ffn_config.ffn_hidden_size": model.moe.ffn,
        "ffn_config.moe_normalize_expert_weights": 1.0 if model.moe.normalized else None,
    }


DBRX = Family(
    model_type="dbrx",
    architecture="DbrxForCausalLM",
    keys=map_same_names("vocab_size hidden_size num_hidden_layers num_attention_heads max_position_embeddings")
    | {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "resid_pdrop": "hidden_dropout",
        "attn_config.attn_pdrop": "attention_dropout",
        "attn_config.clip_qkv": "qkv_clip",
        "attn_config.kv_n_heads": "num_key_value_heads",
        "ffn_config.ffn_hidden_size": "intermediate_size",
        "ffn_config.moe_num_experts": "num_experts",
        "ffn_config.moe_top_k": "num_experts_per_tok",
        "ffn_config.moe_loss_weight": "router_aux_loss_coef",
        "ffn_config.moe_normalize_expert_weights": "weight_norm",
    }
    | decoder.ROTARY
    | decoder.UNREAD_ROTARY_FACTOR
    | {"attn_config.rope_theta": "rope_theta"},
    tables=("attn_config", "ffn_config"),
    defaults={
        **expand_names(width=2048, ffn=3584, layers=24, heads=16, kv_heads=1),
        "norm_epsilon": 1e-5,
        **expand_names(experts=4, topk=1),
        "router_aux_loss_coef": 0.01,
    },
    supported={
        "ffn_config.ffn_act_fn": Supported((None, {"name": "silu"}), "experts of another activation"),
        "ffn_config.moe_jitter_eps": Supported((None, 0), "noise on the router's input"),
        "emb_pdrop": Supported((0,), "dropout of the embedding, which transformers leaves out"),
        "tie_word_embeddings": Supported((False,), "a tied head, which transformers refuses"),
    },
    overwritten=("num_key_value_heads", "ffn_config.hidden_size"),
    to_model=_build_dbrx,
    write=_write_dbrx,
    tensors={
        "blocks": "transformer.blocks.{}",
        "embed.tokens": "transformer.wte",
        "head.norm": "transformer.norm_f",
        "head.out": "lm_head",
        "norm1": "norm_attn_norm.norm_1",
        "norm2": "norm_attn_norm.norm_2",
        **dict.fromkeys(QKV, FusedTensor("norm_attn_norm.attn.Wqkv", QKV)),
        "attention.out": "norm_attn_norm.attn.out_proj",
        "moe.router": "ffn.router.layer",
        **{
            weight: FusedTensor(f"ffn.experts.mlp.{name}", (weight,), flat=True)
            for weight, name in zip(EXPERT_GATE_UP, ("w1", "v1"), strict=True)
        },
        "moe.experts.down": FusedTensor("ffn.experts.mlp.w2", ("moe.experts.down",), transposed=True, flat=True),
    },
)
