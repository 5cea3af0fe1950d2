"""The shaping of logits before the softmax: a factor, then a soft cap that bounds them (Gemma 2).

    shaped = cap · tanh(scale · logits / cap)        ∂shaped/∂logits = scale · (1 − (shaped / cap)²)

It is elementwise, so it is the same on a slice of the vocabulary. Source of the cap: Bello et al., arXiv:1611.09940.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.model.spec import Model


class LogitTransform(NamedTuple):
    """The factor and soft cap that a model applies to its logits before the softmax; ``cap`` None: unbounded."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def from_model(cls, model: Model) -> LogitTransform:
        """Return the factor and cap of ``model``."""
        return cls(model.logit_scale, model.logit_softcap)

    def apply(self, logits: Tensor) -> Tensor:
        """Return the transformed logits as a new tensor, through autograd."""
        if self.cap is not None:
            return (logits * (self.scale / self.cap)).tanh() * self.cap
        return logits if self.scale == 1 else logits * self.scale

    def shape_(self, logits: Tensor, *, padding: slice) -> Tensor:
        """Transform ``logits`` [rows, V] in place, without autograd; columns of ``padding`` become practically −∞."""
        if self.cap is not None:
            logits.mul_(self.scale / self.cap).tanh_().mul_(self.cap)
        elif self.scale != 1:
            logits.mul_(self.scale)
        # finite under a cap, because their gradient is 0 times a power of them
        logits[:, padding] = -torch.inf if self.cap is None else torch.finfo(logits.dtype).min
        return logits

    def gradient_(self, gradient: Tensor, transformed: Tensor) -> Tensor:
        """Convert the gradient of the transformed logits, fp32, to that of the logits, in place."""
        if self.cap is not None:
            gradient.addcmul_(gradient * transformed, transformed, value=-(self.cap**-2))
        return gradient if self.scale == 1 else gradient.mul_(self.scale)


PLAIN = LogitTransform()
