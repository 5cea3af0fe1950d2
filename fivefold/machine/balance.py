"""A machine's balance as records: what a layer offers at each degree of each axis against what the links ask for.

    offered = FLOPs ÷ bytes of the layer        balance = FLOP/s ÷ bytes/s of the machine

``plan/ratios/__init__.py`` fills them, ``show/ratios.py`` prints them; docs/how-a-step-costs/ratios.md explains them.
"""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from fivefold.record import Record


class Degree(Record):
    """One degree of an axis: what the layer offers there, and what the farthest link it reaches asks for."""

    degree: PositiveInt
    token: str  # as in a layout: tp8, tp4x2
    link: str
    flops_per_byte: PositiveFloat
    balance: PositiveFloat
    hides: bool


class Axis(Record):
    """One message of one axis. ``largest``: the last degree that hides it before the first that does not."""

    axis: str
    sends: str
    behind: str
    formula: str
    degrees: tuple[Degree, ...]
    largest: PositiveInt
    reason: str


class Sizing(Record):
    """How a mixture of experts must be cut for its two all-to-alls to hide over ``link``.

    ``ffn_alone``: narrowest expert that hides them behind the experts; ``ffn_layer``: behind the whole layer;
    ``topk_layer``: most experts a token at the present width, behind the whole layer (None: any number).
    """

    link: str
    ffn: PositiveInt
    topk: PositiveInt
    ffn_alone: PositiveInt
    ffn_layer: NonNegativeInt
    topk_layer: NonNegativeInt | None


class Ratios(Record):
    """All axes of one model on one machine, each varied alone; ``balances`` are FLOPs per byte, by link."""

    model: str
    machine: str
    layout: str  # the degrees that stay while one is varied
    sequence: PositiveInt
    global_batch: PositiveInt
    precision: str
    peak_flops: PositiveFloat
    balances: dict[str, PositiveFloat]
    axes: tuple[Axis, ...]
    sizing: tuple[Sizing, ...] = ()
