"""Feed-forward of a dense block and of the shared experts, gated or plain.

    gated   down(act(gate(x)) · up(x))        plain   down(act(up(x)))        sub_norm   down(norm(·))
    sparse  act reads max(gate − (mean + c · deviation), 0), so that a share of the gates is zero (Gemma 3n)

Activations: ``kernels/activations.py``.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.activations import ACTIVATIONS
from fivefold.model.factors import Multipliers
from fivefold.model.spec import Model
from fivefold.trainer.model.kernels.activations import activate_limited
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.lora import project
from fivefold.trainer.model.norm import build_norm
from fivefold.trainer.model.operation import Run, call_directly


class Mlp(nn.Module):
    """Feed-forward of width ``ffn``, gated or plain as ``model`` says.

    ``name`` prefixes the names of its operations. ``alpha_p`` and ``alpha_n``: the trained numbers of xIELU.
    ``sparsity``: share of the gates that are set to zero if gates are normally distributed.
    """

    alpha_p: nn.Parameter
    alpha_n: nn.Parameter

    def __init__(self, model: Model, *, ffn: int, name: str, sparsity: float = 0.0) -> None:
        super().__init__()
        self.run: Run = call_directly
        self.kernels: Kernels = EAGER
        self.name = name
        self.gate = Linear(model.width, ffn, bias=model.mlp_bias) if model.mlp == "gated" else None
        self.up = Linear(model.width, ffn, bias=model.mlp_bias)
        self.activation, self.limit = model.activation, model.mlp_clamp
        self.factors = model.multipliers or Multipliers()
        for parameter in ACTIVATIONS[model.activation].parameters:
            self.register_parameter(parameter, nn.Parameter(torch.empty(1)))
        self.deviations = NormalDist().inv_cdf(sparsity) if sparsity else None
        self.norm = build_norm(model, ffn) if model.sub_norm else None
        self.down = Linear(ffn, model.width, bias=model.mlp_bias)

    def forward(self, x_RD: Tensor, keys_B: Tensor | None = None) -> Tensor:
        """Apply the feed-forward: [R, D] → [R, D].

        ``keys_B``: random keys of the sequences, for dropout of adapters' inputs.
        """
        if self.gate is None:
            (up_RF,) = project(self.run, f"{self.name}.up", x_RD, self.up, keys_B=keys_B)
            if self.activation == "xielu":
                act_RF = self.run(f"{self.name}.act", self.kernels.xielu, up_RF, self.alpha_p, self.alpha_n)
            else:
                act_RF = self.run(f"{self.name}.act", self.kernels.activate, up_RF, self.activation)
            del up_RF
        else:
            gate_RF, up_RF = project(self.run, f"{self.name}.gate_up", x_RD, self.gate, self.up, keys_B=keys_B)
            if self.factors.gate != 1:
                gate_RF = self.run(f"{self.name}.gate.scale", torch.mul, gate_RF, self.factors.gate)
            if self.deviations is not None:
                gate_RF = self.run(f"{self.name}.sparsify", sparsify, gate_RF, self.deviations)
            if self.limit is None:
                act_RF = self.run(f"{self.name}.act", self.kernels.activate_gated, gate_RF, up_RF, self.activation)
            else:
                settings = None, self.activation, self.limit
                act_RF = self.run(f"{self.name}.act", activate_limited, gate_RF, up_RF, *settings)
            del gate_RF, up_RF
        if self.norm is not None:
            act_RF = self.run(f"{self.name}.norm", self.norm, act_RF)
        (out_RD,) = project(self.run, f"{self.name}.down", act_RF, self.down, keys_B=keys_B)
        if self.factors.down != 1:
            out_RD = self.run(f"{self.name}.down.scale", torch.mul, out_RD, self.factors.down)
        return out_RD


def sparsify(gate: Tensor, deviations: float) -> Tensor:
    """Return max(gate − (mean + ``deviations`` · deviation), 0), with mean and deviation of each row [R, F]."""
    return _Sparsify.apply(gate, deviations)


class _Sparsify(torch.autograd.Function):
    """Saves its input and output, and the deviation of each row."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, deviations: float) -> Tensor:
        deviation, mean = torch.std_mean(gate, dim=-1, keepdim=True, correction=0)
        out = F.relu(gate - (mean + deviations * deviation))
        ctx.save_for_backward(gate, out, deviation)
        ctx.deviations = deviations
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gate, out, deviation = ctx.saved_tensors
        passed = grad.masked_fill(out == 0, 0)
        total = passed.sum(-1, keepdim=True) / gate.shape[-1]  # −1 times the gradient of the mean, for each gate
        slope = (ctx.deviations * total / deviation).masked_fill_(deviation == 0, 0)
        mean = gate.mean(-1, keepdim=True)
        return passed.sub_(total).sub_((gate - mean).mul_(slope)), None
