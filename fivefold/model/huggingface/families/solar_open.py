"""Solar Open: DeepSeek-V3's experts in every layer, with grouped-query attention."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_biased_experts

SOLAR_OPEN = Family(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    keys=drop_keys(decoder.KEYS, "intermediate_size") | decoder.BIASED_EXPERT_KEYS | map_same_names("attention_bias"),
    defaults={
        **expand_names(vocab=196_608, layers=48, heads=64, kv_heads=8, head_dim=128, positions=131_072),
        "intermediate_size": None,
        **expand_names(expert_ffn=1280, shared_experts=1, experts=128, topk=8),
        "norm_epsilon": 1e-5,
        "rope_theta": 1_000_000.0,
    },
    to_model=lambda config: build_model(
        config, out_bias=False, ffn=config.moe_intermediate_size, moe=read_biased_experts(config)
    ),
    tensors=decoder.BIASED_EXPERT_TENSORS,
    stacked_tensors=decoder.name_stacked_experts(),
)
