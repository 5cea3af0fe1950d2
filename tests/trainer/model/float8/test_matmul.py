"""The products of linear layers in eight bits: against sums written out, torchao's values, and fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.job import get_recipe
from fivefold.trainer.model.float8.cast import (
    Cast,
    cast_per_block,
    cast_per_matrix,
    cast_per_row,
    cast_per_tensor,
    cast_per_tile,
)
from fivefold.trainer.model.float8.matmul import Float8Gemms, emulate_product
from fivefold.trainer.model.linear import Linear, fused_linears

NAMES = ("fp8", "fp8-rowwise", "fp8-rowwise-gw", "fp8-tiles")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def values(*shape: int, seed: int) -> Tensor:
    """Drawn without a generator, so that any version of torch has the same."""
    place = torch.arange(torch.Size(shape).numel()) + seed
    drawn = ((place * place * 31 + place * 17) % 1009 - 504).double() / 504 * (1 + (place % 7) ** 3) / 64
    return drawn.view(shape).bfloat16()


def linears(name: str, *, into: int = 96, outof: tuple[int, ...] = (160,), dtype: torch.dtype) -> list[Linear]:
    results = []
    for item in outof:
        made = Linear(into, item, bias=False).to(dtype)
        with torch.no_grad():
            made.matrix.copy_(values(item, into, seed=1))
        made.gemms = Float8Gemms(get_recipe(name), kernel=False)
        results.append(made)
    return results


def run(ours: list[Linear], *, rows: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dW of the first."""
    weight = ours[0].matrix
    x = values(rows, weight.shape[1], seed=2).to(weight.dtype).requires_grad_()
    outs = fused_linears(x, *ours)
    torch.autograd.backward(outs, [values(*out.shape, seed=3).to(out.dtype) for out in outs])
    assert x.grad is not None
    assert weight.grad is not None
    return outs[0].detach(), x.grad, weight.grad


# Σ and Σ of squares of y, dx, dW: torchao 0.18.0, Float8Linear.from_float with
# Float8LinearConfig.from_recipe_name(...) and emulate=True, in bf16.
TORCHAO = {
    "fp8": ((-648.381023, 612201.9509), (341.810371, 606703.5186), (158.012623, 611293.4941)),
    "fp8-rowwise": ((-596.026148, 604615.9101), (363.862133, 598895.4628), (133.769108, 602229.1922)),
    "fp8-rowwise-gw": ((-596.026148, 604615.9101), (363.862133, 598895.4628), (128.19532, 607512.6703)),
}


@pytest.mark.parametrize("name", TORCHAO)
def test_casts_of_three_recipes_equal_torchaos(name: str) -> None:
    for result, (total, squares) in zip(run(linears(name, dtype=torch.bfloat16)), TORCHAO[name], strict=True):
        assert result.dtype == torch.bfloat16
        assert result.double().sum().item() == pytest.approx(total, abs=0.05)  # one bit of one element
        assert result.double().square().sum().item() == pytest.approx(squares, rel=1e-6)


def dequantize(cast: Cast) -> Tensor:
    """Every element by the scale that covers it, in fp64."""
    scale = cast.scale.double().expand(1, 1) if cast.scale.dim() == 0 else cast.scale.double()
    places = [
        torch.arange(whole)
        if size == whole
        else torch.arange(whole).div(128, rounding_mode="floor").clamp(max=size - 1)
        for size, whole in zip(scale.shape, cast.data.shape, strict=True)
    ]
    return cast.data.double() * scale[places[0]][:, places[1]]


def multiply(a: Cast, b: Cast) -> Tensor:
    """Σ over k of a[m, k] · b[n, k]."""
    return dequantize(a) @ dequantize(b).t()


