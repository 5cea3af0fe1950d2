"""Recipes as dtypes, and what is refused in one line."""

from __future__ import annotations

import pytest
import torch

from fivefold.errors import UserError
from fivefold.job import Recipe, get_recipe
from fivefold.trainer.model.precision import TRAINABLE, Dtypes


def test_every_copy_of_a_weight_has_the_bytes_of_the_recipe() -> None:
    for name in TRAINABLE:
        bytes_, dtypes = get_recipe(name), Dtypes(get_recipe(name))
        assert dtypes.matrices.itemsize == bytes_.weights_bytes
        assert dtypes.weights.itemsize == bytes_.high_precision_bytes
        assert dtypes.updated.itemsize == bytes_.updated_bytes
        assert dtypes.summed.itemsize == bytes_.summed_bytes
    assert Dtypes(get_recipe("fp16")).weights == torch.float16
    assert Dtypes(get_recipe("fp8")).weights == torch.bfloat16
    assert Dtypes(get_recipe("bf16-pure")).updated == torch.bfloat16


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        (get_recipe("fp8-te"), r"precision 'fp8-te' cannot be trained yet; use one of fp32, tf32, bf16, .*fp8-tiles"),
        (
            get_recipe("fp8").replace(scaling="rowwise"),
            r"'fp8': .* only with scaling=tensorwise, not rowwise",
        ),
        (
            get_recipe("fp16").replace(loss_scaling=False),
            r"'fp16': fp16 without loss_scaling loses .*; set loss_scaling",
        ),
        (
            get_recipe("bf16").replace(moments_bytes=(2, 2)),
            r"'bf16': .* only with moments_bytes=\(4, 4\), not \(2",
        ),
    ],
)
def test_unsupported_precision_is_an_error(asked: Recipe, pattern: str) -> None:
    with pytest.raises(UserError, match=pattern) as error:
        Dtypes(asked)
    assert "\n" not in str(error.value)
