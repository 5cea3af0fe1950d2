"""MXFP8 and NVFP4: every element against a list of all values of its format, and products written out."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fivefold.job import get_recipe
from fivefold.trainer.model.float8.blocks import E2M1, E8M0, MX, NV, cast_mxfp8, cast_nvfp4, widen_blocks
from fivefold.trainer.model.float8.cast import Cast
from fivefold.trainer.model.float8.matmul import Float8Gemms, emulate_product
from tests.trainer.model.float8.test_cast import draw_inputs, find_nearest

SHAPES = [(3, 7), (5, 64), (4, 33), (2, 3, 50)]


def codes(data: Tensor, columns: int) -> Tensor:
    """The four bits of every element."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)[..., :columns]


def blocks(x: Tensor, each: int) -> list[tuple[object, ...]]:
    return [(..., slice(at, at + each)) for at in range(0, x.shape[-1], each)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mxfp8_takes_the_smallest_power_of_two_that_saturates_nothing(shape: tuple[int, ...]) -> None:
    x = draw_inputs(*shape, dtype=torch.bfloat16)
    x[..., :2] = torch.tensor([448.0, -3.5 * 2**-9])  # amax is the format's largest, to the bit
    result = cast_mxfp8(x)
    assert (result.data.dtype, result.scale.dtype, result.outer) == (torch.float8_e4m3fn, E8M0, None)
    for place, part in enumerate(blocks(x, MX)):
        scale = result.scale[..., place].float()
        for ours, amax in zip(scale.flatten().tolist(), x[part].abs().amax(-1).flatten().tolist(), strict=True):
            power = Fraction(ours)
            assert Fraction(amax) / power <= 448 < Fraction(amax) / power * 2
        exact = find_nearest(x[part].double() / scale[..., None].double(), torch.float8_e4m3fn)
        assert torch.equal(result.data[part].double(), exact)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nvfp4_takes_the_nearest_of_fifteen_values(shape: tuple[int, ...]) -> None:
    """Of two equally near ones that with the even code, as torch rounds to e4m3."""
    x = draw_inputs(*shape)
    result = cast_nvfp4(x)
    assert result.outer is not None
    assert torch.equal(result.outer, x.abs().amax((-2, -1), keepdim=True) / (6 * 448))
    values = torch.tensor(E2M1)
    taken = codes(result.data, x.shape[-1])
    for place, part in enumerate(blocks(x, NV)):
        wanted = x[part].abs().amax(-1) / 6 / result.outer[..., 0]
        assert torch.equal(result.scale[..., place].double(), find_nearest(wanted, torch.float8_e4m3fn))
        ratio = x[part] / (result.scale[..., place, None].float() * result.outer)
        away = (ratio.abs()[..., None] - values).abs()
        ours = (taken[part] & 7).long()
        assert (away.gather(-1, ours[..., None])[..., 0] == away.amin(-1)).all()
        assert torch.equal(taken[part] >> 3, ratio.signbit().to(torch.uint8))


def test_ties_of_nvfp4_go_to_the_even_code_and_large_values_to_six() -> None:
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor([[*halves, 6.0, *(-half for half in halves), 0.0]]) * 448
    x[0, -1] = 6 * 448.0  # so that the block's scale is 448 and outer 1
    result = cast_nvfp4(x)
    assert result.scale.float().item() == 448.0
    assert result.outer is not None
    assert result.outer.item() == 1.0
    assert widen_blocks(result, columns=16)[0].div(448).tolist() == [
        0.0,
        1.0,
        1.0,
        2.0,
        2.0,
        4.0,
        4.0,
        6.0,
        -0.0,
        -1.0,
        -1.0,
        -2.0,
        -2.0,
        -4.0,
        -4.0,
        6.0,
    ]


@pytest.mark.parametrize("caster", [cast_mxfp8, cast_nvfp4])
def test_zeros_stay_zeros_and_values_that_are_not_finite_are_reported(caster: object) -> None:
    assert callable(caster)
    x = draw_inputs(4, 64)
    x[1] = 0.0
    assert not widen_blocks(caster(x), columns=64)[1].any()
    assert not widen_blocks(caster(torch.zeros(2, 40)), columns=40).any()
    for bad in (torch.nan, torch.inf):
        x[2, 5] = bad
        assert widen_blocks(caster(x), columns=64)[2, 5].isnan()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_forward_and_backward_matmuls_equal_those_of_the_dequantized_operands(name: str) -> None:
    """Odd sizes along every sum, so that last blocks are short and a byte is half empty."""
    rows, into, outof = 35, 51, 43
    caster = cast_mxfp8 if name == "mxfp8" else cast_nvfp4
    x, w, g = draw_inputs(rows, into), draw_inputs(outof, into), draw_inputs(rows, outof)
    gemms = Float8Gemms(get_recipe(name), kernel=False)
    result = (
        gemms.fprop(gemms.operand(x), w, None),
        gemms.dgrad(g, w, None),
        gemms.wgrad(g, gemms.columns(x)),
    )
    for ours, (a, b) in zip(result, ((x, w), (g, w.t()), (g.t(), x.t())), strict=True):
        left, right = (widen_blocks(caster(item), columns=item.shape[-1]).double() for item in (a, b))
        sums = left @ right.t()
        torch.testing.assert_close(ours.double(), sums, rtol=0, atol=2e-6 * sums.abs().max().item())
        assert (ours - a @ b.t()).norm() / (a @ b.t()).norm() < {"mxfp8": 0.05, "nvfp4": 0.2}[name]


def test_fake_tensors_have_the_same_shapes() -> None:
    results = []
    for mode in (None, FakeTensorMode()):
        if mode is not None:
            mode.__enter__()
        casts = [caster(torch.ones(shape)) for caster in (cast_mxfp8, cast_nvfp4) for shape in ((5, 33), (2, 4, 64))]
        results.append([[None if part is None else (part.shape, part.dtype) for part in cast] for cast in casts])
        if mode is not None:
            mode.__exit__(None, None, None)
    assert results[0] == results[1]


def test_a_row_is_cast_as_if_it_were_alone_but_for_the_matrix_scale() -> None:
    x = draw_inputs(6, 64)
    whole, outer = cast_nvfp4(x), cast_nvfp4(x).outer
    assert outer is not None
    part = cast_nvfp4(x[2:4], amax=x.abs().amax().view(1, 1))
    assert torch.equal(part.data, whole.data[2:4])
    assert torch.equal(cast_mxfp8(x[2:4]).data.float(), cast_mxfp8(x).data[2:4].float())
    assert emulate_product(part, Cast(whole.data, whole.scale, outer)).shape == (2, 6)
