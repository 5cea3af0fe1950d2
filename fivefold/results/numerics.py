"""Records of the errors of a low-precision recipe against fp32, tensor by tensor.

``diagnosis/numerics.py`` fills them, ``rendering/numerics.py`` prints them; docs/how-to/numerics.md explains them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from fivefold.record import Record

# operand: compares an 8-bit matmul input with the tensor it was cast from; the others compare with fp32
Kind = Literal["activation", "gradient", "weight", "operand"]
KINDS: dict[Kind, str] = {
    "activation": "results of operations",
    "gradient": "gradients of those results",
    "weight": "gradients of weights",
    "operand": "operands cast to eight bits",
}
Share = Field(ge=0, le=1)


class Compared(Record):
    """Errors of the tensors called ``name`` in one layer; ``layer`` is None outside the blocks."""

    kind: Kind
    layer: NonNegativeInt | None
    name: str
    elements: NonNegativeInt
    underflow: float = Share  # share of elements that are 0, but in fp32 exceed 2^-20 of the largest
    overflow: float = Share  # share at or above the format's largest number, or NaN
    error: NonNegativeFloat  # ‖a − b‖ / ‖b‖ over finite elements
    cosine: float
    largest: NonNegativeFloat  # largest finite |a|


class Numerics(Record):
    """One batch run with a recipe and in fp32, with the same weights and the same routing to experts."""

    model: str
    recipe: str
    weights: str  # source of the weights
    tokens: NonNegativeInt
    loss: float | None  # None if not finite
    reference_loss: float
    loss_scale: PositiveFloat  # factor on the gradients
    rerouted: float | None = None  # share of routing choices in which the recipe would differ
    rows: tuple[Compared, ...]
