"""The gate of a norm: its output times the sigmoid of two matrices of low rank on it (A.X K2).

    y = norm(x)        z = y · σ(up(silu(down(y))))

Same formula as transformers 5.23, ``AXK2GatedRMSNorm``.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.operation import Run, call_directly


class NormGate(nn.Module):
    """The gate of the norm ``name``, which prefixes the names of its operations."""

    def __init__(self, model: Model, *, name: Literal["norm1", "norm2"]) -> None:
        super().__init__()
        assert model.norm_gate_rank is not None
        self.run: Run = call_directly
        self.kernels: Kernels = EAGER
        self.name = name
        self.down = Linear(model.width, model.norm_gate_rank, bias=False, is_low_precision=False)
        self.up = Linear(model.norm_gate_rank, model.width, bias=False, is_low_precision=False)

    def forward(self, y_RD: Tensor) -> Tensor:
        """Return the norm's output ``y`` times its gate, [R, D]."""
        low = self.run(f"{self.name}.gate_down", self.down, y_RD)
        low = self.run(f"{self.name}.gate_act", self.kernels.activate, low, "silu")
        logits_RD = self.run(f"{self.name}.gate_up", self.up, low)
        del low
        return self.run(f"{self.name}.gate", self.kernels.gate_output, y_RD, logits_RD, "sigmoid")
