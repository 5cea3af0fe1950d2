"""OLMo 2."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import same
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_attention_bias
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model


def _build_olmo2(config: Config) -> Model:
    """Build OLMo 2: norms after attention and MLP, and over all queries and all keys at once."""
    return build_model(config, **read_rope(config), **read_attention_bias(config), block="post", qk_norm="full")


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    keys=decoder.KEYS | same("attention_bias"),
    defaults={**decoder.DEFAULTS, "vocab_size": 50_304, "intermediate_size": 11_008, "norm_epsilon": 1e-5},
    to_model=_build_olmo2,
    tensors=decoder.TENSORS | {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"},
)

FAMILIES = (OLMO2,)
