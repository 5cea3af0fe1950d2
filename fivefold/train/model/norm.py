"""Norms as modules, computed by ``kernels/norms.py``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.train.model.kernels.eager import EAGER, Kernels


class RmsNorm(nn.Module):
    """RMSNorm over the last dim [..., D]; parameter ``weight`` [D]."""

    def __init__(self, width: int, *, epsilon: float) -> None:
        super().__init__()
        self.kernels: Kernels = EAGER
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D], computed in fp32."""
        return self.kernels.rms_norm(x, self.weight, epsilon=self.epsilon)


class LayerNorm(nn.Module):
    """LayerNorm over the last dim [..., D]; parameters ``weight`` and ``bias`` [D]."""

    def __init__(self, width: int, *, epsilon: float) -> None:
        super().__init__()
        self.kernels: Kernels = EAGER
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return self.kernels.layer_norm(x, self.weight, self.bias, epsilon=self.epsilon)


def norm(model: Model, width: int, *, epsilon: float | None = None) -> RmsNorm | LayerNorm:
    """A norm of the kind that ``model`` has; ``epsilon`` defaults to the model's."""
    kind = LayerNorm if model.norm == "layernorm" else RmsNorm
    return kind(width, epsilon=model.norm_epsilon if epsilon is None else epsilon)
