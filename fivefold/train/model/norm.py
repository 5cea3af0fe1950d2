"""Norms as modules: RMSNorm by ``kernels.rms_norm``, LayerNorm by torch.

    rms    x / rms(x) · w        layer    (x − mean(x)) / std(x) · w + b        over the last dim

Sources: Zhang and Sennrich, arXiv:1910.07467; Ba et al., arXiv:1607.06450.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.train.model.kernels import rms_norm


class RmsNorm(nn.Module):
    """RMSNorm over the last dim [..., D]; parameter ``weight`` [D]."""

    def __init__(self, width: int, *, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D], computed in fp32."""
        return rms_norm(x, self.weight, epsilon=self.epsilon)


class LayerNorm(nn.Module):
    """LayerNorm over the last dim [..., D]; parameters ``weight`` and ``bias`` [D]."""

    def __init__(self, width: int, *, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


def norm(model: Model, width: int, *, epsilon: float | None = None) -> RmsNorm | LayerNorm:
    """A norm of the kind that ``model`` has; ``epsilon`` defaults to the model's."""
    kind = LayerNorm if model.norm == "layernorm" else RmsNorm
    return kind(width, epsilon=model.norm_epsilon if epsilon is None else epsilon)
