"""The embedding: rows of a table, times a factor (Gemma), plus positions (GPT-2, XGLM), normed (BLOOM).

    x[r] = scale · tokens[id of r] + positions[offset + place of r in its sequence]

Positions are learned, or sines and then cosines of place · frequency for D / 2 frequencies. Gemma 3n and Gemma 4 also
make inputs of each layer (``per_layer_inputs.py``), and Gemma 3n other parts of the stream (``altup.py``). With
hyper-connections the streams begin as copies.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.trainer.model import embed_lora
from fivefold.trainer.model.altup import make_projections, match_magnitudes
from fivefold.trainer.model.dropout import EMBEDDING, Dropout
from fivefold.trainer.model.hyper_connections import repeat_streams
from fivefold.trainer.model.linear import Linear, fused_linears
from fivefold.trainer.model.lora import has_adapters_on
from fivefold.trainer.model.norm import UnitNorm, build_norm
from fivefold.trainer.model.operation import Run, call_directly, take_all_rows
from fivefold.trainer.model.per_layer_inputs import make_inputs

Places = Callable[[], Tensor]


def _make_table(rows: int, width: int) -> nn.Embedding:
    """Return an embedding table that is not initialized, like all weights here."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


class Embed(nn.Module):
    """Embedding. Tensor parallelism replaces ``lookup`` and, with sp, ``own_rows``, which selects this rank's rows."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.run: Run = call_directly
        self.scale = model.embedding_scale
        self.tokens = _make_table(model.vocab, model.width)
        self.offset, rows = model.position_offset, model.positions + model.position_offset
        self.positions = _make_table(rows, model.width) if model.position == "learned" else None
        self.is_sinusoidal, self.has_endpoint = model.position == "sinusoidal", model.sinusoid_endpoint
        self.lookup: Callable[[Tensor, Tensor], Tensor] = F.embedding
        self.own_rows: Callable[[Tensor], Tensor] = take_all_rows
        self.norm: nn.Module | None = None
        if model.embedding_norm != "none":
            is_weighted = model.embedding_norm == "weighted"
            self.norm = build_norm(model, model.width) if is_weighted else UnitNorm(epsilon=model.norm_epsilon)
        rate = model.dropout_rates.embedding
        self.drop = Dropout(rate, place=EMBEDDING) if rate else None
        self.layers, inputs = model.layers, model.per_layer_inputs
        self.makes_inputs = inputs is not None
        if inputs is not None:
            columns = model.layers * inputs.width
            self.per_layer = _make_table(inputs.vocab, columns)
            self.per_layer_project = Linear(model.width, columns, bias=False)
            self.per_layer_norm = build_norm(model, inputs.width)
        self.altup = make_projections(model)
        self.streams = model.hyper_connections.streams if model.hyper_connections is not None else None

    def forward(
        self, tokens_BT: Tensor, positions_T: Tensor | None = None, keys_B: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Embed tokens: [B, T] → [B · T, D], or [B · T, n, D] of n streams; and the inputs of all layers [B · T, L, P].

        ``positions_T``: positions of the tokens in their sequence; None: from 0 on. ``keys_B``: random keys of the
        sequences, for dropout.
        """
        ids = tokens_BT.flatten()
        if isinstance(self.tokens, embed_lora.AdaptedTable) and has_adapters_on():
            low = self.run("embed.tokens.lora_a", embed_lora.lower, ids, self.tokens)
            x_RD = self.run("embed.tokens", embed_lora.raise_, low, ids, self.tokens)
            del low
        else:
            x_RD = self.run("embed.tokens", self.lookup, ids, self.tokens.weight)
        if self.scale != 1:
            x_RD = self.run("embed.scale", torch.mul, x_RD, self.scale)
        batch, tokens = tokens_BT.shape

        def places() -> Tensor:
            positions = torch.arange(tokens, device=tokens_BT.device) if positions_T is None else positions_T
            return self.own_rows((positions + self.offset if self.offset else positions).repeat(batch))

        if self.positions is not None:
            x_RD = self.run("embed.positions", add_positions, x_RD, self.positions.weight, places)
        if self.is_sinusoidal:
            x_RD = self.run("embed.positions", add_sinusoids, x_RD, places, self.has_endpoint)
        if self.norm is not None:
            x_RD = self.run("embed.norm", self.norm, x_RD)
        if self.drop is not None and keys_B is not None:
            x_RD = self.run("embed.dropout", self.drop, x_RD, keys_B, tokens)
        if self.streams is not None:
            return self.run("embed.streams", repeat_streams, x_RD, self.streams)
        if not self.makes_inputs:
            return x_RD
        inputs = make_inputs(self.run, self, ids, x_RD, layers=self.layers)
        if self.altup is None:
            return x_RD, inputs
        others = self.run("embed.altup", fused_linears, x_RD, *self.altup)
        return self.run("embed.altup.scale", match_magnitudes, x_RD, *others), inputs


class _AddPositions(torch.autograd.Function):
    """Add learned positions and save nothing: the positions are computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, places: Places) -> Tensor:
        ctx.places, ctx.held = places, table.shape[0]
        return F.embedding(places(), table).add_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        table_grad = torch.ops.aten.embedding_dense_backward(grad, ctx.places(), ctx.held, -1, False)
        return grad, table_grad, None


def add_positions(x_RD: Tensor, table: Tensor, places: Places) -> Tensor:
    """Return ``x`` plus the row of ``table`` at the place of each of its rows."""
    return _AddPositions.apply(x_RD, table, places)


def add_sinusoids(x_RD: Tensor, places: Places, has_endpoint: bool) -> Tensor:
    """Return ``x`` plus sines and then cosines of the place of each row times D / 2 frequencies, angles in fp32.

    The frequencies fall by equal factors from 1 to 10,000^(−1 + 2 / D), or with ``has_endpoint`` to 1 / 10,000.
    """
    pairs, steps = x_RD.shape[1] // 2, x_RD.shape[1] // 2 - has_endpoint
    frequencies = torch.arange(pairs, dtype=torch.float32, device=x_RD.device).mul_(-log(10_000) / steps).exp_()
    angles = torch.outer(places().float(), frequencies)
    rows_RD = torch.empty_like(x_RD, requires_grad=False)
    rows_RD[:, :pairs], rows_RD[:, pairs:] = angles.sin(), angles.cos_()
    return rows_RD.add_(x_RD)
