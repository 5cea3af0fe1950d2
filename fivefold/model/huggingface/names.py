"""Our weights as the tensors of a Hugging Face folder: names, shapes, experts, and the order of rotary rows.

    blocks.3.moe.experts.gate [E, F, D] = E times model.layers.3.mlp.experts.0.gate_proj.weight [F, D]
                                or the upper half of model.layers.3.mlp.experts.gate_up_proj [E, 2F, D] (stacked)

Source: modelling code and ``conversion_mapping.py`` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from fivefold.model.spec import Model
from fivefold.model.weights import Weight, weights
from fivefold.record import nearest


class Part(NamedTuple):
    """A tensor of the folder that is ``ours``, one of our weights, or an expert of it, or holds it beside another."""

    name: str
    shape: tuple[int, ...]
    ours: str
    expert: int | None = None  # the one of ours that it is
    first: int = 0  # where ours begins in its last dim but one
    head: tuple[int, int] | None = None  # rows of each head, and how many of them, the last, turn as interleaved pairs

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    def order(self) -> list[int]:
        """Which of its rows each of ours is: a pair lies side by side there, and half the rotary dim apart with us."""
        if self.head is None:
            return list(range(self.shape[0]))
        size, turned = self.head
        still = size - turned
        one = [*range(still), *range(still, size, 2), *range(still + 1, size, 2)]
        return [start + row for start in range(0, self.shape[0], size) for row in one]


DECODER = {
    "embed.tokens": "model.embed_tokens",
    "head.norm": "model.norm",
    "head.out": "lm_head",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
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
EXPERTS = DECODER | {
    "moe.router": "mlp.gate",
    "moe.experts.gate": "mlp.experts.{}.gate_proj.weight",
    "moe.experts.up": "mlp.experts.{}.up_proj.weight",
    "moe.experts.down": "mlp.experts.{}.down_proj.weight",
}
MIXTRAL = DECODER | {
    "moe.router": "block_sparse_moe.gate",
    "moe.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
    "moe.experts.up": "block_sparse_moe.experts.{}.w3.weight",
    "moe.experts.down": "block_sparse_moe.experts.{}.w2.weight",
}
DEEPSEEK = EXPERTS | {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "moe.shared.gate": "mlp.shared_experts.gate_proj",
    "moe.shared.up": "mlp.shared_experts.up_proj",
    "moe.shared.down": "mlp.shared_experts.down_proj",
}
FREE = DEEPSEEK | {"moe.bias": "mlp.gate.e_score_correction_bias"}
# All experts of a layer in one tensor, as transformers 5 has them in memory, whatever the family's names on disk.
STACKED = {
    "moe.router": "mlp.gate",
    "moe.experts.gate": "mlp.experts.gate_up_proj",
    "moe.experts.up": "mlp.experts.gate_up_proj",
    "moe.experts.down": "mlp.experts.down_proj",
}
STACKED_SIGN = ".mlp.experts.gate_up_proj"

NAMES: dict[str, Mapping[str, str]] = {
    "llama": DECODER,
    "mistral": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER,
    "mixtral": MIXTRAL,
    "qwen3_moe": EXPERTS,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": FREE,
    "kimi_k2": FREE,
}


def parts(model: Model, *, family: str, stacked: bool = False, interleaved: bool = True) -> Iterator[Part]:
    """The tensors of a folder of ``family``, in module order; also the biases by which experts are chosen.

    ``stacked``: experts in one tensor per layer. ``interleaved``: pairs of latent attention lie side by side, as in
    every published file (the config's ``rope_interleave``). Raises ``Mistake`` for a family whose names are not known.
    """
    if family not in NAMES:
        raise nearest(family, list(NAMES), kind="family of weights")
    names = {**NAMES[family], **(STACKED if stacked else {})}
    for weight in weights(model):
        yield from _of(weight, model, names, interleaved=interleaved)
    if model.moe is not None and "moe.bias" in names:
        for layer in range(model.moe.dense_layers, model.layers):
            theirs = f"model.layers.{layer}.{names['moe.bias']}"
            yield Part(theirs, (model.moe.experts,), bias_name(layer))


def bias_name(layer: int) -> str:
    """Our name of the bias by which the experts of ``layer`` are chosen, which is no weight."""
    return f"blocks.{layer}.moe.bias"


def _of(weight: Weight, model: Model, names: Mapping[str, str], *, interleaved: bool) -> Iterator[Part]:
    prefix, inner = "", weight.name
    if inner.startswith("blocks."):
        _, layer, inner = inner.split(".", 2)
        prefix = f"model.layers.{layer}."
    if not inner.startswith("moe.experts."):
        stem, _, leaf = inner.rpartition(".")
        head = _head(stem, model) if interleaved else None
        yield Part(f"{prefix}{names[stem]}.{leaf}", weight.shape, weight.name, head=head)
        return
    experts, rows, columns = weight.shape
    if "{}" in names[inner]:
        for expert in range(experts):
            yield Part(prefix + names[inner].format(expert), (rows, columns), weight.name, expert)
    elif inner.endswith(".down"):
        yield Part(prefix + names[inner], weight.shape, weight.name)
    else:
        first = rows if inner.endswith(".up") else 0
        yield Part(prefix + names[inner], (experts, 2 * rows, columns), weight.name, first=first)


def _head(stem: str, model: Model) -> tuple[int, int] | None:
    """Rows of a head and of its rotary part, where the rows of latent attention have one."""
    if model.mla is None:
        return None
    turned = model.mla.rope_dim
    sizes = {
        "attention.q": model.mla.nope_dim + turned,
        "attention.q_up": model.mla.nope_dim + turned,
        "attention.kv_down": model.mla.kv_rank + turned,
    }
    return (sizes[stem], turned) if stem in sizes else None
