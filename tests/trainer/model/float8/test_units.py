"""Inputs of torch's fp8 operations, decoded as documented; and what a computer is missing for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.job import get_recipe
from fivefold.trainer.model.float8 import units
from fivefold.trainer.model.float8.cast import Cast, cast_per_block, cast_per_row, cast_per_tensor, cast_per_tile
from fivefold.trainer.model.float8.grouped import Float8GroupedGemms
from fivefold.trainer.model.float8.matmul import emulate_product
from tests.trainer.model.float8.test_cast import draw_inputs


def decode(data: Tensor, scale: Tensor, kind: Any) -> Tensor:
    """cuBLAS: 1 x 128 has a scale per row and 128 elements, rows side by side; 128 x 128 is [L4, rows/128], L4 (K/128
    padded to a multiple of 4) side by side.
    """
    rows, columns = data.shape
    if kind == F.ScalingType.BlockWise1x128:
        assert (scale.shape, scale.stride()) == ((rows, columns // 128), (1, rows))
        item = scale
    else:
        assert kind == F.ScalingType.BlockWise128x128
        padded = -(-columns // 512) * 4
        assert (scale.shape, scale.stride()) == ((padded, -(-rows // 128)), (1, padded))
        item = scale.t()[:, : columns // 128].repeat_interleave(128, 0)[:rows]
    return data.double() * item.double().repeat_interleave(128, 1)


def test_tiled_matmuls_get_operands_and_scales_in_the_layout_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled_mm(
        a: Tensor, b: Tensor, of_a: Tensor, kind_a: Any, of_b: Tensor, kind_b: Any, *, output_dtype: torch.dtype
    ) -> Tensor:
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        return (decode(a, of_a, kind_a) @ decode(b.t(), of_b, kind_b).t()).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    x, w, g = draw_inputs(48, 640), draw_inputs(208, 640), draw_inputs(80, 640)
    for a, b in ((cast_per_tile(x), cast_per_block(w)), (cast_per_tile(x), cast_per_tile(g))):
        assert units.supports(a, b)
        result, expected = units.multiply(a, b, dtype=torch.float32, fast=True), emulate_product(a, b)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("a", "b", "taken"),
    [
        (cast_per_tile(draw_inputs(16, 256)), cast_per_block(draw_inputs(32, 256)), True),
        (cast_per_tile(draw_inputs(16, 192)), cast_per_block(draw_inputs(32, 192)), False),  # a short tile
        (cast_per_tile(draw_inputs(16, 128)), cast_per_block(draw_inputs(256, 128)), True),  # one tile along the sum
        (cast_per_row(draw_inputs(16, 48)), cast_per_row(draw_inputs(32, 48)), True),
        (cast_per_tensor(draw_inputs(16, 48)), cast_per_tensor(draw_inputs(40, 48)), False),  # 40 is no multiple of 16
        (cast_per_tensor(draw_inputs(0, 48)), cast_per_tensor(draw_inputs(32, 48)), False),
    ],
)
def test_sizes_that_torch_does_not_take_are_emulated(a: Cast, b: Cast, taken: bool) -> None:
    assert units.supports(a, b) == taken


def test_grouped_matmuls_get_contiguous_operands_and_scales_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """[n, K] and [E, K, N] with K side by side in both; scales [n] and [E, N]."""

    def grouped_mm(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, *, offs: Tensor, **rest: Any) -> Tensor:
        assert a.is_contiguous()
        assert b.mT.is_contiguous()
        assert (of_a.shape, of_b.shape) == ((a.shape[0],), (b.shape[0], b.shape[2]))
        assert of_a.is_contiguous()
        assert of_b.is_contiguous()
        assert offs.dtype == torch.int32
        left, right = a.double() * of_a[:, None], b.double() * of_b[:, None, :]
        ends = [0, *offs.tolist()]
        parts = [left[low:high] @ item for low, high, item in zip(ends, ends[1:], right, strict=False)]
        return torch.cat(parts).to(rest["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped_mm)
    gemms = Float8GroupedGemms(get_recipe("fp8-rowwise-gw"))
    offsets, x, w = torch.tensor([5, 5, 20], dtype=torch.int32), draw_inputs(20, 48), draw_inputs(3, 32, 48)
    operand, weights = gemms.operand(x), gemms.casts.weight(w)
    result = units.multiply_by_group(operand, weights, offsets, dtype=torch.float32)
    expected = gemms.fprop(operand, w, offsets, lambda *_: [])
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("name", "experts", "capability", "cuda", "lack"),
    [
        ("fp8", False, None, None, "a CPU has no fp8 units"),
        ("fp8", False, (8, 9), "12.4", ""),
        ("fp8-tiles", False, (9, 0), "12.9", ""),
        ("fp8-tiles", False, (9, 0), "12.8", "torch multiplies tiles from CUDA 12.9 on, and this one is built for "
         "12.8"),
        ("fp8-tiles", False, (10, 0), "13.0", "torch multiplies tiles only on Hopper, and chip has compute capability "
         "10.0"),
        ("fp8-rowwise-gw", True, (9, 0), "12.4", ""),
        ("fp8-rowwise", True, (9, 0), "12.4", "the trainer has no kernel for experts but that of fp8-rowwise-gw"),
        ("fp8-rowwise-gw", True, (8, 9), "12.4", "torch multiplies experts only on Hopper, and chip has compute "
         "capability 8.9"),
        ("fp8-lm", False, (9, 0), "12.9", "the trainer has no kernel for gradients in fp8"),
        ("mxfp8", False, (10, 0), "13.0", "the trainer has no kernel for blocks"),
    ],
)  # fmt: skip
def test_missing_hardware_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, name: str, experts: bool, capability: tuple[int, int] | None, cuda: str, lack: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "chip")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert units.describe_missing(get_recipe(name), experts=experts) == lack
