"""JetMoE: experts make the queries and the output of attention too (arXiv:2404.07413)."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import FusedTensor, drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_experts
from fivefold.model.spec import Model

KV = ("attention.k", "attention.v")


def _build(config: Config) -> Model:
    """Build JetMoE, which has as many heads for each key head as experts for each token."""
    kv_heads = config.num_key_value_heads or 1
    topk = config.num_experts_per_tok or 1
    return build_model(
        config,
        heads=kv_heads * topk,
        kv_heads=kv_heads,
        attention_experts=True,
        out_bias=True,
        moe=read_experts(config, output_bias=True),
    )


JETMOE = Family(
    model_type="jetmoe",
    architecture="JetMoeForCausalLM",
    keys=drop_keys(decoder.KEYS, "hidden_act", "num_attention_heads")
    | map_same_names("num_experts_per_tok")
    | {
        "kv_channels": "head_dim",
        "activation_function": "hidden_act",
        "num_local_experts": "num_experts",
        "aux_loss_coef": "router_aux_loss_coef",
    },
    defaults={
        **expand_names(width=2048, ffn=5632, layers=12, heads=32, kv_heads=16, head_dim=128, positions=4096),
        **expand_names(experts=8, topk=2),
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": True,
    },
    overwritten=("num_attention_heads",),
    to_model=_build,
    tensors={
        **decoder.TENSORS,
        "attention.routing.router": "self_attention.experts.router.layer",
        "attention.experts.q": "self_attention.experts.input_linear.weight",
        "attention.experts.out": "self_attention.experts.output_linear.weight",
        "attention.bias_out": "self_attention.experts.bias",
        **dict.fromkeys(KV, FusedTensor("self_attention.kv_proj", KV)),
        "moe.router": "mlp.router.layer",
        **dict.fromkeys(decoder.EXPERT_GATE_UP, FusedTensor("mlp.input_linear.weight", decoder.EXPERT_GATE_UP)),
        "moe.experts.down": "mlp.output_linear.weight",
        "moe.bias_out": "mlp.bias",
    },
)
