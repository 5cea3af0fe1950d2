"""The norms of a decoder as modules: RMSNorm by our own kernel, LayerNorm by torch's.

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
    """Over the last dim; the weight may be a rank's part of ``width``, and the input as wide as that."""

    def __init__(self, width: int, *, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D], in fp32 inside."""
        return rms_norm(x, self.weight, epsilon=self.epsilon)


class LayerNorm(nn.Module):
    """Over the last dim, with a bias."""

    def __init__(self, width: int, *, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


def norm(model: Model, width: int, *, epsilon: float | None = None) -> RmsNorm | LayerNorm:
    """The kind of ``model``; ``epsilon``: where not the model's own."""
    kind = LayerNorm if model.norm == "layernorm" else RmsNorm
    return kind(width, epsilon=model.norm_epsilon if epsilon is None else epsilon)
