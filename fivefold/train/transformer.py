"""A plain decoder that knows nothing distributed: embedding, blocks, head with loss.

    x = embed(tokens);  x += attention(norm1(x));  x += mlp(norm2(x))  per block;  loss = head(x, targets)

Module names are those of ``model/weights.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.record import Mistake
from fivefold.train.attention import Attention, rotary_tables
from fivefold.train.kernels import cross_entropy, rms_norm, swiglu


class RmsNorm(nn.Module):
    """Root-mean-square norm with a learned weight (arXiv:1910.07467)."""

    def __init__(self, width: int, *, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return rms_norm(x, self.weight, epsilon=self.epsilon)


class Mlp(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) · up(x))."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(model.width, model.ffn, bias=model.mlp_bias)
        self.up = nn.Linear(model.width, model.ffn, bias=model.mlp_bias)
        self.down = nn.Linear(model.ffn, model.width, bias=model.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        out: Tensor = self.down(swiglu(self.gate(x_BTD), self.up(x_BTD)))
        return out


class Block(nn.Module):
    """One decoder layer with norms before attention and MLP."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm1 = RmsNorm(model.width, epsilon=model.norm_epsilon)
        self.attention = Attention(model)
        self.norm2 = RmsNorm(model.width, epsilon=model.norm_epsilon)
        self.mlp = Mlp(model)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        y_BTD: Tensor = x_BTD + self.attention(self.norm1(x_BTD), cos_TH, sin_TH)
        z_BTD: Tensor = y_BTD + self.mlp(self.norm2(y_BTD))
        return z_BTD


class Embed(nn.Module):
    """Token ids to vectors."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab, model.width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """[B, T] → [B, T, D]."""
        out: Tensor = self.tokens(tokens_BT)
        return out


class Head(nn.Module):
    """Last norm, projection to the vocabulary and loss; ``tied`` is the embedding where its weight serves here."""

    def __init__(self, model: Model, *, tied: nn.Embedding | None) -> None:
        super().__init__()
        self.norm = RmsNorm(model.width, epsilon=model.norm_epsilon)
        self.out = nn.Linear(model.width, model.vocab, bias=model.head_bias) if tied is None else None
        self._tied = [tied]  # in a list, so that its weight is listed once, with the embedding

    def logits(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] → [B, T, V]."""
        x_BTD = self.norm(x_BTD)
        tied = self._tied[0]
        if self.out is None:
            assert tied is not None
            return F.linear(x_BTD, tied.weight)
        out: Tensor = self.out(x_BTD)
        return out

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None, scale: float) -> Tensor:
        """``scale`` · Σ of −log p(target) in nats, a scalar; without targets the logits [B, T, V]."""
        logits_BTV = self.logits(x_BTD)
        if targets_BT is None:
            return logits_BTV
        return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), scale=scale)


class Transformer(nn.Module):
    """The whole decoder. Build it on the meta device and give the parameters storage before use."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        _supported(model)
        self.model = model
        self.embed = Embed(model)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.head = Head(model, tied=self.embed.tokens if model.tied_embeddings else None)
        self.tables: tuple[Tensor, ...] = ()  # cos and sin, made at the first forward

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """Loss (``scale`` · Σ nats) of ``targets``, or logits [B, T, V] when there are none."""
        x_BTD = self.embed(tokens_BT)
        cos_TH, sin_TH = self._rotary(tokens_BT.shape[1], like=x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TH, sin_TH)
        loss: Tensor = self.head(x_BTD, targets_BT, scale)
        return loss

    def _rotary(self, tokens: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
        if not self.tables or self.tables[0].shape[0] < tokens:
            self.tables = rotary_tables(self.model, tokens=tokens, dtype=like.dtype, device=like.device)
        cos, sin = self.tables
        return cos[:tokens], sin[:tokens]


def _supported(model: Model) -> None:
    """Refuse, by the name of the missing operation, what this decoder cannot compute."""
    plain = Model(
        name=model.name, layers=1, width=model.width, heads=model.heads, kv_heads=model.kv_heads,
        head_dim=model.head_dim, ffn=model.ffn, vocab=model.vocab,
    )  # fmt: skip
    free = {"layers", "positions", "norm_epsilon", "rope_theta", "tied_embeddings", "source",
            "qkv_bias", "out_bias", "mlp_bias", "head_bias"}  # fmt: skip
    for field in type(model).model_fields:
        value = getattr(model, field)
        if field not in free and value != getattr(plain, field):
            raise Mistake(f"model {model.name!r}: the trainer cannot compute {field}={value!r} yet")
