"""Llama, and families whose published code is Llama's under another name."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported, Wrapper
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.spec import Model

KEYS = decoder.KEYS | map_same_names("attention_bias mlp_bias")


def _build_internlm3(config: Config) -> Model:
    """Build InternLM3: Llama with biases in all matrices or in none."""
    if config.attention_bias != config.mlp_bias:
        raise config.mistake(
            f"qkv_bias={config.attention_bias} and bias={config.mlp_bias} make transformers' code fail; "
            "give both the same value"
        )
    return build_model(config)


LLAMA = Family(model_type="llama", architecture="LlamaForCausalLM", keys=KEYS, defaults={"intermediate_size": 11_008})
INTERNLM3 = Family(
    model_type="internlm3",
    architecture="LlamaForCausalLM",
    published_architecture="InternLM3ForCausalLM",
    keys=KEYS | {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    defaults={
        **expand_names(vocab=128_512, ffn=10_240, layers=48, kv_heads=2, head_dim=128, positions=32_768),
        "norm_epsilon": 1e-5,
    },
    to_model=_build_internlm3,
)
IQUESTCODER = Family(
    model_type="iquestcoder",
    architecture="LlamaForCausalLM",
    published_architecture="IQuestCoderForCausalLM",
    keys=KEYS,
    defaults={
        **expand_names(vocab=76_800, width=5120, ffn=27_648, layers=80, heads=40, kv_heads=8, positions=131_072),
        "head_dim": 128,
        "norm_epsilon": 1e-5,
    },
    supported={
        "clip_qkv": Supported((None,), "queries, keys and values that are clipped"),
        "use_sliding_window": Supported((False, None), "a sliding window, which the family's code refuses"),
    },
)

# The text model of Emu3: Llama whose dropout of attention also applies to what each branch adds.
EMU3_TEXT = Family(
    model_type="emu3_text_model",
    architecture="Emu3TextModel",
    keys=KEYS,
    defaults={
        **expand_names(vocab=184_622, ffn=14_336, kv_heads=8, positions=9216),
        "norm_epsilon": 1e-5,
        "rope_theta": 1_000_000.0,
        "attention_dropout": 0.1,
    },
    to_model=lambda config: build_model(config.replace(hidden_dropout=config.attention_dropout)),
)
WRAPPERS = (Wrapper("emu3", "Emu3ForConditionalGeneration", text="emu3_text_model", tied=False),)
