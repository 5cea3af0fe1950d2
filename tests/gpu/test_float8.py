"""The chip's fp8 units against the emulation of the same casts. Skips itself where there are none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.job import get_recipe
from fivefold.trainer.model.float8.matmul import Float8Gemms
from fivefold.trainer.model.float8.units import FIRST_FP8
from fivefold.trainer.model.linear import Linear, fused_linears

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < FIRST_FP8, reason="needs fp8 units"
)


def run(name: str, *, kernel: bool, rows: int, into: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [Linear(into, outof, bias=True).to(torch.bfloat16) for outof in (256, 64)]
    for item in made:
        with torch.no_grad():
            for weight in item.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator))
        item.cuda().gemms = Float8Gemms(get_recipe(name), kernel=kernel)
    x = torch.randn(rows, into, generator=generator).to(torch.bfloat16).cuda().requires_grad_()
    outs = fused_linears(x, *made)
    gradients = [torch.randn(out.shape, generator=generator).to(torch.bfloat16).cuda() for out in outs]
    torch.autograd.backward(outs, gradients)
    assert x.grad is not None
    return [*(out.detach() for out in outs), x.grad, *(w.grad for entry in made for w in entry.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["fp8", "fp8-rowwise", "fp8-rowwise-gw"])
@pytest.mark.parametrize(("rows", "into"), [(512, 384), (100, 384), (512, 100)])  # the latter are no multiples of 16
def test_fp8_matmuls_of_the_gpu_equal_their_emulation(name: str, rows: int, into: int) -> None:
    """The same casts: sums differ by the accumulator of the units, which has some 14 bits, and one rounding to bf16."""
    for result, expected in zip(
        run(name, kernel=True, rows=rows, into=into), run(name, kernel=False, rows=rows, into=into), strict=True
    ):
        assert (result.float() - expected.float()).norm() <= 0.005 * expected.float().norm()
