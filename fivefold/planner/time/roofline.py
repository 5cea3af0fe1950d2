"""Seconds of one GPU kernel on a chip without calibration: time on the device, without the host's launch.

    matmul      max(waves · (one tile's FLOPs ÷ one multiprocessor's rate + fill) + last write, bytes ÷ bandwidth)
    attention   FLOPs ÷ rate · (1 + diagonal ÷ keys) + tail of the last query rows, which leave most of the chip idle
    moving      bytes ÷ bandwidth

each plus the smallest kernel; rows of no multiple of 16 bytes are slower. Tiles and waves as in NVIDIA's "Matrix
Multiplication Background". The constants are the same for every chip; the tests compare with measured kernels.
"""

from __future__ import annotations

from math import gcd
from typing import Literal

from fivefold.machine.spec import Chip
from fivefold.units import Dtype

# Where each constant comes from, and how much it matters: docs/how-a-step-costs/constants.md.
KERNEL_SECONDS = 3e-6  # the smallest kernel; a 256 x 256 x 256 matmul takes 5 us on H100 and on B200
FILL_SECONDS = 1e-6  # a tile's first operands arrive and its last results leave while its tensor core waits
TILES = (  # rows, columns, split-k parts, relative speed (small tiles read operands more often)
    (128, 256, 1, 1.0),
    (128, 128, 1, 0.9),
    (64, 128, 1, 0.6),
    (128, 128, 4, 0.9),
)
# Tensor memory and asynchronous copies want rows of 16 bytes. For others cuBLAS has kernels with Ampere's instruction
# alone, which reach on a newer chip what FlashAttention-2 does there (``flash2_share``), and less, as they copy words
# of 2 or 4 bytes: odd rows of 16 bits run at 71 to 115 TFLOP/s on H100 (meta-pytorch/float8_experimental pull request
# 145), rows of 588 elements at 96 at 1200 MHz, those of 592 at 340 (m87-labs/kestrel pull request 143: "align2").
UNALIGNED = {1: 0.22, 2: 0.36}  # by elements of 16 bits at whose multiples rows start
ALIGNED = 8
UNEVEN = 0.3  # share of a partly filled last wave that is lost; the choice of tile recovers the rest
WIDTH: dict[Dtype, float] = {"fp64": 8, "fp32": 4, "tf32": 4, "fp8": 1, "fp4": 0.5}
ROWS = 64.0  # query rows still running when the other multiprocessors have finished
DIAGONAL, DIAGONAL_BACKWARD = 400.0, 500.0  # lost time per query, in keys: masked tiles, start of the kernel's pipeline
FLASH1_SHARE = 0.65  # of FlashAttention-2's rate; its paper says half to 0.77 (Triton's): arXiv:2307.08691 §4.1
SOFTMAX_DIM = 40.0  # the softmax of one score takes as long as this many elements of head_dim


def alignment(*widths: int) -> int:
    """The largest power of two, up to ``ALIGNED``, that divides the widths of all rows, in elements."""
    return gcd(ALIGNED, *widths)


def matmul(chip: Chip, *, m: int, n: int, k: int, dtype: Dtype, batch: int = 1, aligned: int = ALIGNED) -> float:
    """Seconds of ``batch`` products ``(m, k) @ (k, n)`` with a 2-byte result; casts to fp8 are not included.

    ``aligned``: of rows in memory, in elements (``alignment``); which of the sizes those are depends on the layout.
    """
    if m < 1 or n < 1 or k < 1 or batch < 1:
        return 0.0
    bandwidth = chip.memory_bandwidth * chip.bandwidth_share
    multiprocessors = chip.multiprocessors
    rate = chip.sustained(dtype) / multiprocessors
    if aligned < ALIGNED and WIDTH.get(dtype, 2) == 2:
        rate *= chip.flash2_share * UNALIGNED[min(aligned, 2)]
    best = float("inf")
    for rows, columns, parts, speed in TILES:
        waves = parts * batch * -(-m // rows) * -(-n // columns) / multiprocessors
        rounds, busy = (waves + UNEVEN * (-(-waves // 1) - waves), 1.0) if waves > 1 else (1.0, waves)
        one = 2 * rows * columns * k / (parts * speed * rate) + FILL_SECONDS
        written = busy * multiprocessors * rows * columns * (2 if parts == 1 else 6)  # bytes; parts of k are fp32
        seconds = rounds * one + written / bandwidth
        if seconds < best:
            best = seconds
    moved = batch * ((m + n) * k * WIDTH.get(dtype, 2) + 2 * m * n)
    # max: reads, and writes of all waves but the last, overlap compute
    return max(best, moved / bandwidth) + KERNEL_SECONDS


def attention(
    chip: Chip,
    *,
    flops: float,
    tokens: int,
    keys: int,
    head_dim: int,
    dtype: Dtype,
    kind: Literal["flash", "flash2", "flash1", "blocks"] = "flash",
    backward: bool = False,
) -> float:
    """Seconds of flash attention of ``flops`` (causal, forward) for ``tokens`` queries over ``keys`` keys.

    The backward recomputes the scores: 2.5 times the forward FLOPs. ``flash`` is the chip's fastest kernel, such as
    cuDNN's or FlashAttention-3 on Hopper; ``flash2`` and ``flash1`` are FlashAttention-2 and -1. fp8 and fp4 run at
    the bf16 rate.
    """
    if flops <= 0 or tokens < 1 or keys < 1:
        return 0.0
    wide: Dtype = "bf16" if dtype in ("fp8", "fp4") else dtype
    share = chip.attention_backward_share if backward else chip.attention_share
    older = {"flash": 1.0, "blocks": 1.0, "flash2": chip.flash2_share, "flash1": chip.flash2_share * FLASH1_SHARE}[kind]
    rate = chip.sustained(wide) * share * older
    work = 2.5 if backward else 1.0
    diagonal = (DIAGONAL_BACKWARD if backward else DIAGONAL) / keys
    softmax = (1 + SOFTMAX_DIM / head_dim) / (1 + SOFTMAX_DIM / 128)  # shares were measured at head_dim 128
    rows = 4 * min(ROWS, tokens) * keys * head_dim * chip.multiprocessors
    return work * (flops * (1 + diagonal) * softmax + rows) / rate + KERNEL_SECONDS


def moving(chip: Chip, *, moved_bytes: float) -> float:
    """Seconds of a memory-bound kernel that reads and writes ``moved_bytes``: bytes / bandwidth + KERNEL_SECONDS."""
    if moved_bytes <= 0:
        return 0.0
    return moved_bytes / (chip.memory_bandwidth * chip.bandwidth_share) + KERNEL_SECONDS
