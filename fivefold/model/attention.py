"""The geometry of attention in one kind of layer: heads, their dims, the rotated part of them, sinks.

``Model.attention`` returns it for each layer. Sliding layers may differ from the others (``Model.sliding``); what they
do not give is as in the model.
"""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from fivefold.bounded_types import HeadDim, Heads
from fivefold.record import Record


class Sliding(Record):
    """The geometry that sliding-window layers have of their own; None: as in the model."""

    heads: Heads | None = None  # query heads
    kv_heads: Heads | None = None  # key and value heads
    head_dim: HeadDim | None = None  # dims of a query and key head
    value_dim: HeadDim | None = None  # dims of a value head
    rope_fraction: float | None = Field(None, gt=0, le=1)  # share of the head dim that is rotated
    sinks: bool | None = None  # a learned logit per head in the softmax
    tied_values: bool | None = None  # values are the projected keys


def list_alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head's bias by distance: 2^(−8 i / n) for i = 1 … n.

    n is ``heads`` if that is a power of two. Otherwise the first heads have those of the power of two below, the others
    every second one of twice as many (arXiv:2108.12409; ofirpress/attention_with_linear_biases@a35aaca).
    """
    below = 2 ** (heads.bit_length() - 1)
    first = [2 ** (-8 * i / below) for i in range(1, below + 1)]
    odd_slopes = [2 ** (-4 * i / below) for i in range(1, 2 * (heads - below), 2)]
    return (*first, *odd_slopes)


class AttentionShape(NamedTuple):
    """The geometry of the attention of a layer. With latent attention every head has a key and a value of its own."""

    heads: int  # query heads (N)
    kv_heads: int  # key and value heads (K)
    head_dim: int  # dims of a query and key head (H), whose product is a score
    value_dim: int  # dims of a value head
    rope_dim: int  # dims of a head that are rotated
    sinks: bool  # a learned logit per head in the softmax
    tied_values: bool = False  # values are the projected keys, before their norm and rotation

    @property
    def query_dims(self) -> int:
        """Return the dims of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def output_dims(self) -> int:
        """Return the dims of the output of all heads."""
        return self.heads * self.value_dim
