"""Precision recipes as torch dtypes, and the recipes that the trainer and this chip can run."""

from __future__ import annotations

import torch

from fivefold.errors import UserError
from fivefold.job import RECIPES, Job, Recipe
from fivefold.model.spec import Model
from fivefold.trainer.model.float8.units import describe_missing
from fivefold.trainer.model.tf32 import has_units

TRAINABLE = (
    "fp32", "tf32", "bf16", "bf16-grad16", "bf16-pure", "fp16", "fp8", "fp8-wire", "fp8-rowwise",
    "fp8-rowwise-gw", "fp8-tiles", "fp8-tiles-wire", "mxfp8", "nvfp4",
    "fp8-deepseek", "fp8-nanotron", "fp8-lm",
)  # fmt: skip
# compute of a recipe → dtype of activations and of weights that are not fp32; fp8 and fp4 are only operands of GEMMs
COMPUTE = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "fp4": torch.bfloat16,
}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PAYLOADS = ("gathers", "dispatches")  # fields that may differ from the named recipe: the formats of messages


class Dtypes:
    """Dtypes of a recipe's weights, master weights and summed gradients; a user error if it cannot be trained."""

    def __init__(self, recipe: Recipe) -> None:
        check_trainable(recipe)
        low = COMPUTE[recipe.compute]

        def choose_dtype(size: int) -> torch.dtype:
            return torch.float32 if size == 4 else half

        half = HALVES[recipe.half] if recipe.holds_casts else low
        self.weights = low if recipe.holds_casts else choose_dtype(recipe.weights_bytes)
        self.matrices = torch.float8_e4m3fn if recipe.holds_casts else self.weights  # of blocks
        self.updated = choose_dtype(recipe.updated_bytes)  # copy that the optimizer updates (master weights)
        self.summed = choose_dtype(recipe.summed_bytes)  # gradients as summed over micro-batches and reduced over ranks


def check_trainable(recipe: Recipe) -> None:
    """Raise a user error if the trainer has no recipe of that name, or one with other values."""
    if recipe.number_format.needs_loss_scaling and not recipe.loss_scaling:
        raise UserError(
            f"precision {recipe.name!r}: fp16 without loss_scaling loses gradients below 2^-24; set loss_scaling"
        )
    if recipe.name not in TRAINABLE:
        raise UserError(f"precision {recipe.name!r} cannot be trained yet; use one of {', '.join(TRAINABLE)}")
    if recipe.weights_bytes == 1 and not recipe.holds_casts:
        raise UserError(
            f"precision {recipe.name!r}: weights stored in 8 bits must also be all-gathered in 8 bits; set gathers = "
            "'fp8'"
        )
    known = RECIPES[recipe.name]
    fields = [field for field in type(known).model_fields if getattr(recipe, field) != getattr(known, field)]
    for field in fields:
        if field not in PAYLOADS:
            raise UserError(
                f"precision {recipe.name!r}: the trainer supports it only with {field}={getattr(known, field)}, not "
                f"{getattr(recipe, field)}; `predict` estimates both"
            )


def check_chip(job: Job, *, model: Model) -> None:
    """Raise a user error if the recipe needs fp8 GEMMs and this chip has no fp8 units or the trainer no kernel."""
    recipe = job.precision
    if not recipe.is_low_precision or job.emulate:
        return
    missing_feature = describe_missing(recipe, experts=model.moe is not None)
    if missing_feature:
        raise UserError(
            f"precision {recipe.name!r}: {missing_feature}; set job.emulate = true (equally exact, but slower), or "
            "use bf16"
        )


def describe_other_format(job: Job) -> str:
    """Return a warning if this chip runs the recipe's products in a format other than the recipe's; else ""."""
    if not job.precision.number_format.rounds_operands or job.emulate or has_units():
        return ""
    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    return f"precision 'tf32': {chip} has no tf32 units and multiplies in fp32; job.emulate = true rounds as they do"
