"""Slices of frozen weights in few bits, as tensor parallelism cuts them, against the full weights."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.base_format import BASE_FORMATS, FOUR_BIT_BASES, BaseFormat
from fivefold.trainer.model.quantized.formats import allocate
from fivefold.trainer.model.quantized.four_bit import VALUES
from fivefold.trainer.model.quantized.weight import MatrixSlice

Part = tuple[slice, ...]


def cut(shape: tuple[int, ...], *parts: Part) -> MatrixSlice:
    return MatrixSlice(torch.Size(shape), parts)


SINGLE_NF4, SINGLE_FP4 = (BASE_FORMATS[name]._replace(double_quantization=False) for name in FOUR_BIT_BASES)
SLICES = [
    (BASE_FORMATS["nf4"], cut((200, 320), (slice(40, 80), slice(0, 320)))),  # rows from within 256 blocks
    (BASE_FORMATS["nf4"], cut((192, 100), (slice(32, 64), slice(0, 100)))),  # rows whose ends are not those of blocks
    (BASE_FORMATS["nf4"], cut((300, 448), (slice(0, 300), slice(192, 256)))),  # columns
    (
        BASE_FORMATS["nf4"],
        cut((512, 128), (slice(64, 128), slice(0, 128)), (slice(320, 384), slice(0, 128))),
    ),  # of two parts
    (BASE_FORMATS["nf4"], cut((33, 98), (slice(0, 33), slice(0, 98)))),
    (BASE_FORMATS["nf4"], cut((68, 36), (slice(0, 20), slice(0, 36)), (slice(20, 68), slice(0, 36)))),  # all parts
    (SINGLE_NF4, cut((200, 320), (slice(40, 80), slice(0, 320)))),
    (SINGLE_NF4, cut((33, 98), (slice(0, 33), slice(0, 98)))),
    (BASE_FORMATS["fp4"], cut((300, 448), (slice(0, 300), slice(192, 256)))),
    (SINGLE_FP4, cut((512, 128), (slice(64, 128), slice(0, 128)), (slice(320, 384), slice(0, 128)))),
    (BASE_FORMATS["int8"], cut((30, 40), (slice(7, 12), slice(0, 40)))),
    (BASE_FORMATS["int8"], cut((30, 40), (slice(0, 30), slice(13, 26)))),
    (BASE_FORMATS["int8"], cut((30, 40), (slice(0, 5), slice(0, 40)), (slice(20, 21), slice(0, 40)))),
    (BASE_FORMATS["fp8"], cut((512, 300), (slice(128, 384), slice(0, 300)))),
    (BASE_FORMATS["fp8"], cut((300, 512), (slice(0, 300), slice(256, 384)))),
    (BASE_FORMATS["fp8"], cut((768, 130), (slice(128, 256), slice(0, 130)), (slice(512, 640), slice(0, 130)))),
    (BASE_FORMATS["fp8"], cut((300, 200), (slice(0, 300), slice(0, 200)))),
    (BASE_FORMATS["fp8"], cut((4, 200, 300), (slice(1, 3), slice(0, 200), slice(0, 300)))),  # of experts
    (BASE_FORMATS["fp8"], cut((3, 512, 130), (slice(0, 3), slice(128, 256), slice(0, 130)))),
    (BASE_FORMATS["mxfp4"], cut((4, 30, 70), (slice(2, 4), slice(0, 30), slice(0, 70)))),
    (BASE_FORMATS["mxfp4"], cut((3, 30, 128), (slice(1, 2), slice(0, 30), slice(32, 96)))),
    (BASE_FORMATS["mxfp4"], cut((2, 30, 64), (slice(0, 2), slice(7, 22), slice(0, 64)))),
]


@pytest.mark.parametrize(("base", "piece"), SLICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_slice_has_the_values_of_the_full_weight(base: BaseFormat, piece: MatrixSlice, dtype: torch.dtype) -> None:
    """It has the same codes too; and rows of it, which ZeRO-3 shards, are those of the slice."""
    weight = torch.randn(piece.full, generator=torch.Generator().manual_seed(3)).to(dtype)
    pieces = [MatrixSlice.from_shape(piece.full), piece]
    (full, ours), buffers = allocate(base, pieces, dtype=dtype, device=weight.device)
    dequantized = torch.cat([full.dequantize(full.quantize(weight))[part] for part in piece.parts])
    elements = ours.quantize(weight)
    assert piece.shape == dequantized.shape
    assert torch.equal(ours.dequantize(elements), dequantized)
    stacked = dequantized.flatten(0, -2)  # rows of experts
    first = len(stacked) // 3
    rows = len(stacked) - first
    skipped = base.count_element_bytes(first * piece.shape[-1])
    assert torch.equal(ours.dequantize_rows(elements[skipped:], first=first, rows=rows), stacked[first:].float())
    counted = sum(base.count_scale_bytes(*part.shape) for part in pieces)
    # the scales of scales are those of the full weight
    counted += base.count_outer_scale_bytes(piece.full.numel()) - base.count_outer_scale_bytes(piece.shape.numel())
    assert sum(buffer.nbytes for buffer in buffers) == counted


class CustomOps(TorchDispatchMode):
    """Keeps the calls of our own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fivefold":
            self.calls.append((func, args))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("base", "piece"), SLICES[::2], ids=str)
