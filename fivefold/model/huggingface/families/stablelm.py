"""StableLM."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model


def _build_stablelm(config: Config) -> Model:
    """Build StableLM: LayerNorm, a quarter of the head rotates; attention and MLP may be parallel, on one norm."""
    block = "parallel_shared" if config.use_parallel_residual else "pre"
    fields = {"norm": "layernorm", "out_bias": False, "block": block}
    return build_model(config, **read_rope(config, has_partial_rotary=True), **fields)


STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    keys=drop_keys(decoder.LAYER_NORM_KEYS, "head_dim")
    | {"layer_norm_eps": "norm_epsilon", "use_qkv_bias": "attention_bias"}
    | map_same_names("partial_rotary_factor use_parallel_residual"),
    defaults={
        **expand_names(vocab=50_304, width=2560, ffn=6912, kv_heads=32, positions=4096),
        "norm_epsilon": 1e-5,
        "partial_rotary_factor": 0.25,
    },
    supported={
        "qk_layernorm": Supported((False,), "norms of each head without biases next to norms with biases"),
        "hidden_dropout": Supported((0,), "dropout only of what the MLP adds"),
    },
    to_model=_build_stablelm,
    write=lambda model: {"use_parallel_residual": model.block == "parallel_shared"},
)
