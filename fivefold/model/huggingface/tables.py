"""Names of the tensors of dense families in a Hugging Face folder: ours → theirs, in a block relative to the block.

Source: modelling code of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Fused(NamedTuple):
    """One of ``weights`` (our names, in order) that lie in one tensor of the folder called ``name``.

    In each of ``groups`` equal groups of rows lie the rows of the first weight, then of the next: 1: one weight after
    another; 0: the rows of all in turn; kv_heads: by key heads, each after its queries. ``transposed``: stored as
    [in, out].
    """

    name: str
    weights: tuple[str, ...]
    groups: int | Literal["kv_heads"] = 1
    transposed: bool = False


Names = Mapping[str, "str | Fused"]
DECODER: dict[str, str | Fused] = {
    "blocks": "model.layers.{}",
    "embed.tokens": "model.embed_tokens",
    "head.norm": "model.norm",
    "head.out": "lm_head",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "mtp.embed_norm": "enorm",
    "mtp.hidden_norm": "hnorm",
    "mtp.project": "eh_proj",
    "mtp.norm": "shared_head.norm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
QKV = ("attention.q", "attention.k", "attention.v")
GATE_UP = ("mlp.gate", "mlp.up")
_JOINED = dict.fromkeys(GATE_UP, Fused("mlp.gate_up_proj", GATE_UP))
_FOUR = {"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}


def _turned(name: str, *ours: str) -> dict[str, str | Fused]:
    """Weights stored as [in, out], one after another."""
    return dict.fromkeys(ours, Fused(name, ours, transposed=True))


GPT2: dict[str, str | Fused] = {
    "blocks": "transformer.h.{}",
    "embed.tokens": "transformer.wte",
    "embed.positions": "transformer.wpe",
    "head.norm": "transformer.ln_f",
    "head.out": "lm_head",
    "norm1": "ln_1",
    "norm2": "ln_2",
    **_turned("attn.c_attn", *QKV),
    **_turned("attn.c_proj", "attention.out"),
    **_turned("mlp.c_fc", "mlp.up"),
    **_turned("mlp.c_proj", "mlp.down"),
}
GPT_NEOX: dict[str, str | Fused] = {
    "blocks": "gpt_neox.layers.{}",
    "embed.tokens": "gpt_neox.embed_in",
    "head.norm": "gpt_neox.final_layer_norm",
    "head.out": "embed_out",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    **dict.fromkeys(QKV, Fused("attention.query_key_value", QKV, groups="kv_heads")),
    "attention.out": "attention.dense",
    **_FOUR,
}
GEMMA = DECODER | {
    "norm1_post": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "norm2_post": "post_feedforward_layernorm",
}
PHI3 = DECODER | dict.fromkeys(QKV, Fused("self_attn.qkv_proj", QKV)) | _JOINED
OLMO2 = DECODER | {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"}

GLM = DECODER | _JOINED
GLM4 = GLM | {"norm1_post": "post_self_attn_layernorm", "norm2_post": "post_mlp_layernorm"}
FALCON: dict[str, str | Fused] = {
    "blocks": "transformer.h.{}",
    "embed.tokens": "transformer.word_embeddings",
    "head.norm": "transformer.ln_f",
    "head.out": "lm_head",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    **dict.fromkeys(QKV, Fused("self_attention.query_key_value", QKV, groups="kv_heads")),
    "attention.out": "self_attention.dense",
    **_FOUR,
}

# families without experts
DENSE: dict[str, Names] = {
    "llama": DECODER,
    "internlm3": DECODER,
    "iquestcoder": DECODER,
    "mistral": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi3": PHI3,
    "nemotron": DECODER,
    "olmo2": OLMO2,
    "granite": DECODER,
    "starcoder2": DECODER | {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    "glm": GLM,
    "glm4": GLM4,
    "smollm3": DECODER,
    "cohere": DECODER,
    "cohere2": DECODER,
    "falcon": FALCON,
}
# where names depend on the kind of block
VARIANTS: dict[tuple[str, str], Names] = {("falcon", "parallel"): FALCON | {"norm1": "ln_attn", "norm2": "ln_mlp"}}
# families whose rotary pairs lie side by side in the file, and half a rotary dim apart here
INTERLEAVED = frozenset({"glm", "glm4", "cohere", "cohere2", "llama4_text"})
