"""The linear layers of a model by the names of their modules in transformers, as peft's ``target_modules`` has them.

Several of our layers may be one module there, as q, k and v of Qwen3.5's Gated DeltaNets are ``in_proj_qkv``. Its
adapter has one pair of factors: ours has a factor B for each layer, and the first of them has the factor A of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from fivefold.adapter import ALL_TARGETS, MERGED_LINEARS, Adapter
from fivefold.model.shape import ModelShape


class AdaptedLinear(NamedTuple):
    """The name of a linear layer's module in transformers, and the first of our layers that are that module."""

    target: str
    leader: str


@lru_cache(maxsize=64)
def map_linears(model: ModelShape) -> Mapping[str, AdaptedLinear]:
    """Return the linear layers of ``model`` that may have adapters, by our names, which are relative to a block."""
    linears = {linear: AdaptedLinear(name, linear) for name, linears in ALL_TARGETS.items() for linear in linears}
    if model.gate_in_query:
        linears["attention.gate"] = linears["attention.q"]
    if model.short_conv is not None and not model.output_gate:  # LFM2, unlike LFM3, which has gates
        linears["attention.out"] = AdaptedLinear("out_proj", "attention.out")
    for mixer in model.mixer_geometries:
        for name, parts in mixer.targets.items():
            linears |= {f"mixer.{part}": AdaptedLinear(name, f"mixer.{parts[0]}") for part in parts}
    return MappingProxyType(linears)


def has_adapter(model: ModelShape, adapter: Adapter, linear: str) -> bool:
    """Tell whether a linear layer, such as ``attention.q`` or ``attention.qkv`` of a block, has an adapter."""
    linears = map_linears(model)
    parts = (linears.get(part) for part in MERGED_LINEARS.get(linear, (linear,)))
    return any(part is not None and adapter.has_target(part.target) for part in parts)


def resolve_linear(model: ModelShape, adapter: Adapter, linear: str) -> Adapter:
    """Return the adapter with the rank and alpha of a linear layer, such as ``attention.q`` or ``head.out``.

    Those of merged layers, such as ``attention.qkv``, are equal (``layout/validity/adapters.py``).
    """
    part, *_ = MERGED_LINEARS.get(linear, (linear,))
    return adapter.resolve_target(map_linears(model)[part].target)


def name_leader(model: ModelShape, linear: str) -> str:
    """Return the layer that has the factor A of a linear layer, both with the number of their block: itself, if alone.

    ``linear``: such as ``blocks.3.mixer.k``.
    """
    if not linear.startswith("blocks."):
        return linear
    blocks, layer, inner = linear.split(".", 2)
    return f"{blocks}.{layer}.{map_linears(model)[inner].leader}"
