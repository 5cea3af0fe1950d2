"""DeepSeek-V2 and V3, and Kimi K2: latent attention, and experts chosen within groups; the text model of OCR 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported, Wrapper
from fivefold.model.huggingface.mapping import build_model, read_experts, read_latent, read_mlp_layer_types, read_mtp
from fivefold.model.spec import Model

KEYS = (
    decoder.KEYS
    | decoder.LATENT_KEYS
    | map_same_names(
        "num_experts_per_tok moe_intermediate_size n_shared_experts first_k_dense_replace routed_scaling_factor "
        "n_group topk_group topk_method scoring_func norm_topk_prob aux_loss_alpha"
    )
)
DEFAULTS = {**expand_names(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128)}
LAYER_FREQUENCY = Supported((1,), "experts in every n-th layer only")  # read by the family's published code
TENSORS = decoder.EXPERT_TENSORS | decoder.SHARED_EXPERT_TENSORS | decoder.LATENT_TENSORS


def _build_deepseek(config: Config, *, score: str, methods: tuple[str, ...], moe: dict[str, Any]) -> Model:
    """Build a model of DeepSeek-V2 or V3; ``score`` and ``methods``: the routing that its code supports."""
    if config.scoring_func not in (None, score):
        raise config.mistake(f"scoring_func={config.scoring_func!r} is not supported in this family; only {score!r}")
    if config.topk_method not in (None, *methods):
        raise config.mistake(f"topk_method={config.topk_method!r} is not supported; supported: {', '.join(methods)}")
    experts = {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.moe_intermediate_size,
        "shared_experts": config.n_shared_experts or 0,
        "dense_layers": config.first_k_dense_replace,
        "score": score,
        "scaling": config.routed_scaling_factor,
    }
    return build_model(config, **read_latent(config), moe=experts | moe, mtp=read_mtp(config))


def _build_v2(config: Config) -> Model:
    """Build a model with softmax routing, optionally limited to groups of experts."""
    if config.norm_topk_prob:
        raise config.mistake(
            "norm_topk_prob=true is not supported, as implementations of DeepSeek-V2 differ on it; give false"
        )
    grouped = config.topk_method == "group_limited_greedy"
    moe = {
        "aux_coefficient": config.aux_loss_alpha or 0.0,
        "normalized": False,
        "groups": config.n_group if grouped else 1,
        "topk_groups": config.topk_group if grouped else 1,
    }
    return _build_deepseek(config, score="softmax", methods=("greedy", "group_limited_greedy"), moe=moe)


def _build_v3(config: Config) -> Model:
    """Build a model with sigmoid routing with a balancing bias, limited to groups of experts.

    The balancing bias e_score_correction_bias is not a weight: transformers 5.23 has it as a buffer, which is updated
    from the load without gradients. It is not counted. Rotary pairs are neighbors in the file and half a rotary dim
    apart here: a permutation of rows, not another operation.
    """
    if config.head_dim not in (None, config.qk_rope_head_dim):
        raise config.mistake(
            f"head_dim={config.head_dim} is not qk_rope_head_dim={config.qk_rope_head_dim}: the family's code would "
            "compute rotary angles for the first and fail at the second; remove head_dim"
        )
    moe = {
        "balance": "free",
        "aux_coefficient": config.aux_loss_alpha or 0.0,
        "normalized": config.norm_topk_prob,
        "groups": config.n_group or 1,
        "topk_groups": config.topk_group or 1,
    }
    return _build_deepseek(config, score="sigmoid", methods=("noaux_tc",), moe=moe)


def _build_ocr2(config: Config) -> Model:
    """Build the text model of DeepSeek-OCR 2: Llama's attention and the experts of DeepSeek-V2."""
    if config.mlp_layer_types is None:
        raise config.mistake(
            "no mlp_layer_types, without which transformers' code fails; give dense or sparse by layer"
        )
    grouped = config.topk_method == "group_limited_greedy"
    moe = read_experts(
        config,
        aux_coefficient=0.0,
        normalized=False,
        groups=config.n_group if grouped else 1,
        topk_groups=config.topk_group if grouped else 1,
        **read_mlp_layer_types(config, dense=0),
    )
    return build_model(config, moe=moe)


def _write_ocr2(model: Model) -> dict[str, Any]:
    grouped = model.moe is not None and model.moe.groups > 1
    kinds = ["sparse" if model.is_moe(layer) else "dense" for layer in range(model.layers)]
    return {"topk_method": "group_limited_greedy" if grouped else "greedy", "mlp_layer_types": kinds}


def _write_v2(model: Model) -> dict[str, Any]:
    grouped = model.moe is not None and model.moe.groups > 1
    return decoder.write_latent(model) | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _write_v3(model: Model) -> dict[str, Any]:
    return decoder.write_latent(model) | {"topk_method": "noaux_tc"}


V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    keys=KEYS | {"num_experts": "num_experts", "n_routed_experts": "num_experts"} | map_same_names("mlp_bias"),
    defaults={
        **DEFAULTS,
        "vocab_size": 102_400,
        "intermediate_size": 11_008,
        **expand_names(expert_ffn=1407, shared_experts=2, experts=64),
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "aux_loss_alpha": 0.001,
    },
    supported={
        "moe_layer_freq": LAYER_FREQUENCY,
        "rope_interleave": Supported((True,), "rotary pairs that lie half a head apart"),
    },
    to_model=_build_v2,
    write=_write_v2,
    tensors=TENSORS,
    stacked_tensors=decoder.name_stacked_experts(),
)
V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    keys=KEYS | {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"} | decoder.MTP_KEYS,
    defaults={
        **DEFAULTS,
        **expand_names(vocab=129_280, width=7168, ffn=18_432, layers=61, heads=128, kv_heads=128, positions=4096),
        **expand_names(expert_ffn=2048, shared_experts=1, experts=256, topk=8),
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
    },
    supported={"moe_layer_freq": LAYER_FREQUENCY},
    to_model=_build_v3,
    write=_write_v3,
    tensors=TENSORS | {"moe.bias": "mlp.gate.e_score_correction_bias"},
    stacked_tensors=decoder.name_stacked_experts(),
)
KIMI_K2 = replace(V3, model_type="kimi_k2")

OCR2_TEXT = Family(
    model_type="deepseek_ocr2_text",
    architecture="DeepseekOcr2TextModel",
    keys=drop_keys(decoder.KEYS, "head_dim")
    | {"num_experts": "num_experts", "n_routed_experts": "num_experts"}
    | map_same_names(
        "attention_bias mlp_bias mlp_layer_types num_experts_per_tok moe_intermediate_size n_shared_experts "
        "routed_scaling_factor n_group topk_group topk_method"
    ),
    defaults={
        "vocab_size": 102_400,
        "intermediate_size": 11_008,
        **expand_names(expert_ffn=1407, shared_experts=2, experts=64),
        "topk_method": "greedy",
    },
    to_model=_build_ocr2,
    write=_write_ocr2,
    tensors=decoder.EXPERT_TENSORS | decoder.SHARED_EXPERT_TENSORS,
    stacked_tensors=decoder.name_stacked_experts(),
)
WRAPPERS = (Wrapper("deepseek_ocr2", "DeepseekOcr2ForConditionalGeneration", text="deepseek_ocr2_text", tied=False),)
