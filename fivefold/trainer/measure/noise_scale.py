"""The gradient noise scale (McCandlish et al., arXiv:1812.06162, appendix A.1), from norms that a step has at hand.

    |G|² = (B·|g_B|² - b·|g_b|²) / (B - b)     S = (|g_b|² - |g_B|²) / (1/b - 1/B)     scale = S / |G|²

g_B is the gradient of the whole batch of B sequences, g_b that of the b sequences which a rank sums before a reduction.
Both estimates are without bias; their ratio is of means over steps. Left out are weights whose gradient is no rank's
own before a reduction: of experts, and those that are summed over further ranks too.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from fivefold.layout.spec import Layout
from fivefold.trainer.build import Built
from fivefold.trainer.parallel.gradients import Gradients

DECAY = 0.98  # of the means over steps, each step


class Noise(NamedTuple):
    """Of a step: |G|², S per sequence, and their ratio over the last steps, in sequences; None while it has none."""

    square: float
    variance: float
    scale: float | None


def noise(*, small: float, whole: float, batches: int, sequences: int) -> tuple[float, float]:
    """|G|² and S of one step: ``small``: mean square of the gradients of ``batches`` equal parts of the batch."""
    each = sequences / batches
    square = (sequences * whole - each * small) / (sequences - each)
    return square, (small - whole) / (1 / each - 1 / sequences)


class Squares:
    """Sum of squares of the gradients that this rank sums up before each reduction of a step."""

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float32, device=device)

    def add(self, gradients: Gradients, columns: tuple[Tensor, ...]) -> None:
        """The ``columns`` [ranks, padded numel] of each weight, as they are before they are reduced."""
        for index in own_weights(gradients):
            shard = gradients.shards[index]
            copies = max(1, shard.local_weight.holders // gradients.replica.size)
            left = shard.shape.numel()
            for row in columns[index]:
                if left > 0:
                    self.total += torch.linalg.vector_norm(row[:left], dtype=torch.float32).square() / copies
                left -= row.numel()


def own_weights(gradients: Gradients) -> list[int]:
    """Weights of a unit whose gradient, before it is reduced, is that of this rank's sequences."""
    elsewhere = {index for also in gradients.also for index in also.weights}
    experts = {at for at, each in enumerate(gradients.shards) if each.local_weight.weight.kind.startswith("expert")}
    return [index for index in range(len(gradients.shards)) if index not in elsewhere | experts]


class NoiseScale:
    """Measures it in every step that is asked for; ``begin`` before the backward, ``squares`` after it."""

    def __init__(self, units: list[Gradients], *, replicas: int, device: torch.device) -> None:
        self.units, self.replicas, self.device = units, replicas, device
        self._squares: Squares | None = None
        self._means = (0.0, 0.0)  # of |G|² and S, not yet divided by ``_weight``
        self._weight = 0.0

    @classmethod
    def of(cls, built: Built, layout: Layout) -> Self:
        """Of all that ``built`` trains."""
        return cls([unit.gradients for unit in built.units], replicas=layout.dp, device=built.ranks.device)

    def begin(self, *, wanted: bool) -> None:
        """Take the squares of the backward that begins, or do not."""
        self._squares = Squares(self.device) if wanted else None
        for each in self.units:
            each.squares = self._squares

    def squares(self) -> list[Tensor]:
        """Of the parts and of the whole gradient, this rank's share of each, to be summed over all ranks; [] if not
        wanted.
        """
        if self._squares is None:
            return []
        whole = torch.zeros_like(self._squares.total)
        for unit in self.units:
            for index in own_weights(unit):
                shard = unit.shards[index]
                if shard.weight.grad is not None:
                    square = torch.linalg.vector_norm(shard.weight.grad, dtype=torch.float32).square()
                    whole += square / shard.local_weight.holders
        return [self._squares.total, whole]

    def take(self, summed: list[Tensor], *, sequences: int, scale: float) -> Noise | None:
        """The noise of a step from its sums over all ranks; ``scale``: of the loss. None if it was not wanted."""
        if not summed:
            return None
        batches = self.replicas * self.units[0].times
        parts, whole = (each.item() / scale**2 for each in summed)
        square, variance = noise(small=parts * batches, whole=whole, batches=batches, sequences=sequences)
        self._means = (DECAY * self._means[0] + square, DECAY * self._means[1] + variance)
        self._weight = DECAY * self._weight + 1
        mean_square, mean_variance = (each / self._weight for each in self._means)
        return Noise(square, variance, mean_variance / mean_square if mean_square > 0 else None)
