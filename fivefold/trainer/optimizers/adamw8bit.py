"""8-bit AdamW as in bitsandbytes: the moments are stored as one-byte codes."""

from __future__ import annotations

from fivefold.trainer.optimizers.adamw import build_narrow
from fivefold.trainer.optimizers.eight_bit import Codebook
from fivefold.trainer.optimizers.low_precision_moments import NarrowAdamW
from fivefold.trainer.optimizers.optimized_weights import OptimizedWeights


def build(weights: OptimizedWeights) -> NarrowAdamW:
    """Build 8-bit AdamW over this rank's shards."""
    formats = (Codebook.build(signed=True, device=weights.device), Codebook.build(signed=False, device=weights.device))
    return build_narrow(weights, formats, name="adamw8bit")
