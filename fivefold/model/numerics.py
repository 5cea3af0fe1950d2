"""What a recipe of few bits loses against fp32, tensor by tensor, as a record.

``check/numerics.py`` fills it, ``show/numerics.py`` prints it; docs/numerics.md explains it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from fivefold.record import Record

# operand: what a matmul in eight bits reads, against what it was cast from; all others against the same in fp32
Kind = Literal["activation", "gradient", "weight", "operand"]
KINDS: dict[Kind, str] = {
    "activation": "results of operations",
    "gradient": "gradients of those results",
    "weight": "gradients of weights",
    "operand": "operands cast to eight bits",
}
Share = Field(ge=0, le=1)


class Compared(Record):
    """The tensors of one ``name`` in one layer, or outside of all."""

    kind: Kind
    layer: NonNegativeInt | None
    name: str
    elements: NonNegativeInt
    underflow: float = Share  # share that is 0, and in fp32 is more than 2^-20 of the tensor's largest
    overflow: float = Share  # share at or above the largest number of the format, or none at all
    error: NonNegativeFloat  # ‖a − b‖ / ‖b‖ of what is finite
    cosine: float
    largest: NonNegativeFloat  # of what is finite


class Numerics(Record):
    """One batch through a recipe and through fp32, with the same weights and the same choice of experts."""

    model: str
    recipe: str
    weights: str  # where they come from
    tokens: NonNegativeInt
    loss: float | None  # None: not finite
    reference_loss: float
    loss_scale: PositiveFloat  # by which gradients were multiplied
    rerouted: float | None = None  # share of choices of experts that would have been others
    rows: tuple[Compared, ...]
