"""Muon: the momentum of each matrix, made orthogonal, is its update. Vectors, embeddings and head are AdamW's.

    m ← μ m + (1−μ) g        o = NS₅(g + μ (m − g))        w ← w − lr (0.2 √max(rows, columns) · o + λ w)

Jordan et al., kellerjordan.github.io/posts/muon; scale and decay: arXiv:2502.16982 §2.2, by which the rate is AdamW's.
Newton-Schulz needs whole matrices and works in bf16, so they travel in bf16: as many at a time as there are ranks, one
to each (``gather_matrices.py``). Replicas of a shard do the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from math import sqrt

import torch
from torch import Tensor

from fivefold.train.optimizers.gather_matrices import ShardedWeight, gather_owned, return_owned
from fivefold.update import Rates

COEFFICIENTS, STEPS, EPSILON = (3.4445, -4.7750, 2.0315), 5, 1e-7  # as in torch.optim.Muon


class Muon(torch.optim.Optimizer):
    """Over the matrices of ``sharded_weights``, with λ and the rate's factor by name in ``rates``; ``rest`` updates all
    other weights, and has its groups and state here too.
    """

    def __init__(
        self, sharded_weights: list[ShardedWeight], rest: torch.optim.Optimizer | None, *, lr: float, momentum: float,
        rates: dict[str, Rates],
    ) -> None:  # fmt: skip
        super().__init__([cut.shard.weight for cut in sharded_weights], {"lr": lr, "momentum": momentum})
        self.rates = rates
        self.rest, self.rounds = rest, list(_rounds(sharded_weights))
        for cut in sharded_weights:
            if cut.shard.rows:
                self.state[cut.shard.weight]["momentum"] = torch.zeros_like(cut.shard.weight, dtype=torch.float32)
        if rest is not None:
            self.param_groups += rest.param_groups
            self.state.update(rest.state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all weights; every rank of the stage calls it."""
        for sharded_weights in self.rounds:
            self._round(sharded_weights, rate=self.param_groups[0]["lr"], momentum=self.param_groups[0]["momentum"])
        if self.rest is not None:
            self.rest.step()

    def _round(self, sharded_weights: list[ShardedWeight], *, rate: float, momentum: float) -> None:
        """Nothing of it lives when the next one begins."""
        sent = [self._direction(cut, momentum=momentum) for cut in sharded_weights]
        for cut, part in zip(sharded_weights, _orthogonal(sharded_weights, sent), strict=True):
            shard, (rows, columns) = cut.shard, cut.shard.local_weight.weight.shape[-2:]
            wide = shard.weight.float()  # itself, where it is wide
            times, decay = self.rates[shard.name]
            wide.mul_(1 - times * rate * decay)
            wide.add_(shard.local(part), alpha=-0.2 * sqrt(max(rows, columns)) * times * rate)
            shard.weight.copy_(wide)

    def _direction(self, cut: ShardedWeight, *, momentum: float) -> Tensor:
        """What this rank has of the matrix to be made orthogonal, flat and padded."""
        shard = cut.shard
        part = torch.zeros(shard.padded_numel, dtype=torch.bfloat16, device=shard.weight.device)
        if shard.rows:
            assert shard.weight.grad is not None
            kept, gradient = self.state[shard.weight]["momentum"], shard.weight.grad.float()
            kept.lerp_(gradient, 1 - momentum)
            shard.local(part).copy_(gradient.lerp(kept, momentum))
        return part


def _rounds(sharded_weights: list[ShardedWeight]) -> Iterator[list[ShardedWeight]]:
    """So many matrices that each rank gets one; those of one round are about as large."""

    def axes(cut: ShardedWeight) -> tuple[str, str]:
        return cut.rows.name, cut.pieces.name

    for _, same in groupby(sorted(sharded_weights, key=lambda cut: (axes(cut), -cut.shard.shape.numel())), axes):
        found = list(same)
        ranks = found[0].rows.size * found[0].pieces.size
        for first in range(0, len(found), ranks):
            yield found[first : first + ranks]


def _orthogonal(sharded_weights: list[ShardedWeight], parts: list[Tensor]) -> list[Tensor]:
    """This rank's part of each matrix → of the orthogonal one."""
    rows = sharded_weights[0].rows
    dealt = gather_owned(parts, rows)
    _replace(sharded_weights[rows.rank :: rows.size], dealt)
    return return_owned(dealt, parts, rows)


def _replace(mine: list[ShardedWeight], dealt: list[Tensor]) -> None:
    """The pieces of this rank's matrices by those of the orthogonal ones."""
    if not mine:
        return
    pieces = mine[0].pieces
    shapes = [cut.shard.shape for cut in mine]
    local = [each.view(-1)[: shape.numel()].view(shape) for shape, each in zip(shapes, dealt, strict=True)]
    wholes = [
        _apart(newton_schulz(_joined(stack, cut)), cut)
        for cut, stack in zip(mine[pieces.rank :: pieces.size], gather_owned(local, pieces), strict=True)
    ]
    for each, piece in zip(dealt, return_owned(wholes, local, pieces), strict=True):
        each.view(-1)[: piece.numel()] = piece.reshape(-1)


def _joined(stack: Tensor, cut: ShardedWeight) -> Tensor:
    """Pieces [ranks, ...] → the whole matrix, or those of the experts that are here."""
    return stack[0] if cut.dim is None else torch.cat(stack[:: cut.copies].unbind(), dim=cut.dim)


def _apart(whole: Tensor, cut: ShardedWeight) -> Tensor:
    size = cut.pieces.size
    if cut.dim is None:
        return whole.expand(size, *whole.shape)
    pieces = whole.chunk(size // cut.copies, dim=cut.dim)
    return torch.stack([pieces[rank // cut.copies] for rank in range(size)])


def newton_schulz(matrix: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix [..., rows, columns], roughly: singular values come between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if tall else matrix).reshape(-1, *sorted(matrix.shape[-2:]))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrix.shape)
