"""A recipe whose operands the matrix units of a chip do not take is said to be predicted at another format's rate."""

from pathlib import Path

import pytest

from fivefold.job import RECIPES
from fivefold.layout.validity import describe_number_format
from fivefold.machine.catalog import resolve


@pytest.mark.parametrize(
    ("machine", "recipe", "words"),
    [
        ("a100:8", "fp8", "a100 has no fp8 matrix units: matmuls of fp8 are predicted at the rate of fp16"),
        ("h100:8", "nvfp4", "h100 has no fp4 matrix units: matmuls of nvfp4 are predicted at the rate of fp8"),
        ("h100:8", "mxfp8", "the matrix units of h100 take no scales of blocks"),
        ("mi300x:8", "mxfp8", "the matrix units of mi300x take no scales of blocks"),
        ("h100:8", "fp8-tiles", None),
        ("b200:8", "mxfp8", None),
        ("b200:8", "nvfp4", None),
        ("a100:8", "bf16", None),
    ],
)
def test_formats_that_a_chip_does_not_multiply_are_said(machine: str, recipe: str, words: str | None) -> None:
    lines = describe_number_format(resolve(machine, local=Path("/nowhere")), RECIPES[recipe])
    assert [words in line for line in lines] == ([True] if words else [])
