"""The feed-forward of RWKV-4 (arXiv:2305.13048 §3.2): a plain MLP of a mean of two tokens, and a gate of another mean.

    h₋ = shift(h)      σ(receptance(mix(h, h₋))) · down(act(up(mix(h, h₋))))

Same formula as transformers 5.23, ``RwkvFeedForward``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.operation import Run, call_directly
from fivefold.trainer.model.token_shift import mix_tokens, shift_tokens


class ReceptanceMlp(nn.Module):
    """The feed-forward of width ``ffn``; ``mix_up`` and ``mix_receptance``: shares of a token in both means [D]."""

    def __init__(self, model: Model, *, ffn: int) -> None:
        super().__init__()
        self.run: Run = call_directly
        self.kernels: Kernels = EAGER
        self.activation = model.activation
        self.mix_up, self.mix_receptance = (nn.Parameter(torch.empty(model.width)) for _ in range(2))
        self.receptance = Linear(model.width, model.width, bias=False)
        self.up = Linear(model.width, ffn, bias=model.mlp_bias)
        self.down = Linear(ffn, model.width, bias=model.mlp_bias)

    def forward(self, x_RD: Tensor, tokens: int) -> Tensor:
        """Apply the feed-forward to sequences of ``tokens``: [R, D] → [R, D]."""
        shifted_RD = self.run("mlp.shift", shift_tokens, x_RD, tokens)
        mixed_RD = self.run("mlp.mix_up", mix_tokens, x_RD, shifted_RD, self.mix_up)
        up_RF = self.run("mlp.up", self.up, mixed_RD)
        mixed_RD = self.run("mlp.mix_receptance", mix_tokens, x_RD, shifted_RD, self.mix_receptance)
        del shifted_RD
        logits_RD = self.run("mlp.receptance", self.receptance, mixed_RD)
        del mixed_RD
        act_RF = self.run("mlp.act", self.kernels.activate, up_RF, self.activation)
        del up_RF
        out_RD = self.run("mlp.down", self.down, act_RF)
        del act_RF
        return self.run("mlp.gate", self.kernels.gate_output, out_RD, logits_RD, "sigmoid")
