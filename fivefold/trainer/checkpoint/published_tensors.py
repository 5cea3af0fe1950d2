"""Weights of a folder in few bits, as DeepSeek-V3 (fp8), gpt-oss (MXFP4) and bitsandbytes (nf4, fp4, int8) store them.

They are read as if they were not in few bits.

    fp8     NAME, codes in E4M3         NAME_scale_inv [rows / 128, columns / 128] in fp32      w = code · scale
                                        or one scale of all, as Ministral 3 is published
    nf4     NAME, codes, two in a byte  NAME.absmax, NAME.nested_absmax and others         ``quantized/four_bit.py``
            fp4 too
    int8    NAME [rows, columns]        SCB [rows] in fp32                                      w = code · SCB / 127
    MXFP4   NAME_blocks [E, columns, rows / 32, 16] and NAME_scales          w = value[code] · 2^(scale − 127)

Values are those of transformers (5.23: integrations/finegrained_fp8.py, Fp8Dequantize; integrations/mxfp4.py,
convert_moe_packed_tensors), in fp32 and in bf16. Only the rows that are read are dequantized.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.base_format import (
    BASE_FORMATS,
    BITSANDBYTES_BASES,
    FOUR_BIT_BLOCK,
    FOUR_BIT_SCALES_BLOCK,
    FP8_BLOCK,
    MXFP4_BLOCK,
    BaseFormat,
)
from fivefold.errors import UserError
from fivefold.model.huggingface.quantization import find_quantization
from fivefold.trainer.model.quantized.formats import allocate
from fivefold.trainer.model.quantized.four_bit import list_scale_values, list_values
from fivefold.trainer.model.quantized.mxfp4 import SCALE_BIAS, VALUES
from fivefold.trainer.model.quantized.weight import MatrixSlice
from fivefold.units import ceil_div

FP8_INPUT_SCALE = ".activation_scale"  # of the input of a matmul in fp8, which is not made here
FP8_SCALES, MXFP4_BLOCKS, MXFP4_SCALES = "_scale_inv", "_blocks", "_scales"
# Bytes per element, with the scales, of the dtypes that tensors of this module say they have.
PUBLISHED_DTYPES = {
    "FP8": 1 + 4 / FP8_BLOCK**2,
    "MXFP4": 0.5 + 1 / MXFP4_BLOCK,
    **dict.fromkeys(("NF4", "FP4"), 0.5 + (1 + 4 / FOUR_BIT_SCALES_BLOCK) / FOUR_BIT_BLOCK),
    **{f"{base} WITHOUT DOUBLE QUANTIZATION": 0.5 + 4 / FOUR_BIT_BLOCK for base in ("NF4", "FP4")},
    "INT8": 1.0,  # and 4 for each row
}
CPU = torch.device("cpu")
FOUR_BIT_STATE = ".quant_state.bitsandbytes__"  # of the name of a weight, before that of its format; JSON in bytes
FOUR_BIT_PARTS = (".absmax", ".quant_map")
OUTER_PARTS = (".nested_absmax", ".nested_quant_map")  # with double quantization
INT8_SCALES, INT8_LAYOUT = ".SCB", ".weight_format"  # of the name of a layer


class Fp8Tensor:
    """A matrix in fp8 with its scales, as a lazy slice of safetensors with values in fp32."""

    def __init__(self, codes: Any, scales: Any) -> None:
        self.codes, self.scales = codes, scales

    def get_shape(self) -> list[int]:
        """Return the shape of the values."""
        return self.codes.get_shape()

    def get_dtype(self) -> str:
        """Return the name of the format."""
        return "FP8"

    def __getitem__(self, slices: Any) -> Tensor:
        rows, columns = _list_ranges(slices, self.get_shape())
        codes: Tensor = self.codes[rows.start : rows.stop, columns.start : columns.stop]
        scales: Tensor = self.scales[tuple(_list_blocks(part) for part in (rows, columns))]
        for dim, part in enumerate((rows, columns)):
            skipped = part.start % FP8_BLOCK
            scales = scales.repeat_interleave(FP8_BLOCK, dim).narrow(dim, skipped, len(part))
        return codes.float().mul_(scales)


class Mxfp4Tensor:
    """Stacked matrices of experts [E, rows, columns] in MXFP4, as a lazy slice of safetensors with values in bf16."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self.blocks, self.scales = blocks, scales

    def get_shape(self) -> list[int]:
        """Return the shape of the values."""
        experts, columns, groups, _ = self.blocks.get_shape()
        return [experts, groups * MXFP4_BLOCK, columns]

    def get_dtype(self) -> str:
        """Return the name of the format."""
        return "MXFP4"

    def __getitem__(self, slices: Any) -> Tensor:
        experts, rows, columns = (slice(part.start, part.stop) for part in _list_ranges(slices, self.get_shape()))
        packed: Tensor = self.blocks[experts, columns]
        scales: Tensor = self.scales[experts, columns]
        codes = torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)
        values = torch.tensor(VALUES)[codes.int()]
        values = torch.ldexp(values, scales.int()[..., None] - SCALE_BIAS)
        return values.flatten(-2).to(torch.bfloat16).mT[:, rows].contiguous()


