"""The shapes and sizes that ``calibrate`` measures, and the records that it exchanges with its workers (without torch).

Shapes and sizes are evenly spaced in the logarithm, in which the planner interpolates. Matmuls (m, k) @ (k, n) form a
cube without its most expensive corner, where the rate no longer changes.
"""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from fivefold.record import Record
from fivefold.units import KIB, MIB, Dtype


class AttentionPointShape(Record):
    """The shape of a causal attention with as many kv heads as heads."""

    sequences: PositiveInt
    tokens: PositiveInt
    heads: PositiveInt
    head_dim: PositiveInt


class Points(Record):
    """The points of one calibration; byte sizes are the bytes of one tensor."""

    dtypes: tuple[Dtype, ...]
    matmuls: tuple[tuple[PositiveInt, PositiveInt, PositiveInt], ...]  # m, n, k
    attentions: tuple[AttentionPointShape, ...]
    kernel_bytes: tuple[PositiveInt, ...]
    collective_bytes: tuple[PositiveInt, ...]
    rounds: PositiveInt  # passes over all points and runs, so that a drift of the computer's speed meets all of them
    budget_seconds: PositiveFloat  # rounds after the least number stop when it is spent; processor time on a CPU
    step_seconds: PositiveFloat  # at most so much of it is for steps, at least half: no run begins that needs more
    seconds_per_point: PositiveFloat  # time for repeats of a point in one round
    message_repeats: PositiveInt = 30  # most repeats of a message


class Facts(Record):
    """The device that rank 0 reports before it measures; memory is that of the full device."""

    device: str
    backend: Literal["gloo", "nccl"]
    memory_bytes: PositiveInt
    torch: str


Kind = Literal["matmuls", "attentions", "kernels", "collectives"]  # the fields of ``Calibration``


class CalibrationProgress(Record):
    """The number of measurements that rank 0 has done, sent after each."""

    kind: Kind | Literal["steps"]
    done: PositiveInt
    total: PositiveInt


class MeasuredPoint(Record):
    """One measured point, sent when all are measured; ``point`` holds the fields of the record of its kind."""

    kind: Kind
    point: dict[str, Any]
    spread: NonNegativeFloat | None = None  # relative, between its two best rounds; None: measured once


def list_matmul_shapes(sizes: tuple[int, ...], *, most_flops: int) -> tuple[tuple[int, int, int], ...]:
    """Return every (m, n, k) of ``sizes`` with 2·m·n·k ≤ ``most_flops``, so that fprop, dgrad and wgrad are covered."""
    return tuple((m, n, k) for m, n, k in product(sizes, repeat=3) if 2 * m * n * k <= most_flops)


def _list_attention_shapes(*shapes: tuple[int, int, int, int]) -> tuple[AttentionPointShape, ...]:
    return tuple(AttentionPointShape(sequences=b, tokens=t, heads=n, head_dim=h) for b, t, n, h in shapes)


def choose_default_points(backend: Literal["gloo", "nccl"], *, quick: bool) -> Points:
    """Return the default points for a CPU (``gloo``) or a GPU (``nccl``)."""
    if backend == "nccl":
        return GPU.replace(rounds=1) if quick else GPU
    return QUICK if quick else FULL


FULL = Points(
    dtypes=("fp32", "bf16"),
    matmuls=list_matmul_shapes((64, 128, 256, 512, 1024, 4096), most_flops=2**31),
    attentions=_list_attention_shapes(
        (1, 64, 8, 64), (1, 128, 8, 32), (1, 128, 8, 64), (1, 256, 8, 32), (1, 256, 8, 64), (1, 512, 8, 32),
        (1, 512, 8, 64), (1, 512, 4, 128), (1, 1024, 4, 64), (1, 2048, 4, 64), (1, 4096, 2, 64),
    ),
    kernel_bytes=tuple(64 * KIB * 4**step for step in range(6)),
    collective_bytes=(*(KIB * 4**step for step in range(8)), 32 * MIB),
    rounds=8,
    budget_seconds=44.0,
    step_seconds=30.0,
    seconds_per_point=0.01,
)  # fmt: skip

QUICK = Points(
    dtypes=("fp32", "bf16"),
    matmuls=list_matmul_shapes((64, 128, 256, 512, 1024), most_flops=2**29),
    attentions=_list_attention_shapes(
        (1, 128, 8, 32), (1, 128, 4, 64), (1, 256, 8, 32), (1, 512, 4, 64), (1, 1024, 4, 64)
    ),
    kernel_bytes=(64 * KIB, 512 * KIB, 4 * MIB),
    collective_bytes=(KIB, 32 * KIB, MIB, 32 * MIB),
    rounds=4,
    budget_seconds=11.0,
    step_seconds=8.0,
    seconds_per_point=0.001,
    message_repeats=12,
)

GPU = FULL.replace(
    matmuls=list_matmul_shapes((256, 1024, 4096, 16384), most_flops=2**42),
    attentions=_list_attention_shapes(
        (8, 512, 16, 64), (1, 2048, 16, 64), (4, 2048, 16, 128), (1, 4096, 32, 128), (1, 16384, 8, 128),
    ),
    kernel_bytes=tuple(MIB * 8**step for step in range(4)),
    collective_bytes=tuple(KIB * 4**step for step in range(11)),
    rounds=2,
)  # fmt: skip
