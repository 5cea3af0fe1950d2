"""A Llama of PyTorch's own modules alone, with the weights that our engine draws: what one would write by hand.

Its modules have the names of ``model/weights.py``, so that it is what plain and native parallel contenders share.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.model.weights import list_weights
from fivefold.trainer.build import draw_initial_weight


def initial_weights(model: Model, *, seed: int) -> dict[str, Tensor]:
    """Return the trainer's weights before the first step, in full and in fp32."""
    return {weight.name: draw_initial_weight(weight, model=model, seed=seed) for weight in list_weights(model)}


class Attention(nn.Module):
    """Seam: ``core``, on [B, heads, T, H]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_dim, self.core = model.head_dim, flash
        self.q = nn.Linear(model.width, model.heads * model.head_dim, bias=False)
        self.k = nn.Linear(model.width, model.kv_heads * model.head_dim, bias=False)
        self.v = nn.Linear(model.width, model.kv_heads * model.head_dim, bias=False)
        self.out = nn.Linear(model.heads * model.head_dim, model.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = self.core(_rope(q, cos, sin), _rope(k, cos, sin), v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class DecoderMlp(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(model.width, model.ffn, bias=False)
        self.up = nn.Linear(model.width, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class DecoderBlock(nn.Module):
    """A block of a decoder in plain PyTorch: attention and an MLP, each after a norm."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(model.width, eps=model.norm_epsilon)
        self.attention = Attention(model)
        self.norm2 = nn.RMSNorm(model.width, eps=model.norm_epsilon)
        self.mlp = DecoderMlp(model)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Decoder(nn.Module):
    """``layers`` of the model; with the first of them also the embedding, with the last the head."""

    def __init__(self, model: Model, *, seed: int, layers: range | None = None) -> None:
        super().__init__()
        layers = range(model.layers) if layers is None else layers
        self.model = model
        self.embed, self.head = nn.ModuleDict(), nn.ModuleDict()
        if layers.start == 0:
            self.embed["tokens"] = nn.Embedding(model.vocab, model.width)
        self.blocks = nn.ModuleDict({str(layer): DecoderBlock(model) for layer in layers})
        if layers.stop == model.layers:
            self.head["norm"] = nn.RMSNorm(model.width, eps=model.norm_epsilon)
            self.head["out"] = nn.Linear(model.width, model.vocab, bias=False)
        weights = initial_weights(model, seed=seed)
        self.load_state_dict({name: weights[name] for name in self.state_dict()})
        self.tables: tuple[Tensor, Tensor] | None = None
        self.positions: Tensor | None = None  # of the tokens here; None: all, in order

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens [B, T] or a stream [B, T, D] → stream, or logits [B, T, V]."""
        cos, sin = self._rotary(x)
        if self.embed:
            x = self.embed["tokens"](x)
        for block in self.blocks.values():
            x = block(x, cos, sin)
        if self.head:
            x = self.head["out"](self.head["norm"](x))
        return x

    def _rotary(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of all positions [T, head dim], which are computed once."""
        if self.tables is None:
            model, dtype = self.model, next(self.parameters()).dtype
            positions = torch.arange(x.shape[1]) if self.positions is None else self.positions
            exponents = torch.arange(0, model.head_dim, 2) / model.head_dim
            angles = torch.outer(positions, model.rope_theta**-exponents).repeat(1, 2)
            self.tables = angles.cos().to(dtype), angles.sin().to(dtype)
        return self.tables


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return mean −log p in nats, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