class QuantizedTensor:
    """A matrix as bitsandbytes stores it, as a lazy slice of safetensors with values in fp32.

    ``parts``: the tensors of its codes and scales as ``QuantizedWeight.keep`` takes them.
    """

    def __init__(self, base: BaseFormat, shape: list[int], parts: Callable[[], tuple[Tensor, ...]]) -> None:
        self.base, self.shape, self.read_parts = base, shape, parts

    def get_shape(self) -> list[int]:
        """Return the shape of the values."""
        return self.shape

    def get_dtype(self) -> str:
        """Return the name of the format."""
        return self.base.label.upper()

    def __getitem__(self, slices: Any) -> Tensor:
        full = MatrixSlice.from_shape(torch.Size(self.shape))
        (stored,), _ = allocate(self.base, [full], dtype=torch.float32, device=CPU)
        return stored.dequantize(stored.keep(*self.read_parts()))[slices]


def read_published(tensors: Mapping[str, Any], config: Mapping[str, Any], *, path: Path) -> dict[str, Any]:
    """Return ``tensors`` with those in few bits and their scales in one, if ``config`` says how they are quantized."""
    table = config.get("quantization_config")
    if not table:
        return dict(tensors)
    method = table.get("quant_method", "unknown")
    published = dict(tensors)
    in_fp8 = [name.removesuffix(FP8_SCALES) for name in tensors if name.endswith(FP8_SCALES)]
    default = [FP8_BLOCK, FP8_BLOCK] if in_fp8 else []  # with one scale of each matrix
    if method == "fp8" and list(table.get("weight_block_size") or default) == [FP8_BLOCK, FP8_BLOCK]:
        for name in in_fp8:
            _check_fp8(published, name, path=path, has_blocks=bool(table.get("weight_block_size")))
            scales = published.pop(f"{name}{FP8_SCALES}")
            if not table.get("weight_block_size"):
                grid = [ceil_div(size, FP8_BLOCK) for size in published[name].get_shape()]
                scales = scales[...].float().reshape(1, 1).expand(grid)
            published[name] = Fp8Tensor(published[name], scales)
            published.pop(f"{name.removesuffix('.weight')}{FP8_INPUT_SCALE}", None)
    elif method == "mxfp4":
        for name in [name.removesuffix(MXFP4_BLOCKS) for name in tensors if name.endswith(MXFP4_BLOCKS)]:
            if f"{name}{MXFP4_SCALES}" not in published:
                raise UserError(f"{path}: {name}{MXFP4_BLOCKS} has no {name}{MXFP4_SCALES}; download the folder again")
            blocks, scales = published.pop(f"{name}{MXFP4_BLOCKS}"), published.pop(f"{name}{MXFP4_SCALES}")
            published[name] = Mxfp4Tensor(blocks, scales)
    elif find_quantization(dict(config)) in BITSANDBYTES_BASES and method.startswith("bitsandbytes"):
        _join_bitsandbytes(published, path=path)
    else:
        blocks = f", blocks of {table['weight_block_size']}" if table.get("weight_block_size") else ""
        raise UserError(
            f"{path}: its weights are quantized ({method}{blocks}); convert them to bf16 first (fp8 with blocks of "
            f"{FP8_BLOCK} x {FP8_BLOCK} and mxfp4 are read, and nf4, fp4 and int8 of bitsandbytes)"
        )
    return published


def _join_bitsandbytes(tensors: dict[str, Any], *, path: Path) -> None:
    """Replace in ``tensors`` the codes and scales of matrices in nf4, fp4 and int8 by one tensor each."""
    for base in (base for base in BASE_FORMATS.values() if base.is_four_bit):
        state_part = f"{FOUR_BIT_STATE}{base.name}"
        for name in [name.removesuffix(state_part) for name in tensors if name.endswith(state_part)]:
            state = json.loads(bytes(tensors.pop(f"{name}{state_part}")[...].tolist()))
            parts = {
                part: tensors.pop(f"{name}{part}")
                for part in FOUR_BIT_PARTS + OUTER_PARTS
                if f"{name}{part}" in tensors
            }
            base = base._replace(double_quantization="nested_blocksize" in state)
            tensors[name] = _read_four_bit(base, tensors.get(name), state, parts, name=name, path=path)
    for layer in [name.removesuffix(INT8_SCALES) for name in tensors if name.endswith(INT8_SCALES)]:
        scales, layout = tensors.pop(f"{layer}{INT8_SCALES}"), tensors.pop(f"{layer}{INT8_LAYOUT}", None)
        name = f"{layer}.weight"
        codes = tensors.get(name)
        if codes is None or (layout is not None and int(layout[...])) or codes.get_dtype() != "I8":
            raise UserError(f"{path}: {name} in int8 is missing, or not stored row by row; download the folder again")
        tensors[name] = QuantizedTensor(
            BASE_FORMATS["int8"], codes.get_shape(), partial(_read_int8_parts, codes, scales)
        )


