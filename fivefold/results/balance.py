"""Records of the arithmetic intensity of a layer's messages at each degree of each axis, and of link balances.

    intensity = FLOPs ÷ bytes of the layer        balance = FLOP/s ÷ bytes/s of the machine

``planner/ratios/__init__.py`` computes them, ``rendering/ratios.py`` prints them, and
docs/explanation/how-a-step-costs/ratios.md explains them.
"""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from fivefold.record import Record


class Degree(Record):
    """One degree of an axis: FLOPs per byte of the layer, and the balance of the slowest link that it uses."""

    degree: PositiveInt
    token: str  # as in a layout: tp8, tp4x2
    link: str
    flops_per_byte: PositiveFloat
    balance: PositiveFloat
    overlaps: bool


class Axis(Record):
    """One message of one axis. ``largest``: the highest degree at which compute can overlap it fully."""

    axis: str
    sends: str
    overlapped_with: str
    formula: str
    degrees: tuple[Degree, ...]
    largest: PositiveInt
    reason: str


class Sizing(Record):
    """The MoE layer shape at which compute overlaps its two all-to-alls over ``link``.

    ``ffn_alone``: smallest expert ffn at which the experts' compute overlaps them; ``ffn_layer``: at which the full
    layer does; ``topk_layer``: largest top-k at the present ffn at which the full layer does (None: any).
    """

    link: str
    ffn: PositiveInt
    topk: PositiveInt
    ffn_alone: PositiveInt
    ffn_layer: NonNegativeInt
    topk_layer: NonNegativeInt | None


class Ratios(Record):
    """All axes of one model on one machine, each varied by itself; ``balances``: FLOPs per byte, by link."""

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
