"""Phi-1, 1.5, 2, 3 and 4, Phi-3.5-MoE, and the text model of Phi-4-multimodal."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import QKV, FusedTensor, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported, Wrapper
from fivefold.model.huggingface.mapping import build_model, read_experts, read_windows
from fivefold.model.huggingface.rope import read_rope, read_table
from fivefold.model.spec import Model


def _build_phi(config: Config) -> Model:
    """Build Phi-1, 1.5 or 2: attention and MLP in parallel on one norm, half of each head rotates, biases."""
    return build_model(
        config,
        **read_rope(config, has_partial_rotary=True),
        **decoder.GPT_FIELDS,
        head_bias=True,
        block="parallel_shared",
        qk_norm="head" if config.use_qk_norm else "none",
    )


def _build_phi3(config: Config) -> Model:
    """Build Phi-3 or Phi-4: a part of the head rotates. "su" and "yarn" were early names of longrope."""
    kinds = dict.fromkeys(("longrope", "su", "yarn"), "longrope")
    return build_model(config, **read_rope(config, has_partial_rotary=True, kinds=kinds), **read_windows(config))


def _build_phimoe(config: Config) -> Model:
    """Build Phi-3.5-MoE: LayerNorms, biases, SparseMixer's two experts; longrope with a factor of its own."""
    rope = read_rope(config, kinds={"longrope": "longrope"})
    table = read_table(config)
    if rope["rope_scaling"] is not None:
        if table.short_mscale is None or table.short_mscale != table.long_mscale:
            raise config.mistake(
                f"short_mscale={table.short_mscale} and long_mscale={table.long_mscale}: a factor by the length of the "
                "sequence is not supported; give both the same value"
            )
        rope["rope_scaling"]["attention_factor"] = table.short_mscale
    if config.num_experts_per_tok != 2:
        raise config.mistake(f"num_experts_per_tok={config.num_experts_per_tok}, but SparseMixer chooses two; use 2")
    moe = read_experts(config, score="sparsemixer", normalized=False, jitter=config.router_jitter_noise)
    return build_model(config, **rope, **read_windows(config), norm="layernorm", head_bias=config.head_bias, moe=moe)


PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    keys=decoder.LAYER_NORM_KEYS
    | {
        "layer_norm_eps": "norm_epsilon",
        "qk_layernorm": "use_qk_norm",
        "resid_pdrop": "hidden_dropout",
        "embd_pdrop": "embedding_dropout",
    }
    | map_same_names("partial_rotary_factor"),
    defaults={
        **expand_names(vocab=51_200, width=2048, ffn=8192, layers=24),
        "hidden_act": "gelu_new",
        "norm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    to_model=_build_phi,
    write=lambda model: {"qk_layernorm": model.qk_norm == "head"},
    tensors=decoder.TENSORS
    | {
        "head.norm": "model.final_layernorm",
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "attention.out": "self_attn.dense",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    },
)
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    keys=decoder.KEYS | map_same_names("partial_rotary_factor sliding_window") | {"resid_pdrop": "hidden_dropout"},
    defaults={
        **expand_names(vocab=32_064, width=3072, ffn=8192, positions=4096),
        "original_max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
    },
    to_model=_build_phi3,
    tensors=decoder.TENSORS | dict.fromkeys(QKV, FusedTensor("self_attn.qkv_proj", QKV)) | decoder.FUSED_GATE_UP,
)

PHIMOE = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    keys=decoder.KEYS
    | map_same_names("attention_bias sliding_window router_aux_loss_coef router_jitter_noise")
    | {"lm_head_bias": "head_bias", "num_local_experts": "num_experts"},
    defaults={
        **expand_names(vocab=32_064, ffn=6400, kv_heads=8, positions=131_072),
        "norm_epsilon": 1e-5,
        "rope_theta": 1_000_000.0,
        **expand_names(experts=16, topk=2),
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.01,
    },
    supported={"input_jitter_noise": Supported((0,), "noise on the router's input")},
    to_model=_build_phimoe,
    tensors=decoder.MIXTRAL_TENSORS,
    stacked_tensors=decoder.name_stacked_experts(router="router"),
)
WRAPPERS = (
    Wrapper(
        "phi4_multimodal",
        "Phi4MultimodalForCausalLM",
        text="phi3",
        tied=False,
        flat=True,
        missing={"vocab_size": 200_064, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
    ),
)
