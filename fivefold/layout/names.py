"""The names of mesh axes and of what is offloaded, and the kinds of context parallelism with their properties.

Imports nothing, so that any record may use them. Whoever adds a kind of context parallelism states its properties here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Axis = Literal["dp", "tp", "cp", "ep", "pp"]
MeshAxis = Literal["tp", "cp", "dp", "pp"]
DEFAULT_ORDER: tuple[MeshAxis, ...] = ("tp", "cp", "dp", "pp")  # nearest ranks first

CpKind = Literal["ring", "ulysses"]
Offloaded = Literal["optimizer", "activations", "parameters"]  # what is kept in host memory


class ContextParallelism(NamedTuple):
    """Properties of a kind of context parallelism that affect bytes, messages, seconds and what is legal."""

    # attention runs on all tokens of some of the heads, which all_to_all exchanges for tokens; else keys and values
    # are sent from rank to rank, and attention runs on the tokens of a rank
    exchanges_heads: bool
    parts_per_rank: int  # equal parts of a sequence that a rank holds


CONTEXT_PARALLELISMS: Mapping[CpKind, ContextParallelism] = {
    # an early part and a late one, so that causal attention is as much work on each rank
    "ring": ContextParallelism(exchanges_heads=False, parts_per_rank=2),
    "ulysses": ContextParallelism(exchanges_heads=True, parts_per_rank=1),
}
CP_KINDS: tuple[CpKind, ...] = tuple(CONTEXT_PARALLELISMS)  # the first one is the default
