"""Casts to fp8 in Triton's kernels, in its interpreter, against PyTorch's: the same bytes and the same scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.model.float8.cast import (
    Cast,
    cast_per_block,
    cast_per_matrix,
    cast_per_row,
    cast_per_tensor,
    cast_per_tile,
)
from fivefold.trainer.model.kernels.fused import casts
from tests.selection import mark_share

pytest.importorskip("triton", reason="Triton is made for Linux on x86-64")
Fork = Callable[..., list[Any]]
KINDS = {
    "tensor": cast_per_tensor,
    "matrix": cast_per_matrix,
    "row": cast_per_row,
    "tile": cast_per_tile,
    "block": cast_per_block,
}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def draw_inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows and columns of very different sizes, and numbers far below them."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.randn(*shape[:-1], 1, generator=generator).exp()
    return (x * torch.randn(shape[-1], generator=generator).mul(3).exp()).to(dtype)


def check_same(found: Cast, wanted: Cast) -> None:
    assert (found.data.dtype, found.data.shape, found.scale.shape) == (
        wanted.data.dtype,
        wanted.data.shape,
        wanted.scale.shape,
    )
    torch.testing.assert_close(found.scale, wanted.scale, rtol=0, atol=0, equal_nan=True)
    ours, theirs = found.data.float(), wanted.data.float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "into", "power_of_two_scales"),
    mark_share(3, [(torch.float32, E4M3, False), (torch.bfloat16, E4M3, True), (torch.bfloat16, E5M2, False)]),
)
@pytest.mark.parametrize("kind", mark_share(3, KINDS))
def test_casts_of_triton_equal_those_of_pytorch(
    kind: str, dtype: torch.dtype, into: torch.dtype, power_of_two_scales: bool
) -> None:
    wide, tall, stack = (draw_inputs(*shape, dtype=dtype) for shape in ((3, 1050), (130, 7), (2, 5, 131)))
    for x in (wide, wide.mT, tall, tall.mT, stack, stack.mT):
        options = {"dtype": into, "power_of_two_scales": power_of_two_scales}
        check_same(KINDS[kind](x, fused=True, **options), KINDS[kind](x, **options))


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("kind", KINDS)
def test_casts_of_zeros_empty_tensors_and_nan_equal_those_of_pytorch(kind: str) -> None:
    empty = torch.zeros(0, 256)
    for x in (torch.zeros(3, 200), empty):
        check_same(KINDS[kind](x, fused=True), KINDS[kind](x))
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = draw_inputs(3, 200)
        x[1, 150] = bad
        for power_of_two_scales in (False, True):
            check_same(
                KINDS[kind](x, fused=True, power_of_two_scales=power_of_two_scales),
                KINDS[kind](x, power_of_two_scales=power_of_two_scales),
            )


def test_a_cast_uses_a_given_amax() -> None:
    x = draw_inputs(9, 70)
    for amax in (x.abs().max(), x.abs().max() / 8):  # the latter saturates
        check_same(cast_per_tensor(x, amax=amax, fused=True), cast_per_tensor(x, amax=amax))
    check_same(cast_per_tensor(x[0], fused=True), cast_per_tensor(x[0]))


MODEL = Model(name="small", layers=1, width=24, heads=2, kv_heads=1, head_dim=12, ffn=40, vocab=61)
LAYOUT = Layout.parse("dp1 mbs1")
CASTS = 7 + 4 + 7 + 7 + 4 + 7  # of seven weights and four inputs; of W in dx and g; of x and g along columns


def train(kernels: str) -> tuple[float, float, int]:
    """Loss and gradient norm of a step, and calls of Triton's casts."""
    calls, real = [], casts.cast
    casts.cast = lambda *tensors, **sizes: (calls.append(1), real(*tensors, **sizes))[1]  # type: ignore[assignment]
    job = Job(sequence=9, global_batch=1, precision=get_recipe("fp8-tiles"), emulate=True, steps=9, kernels=kernels)
    built = build(model=MODEL, layout=LAYOUT, job=job, device=torch.device("cpu"))
    tokens = torch.randint(61, (1, 1, 10), generator=torch.Generator().manual_seed(0))
    done = Engine(built, model=MODEL, layout=LAYOUT, job=job).step(tokens)
    return done.loss, done.norm, len(calls)


@pytest.mark.long  # each cast is compared above
def test_a_step_casts_by_tritons_kernels(forked: Fork) -> None:
    ((*ours, calls),), ((*theirs, none),) = (forked(1, train, kernels) for kernels in ("triton", "eager"))
    assert (calls, none) == (CASTS, 0)
    assert ours == pytest.approx(theirs, rel=2e-2)  # bf16 of the other kernels is cut in the interpreter
