"""The gradient noise scale (McCandlish et al., arXiv:1812.06162, appendix A.1), from norms that a step computes.

    |G|² = (B·|g_B|² - b·|g_b|²) / (B - b)     S = (|g_b|² - |g_B|²) / (1/b - 1/B)     scale = S / |G|²

g_B is the gradient of the full batch of B sequences, g_b that of the b sequences which a rank sums before a reduction.
Both estimates are unbiased; their ratio is of means over steps. Weights whose gradient before a reduction is not of
one rank's sequences are left out: those of experts, and those that are summed over further ranks too.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from fivefold.layout.spec import Layout
from fivefold.trainer.build import Built
from fivefold.trainer.parallel.gradients import Gradients

DECAY = 0.98  # decay of the running means, per step


class GradientNoise(NamedTuple):
    """The gradient noise of a step: |G|², S per sequence, and their ratio over the last steps, in sequences or None."""

    square: float
    variance: float
    scale: float | None


def estimate_noise(*, small: float, full: float, batches: int, sequences: int) -> tuple[float, float]:
    """Estimate |G|² and S of one step. ``small``: mean square of the gradients of ``batches`` equal parts."""
    part_sequences = sequences / batches
    square = (sequences * full - part_sequences * small) / (sequences - part_sequences)
    return square, (small - full) / (1 / part_sequences - 1 / sequences)


class Squares:
    """The sum of squares of the gradients that this rank accumulates before each reduction of a step."""

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float32, device=device)

    def add(self, gradients: Gradients, columns: tuple[Tensor, ...]) -> None:
        """Add the squares of ``columns`` [ranks, padded numel] of each weight, before they are reduced."""
        for index in list_local_weights(gradients):
            shard = gradients.shards[index]
            copies = max(1, shard.local_weight.holders // gradients.replica.size)
            remaining = shard.shape.numel()
            for row in columns[index]:
                if remaining > 0:
                    self.total += torch.linalg.vector_norm(row[:remaining], dtype=torch.float32).square() / copies
                remaining -= row.numel()


def list_local_weights(gradients: Gradients) -> list[int]:
    """List the weights of a unit whose gradient, before it is reduced, is that of this rank's sequences."""
    summed_further = {index for also in gradients.extra_reduces for index in also.weights}
    experts = {i for i, shard in enumerate(gradients.shards) if shard.local_weight.weight.kind.startswith("expert")}
    return [index for index in range(len(gradients.shards)) if index not in summed_further | experts]


class NoiseScale:
    """A measurement of the noise scale in chosen steps: call ``begin`` before the backward and ``squares`` after it."""

    def __init__(self, units: list[Gradients], *, replicas: int, device: torch.device) -> None:
        self.units, self.replicas, self.device = units, replicas, device
        self._squares: Squares | None = None
        self._means = (0.0, 0.0)  # of |G|² and S, not yet divided by ``_weight``
        self._weight = 0.0

    @classmethod
    def from_built(cls, built: Built, layout: Layout) -> Self:
        """Build the measurement of all units of ``built``."""
        return cls([unit.gradients for unit in built.units], replicas=layout.dp, device=built.ranks.device)

    def begin(self, *, wanted: bool) -> None:
        """Measure the squares of the next backward if ``wanted``."""
        self._squares = Squares(self.device) if wanted else None
        for unit in self.units:
            unit.squares = self._squares

    def squares(self) -> list[Tensor]:
        """Return this rank's shares of the squares of the parts and of the full gradient, to be summed over all ranks.

        [] if not wanted.
        """
        if self._squares is None:
            return []
        full = torch.zeros_like(self._squares.total)
        for unit in self.units:
            for index in list_local_weights(unit):
                shard = unit.shards[index]
                if shard.gradient is not None:
                    square = torch.linalg.vector_norm(shard.gradient, dtype=torch.float32).square()
                    full += square / shard.local_weight.holders
        return [self._squares.total, full]

    def take(self, summed: list[Tensor], *, sequences: int, scale: float) -> GradientNoise | None:
        """Return the noise of a step from its sums over all ranks; ``scale``: loss scale. None if it was not wanted."""
        if not summed:
            return None
        batches = self.replicas * self.units[0].reductions_per_step
        parts, full = (part.item() / scale**2 for part in summed)
        square, variance = estimate_noise(small=parts * batches, full=full, batches=batches, sequences=sequences)
        self._means = (DECAY * self._means[0] + square, DECAY * self._means[1] + variance)
        self._weight = DECAY * self._weight + 1
        mean_square, mean_variance = (mean / self._weight for mean in self._means)
        return GradientNoise(square, variance, mean_variance / mean_square if mean_square > 0 else None)
