"""Slices of frozen weights in few bits, as tensor parallelism cuts them, against the full weights."""

from __future__ import annotations

import pytest
import torch

from fivefold.adapter import QuantizedBase, count_nf4_scales_of_scales, count_scale_bytes
from fivefold.trainer.model.quantized.formats import FORMATS
from fivefold.trainer.model.quantized.weight import MatrixSlice

Part = tuple[slice, slice]


def cut(shape: tuple[int, int], *parts: Part) -> MatrixSlice:
    return MatrixSlice(torch.Size(shape), parts)


SLICES = [
    ("nf4", cut((200, 320), (slice(40, 80), slice(0, 320)))),  # rows from within 256 blocks
    ("nf4", cut((192, 100), (slice(32, 64), slice(0, 100)))),  # rows whose ends are not those of blocks
    ("nf4", cut((300, 448), (slice(0, 300), slice(192, 256)))),  # columns
    ("nf4", cut((512, 128), (slice(64, 128), slice(0, 128)), (slice(320, 384), slice(0, 128)))),  # of two parts
    ("nf4", cut((33, 98), (slice(0, 33), slice(0, 98)))),
    ("int8", cut((30, 40), (slice(7, 12), slice(0, 40)))),
    ("int8", cut((30, 40), (slice(0, 30), slice(13, 26)))),
    ("int8", cut((30, 40), (slice(0, 5), slice(0, 40)), (slice(20, 21), slice(0, 40)))),
    ("fp8", cut((512, 300), (slice(128, 384), slice(0, 300)))),
    ("fp8", cut((300, 512), (slice(0, 300), slice(256, 384)))),
    ("fp8", cut((768, 130), (slice(128, 256), slice(0, 130)), (slice(512, 640), slice(0, 130)))),
    ("fp8", cut((300, 200), (slice(0, 300), slice(0, 200)))),
]


@pytest.mark.parametrize(("base", "piece"), SLICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_slice_has_the_values_of_the_full_weight(base: QuantizedBase, piece: MatrixSlice, dtype: torch.dtype) -> None:
    """It has the same codes too; and rows of it, which ZeRO-3 shards, are those of the slice."""
    weight = torch.randn(piece.full, generator=torch.Generator().manual_seed(3)).to(dtype)
    pieces = [MatrixSlice.from_shape(piece.full), piece]
    (full, ours), buffers = FORMATS[base].allocate(pieces, dtype=dtype, device=weight.device)
    dequantized = torch.cat([full.dequantize(full.quantize(weight))[part] for part in piece.parts])
    elements = ours.quantize(weight)
    assert piece.shape == dequantized.shape
    assert torch.equal(ours.dequantize(elements), dequantized)
    first = len(dequantized) // 3
    rows = len(dequantized) - first
    skipped = ours.count_bytes(first * piece.shape[1])
    assert torch.equal(ours.dequantize_rows(elements[skipped:], first=first, rows=rows), dequantized[first:].float())
    counted = sum(count_scale_bytes(base, *part.shape) for part in pieces)
    if base == "nf4":  # the scales of scales are those of the full weight
        counted += count_nf4_scales_of_scales(piece.full.numel()) - count_nf4_scales_of_scales(piece.shape.numel())
    assert sum(buffer.nbytes for buffer in buffers) == counted


def test_elements_of_a_slice_in_nf4_are_bytes_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(128, 512, generator=torch.Generator().manual_seed(3))
    packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    columns = cut((128, 512), (slice(0, 128), slice(128, 256)))
    rows = cut((128, 512), (slice(96, 128), slice(0, 512)))
    (by_columns, by_rows), _ = FORMATS["nf4"].allocate([columns, rows], dtype=weight.dtype, device=weight.device)
    assert torch.equal(by_columns.quantize(weight), packed.view(128, 256)[:, 64:128].flatten())
    assert torch.equal(by_columns.scales, state.absmax.view(128, 8)[:, 2:4].flatten())  # type: ignore[attr-defined]
    assert torch.equal(by_rows.quantize(weight), packed.view(128, 256)[96:].flatten())
    assert torch.equal(by_rows.scales, state.absmax.view(128, 8)[96:].flatten())  # type: ignore[attr-defined]
