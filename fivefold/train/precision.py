"""The recipe's byte counts as torch dtypes."""

from __future__ import annotations

import torch

from fivefold.job import RECIPES, Recipe
from fivefold.record import Mistake

TRAINABLE = ("fp32", "bf16", "bf16-grad16", "bf16-pure", "fp16")
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Dtypes:
    """Dtypes of the matrix multiplications and of the copies that ZeRO moves."""

    def __init__(self, recipe: Recipe) -> None:
        check_trainable(recipe)
        low = COMPUTE[recipe.compute]

        def of(size: int) -> torch.dtype:
            return torch.float32 if size == 4 else low

        self.weights = of(recipe.weights_bytes)
        self.updated = of(recipe.updated_bytes)  # what the optimizer changes
        self.summed = of(recipe.summed_bytes)  # gradients over micro-batches and ranks


def check_trainable(recipe: Recipe) -> None:
    """A ``Mistake`` where the engine has no such recipe, or one of that name with other bytes."""
    if recipe.compute == "fp16" and not recipe.loss_scaling:
        raise Mistake(
            f"precision {recipe.name!r}: fp16 without loss_scaling loses gradients below 2^-24; set loss_scaling"
        )
    if recipe.name not in TRAINABLE:
        raise Mistake(f"precision {recipe.name!r} cannot be trained yet; known: {', '.join(TRAINABLE)}")
    if recipe != (ours := RECIPES[recipe.name]):
        field = next(field for field in type(ours).model_fields if getattr(recipe, field) != getattr(ours, field))
        raise Mistake(
            f"precision {recipe.name!r}: the engine has {field}={getattr(ours, field)} in it, not "
            f"{getattr(recipe, field)}; `predict` plans both"
        )
