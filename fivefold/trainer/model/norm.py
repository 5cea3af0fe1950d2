"""Norms as modules, computed by ``kernels/norms.py``; ``build_norm`` builds the norm of a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fivefold.model.norms import NORMS, NormName
from fivefold.model.spec import Model
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.kernels.norms import RankSums, spread_layer_norm, spread_rms_norm


class RmsNorm(nn.Module):
    """RMSNorm over the last dim [..., D]; parameter ``weight``: [D], or [N, D] for heads with weights of their own.

    ``sums``: set by tp if a rank has a part of D.
    """

    def __init__(self, *shape: int, epsilon: float, plus_one: bool = False) -> None:
        super().__init__()
        self.kernels: Kernels = EAGER
        self.weight = nn.Parameter(torch.empty(shape))
        self.epsilon, self.plus_one = epsilon, plus_one
        self.sums: RankSums | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., D] → [..., D], computed in fp32."""
        if self.sums is not None:
            return spread_rms_norm(x, self.weight, epsilon=self.epsilon, plus_one=self.plus_one, sums=self.sums)
        return self.kernels.rms_norm(x, self.weight, epsilon=self.epsilon, plus_one=self.plus_one)


class UnitNorm(nn.Module):
    """RMSNorm over the last dim [..., D] without weights; ``centered``: LayerNorm."""

    def __init__(self, *, epsilon: float, centered: bool = False) -> None:
        super().__init__()
        self.kernels: Kernels = EAGER
        self.epsilon, self.centered = epsilon, centered

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., D] → [..., D], computed in fp32."""
        if self.centered:
            return self.kernels.layer_norm(x, None, None, epsilon=self.epsilon)
        return self.kernels.rms_norm(x, None, epsilon=self.epsilon)


class LayerNorm(nn.Module):
    """LayerNorm over the last dim [..., D]; parameters ``weight`` and optionally ``bias``, shaped as in ``RmsNorm``."""

    def __init__(self, *shape: int, epsilon: float, plus_one: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.kernels: Kernels = EAGER
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape)) if bias else None
        self.epsilon, self.plus_one = epsilon, plus_one
        self.sums: RankSums | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., D] → [..., D], computed in fp32."""
        if self.sums is not None:
            return spread_layer_norm(
                x, self.weight, self.bias, epsilon=self.epsilon, plus_one=self.plus_one, sums=self.sums
            )
        return self.kernels.layer_norm(x, self.weight, self.bias, epsilon=self.epsilon, plus_one=self.plus_one)


def build_norm(model: Model, *shape: int, epsilon: float | None = None) -> RmsNorm | LayerNorm | UnitNorm:
    """Build a norm of the kind that ``model`` has; ``epsilon`` defaults to the model's."""
    epsilon = model.norm_epsilon if epsilon is None else epsilon
    if not model.norm_weight:
        return UnitNorm(epsilon=epsilon, centered=NORMS[model.norm].statistics == 2)
    return BUILDERS[model.norm](model, shape, epsilon)


def _build_rms_norm(model: Model, shape: tuple[int, ...], epsilon: float) -> RmsNorm:
    return RmsNorm(*shape, epsilon=epsilon, plus_one=model.norm_plus_one)


def _build_layer_norm(model: Model, shape: tuple[int, ...], epsilon: float) -> LayerNorm:
    return LayerNorm(*shape, epsilon=epsilon, plus_one=model.norm_plus_one, bias=model.norm_bias)


BUILDERS: dict[NormName, Callable[[Model, tuple[int, ...], float], RmsNorm | LayerNorm]] = {
    "rmsnorm": _build_rms_norm,
    "layernorm": _build_layer_norm,
}
