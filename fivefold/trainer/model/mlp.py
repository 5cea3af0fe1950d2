"""Feed-forward of a dense block and of the shared experts, gated or plain.

    gated   down(act(gate(x)) · up(x))        plain   down(act(up(x)))        sub_norm   down(norm(·))

Activations: ``kernels/activations.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.model.activations import ACTIVATIONS
from fivefold.model.spec import Model
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.lora import project
from fivefold.trainer.model.norm import build_norm
from fivefold.trainer.model.operation import Run, call_directly


class Mlp(nn.Module):
    """Feed-forward of width ``ffn``, gated or plain as ``model`` says.

    ``name`` prefixes the names of its operations. ``alpha_p`` and ``alpha_n``: the trained numbers of xIELU.
    """

    alpha_p: nn.Parameter
    alpha_n: nn.Parameter

    def __init__(self, model: Model, *, ffn: int, name: str) -> None:
        super().__init__()
        self.run: Run = call_directly
        self.kernels: Kernels = EAGER
        self.name = name
        self.gate = Linear(model.width, ffn, bias=model.mlp_bias) if model.mlp == "gated" else None
        self.up = Linear(model.width, ffn, bias=model.mlp_bias)
        self.activation = model.activation
        for parameter in ACTIVATIONS[model.activation].parameters:
            self.register_parameter(parameter, nn.Parameter(torch.empty(1)))
        self.norm = build_norm(model, ffn) if model.sub_norm else None
        self.down = Linear(ffn, model.width, bias=model.mlp_bias)

    def forward(self, x_RD: Tensor, keys_B: Tensor | None = None) -> Tensor:
        """Apply the feed-forward: [R, D] → [R, D]. ``keys_B``: of the sequences, for dropout of adapters' inputs."""
        if self.gate is None:
            (up_RF,) = project(self.run, f"{self.name}.up", x_RD, self.up, keys_B=keys_B)
            if self.activation == "xielu":
                act_RF = self.run(f"{self.name}.act", self.kernels.xielu, up_RF, self.alpha_p, self.alpha_n)
            else:
                act_RF = self.run(f"{self.name}.act", self.kernels.activate, up_RF, self.activation)
            del up_RF
        else:
            gate_RF, up_RF = project(self.run, f"{self.name}.gate_up", x_RD, self.gate, self.up, keys_B=keys_B)
            act_RF = self.run(f"{self.name}.act", self.kernels.activate_gated, gate_RF, up_RF, self.activation)
            del gate_RF, up_RF
        if self.norm is not None:
            act_RF = self.run(f"{self.name}.norm", self.norm, act_RF)
        (out_RD,) = project(self.run, f"{self.name}.down", act_RF, self.down, keys_B=keys_B)
        return out_RD
