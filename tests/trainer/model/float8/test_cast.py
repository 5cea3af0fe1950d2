"""Casts to eight bits: what they lose, what they keep, and every scale's place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fivefold.trainer.model.float8 import cast
from fivefold.trainer.model.float8.cast import (
    Cast,
    cast_per_block,
    cast_per_matrix,
    cast_per_row,
    cast_per_tensor,
    cast_per_tile,
    widen,
)

KINDS = {
    "tensor": cast_per_tensor,
    "matrix": cast_per_matrix,
    "row": cast_per_row,
    "tile": cast_per_tile,
    "block": cast_per_block,
}
PARTS = {"matrix": (0, 0), "row": (1, 0), "tile": (1, 128), "block": (128, 128)}  # rows and columns; 0: all


def draw_inputs(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows and columns of very different sizes."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    x = torch.randn(shape, generator=generator) * torch.randn(*shape[:-1], 1, generator=generator).exp()
    return (x * torch.randn(shape[-1], generator=generator).exp()).to(dtype)


def compute_amax(x: Tensor, kind: str) -> Tensor:
    """|x| of the part of each element, one part after another."""
    if kind == "tensor":
        return x.abs().max().expand(x.shape)
    result = torch.empty_like(x)
    rows, columns = (few or size for few, size in zip(PARTS[kind], x.shape[-2:], strict=True))
    for top in range(0, x.shape[-2], rows):
        for left in range(0, x.shape[-1], columns):
            part = (..., slice(top, top + rows), slice(left, left + columns))
            result[part] = x[part].abs().amax((-2, -1), keepdim=True)
    return result


def find_nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The value of ``dtype`` nearest to each of ``x``, of two the one whose last bit is 0, from a list of them all."""
    bits = torch.arange(128, dtype=torch.uint8)
    values = bits.view(dtype).double()
    values = values[values.isfinite()]
    place = torch.searchsorted(values, x.abs().double().clamp(max=values[-1])).clamp(max=len(values) - 1)
    below = (place - 1).clamp(min=0)
    up, down = values[place] - x.abs(), x.abs() - values[below]
    take = torch.where((up < down) | ((up == down) & (place % 2 == 0)), place, below)
    return values[take] * x.sign()


@pytest.mark.parametrize("power_of_two_scales", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(3, 7), (130, 257), (2, 129, 130)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_element_is_rounded_to_the_nearest_of_its_part(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, power_of_two_scales: bool
) -> None:
    x = draw_inputs(*shape, dtype=torch.bfloat16)
    result = KINDS[kind](x, dtype=dtype, power_of_two_scales=power_of_two_scales)
    factor = (torch.finfo(dtype).max / compute_amax(x.double(), kind)).float()
    if power_of_two_scales:
        factor = 2.0 ** torch.frexp(factor).exponent.sub(1)
    expected = find_nearest((x.float() * factor), dtype)
    assert torch.equal(result.data.double(), expected)
    torch.testing.assert_close(widen(result, torch.float64), expected / factor, rtol=2**-22, atol=0)


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 300), st.integers(1, 300), st.booleans(), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_no_value_is_farther_off_than_half_a_step(
    kind: str, rows: int, columns: int, power_of_two_scales: bool, seed: int
) -> None:
    """Three bits of mantissa: 1/16 of the value, or half of the smallest step, 2^-9, of the scale."""
    x = draw_inputs(rows, columns, seed=seed)
    result = KINDS[kind](x, power_of_two_scales=power_of_two_scales)
    step = compute_amax(x, kind) / 448 * 2**-10 * (2 if power_of_two_scales else 1)
    assert ((widen(result, torch.float32) - x).abs() <= torch.maximum(x.abs() / 16, step) * 1.0001).all()
    again = KINDS[kind](widen(result, torch.float32), power_of_two_scales=power_of_two_scales)
    assert power_of_two_scales or torch.equal(again.data.float(), result.data.float())  # the largest stays the largest


@pytest.mark.parametrize(
    ("kind", "shape", "scales"),
    [
        ("tensor", (130, 300), ()), ("matrix", (4, 130, 300), (4, 1, 1)), ("row", (130, 300), (130, 1)),
        ("tile", (130, 300), (130, 3)), ("block", (4, 130, 300), (4, 2, 3)), ("tile", (0, 300), (0, 3)),
    ],
)  # fmt: skip
def test_scales_have_their_places_on_fake_tensors_too(
    kind: str, shape: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    result = KINDS[kind](torch.ones(shape))
    with FakeTensorMode():
        fake = KINDS[kind](torch.ones(shape))
        assert widen(fake, torch.bfloat16).shape == shape
    for item in (result, fake):
        assert (item.data.shape, item.data.dtype) == (shape, torch.float8_e4m3fn)
        assert (item.scale.shape, item.scale.dtype) == (scales, torch.float32)
    assert result.data.is_contiguous()


def test_zeros_stay_zero_and_no_number_stays_visible() -> None:
    for kind in KINDS.values():
        assert torch.equal(widen(kind(torch.zeros(3, 4)), torch.float32), torch.zeros(3, 4))
        for power_of_two_scales in (False, True):
            for bad in (torch.nan, torch.inf, -torch.inf):
                x = torch.ones(3, 4)
                x[1, 2] = bad
                assert widen(kind(x, power_of_two_scales=power_of_two_scales), torch.float32)[1, 2].isnan()
    x = torch.ones(3, 4)
    x[1, 2] = torch.inf
    assert torch.equal(widen(cast_per_row(x), torch.float32)[::2], torch.ones(2, 4))  # rows of their own scale are well


def test_a_given_amax_makes_one_scale_of_many_shards() -> None:
    x = draw_inputs(64, 48)
    whole = cast_per_tensor(x)
    for part in x.chunk(4):
        shard = cast_per_tensor(part, amax=x.abs().max())
        assert torch.equal(shard.scale, whole.scale)
    assert torch.equal(cast_per_tensor(x.flatten()).data.float(), whole.data.float().flatten())
    clipped = cast_per_tensor(x, amax=x.abs().max() / 4)  # saturates
    assert clipped.data.float().abs().max() == 448


def test_transposed_and_chunked_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw_inputs(300, 70)
    whole = [kind(x.t()) for kind in KINDS.values()]
    monkeypatch.setattr(cast, "CHUNK_ELEMENTS", 1000)
    for kind, other in zip(KINDS.values(), whole, strict=True):
        result: Cast = kind(x.t().contiguous())
        assert torch.equal(result.data.float(), other.data.float())
        assert torch.equal(result.scale, other.scale)
        assert torch.equal(widen(result, torch.float32), widen(other, torch.float32))
