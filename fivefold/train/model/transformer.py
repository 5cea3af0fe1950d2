"""A plain decoder, which ``parallel/`` makes distributed by replacing attributes: embedding, blocks, head with loss.

    x = embed(tokens);  x += attention(norm1(x));  x += mlp(norm2(x))  per block;  loss = head(x, targets)

The residual stream x_RD has a row per token, R = B · T, sequence after sequence. Module names: ``model/weights.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.train.model.attention import GroupedAttention, LatentAttention
from fivefold.train.model.chunked_loss import chunked_loss
from fivefold.train.model.kernels.eager import EAGER, Kernels
from fivefold.train.model.kernels.loss import Nats, cross_entropy
from fivefold.train.model.linear import Linear
from fivefold.train.model.mlp import Mlp
from fivefold.train.model.moe import Moe
from fivefold.train.model.norm import RmsNorm
from fivefold.train.model.operation import Run, direct
from fivefold.train.model.rotary import Rows, tables_of


class Block(nn.Module):
    """One pre-norm decoder layer: attention, then MLP or mixture of experts, as ``model`` has at ``layer``."""

    def __init__(self, model: Model, *, layer: int) -> None:
        super().__init__()
        self.run: Run = direct
        self.norm1 = RmsNorm(model.width, epsilon=model.norm_epsilon)
        self.attention = (LatentAttention if model.mla else GroupedAttention)(model, layer=layer)
        self.norm2 = RmsNorm(model.width, epsilon=model.norm_epsilon)
        self.moe = Moe(model) if model.is_moe(layer) else None
        self.mlp = None if model.is_moe(layer) else Mlp(model, ffn=model.ffn, name="mlp")

    @property
    def feed_forward(self) -> nn.Module:
        """The mixture of experts or the MLP."""
        found = self.moe or self.mlp
        assert found is not None
        return found

    def forward(self, x_RD: Tensor, rows: Rows) -> Tensor:
        """[R, D] → [R, D]."""
        a_RD: Tensor = self.attention(self.run("norm1", self.norm1, x_RD), rows)
        y_RD: Tensor = self.run("attention.add", residual, x_RD, a_RD)
        del a_RD
        d_RD: Tensor = self.feed_forward(self.run("norm2", self.norm2, y_RD))
        z_RD: Tensor = self.run("mlp.add", residual, y_RD, d_RD)
        return z_RD


def residual(x_RD: Tensor, y_RD: Tensor) -> Tensor:
    """``x + y`` of the residual stream."""
    return x_RD + y_RD


class Embed(nn.Module):
    """Token embedding. Tensor parallelism replaces ``lookup``."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.run: Run = direct
        self.tokens = nn.Embedding(model.vocab, model.width)
        self.lookup: Callable[[Tensor, Tensor], Tensor] = F.embedding

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """[B, T] → [B · T, D]."""
        x_RD: Tensor = self.run("embed.tokens", self.lookup, tokens_BT.flatten(), self.tokens.weight)
        return x_RD


class Head(nn.Module):
    """Last norm, output projection and loss; tensor parallelism sets ``loss``. ``chunked``: ``chunked_loss.py``."""

    def __init__(self, model: Model, *, tied: nn.Embedding | None) -> None:
        super().__init__()
        self.run: Run = direct
        self.norm = RmsNorm(model.width, epsilon=model.norm_epsilon)
        bias = model.head_bias
        self.out = Linear(model.width, model.vocab, bias=bias) if tied is None else Linear.tied(tied, bias=bias)
        self.kernels: Kernels = EAGER
        self.words = model.vocab
        self.loss: Nats | None = None  # tensor parallelism's, over a sharded vocabulary
        self.chunked = False

    def forward(self, x_RD: Tensor, targets_BT: Tensor | None, scale: float) -> Tensor:
        """``scale`` · Σ over rows of −log p(target) in nats, an fp32 scalar; without targets the logits [R, V].

        ``chunked``: where gradients are required the scalar is NaN until its backward has run.
        """
        lost: Tensor
        loss = self.loss or partial(self.kernels.nats, words=self.words)
        h_RD: Tensor = self.run("head.norm", self.norm, x_RD)
        if targets_BT is not None and self.chunked:
            lost = self.run("loss", partial(chunked_loss, scale=scale, loss=loss), h_RD, self.out, targets_BT)
            return lost
        logits_RV: Tensor = self.run("head.out", self.out, h_RD)
        if targets_BT is None:
            return logits_RV
        lost = self.run("loss", partial(cross_entropy, scale=scale, loss=loss), logits_RV, targets_BT.flatten())
        return lost


class Transformer(nn.Module):
    """The whole decoder. Build it on the meta device and give the parameters storage before use.

    ``positions`` [T]: which of the ``length`` tokens of a sequence this rank holds (context parallelism); None: all.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.positions: Tensor | None = None
        self.length: int | None = None
        self.embed = Embed(model)
        self.blocks = nn.ModuleList(Block(model, layer=layer) for layer in range(model.layers))
        self.head = Head(model, tied=self.embed.tokens if model.tied_embeddings else None)
        self.tables: tuple[Tensor, ...] = ()  # of ``tables_of``, made at the first forward

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """Loss (``scale`` · Σ nats) of ``targets``, or logits [B, T, V] when there are none."""
        out = self.stage(tokens_BT, targets_BT, layers=range(self.model.layers), scale=scale)
        return out if targets_BT is not None else out.view(*tokens_BT.shape, -1)

    def stage(
        self, tokens_BT: Tensor, targets_BT: Tensor | None, *, layers: range, entry_RD: Tensor | None = None,
        documents_BT: Tensor | None = None, scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """A pipeline stage: ``layers`` on ``entry_RD``, or on the embedding if None; the last layer's also the head.

        ``documents_BT``: a document id per token of the whole sequences, if tokens attend only inside their document.
        """
        x_RD: Tensor = self.embed(tokens_BT) if entry_RD is None else entry_RD
        tokens = tokens_BT.shape[1]
        rows = Rows(tokens, self._rotary(tokens, like=x_RD), documents_BT)
        for layer in layers:
            x_RD = self.blocks[layer](x_RD, rows)
        if layers.stop < self.model.layers:
            return x_RD
        out: Tensor = self.head(x_RD, targets_BT, scale)
        return out

    def _rotary(self, tokens: int, *, like: Tensor) -> tuple[Tensor, ...]:
        """Cached tables of the first ``tokens``, in the dtype and on the device of ``like``."""
        if not self.tables or self.tables[0].shape[0] < tokens:
            positions = torch.arange(tokens, device=like.device) if self.positions is None else self.positions
            self.tables = tables_of(
                self.model, positions=positions, length=self.length, dtype=like.dtype, device=like.device
            )
        return tuple(table[:tokens] for table in self.tables)
