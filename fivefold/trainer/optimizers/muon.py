"""Muon: the update of a matrix is its orthogonalized momentum; vectors, embeddings and the head are updated by AdamW.

    m ← μ m + (1−μ) g        o = NS₅(g + μ (m − g))        w ← w − lr (0.2 √max(rows, columns) · o + λ w)

Jordan et al., kellerjordan.github.io/posts/muon. The scale, which allows AdamW's learning rate, and the weight decay
are from arXiv:2502.16982 §2.2. Newton-Schulz needs full matrices and computes in bf16: they are gathered in bf16, one
to each rank at a time (``gather_matrices.py``). Data-parallel replicas of a shard do the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from math import sqrt

import torch
from torch import Tensor

from fivefold.trainer.optimizers.adamw import build_fp32
from fivefold.trainer.optimizers.gather_matrices import ShardAxes, gather_owned, return_owned
from fivefold.trainer.optimizers.optimized_weights import OptimizedWeights, ensure_moments
from fivefold.update import Rates

COEFFICIENTS, STEPS, EPSILON = (3.4445, -4.7750, 2.0315), 5, 1e-7  # as in torch.optim.Muon


def build(weights: OptimizedWeights) -> Muon:
    """Build Muon over this rank's hidden matrices, and AdamW over its other weights."""
    rest = [cut.shard for cut in weights.sharded if not cut.is_hidden and cut.shard.rows]
    adamw = build_fp32(weights, rest) if rest else None
    if adamw is not None:
        ensure_moments(adamw, rest)
    hidden = [cut for cut in weights.sharded if cut.is_hidden]
    job = weights.job
    return Muon(hidden, adamw, lr=job.learning_rate.peak, momentum=job.optimizer.momentum, rates=weights.rates)


class Muon(torch.optim.Optimizer):
    """Update the matrices ``sharded_weights``.

    ``rates`` maps a weight's name to weight decay λ and learning-rate factor. The optimizer ``rest`` updates all other
    weights; its parameter groups and state are also listed here.
    """

    def __init__(
        self,
        sharded_weights: list[ShardAxes],
        rest: torch.optim.Optimizer | None,
        *,
        lr: float,
        momentum: float,
        rates: dict[str, Rates],
    ) -> None:
        super().__init__([sharded.shard.weight for sharded in sharded_weights], {"lr": lr, "momentum": momentum})
        self.rates = rates
        self.rest, self.rounds = rest, list(_group_rounds(sharded_weights))
        for sharded in sharded_weights:
            if sharded.shard.rows:
                self.state[sharded.shard.weight]["momentum"] = torch.zeros_like(
                    sharded.shard.weight, dtype=torch.float32
                )
        if rest is not None:
            self.param_groups += rest.param_groups
            self.state.update(rest.state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights once; every rank of the stage must call it."""
        for sharded_weights in self.rounds:
            self._round(sharded_weights, rate=self.param_groups[0]["lr"], momentum=self.param_groups[0]["momentum"])
        if self.rest is not None:
            self.rest.step()

    def _round(self, sharded_weights: list[ShardAxes], *, rate: float, momentum: float) -> None:
        """Update one matrix per rank; all temporary memory is freed on return."""
        sent = [self._momentum_direction(sharded, momentum=momentum) for sharded in sharded_weights]
        for sharded, part in zip(sharded_weights, _orthogonalize(sharded_weights, sent), strict=True):
            shard, (rows, columns) = sharded.shard, sharded.shard.local_weight.weight.shape[-2:]
            weight_fp32 = shard.weight.float()  # the weight itself if it is fp32
            rate_factor, decay = self.rates[shard.name]
            weight_fp32.mul_(1 - rate_factor * rate * decay)
            weight_fp32.add_(shard.view_local(part), alpha=-0.2 * sqrt(max(rows, columns)) * rate_factor * rate)
            shard.weight.copy_(weight_fp32)

    def _momentum_direction(self, sharded: ShardAxes, *, momentum: float) -> Tensor:
        """Update the momentum; return this rank's part of the matrix to orthogonalize, in bf16, flat and padded."""
        shard = sharded.shard
        part = torch.zeros(shard.padded_numel, dtype=torch.bfloat16, device=shard.weight.device)
        if shard.rows:
            assert shard.weight.grad is not None
            average = self.state[shard.weight]["momentum"]
            gradient = shard.weight.grad.float()
            average.lerp_(gradient, 1 - momentum)
            shard.view_local(part).copy_(gradient.lerp(average, momentum))
        return part


def _group_rounds(sharded_weights: list[ShardAxes]) -> Iterator[list[ShardAxes]]:
    """Group the matrices so that each rank owns at most one per round; matrices of a round have similar sizes."""

    def list_axes(sharded: ShardAxes) -> tuple[str, str]:
        return sharded.rows.name, sharded.pieces.name

    for _, same_axes in groupby(
        sorted(sharded_weights, key=lambda sharded: (list_axes(sharded), -sharded.shard.shape.numel())), list_axes
    ):
        group = list(same_axes)
        ranks = group[0].rows.size * group[0].pieces.size
        for first in range(0, len(group), ranks):
            yield group[first : first + ranks]


def _orthogonalize(sharded_weights: list[ShardAxes], parts: list[Tensor]) -> list[Tensor]:
    """Exchange this rank's part of each matrix for its part of the orthogonalized matrix.

    That takes one all-to-all each way and axis.
    """
    rows = sharded_weights[0].rows
    owned_slices = gather_owned(parts, rows)
    _orthogonalise_owned(sharded_weights[rows.rank :: rows.size], owned_slices)
    return return_owned(owned_slices, parts, rows)


def _orthogonalise_owned(owned: list[ShardAxes], owned_slices: list[Tensor]) -> None:
    """Orthogonalize the matrices that this rank owns, in place in their tp slices ``owned_slices``."""
    if not owned:
        return
    pieces = owned[0].pieces
    shapes = [sharded.shard.shape for sharded in owned]
    local_slices = [
        flat.view(-1)[: shape.numel()].view(shape) for shape, flat in zip(shapes, owned_slices, strict=True)
    ]
    orthogonal_slices = [
        _split_slices(orthogonalize(_join_slices(stack, sharded)), sharded)
        for sharded, stack in zip(owned[pieces.rank :: pieces.size], gather_owned(local_slices, pieces), strict=True)
    ]
    for flat, piece in zip(owned_slices, return_owned(orthogonal_slices, local_slices, pieces), strict=True):
        flat.view(-1)[: piece.numel()] = piece.reshape(-1)


def _join_slices(stack: Tensor, sharded: ShardAxes) -> Tensor:
    """Join the slices of all tp ranks [ranks, ...] to the full matrix, or this ep rank's expert matrices [E, ...]."""
    return stack[0] if sharded.dim is None else torch.cat(stack[:: sharded.copies].unbind(), dim=sharded.dim)


def _split_slices(full: Tensor, sharded: ShardAxes) -> Tensor:
    """Reverse ``_join_slices``: split the full matrix into the slice of each tp rank [ranks, ...]."""
    size = sharded.pieces.size
    if sharded.dim is None:
        return full.expand(size, *full.shape)
    pieces = full.chunk(size // sharded.copies, dim=sharded.dim)
    return torch.stack([pieces[rank // sharded.copies] for rank in range(size)])


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix [..., rows, columns]: singular values become 0.7 … 1.2."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if tall else matrix).reshape(-1, *sorted(matrix.shape[-2:]))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrix.shape)
