"""The parts of a model that a job freezes, such as ``embed_tokens``, ``layers[:-2]``, ``layers[8:].mlp``, ``lm_head``.

A part is an end of the model, or a slice of its layers as in Python, of which a module may be named. Frozen weights
have no gradient, no optimizer state and no master copy; below the lowest trained weight nothing has a backward.
``embed_tokens,layers[:-2],norm,lm_head`` freezes all but the last two layers. The names are those of Hugging Face.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fivefold.adapter import TARGETS

ALL = "all"  # every weight of a layer
# The beginnings of the names of weights in a model's ends and in a block, and of the operations that read them.
ENDS = {"embed_tokens": ("embed.",), "norm": ("head.norm",), "lm_head": ("head.out", "loss")}
MODULES = {
    "attention": ("attention.",),
    "mlp": ("mlp.", "moe."),
    "norms": ("norm1", "norm2"),
    "router": ("moe.router.",),
    "experts": ("moe.experts.",),
    **{target: tuple(f"{linear}." for linear in linears) for target, linears in TARGETS.items()},
}
PREFIXES = {**ENDS, **MODULES, ALL: ("",)}
FORMS = f"{', '.join(ENDS)}, layers, layers[:-2], layers[8] or layers[8:].MODULE, which is one of {', '.join(MODULES)}"
_LAYERS = re.compile(r"layers(?:\[(-?\d+)\]|\[(-?\d+)?:(-?\d+)?\])?(?:\.(\w+))?")


class FrozenPart(NamedTuple):
    """A part of a model: an end, or a module of some layers; ``ALL``: all their weights."""

    module: str
    layers: slice | None = None


def parse_part(text: str) -> FrozenPart:
    """Read a part of a model; raise ``ValueError`` if it is none."""
    if text in ENDS:
        return FrozenPart(text)
    match = _LAYERS.fullmatch(text)
    if match is None or (match[4] or ALL) not in PREFIXES or match[4] in ENDS:
        raise ValueError(f"{text!r} is not a part of a model; use {FORMS}")
    index, start, stop, module = match.groups()
    if index is not None:
        start, stop = index, (None if index == "-1" else str(int(index) + 1))
    return FrozenPart(module or ALL, slice(start and int(start), stop and int(stop)))


def is_frozen(name: str, modules: frozenset[str]) -> bool:
    """Tell whether a weight or an operation, such as ``attention.q.weight``, is one of frozen ``modules``."""
    return any(f"{name}.".startswith(PREFIXES[module]) for module in modules)