def test_fake_weights_are_quantized_and_dequantized_as_real_ones(base: BaseFormat, piece: MatrixSlice) -> None:
    """By torch's own check of the fake kernels, which a dry run executes instead."""
    (ours,), _ = allocate(base, [piece], dtype=torch.bfloat16, device=torch.device("cpu"))
    with CustomOps() as ops:
        elements = ours.quantize(torch.randn(piece.full))
        ours.dequantize(elements)
        rows = piece.shape.numel() // piece.shape[-1] // 2
        ours.dequantize_rows(elements[: base.count_element_bytes(rows * piece.shape[-1])], first=0, rows=rows)
    assert len(ops.calls) >= 2  # rows in nf4 are dequantized without one
    for op, arguments in ops.calls:
        torch.library.opcheck(op, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("name", FOUR_BIT_BASES)
@pytest.mark.parametrize("is_double", [True, False])
def test_elements_of_a_slice_in_4_bits_are_bytes_of_bitsandbytes(name: str, is_double: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(128, 512, generator=torch.Generator().manual_seed(3))
    packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=is_double, quant_type=name)
    columns = cut((128, 512), (slice(0, 128), slice(128, 256)))
    rows = cut((128, 512), (slice(96, 128), slice(0, 512)))
    base = BASE_FORMATS[name]._replace(double_quantization=is_double)
    (by_columns, by_rows), _ = allocate(base, [columns, rows], dtype=weight.dtype, device=weight.device)
    assert torch.equal(by_columns.quantize(weight), packed.view(128, 256)[:, 64:128].flatten())
    assert torch.equal(by_columns.scales[0], state.absmax.view(128, 8)[:, 2:4].flatten())  # type: ignore[attr-defined]
    assert torch.equal(by_rows.quantize(weight), packed.view(128, 256)[96:].flatten())
    assert torch.equal(by_rows.scales[0], state.absmax.view(128, 8)[96:].flatten())  # type: ignore[attr-defined]


@pytest.mark.parametrize("base", [SINGLE_NF4, SINGLE_FP4], ids=str)
def test_elements_in_4_bits_are_the_nearest_of_their_block(base: BaseFormat) -> None:
    """Of the 16 values times the largest of the block, by brute force."""
    weight = torch.randn(5, 128, generator=torch.Generator().manual_seed(3))
    (stored,), (scales,) = allocate(
        base, [MatrixSlice.from_shape(weight.shape)], dtype=torch.float32, device=weight.device
    )
    dequantized = stored.dequantize(stored.quantize(weight)).view(10, 64)
    blocks = weight.view(10, 64)
    assert torch.equal(scales, blocks.abs().amax(1))
    fp4 = torch.tensor([0.0, 0.0625, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]) / 12
    values = torch.cat([fp4, -fp4]) if base.name == "fp4" else torch.tensor(VALUES["nf4"])
    distances = (blocks[..., None] - values * scales[:, None, None]).abs()
    torch.testing.assert_close((blocks - dequantized).abs(), distances.amin(-1), rtol=1e-5, atol=1e-6)


def test_elements_in_mxfp4_are_the_nearest_of_their_block() -> None:
    """Every value of E2M1 times the power of two of the block, by brute force; ties go to the even code."""
    weight = torch.randn(2, 5, 70, generator=torch.Generator().manual_seed(3)) * 10.0 ** torch.arange(-2, 3)[:, None]
    weight[0, 0, :32] = 0.0
    weight[0, 1, :4] = torch.tensor([4.0, 0.25, -0.75, 2.5])  # 0.25 and 0.75 of the largest power of two: ties
    weight[0, 1, 4:32] = 0.0
    (stored,), (scales,) = allocate(
        BASE_FORMATS["mxfp4"], [MatrixSlice.from_shape(weight.shape)], dtype=torch.float32, device=weight.device
    )
    dequantized = stored.dequantize(stored.quantize(weight))
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])
    for expert, row, block in itertools.product(range(2), range(5), range(3)):
        part = weight[expert, row, 32 * block : 32 * (block + 1)].double()
        largest = float(part.abs().max())
        exponent = math.floor(math.log2(largest)) - 2 if largest else -127
        assert int(scales.view(2, 5, 3)[expert, row, block]) == exponent + 127
        choices = values.double() * 2.0**exponent
        distances = (part.clamp(float(choices.min()), float(choices.max()))[:, None] - choices).abs()
        nearest = dequantized[expert, row, 32 * block : 32 * (block + 1)].double()
        assert torch.equal((nearest - part.clamp(float(choices.min()), float(choices.max()))).abs(), distances.amin(1))
    assert dequantized[0, 1, :4].tolist() == [4.0, 0.0, -1.0, 2.0]
