"""The lightning indexer (arXiv:2512.02556 §2.1): it chooses the keys to which each query attends, without a gradient.

    q = rope(latent W_q)        k = rope(norm(x W_k))        w = x W_w        indices = top-k of Σ_j w_j · ReLU(q_j · k)

The choice is not differentiable, and as in transformers 5.23 (``DeepseekV32Indexer``) all of it runs without autograd:
a training step leaves the weights of an indexer as they are. DeepSeek trains them by a loss of their own (ibid. §2.1.1,
the divergence of the scores from attention's probabilities), which is not computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.indexer import Indexer
from fivefold.trainer.model.kernels.rotary import rotate_first
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.norm import LayerNorm
from fivefold.trainer.model.operation import Run, call_directly
from fivefold.trainer.model.rotary import RowInputs
from fivefold.trainer.model.sparse_attention import choose_keys


class RowShare(Protocol):
    """The rows of this rank under sequence parallelism."""

    rank: int

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks."""


class LightningIndexer(nn.Module):
    """The indexer of a layer. ``row_share``: under sp, the rows whose keys this rank chooses, among all rows."""

    def __init__(self, shape: Indexer, *, q_rank: int, width: int) -> None:
        super().__init__()
        self.run: Run = call_directly
        self.shape = shape
        self.row_share: RowShare | None = None
        self.q = Linear(q_rank, shape.heads * shape.head_dim, bias=False, is_low_precision=False)
        self.k = Linear(width, shape.head_dim, bias=False, is_low_precision=False)
        self.k_norm = LayerNorm(shape.head_dim, epsilon=shape.norm_epsilon)
        self.w = Linear(width, shape.heads, bias=False, is_low_precision=False)

    def forward(self, x_RD: Tensor, latent: Tensor, rows: RowInputs) -> Tensor:
        """Return the indices [B · T, K] of the keys that each query attends to; see ``choose_keys``."""
        run, share, first = self.run, self.row_share, 0
        q = run("attention.indexer.q", _project, latent, self.q.matrix)
        k = run("attention.indexer.k", _project, x_RD, self.k.matrix)
        k = run("attention.indexer.k_norm", _normalize, k, self.k_norm)
        w = run("attention.indexer.w", _project, x_RD, self.w.matrix)
        tables = rows.rotary(sliding=False)
        if share is not None:
            first = share.rank * len(x_RD)
        q = run("attention.indexer.rope.q", _rotate, q.unflatten(1, (self.shape.heads, -1)), *tables, first)
        k = run("attention.indexer.rope.k", _rotate, k[:, None], *tables, first)[:, 0]
        if share is not None:
            k = run("attention.indexer.ikr.gather", share.gather, k)
        documents = None if rows.documents is None else rows.documents.to(k.device).flatten()
        settings = first, rows.tokens, self.shape.topk, documents
        chosen: Tensor = run("attention.indexer.choice", _choose, q, k, w, *settings)
        if share is not None:
            chosen = run("attention.indexer.ichosen.gather", share.gather, chosen)
        return chosen


def disable_gradient(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``function`` under ``torch.no_grad``."""
    return torch.no_grad()(function)


@disable_gradient
def _project(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


@disable_gradient
def _normalize(x: Tensor, norm: LayerNorm) -> Tensor:
    return norm(x)


@disable_gradient
def _rotate(x_RNH: Tensor, cos: Tensor, sin: Tensor, first: int) -> Tensor:
    """Rotate the first dims of rows from row ``first`` of all on; the tables are those of a sequence's tokens."""
    places = torch.arange(first, first + len(x_RNH), device=cos.device) % len(cos)
    return rotate_first(x_RNH, cos[places], sin[places])


@disable_gradient
def _choose(q: Tensor, k: Tensor, w: Tensor, first: int, tokens: int, topk: int, documents: Tensor | None) -> Tensor:
    return choose_keys(q, k, w, first, tokens, topk, documents)
