"""Factors on tensors of a model, by position, branch or name."""

from typing import Literal

from pydantic import Field

from fivefold.bounded_types import Scalar, Tokens
from fivefold.record import Record


class Temperature(Record):
    """A factor on queries by their position (arXiv:2501.19399): 1 + scale · ln(1 + ⌊(position + 1) / floor⌋).

    Applies to layers without rotary positions. The first ``floor`` − 1 tokens of a sequence have the factor 1.
    """

    scale: Scalar = 0.1  # factor on the logarithm
    floor: Tokens = 8192  # tokens per step of the logarithm
    form: Literal["logarithm", "power"] = "logarithm"  # power: (1 + (position + 1) / floor)^scale instead (Beam)
    rotated: bool = False  # applies to rotary layers too, after the rotation (Ministral 3)
    first: int = Field(1, ge=0, le=1)  # what the first position counts as; 0: the first ``floor`` tokens have factor 1


class ResidualFactors(Record):
    """Factors on the stream and on the branch that is added to it, by the kind of the branch (MiniMax)."""

    attention: tuple[Scalar, Scalar] = (1.0, 1.0)  # factors of stream and branch for attention
    mixer: tuple[Scalar, Scalar] = (1.0, 1.0)  # the same for other token mixers
    feed_forward: tuple[Scalar, Scalar] = (1.0, 1.0)  # the same for the feed-forward


class Multipliers(Record):
    """Factors on tensors within a layer (Falcon-H1); each but 1 is an operation of its own."""

    attention_in: Scalar = 1.0  # factor of the input of attention
    attention_out: Scalar = 1.0  # factor of the output of attention
    key: Scalar = 1.0  # factor of projected keys, before their rotation
    mixer_in: Scalar = 1.0  # factor of the input of the Mamba-2
    mixer_out: Scalar = 1.0  # factor of the output of the Mamba-2
    mixer_parts: tuple[Scalar, ...] = ()  # factors of z, x, B, C and dt of a Mamba-2; empty: all 1
    gate: Scalar = 1.0  # factor of the feed-forward's projected gate
    down: Scalar = 1.0  # factor of the feed-forward's output
