"""Dynamic loss scaling for fp16, whose range is 2^-24 … 65504: the loss is scaled so that gradients stay inside it.

    finite:      update with g / scale; after GROWTH such steps in a row  scale x 2
    not finite:  no update,                                               scale / 2

Gradients are finite if their global norm is, which all ranks know. Micikevicius et al., arXiv:1710.03740 §3.2; the
initial scale and the interval are those of torch.amp.GradScaler. Scales are powers of two, which cost no precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL_SCALE, GROWTH_INTERVAL, MIN_SCALE = 2.0**16, 2000, 1.0


class LossScaler:
    """``scale`` of the next loss, number of ``finite`` steps since it last changed, total of ``skipped`` steps."""

    def __init__(self) -> None:
        self.scale, self.finite, self.skipped = INITIAL_SCALE, 0, 0

    def update(self, *, finite: bool) -> None:
        """Double the scale after ``GROWTH_INTERVAL`` finite steps in a row; halve it after any other step."""
        if not finite:
            self.skipped += 1
            self.finite, self.scale = 0, max(MIN_SCALE, self.scale / 2)
            return
        self.finite += 1
        if self.finite == GROWTH_INTERVAL:
            self.finite, self.scale = 0, self.scale * 2

    def state(self) -> Tensor:
        """Return [scale, finite, skipped] in fp64, for a checkpoint."""
        return torch.tensor([self.scale, self.finite, self.skipped], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        """Load ``state`` from a checkpoint."""
        scale, finite, skipped = state.tolist()
        self.scale, self.finite, self.skipped = scale, int(finite), int(skipped)