@pytest.mark.parametrize("name", NAMES)
def test_each_matmul_equals_that_of_its_dequantized_operands(name: str) -> None:
    """Three tiles along every sum, the last of them short; the casts of each operand spelled out."""
    rows, into, outof = 259, 262, 130
    y, dx, dw = run(linears(name, into=into, outof=(outof,), dtype=torch.float32), rows=rows)
    x, w, g = (
        values(rows, into, seed=2).float(),
        values(outof, into, seed=1).float(),
        values(rows, outof, seed=3).float(),
    )
    pairs = {
        "fp8": (
            (cast_per_tensor(x), cast_per_tensor(w)),
            (cast_per_tensor(g, dtype=E5M2), cast_per_tensor(w.t())),
            (cast_per_tensor(g.t(), dtype=E5M2), cast_per_tensor(x.t())),
        ),
        "fp8-rowwise": tuple(
            (cast_per_row(a, power_of_two_scales=True), cast_per_row(b, power_of_two_scales=True))
            for a, b in ((x, w), (g, w.t()), (g.t(), x.t()))
        ),
        "fp8-rowwise-gw": (
            (cast_per_row(x, power_of_two_scales=True), cast_per_row(w, power_of_two_scales=True)),
            (cast_per_row(g, power_of_two_scales=True), cast_per_matrix(w.t(), power_of_two_scales=True)),
        ),
        "fp8-tiles": (
            (cast_per_tile(x), cast_per_block(w)),
            (cast_per_tile(g), cast_per_block(w.t())),
            (cast_per_tile(g.t()), cast_per_tile(x.t())),
        ),
    }[name]
    expected = [multiply(*pair) for pair in pairs]
    if name == "fp8-rowwise-gw":
        expected.append(g.double().t() @ x.double())
    for result, sums in zip((y, dx, dw), expected, strict=True):
        torch.testing.assert_close(result.double(), sums, rtol=0, atol=2e-6 * sums.abs().max().item())


@pytest.mark.parametrize(
    ("name", "bound"), [("fp8", 0.06), ("fp8-rowwise", 0.045), ("fp8-rowwise-gw", 0.045), ("fp8-tiles", 0.04)]
)
def test_the_error_of_fp8_matmuls_is_that_of_three_mantissa_bits(name: str, bound: float) -> None:
    """Each operand is off by up to 1/16 (2^-4 of a mantissa of three bits; e5m2 1/8), on average by a third of it."""
    ours = run(linears(name, into=256, dtype=torch.float32), rows=256)
    x, w, g = values(256, 256, seed=2).float(), values(160, 256, seed=1).float(), values(256, 160, seed=3).float()
    for result, exact in zip(ours, (x @ w.t(), g @ w, g.t() @ x), strict=True):
        error = (result - exact).norm() / exact.norm()
        assert error < bound
        assert (error < 1e-6) == (name == "fp8-rowwise-gw" and result is ours[2])


def test_scales_per_tile_keep_precision_with_outliers() -> None:
    """DeepSeek-V3 §3.3: a few large activations push all others below the smallest step of a common scale."""
    x, w = values(64, 512, seed=2).float() / 1000, values(32, 512, seed=1).float()
    x[:, 3] = 2000.0
    exact = x[:, 128:] @ w[:, 128:].t()  # of the other tiles
    errors = []
    for a, b in (
        (cast_per_tensor(x), cast_per_tensor(w)),
        (cast_per_row(x), cast_per_row(w)),
        (cast_per_tile(x), cast_per_block(w)),
    ):
        tail = emulate_product(a, b) - emulate_product(_keep_first_tile(a), _keep_first_tile(b))
        errors.append(((tail - exact).norm() / exact.norm()).item())
    assert errors[0] > 0.5
    assert errors[1] > 0.5
    assert errors[2] < 0.05


def _keep_first_tile(cast: Cast) -> Cast:
    """With zeros behind the first tile."""
    data = cast.data.clone()
    data[:, 128:] = 0
    return Cast(data, cast.scale)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_layers_with_one_input_are_added(name: str) -> None:
    several = linears(name, outof=(160, 32), dtype=torch.bfloat16)
    y, dx, dw = run(several)
    first, second = (run(linears(name, outof=(outof,), dtype=torch.bfloat16)) for outof in (160, 32))
    assert torch.equal(y, first[0])
    assert torch.equal(dw, first[2])
    assert torch.equal(dx, first[1] + second[1])
