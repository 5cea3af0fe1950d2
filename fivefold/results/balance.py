"""Arithmetic intensity of a layer's messages at each degree of each axis, against the balance of the links; records.

    intensity = FLOPs ÷ bytes of the layer        balance = FLOP/s ÷ bytes/s of the machine

``planner/ratios/__init__.py`` computes them, ``rendering/ratios.py`` prints them,
docs/explanation/how-a-step-costs/ratios.md
explains them.
"""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from fivefold.record import Record


class Degree(Record):
    """One degree of an axis: FLOPs per byte of the layer, and the balance of the farthest link that it uses."""

    degree: PositiveInt
    token: str  # as in a layout: tp8, tp4x2
    link: str
    flops_per_byte: PositiveFloat
    balance: PositiveFloat
    hides: bool


class Axis(Record):
    """One message of one axis. ``largest``: the highest degree up to which compute hides it."""

    axis: str
    sends: str
    behind: str
    formula: str
    degrees: tuple[Degree, ...]
    largest: PositiveInt
    reason: str


class Sizing(Record):
    """How an MoE layer must be shaped so that compute hides its two all_to_alls over ``link``.

    ``ffn_alone``: smallest expert ffn that hides them behind the experts; ``ffn_layer``: behind the whole layer;
    ``topk_layer``: largest top-k at the present ffn, behind the whole layer (None: any).
    """

    link: str
    ffn: PositiveInt
    topk: PositiveInt
    ffn_alone: PositiveInt
    ffn_layer: NonNegativeInt
    topk_layer: NonNegativeInt | None


class Ratios(Record):
    """All axes of one model on one machine, each varied alone; ``balances``: FLOPs per byte, by link."""

    model: str
    machine: str
    layout: str  # the fixed degrees while one axis is varied
    sequence: PositiveInt
    global_batch: PositiveInt
    precision: str
    peak_flops: PositiveFloat
    balances: dict[str, PositiveFloat]
    axes: tuple[Axis, ...]
    sizing: tuple[Sizing, ...] = ()
