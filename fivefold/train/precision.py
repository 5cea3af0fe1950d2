"""The recipe's byte counts as torch dtypes."""

from __future__ import annotations

import torch

from fivefold.job import Recipe
from fivefold.record import Mistake

TRAINABLE = ("fp32", "bf16", "bf16-grad16")


class Dtypes:
    """Dtypes of the matrix multiplications and of the copies that ZeRO moves."""

    def __init__(self, recipe: Recipe) -> None:
        if recipe.name not in TRAINABLE:
            raise Mistake(f"precision {recipe.name!r} cannot be trained yet; known: {', '.join(TRAINABLE)}")
        low = {"fp32": torch.float32, "bf16": torch.bfloat16}[recipe.compute]

        def of(size: int) -> torch.dtype:
            return torch.float32 if size == 4 else low

        self.weights = of(recipe.weights_bytes)
        self.updated = of(recipe.updated_bytes)  # what the optimizer changes
        self.summed = of(recipe.summed_bytes)  # gradients over micro-batches and ranks
