"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437 §2.2): module k predicts from position i the token i + k + 1.

    h⁰ = the main model's normed output    h^k = norm(block(W [norm(embedding of token i + k); norm(h^k−1)]))
    loss = L⁰ + λ / depth · Σ L^k          L^k: the main output projection on h^k, against the targets k tokens later

As in the published weights, the embedding comes first in the projection's input and each module has its own last norm
(transformers' ``MtpModel``). Parallelisms see a block and plain layers; ``lookup`` reads the model's embedding.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.trainer.model.linear import Linear, accumulate_grad
from fivefold.trainer.model.norm import build_norm
from fivefold.trainer.model.operation import Run, call_directly


class MTPTargets(NamedTuple):
    """Inputs of the modules for a micro-batch, [B, T] each: module k gets the tokens k positions later, and targets."""

    tokens: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]


class Prediction(nn.Module):
    """One multi-token prediction module; ``block``: its layer."""

    def __init__(self, model: Model, *, block: nn.Module) -> None:
        super().__init__()
        self.run: Run = call_directly
        self.embed_norm, self.hidden_norm = build_norm(model, model.width), build_norm(model, model.width)
        self.project = Linear(2 * model.width, model.width, bias=False)
        self.block = block
        self.norm = build_norm(model, model.width)

    def forward(self, h_RD: Tensor, e_RD: Tensor, rows: Any) -> Tensor:
        """Compute hidden states [R, D] from the previous ones and the embeddings of the later tokens, [R, D] each."""
        e_RD = self.run("mtp.embed_norm", self.embed_norm, e_RD)
        h_RD = self.run("mtp.hidden_norm", self.hidden_norm, h_RD)
        joined = self.run("mtp.join", _side_by_side, e_RD, h_RD)
        del e_RD, h_RD
        x_RD = self.run("mtp.project", self.project, joined)
        del joined
        x_RD = self.block(x_RD, rows)
        return self.run("mtp.norm", self.norm, x_RD)


def _side_by_side(e_RD: Tensor, h_RD: Tensor) -> Tensor:
    return torch.cat((e_RD, h_RD), dim=-1)


def look_up(embed: Any, tokens_BT: Tensor) -> Tensor:
    """Embed tokens with the module ``embed`` → [R, D], whose table gets its gradient as soon as there is one.

    Autograd would hold it until the embedding's own backward, the last of all.
    """
    table: Tensor = embed.tokens.weight
    if not torch.is_grad_enabled():
        return embed.lookup(tokens_BT.flatten(), table)
    leaf = table.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(partial(_collect, table))
    return embed.lookup(tokens_BT.flatten(), leaf)


def _collect(table: Tensor, leaf: Tensor) -> None:
    gradient, leaf.grad = leaf.grad, None
    if gradient is not None:
        accumulate_grad(table, gradient)


def join_losses(losses: Tensor, parts: list[Tensor], *, filled: bool) -> Tensor:
    """Return the vector ``losses`` [1 + depth] as the end of a stage; its backward runs those of the entries ``parts``.

    ``filled``: the parts are views of it, into which their backward writes (a chunked loss).
    """
    return _Joined.apply(losses, filled, *parts)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, filled: bool, *parts: Tensor) -> Tensor:
        if not filled:
            torch.stack(parts, out=losses)
        return losses.detach()  # shares its storage

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *gradient.unbind())
