"""Per-layer inputs (Gemma 3n, Gemma 4): numbers that a token's id and embedding make for each layer.

    embed    ids → table · √P;  x → project / √D → norm;  their sum / √2 → inputs [R, L, P]
    block    z + norm(project(act(gate(z)) · inputs of this layer))

Formulas: ``fivefold/model/per_layer_inputs.py``. With AltUp (``altup.py``) a layer adds to all parts of the stream but
the first.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.norm import build_norm
from fivefold.trainer.model.operation import Run, call_directly


def make_inputs(run: Run, embed: Any, ids: Tensor, x_RD: Tensor, *, layers: int) -> Tensor:
    """Return the inputs [R, L, P] of all layers, computed by weights of ``embed`` from ids [R] and their embedding."""
    rows, width = x_RD.shape
    table = run("embed.per_layer", F.embedding, ids, embed.per_layer.weight)
    size = table.shape[1] // layers
    table = run("embed.per_layer.scale", torch.mul, table, sqrt(size))
    projected = run("embed.per_layer_project", embed.per_layer_project, x_RD)
    projected = run("embed.per_layer_project.scale", torch.mul, projected, 1 / sqrt(width))
    normed = run("embed.per_layer_norm", embed.per_layer_norm, projected.view(rows, layers, size))
    del projected
    total = run("embed.per_layer.add", torch.add, normed, table.view_as(normed))
    del normed, table
    return run("embed.per_layer.halve", torch.mul, total, 1 / sqrt(2))


class LayerInput(nn.Module):
    """The addition to the stream at the end of a layer: norm(project(act(gate(x)) · input))."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        inputs = model.per_layer_inputs
        assert inputs is not None
        self.run: Run = call_directly
        self.kernels: Kernels = EAGER
        self.activation = model.activation
        self.gate = Linear(model.width, inputs.width, bias=False, is_low_precision=False)
        self.project = Linear(inputs.width, model.width, bias=False, is_low_precision=False)
        self.norm = build_norm(model, model.width)

    def forward(self, x_RD: Tensor, layer_input: Tensor) -> Tensor:
        """Return [R, D] from the stream, or its first part, and the layer's input."""
        gate = self.run("per_layer.gate", self.gate, x_RD)
        act = self.run("per_layer.act", self.kernels.activate_gated, gate, layer_input, self.activation)
        del gate
        out_RD = self.run("per_layer.project", self.project, act)
        del act
        return self.run("per_layer.norm", self.norm, out_RD)
