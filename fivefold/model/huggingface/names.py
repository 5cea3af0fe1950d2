"""Maps our weights to the tensors of a Hugging Face folder: names, shapes, experts, and order of rotary rows.

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
    """A tensor of the folder that holds our weight ``ours``: alone, one expert of it, or fused with another."""

    name: str
    shape: tuple[int, ...]
    ours: str
    expert: int | None = None  # index of the expert
    first: int = 0  # first row of ours in dim -2 of a fused tensor
    head: tuple[int, int] | None = None  # (rows per head, last rows of them that are interleaved rotary pairs)

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    def order(self) -> list[int]:
        """Index of the folder's row for each of our rows: rotary pairs are interleaved there and half-split here."""
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
# All experts of a layer in one tensor, as transformers 5 has them in memory, for any family's names on disk.
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
    """The tensors of a folder of ``family``, in module order, with the routing biases of experts.

    ``stacked``: experts in one tensor per layer. ``interleaved``: rotary pairs of latent attention are interleaved, as
    in every published file (``rope_interleave``). Raises ``Mistake`` for a family whose names are unknown.
    """
    if family not in NAMES:
        raise nearest(family, list(NAMES), kind="family of weights")
    names = {**NAMES[family], **(STACKED if stacked else {})}
    for weight in weights(model):
        yield from _parts_of(weight, model, names, interleaved=interleaved)
    if model.moe is not None and "moe.bias" in names:
        for layer in range(model.moe.dense_layers, model.layers):
            theirs = f"model.layers.{layer}.{names['moe.bias']}"
            yield Part(theirs, (model.moe.experts,), bias_name(layer))


def bias_name(layer: int) -> str:
    """Our name of the routing bias of ``layer``, a buffer that is not listed as a weight."""
    return f"blocks.{layer}.moe.bias"


def _parts_of(weight: Weight, model: Model, names: Mapping[str, str], *, interleaved: bool) -> Iterator[Part]:
    prefix, inner = "", weight.name
    if inner.startswith("blocks."):
        _, layer, inner = inner.split(".", 2)
        prefix = f"model.layers.{layer}."
    if not inner.startswith("moe.experts."):
        stem, _, leaf = inner.rpartition(".")
        head = _rotary_rows(stem, model) if interleaved else None
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


def _rotary_rows(stem: str, model: Model) -> tuple[int, int] | None:
    """(Rows per head, rotary rows of them) if a weight of latent attention has rotary rows; else None."""
    if model.mla is None:
        return None
    turned = model.mla.rope_dim
    sizes = {
        "attention.q": model.mla.nope_dim + turned,
        "attention.q_up": model.mla.nope_dim + turned,
        "attention.kv_down": model.mla.kv_rank + turned,
    }
    return (sizes[stem], turned) if stem in sizes else None
