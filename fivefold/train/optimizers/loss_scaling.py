"""Dynamic loss scaling: fp16 ends at 2^-24 and at 65504, so the loss is multiplied by what keeps gradients between.

    finite:  update with g / scale; after GROWTH such steps in a row  scale x 2
    not:     no update,                                               scale / 2

Whether a gradient is finite is read off the global norm, which all ranks have. Micikevicius et al., arXiv:1710.03740
§3.2; start and interval are those of torch.amp.GradScaler. Powers of two cost no bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

START, GROWTH, LEAST = 2.0**16, 2000, 1.0


class LossScaler:
    """The scale of the next loss, the finite steps since it last changed, and all steps that were skipped."""

    def __init__(self) -> None:
        self.scale, self.finite, self.skipped = START, 0, 0

    def update(self, *, finite: bool) -> None:
        """A step is over."""
        if not finite:
            self.skipped += 1
            self.finite, self.scale = 0, max(LEAST, self.scale / 2)
            return
        self.finite += 1
        if self.finite == GROWTH:
            self.finite, self.scale = 0, self.scale * 2

    def state(self) -> Tensor:
        """What a checkpoint keeps."""
        return torch.tensor([self.scale, self.finite, self.skipped], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        """Go on from a checkpoint."""
        scale, finite, skipped = state.tolist()
        self.scale, self.finite, self.skipped = scale, int(finite), int(skipped)