def _read_int8_parts(codes: Any, scales: Any) -> tuple[Tensor, ...]:
    return codes[...].view(torch.uint8).flatten(), scales[...].float()


def _read_four_bit(
    base: BaseFormat, codes: Any, state: Mapping[str, Any], parts: Mapping[str, Any], *, name: str, path: Path
) -> QuantizedTensor:
    """Return a matrix in nf4 or fp4 with the ``QuantState`` of bitsandbytes; ``parts``: its tensors by endings."""
    tables = {".quant_map": list_values(base.name, CPU)}
    sizes = [state.get("blocksize")]
    if base.double_quantization:
        tables[".nested_quant_map"] = list_scale_values(CPU)
        sizes.append(state["nested_blocksize"])
    expected = FOUR_BIT_PARTS + OUTER_PARTS * base.double_quantization
    if codes is None or sizes != [FOUR_BIT_BLOCK, FOUR_BIT_SCALES_BLOCK][: len(sizes)] or parts.keys() != {*expected}:
        blocks = " and scales in blocks of ".join(map(str, sizes))
        raise UserError(
            f"{path}: {name} is in {base.name} with blocks of {blocks}, or lacks a tensor, but blocks of "
            f"{FOUR_BIT_BLOCK} with scales in fp32 or in blocks of {FOUR_BIT_SCALES_BLOCK} are read "
            f"({', '.join(expected)}); convert it to bf16 first"
        )
    for part, values in tables.items():
        if not torch.equal(parts[part][...].float(), values):
            raise UserError(f"{path}: {name}{part} has other values than bitsandbytes'; convert it to bf16 first")

    def read_parts() -> tuple[Tensor, ...]:
        packed = codes[...].contiguous().view(torch.uint8).flatten()  # may be stored as two-byte elements
        scales: Tensor = parts[".absmax"][...]
        if not base.double_quantization:
            return packed, scales.float()
        mean = torch.tensor([state["nested_offset"]], dtype=torch.float32)
        return packed, scales, parts[".nested_absmax"][...].float(), mean

    return QuantizedTensor(base, list(state["shape"]), read_parts)


def _check_fp8(tensors: Mapping[str, Any], name: str, *, path: Path, has_blocks: bool) -> None:
    """Raise a ``UserError`` if the matrix ``name`` in fp8 is missing, or its scales are not of blocks or of all."""
    scales = tensors[f"{name}{FP8_SCALES}"]
    if name not in tensors:
        raise UserError(f"{path}: {name}{FP8_SCALES} scales no tensor, as {name} is missing; download the folder again")
    shape = list(tensors[name].get_shape())
    grid = [ceil_div(size, FP8_BLOCK) for size in shape]
    stored = (tensors[name].get_dtype(), scales.get_dtype(), list(scales.get_shape()))
    if has_blocks:
        is_read = stored == ("F8_E4M3", "F32", grid)
    else:
        is_read = stored[0] == "F8_E4M3" and stored[1] in ("F32", "BF16") and stored[2] in ([], [1])
    if not is_read or len(shape) != 2:
        read = f"scales {grid} in F32" if has_blocks else "one scale"
        raise UserError(
            f"{path}: {name} {shape} is stored as {stored[0]} with scales {stored[2]} in {stored[1]}, but a matrix as "
            f"F8_E4M3 with {read} is read; convert it to bf16 first"
        )


def _list_ranges(slices: Any, shape: list[int]) -> list[range]:
    """Return the indices of each dim of a slice, which may leave out the last dims or be an ellipsis."""
    parts = () if slices is Ellipsis else slices if isinstance(slices, tuple) else (slices,)
    parts = (*parts, *(slice(None),) * (len(shape) - len(parts)))
    return [range(*part.indices(size)) for part, size in zip(parts, shape, strict=True)]


def _list_blocks(indices: range) -> slice:
    """Return the blocks that hold ``indices``."""
    return slice(indices.start // FP8_BLOCK, ceil_div(indices.stop, FP8_BLOCK))
