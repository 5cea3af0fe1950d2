"""Seconds of one GPU kernel on a chip without calibration: time on the device, without the host's launch.

    matmul      max(waves · (one tile's FLOPs ÷ one multiprocessor's rate + fill) + last write, bytes ÷ bandwidth)
    attention   FLOPs ÷ rate · (1 + diagonal ÷ keys) + tail of the last query rows, which leave most of the chip idle,
                but no less than the start and end of every block of queries
    moving      bytes ÷ bandwidth

each plus the smallest kernel; rows that are no multiple of 16 bytes are slower. Tiles and waves as in NVIDIA's "Matrix
Multiplication Background". ``Constants`` are the same for every chip; the tests compare with measured kernels.
"""

from __future__ import annotations

from math import gcd

from fivefold.machine.spec import Chip
from fivefold.number_formats import NUMBER_FORMATS
from fivefold.planner.time.constants import PUBLISHED, Constants
from fivefold.stack.spec import Attention
from fivefold.units import Dtype

ALIGNED = 8
ATTENTION_BLOCK = 256  # queries that a multiprocessor takes at once in cuDNN's kernels for Blackwell
WIDTH: dict[Dtype, float] = {"fp64": 8, "fp32": 4, "tf32": 4, "fp8": 1, "fp4": 0.5}


def find_alignment(*widths: int) -> int:
    """Return the largest power of two, up to ``ALIGNED``, that divides the widths of all rows, in elements."""
    return gcd(ALIGNED, *widths)


def estimate_matmul(
    chip: Chip,
    *,
    m: int,
    n: int,
    k: int,
    dtype: Dtype,
    batch: int = 1,
    aligned: int = ALIGNED,
    constants: Constants = PUBLISHED,
) -> float:
    """Return the seconds of ``batch`` products ``(m, k) @ (k, n)`` with a 2-byte result; casts to fp8 are not included.

    ``aligned``: alignment of the rows in memory, in elements (``find_alignment``); which sizes are rows depends on the
    layout.
    """
    if m < 1 or n < 1 or k < 1 or batch < 1:
        return 0.0
    bandwidth = chip.memory_bandwidth * chip.bandwidth_share
    multiprocessors = chip.multiprocessors
    rate = chip.sustained_flops(dtype) / multiprocessors
    if aligned < ALIGNED and WIDTH.get(dtype, 2) == 2:
        rate *= chip.flash2_share * constants.unaligned_shares[min(aligned, 2)]
    best_seconds = float("inf")
    for rows, columns, k_parts, speed in constants.matmul_tiles:
        waves = k_parts * batch * -(-m // rows) * -(-n // columns) / multiprocessors
        n_waves, last_wave = (
            (waves + constants.last_wave_loss * (-(-waves // 1) - waves), 1.0) if waves > 1 else (1.0, waves)
        )
        tile_seconds = 2 * rows * columns * k / (k_parts * speed * rate) + constants.tile_fill_seconds
        write_bytes = (
            last_wave * multiprocessors * rows * columns * (2 if k_parts == 1 else 6)
        )  # bytes; parts of k are fp32
        seconds = n_waves * tile_seconds + write_bytes / bandwidth
        if seconds < best_seconds:
            best_seconds = seconds
    moved = batch * ((m + n) * k * WIDTH.get(dtype, 2) + 2 * m * n)
    # max: reads, and writes of all waves but the last, overlap compute
    return max(best_seconds, moved / bandwidth) + constants.smallest_kernel_seconds


def estimate_attention(
    chip: Chip,
    *,
    flops: float,
    tokens: int,
    keys: int,
    head_dim: int,
    dtype: Dtype,
    kind: Attention = "flash",
    backward: bool = False,
    constants: Constants = PUBLISHED,
) -> float:
    """Return the seconds of flash attention of ``flops`` (causal, forward) for ``tokens`` queries over ``keys`` keys.

    The backward recomputes the scores: 2.5 times the forward FLOPs. ``flash`` is the chip's fastest kernel, such as
    cuDNN's or FlashAttention-3 on Hopper; ``flash2`` and ``flash1`` are FlashAttention-2 and -1, ``flash1_triton`` the
    latter in Triton. fp8 and fp4 run at the bf16 rate times the chip's share of fp8.
    """
    if flops <= 0 or tokens < 1 or keys < 1:
        return 0.0
    matmul_dtype: Dtype = "bf16" if NUMBER_FORMATS[dtype].operand_bits < 16 else dtype
    share = chip.attention_backward_share if backward else chip.attention_share
    if NUMBER_FORMATS[dtype].operand_bits < 16:
        share *= chip.fp8_attention_backward_share if backward else chip.fp8_attention_share
    older_share = {
        "flash": 1.0,
        "blocks": 1.0,
        "unfused": 1.0,  # a dry run prices the kernel that computes the same
        "flash2": chip.flash2_share,
        "flash1": chip.flash2_share * constants.flash1_shares[head_dim > 64],
        "flash1_triton": chip.flash2_share * constants.flash1_triton_share,
    }[kind]
    rate = chip.sustained_flops(matmul_dtype) * share * older_share
    backward_ratio = 2.5 if backward else 1.0
    diagonal = (constants.attention_backward_diagonal_keys if backward else constants.attention_diagonal_keys) / keys
    softmax_dim = constants.softmax_dim
    softmax = (1 + softmax_dim / head_dim) / (1 + softmax_dim / 128)  # shares were measured at head_dim 128
    if chip.hidden_softmax_dim and not backward and kind == "flash":
        softmax = max(1.0, chip.hidden_softmax_dim / head_dim)
    if backward and head_dim > 128:
        softmax = 1 / constants.wide_backward_share
    tail_flops = 4 * min(constants.attention_tail_rows, tokens) * keys * head_dim * chip.multiprocessors
    heads = flops / (2 * tokens * keys * head_dim)  # of all sequences
    blocks = heads * tokens / ATTENTION_BLOCK / chip.multiprocessors  # of queries, that a multiprocessor computes
    return (
        max(
            backward_ratio * (flops * (1 + diagonal) * softmax + tail_flops) / rate,
            blocks * constants.attention_block_seconds[backward],
        )
        + constants.smallest_kernel_seconds
    )


def estimate_memory_bound(chip: Chip, *, moved_bytes: float, constants: Constants = PUBLISHED) -> float:
    """Return the seconds of a memory-bound kernel: ``moved_bytes`` read and written / bandwidth + smallest kernel."""
    if moved_bytes <= 0:
        return 0.0
    return moved_bytes / (chip.memory_bandwidth * chip.bandwidth_share) + constants.smallest_kernel_seconds
