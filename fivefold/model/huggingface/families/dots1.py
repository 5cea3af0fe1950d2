"""dots.llm1: DeepSeek-V3's experts with grouped-query attention, whose queries and keys have norms."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_biased_experts, read_windows
from fivefold.model.spec import Model


def _build_dots1(config: Config) -> Model:
    """Build dots.llm1, in which layers from ``max_window_layers`` on slide if there is a window."""
    layers = range(config.num_hidden_layers)
    has_window = config.sliding_window is not None
    windows = read_windows(config, default=tuple(has_window and layer >= config.max_window_layers for layer in layers))
    moe = read_biased_experts(config) | {"dense_layers": config.first_k_dense_replace}
    fields = windows
    return build_model(config, **fields, qk_norm="head", moe=moe)


DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    keys=decoder.KEYS
    | decoder.BIASED_EXPERT_KEYS
    | map_same_names("attention_bias first_k_dense_replace sliding_window max_window_layers layer_types"),
    defaults={
        **expand_names(vocab=152_064, width=4608, ffn=10_944, layers=62, kv_heads=32),
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    to_model=_build_dots1,
    tensors=decoder.BIASED_EXPERT_TENSORS,
    stacked_tensors=decoder.name_stacked_experts(),
)
