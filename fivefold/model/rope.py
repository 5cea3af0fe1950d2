"""Rotary positions of attention and other mixers, and their scaling for sequences longer than in pre-training."""

from typing import Literal, NamedTuple

from pydantic import Field

from fivefold.bounded_types import Positive, Scalar, Tokens
from fivefold.record import Record


class RopeScaling(Record):
    """Scaling of rotary frequencies for sequences longer than in pre-training."""

    # ``rope_type`` of Hugging Face; proportional: pairs of the full head, of which the first ``fraction`` rotate
    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
    factor: Positive = 1.0  # ratio of the new to the old context length
    fraction: float = Field(1.0, gt=0, le=1)  # proportional only: share of the pairs that rotate
    original_positions: Tokens | None = None  # context length of pre-training, in tokens
    low_frequency_factor: Positive = 1.0  # llama3 only
    high_frequency_factor: Positive = 4.0  # llama3 only
    beta_fast: Positive = 32.0  # yarn only
    beta_slow: Positive = 1.0  # yarn only
    attention_factor: Scalar | None = None  # factor on cosines and sines; None: computed
    mscale: Scalar | None = None  # yarn only (DeepSeek)
    mscale_all_dims: Scalar | None = None  # yarn only (DeepSeek)
    truncate: bool = True  # yarn: round the range of corrected dims
    short_factors: tuple[Scalar, ...] = ()  # longrope: per dim, within the original context length
    long_factors: tuple[Scalar, ...] = ()  # longrope: per dim, beyond it


class RotaryTable(NamedTuple):
    """A table of cosines and sines: the rotated dims of a head, the base of the frequencies, their scaling."""

    dim: int
    theta: float
    scaling: RopeScaling | None
