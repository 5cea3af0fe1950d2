"""Seconds of one operation on one chip.

    matmul, attention: FLOPs ÷ rate     memory-bound: bytes ÷ bandwidth     each plus one launch

On a calibrated machine the rate is read off its measurements, between the nearest shapes in the logarithm, and at
the number of processes that share it. Otherwise it is a fixed share of the data sheet's peak (roofline).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fivefold.machine.spec import Machine
from fivefold.plan.count.ops import Op
from fivefold.units import Dtype

# Without measurements: what large kernels reach of the data sheet, and the cost of issuing one. Sources: best
# measured matmul of an H100, 794.5 of 989 TFLOP/s (stas00/ml-engineering, MAMF table); STREAM-like kernels reach about
# nine tenths of HBM's bandwidth; a CUDA launch costs about five microseconds of host time.
MATMUL_SHARE, ATTENTION_SHARE, BANDWIDTH_SHARE, LAUNCH_SECONDS = 0.75, 0.5, 0.9, 5e-6

KERNELS = {
    "norm": "rms_norm",
    "rope": "rope",
    "activation": "swiglu",
    "add": "add",
    "embedding": "copy",
    "loss": "cross_entropy",
}


class Prices:
    """What operations cost on ``machine`` while ``ranks`` of its processes work side by side in ``dtype``."""

    def __init__(self, machine: Machine, *, ranks: int, dtype: Dtype) -> None:
        self.machine, self.dtype = machine, dtype
        calibration = machine.calibration
        measured = sorted({p.ranks for p in calibration.matmuls}) if calibration else []
        self.ranks = next((n for n in measured if n >= ranks), measured[-1] if measured else ranks)
        self._matmuls: dict[tuple[float, ...], float] = {}
        self._attentions: tuple[dict[tuple[float, ...], float], dict[tuple[float, ...], float]] = ({}, {})
        self._bandwidths: dict[str, dict[tuple[float, ...], float]] = {}
        if calibration is not None:
            self._read()

    def _read(self) -> None:
        calibration = self.machine.calibration
        assert calibration is not None
        for m in calibration.matmuls:
            if (m.ranks, m.dtype) == (self.ranks, self.dtype):
                self._matmuls[_log(m.m, m.n, m.k)] = 2 * m.m * m.n * m.k / m.seconds
        for a in calibration.attentions:
            if (a.ranks, a.dtype) == (self.ranks, self.dtype):
                place = _log(a.sequences * a.heads, a.tokens, a.head_dim)
                flops = 2 * a.sequences * a.heads * a.head_dim * a.tokens**2
                self._attentions[0][place] = flops / a.forward_seconds
                self._attentions[1][place] = 2 * flops / a.backward_seconds
        for k in calibration.kernels:
            if k.ranks == self.ranks and k.dtype in (self.dtype, "fp32"):
                curve = self._bandwidths.setdefault(f"{k.kernel} {k.dtype}", {})
                curve[_log(k.moved_bytes)] = k.moved_bytes / k.seconds

    def operation(self, op: Op, *, heads: int) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        if op.kind == "matmul":
            m, n, k = op.shape
            into, weight = self.matmul(m, k, n), self.matmul(n, k, m)
            return self.matmul(m, n, k), into + weight
        if op.kind == "attention":
            return self._attention(op, heads=heads)
        kernel = KERNELS[op.kind]
        backward = f"{kernel}_backward" if f"{kernel}_backward {self.dtype}" in self._bandwidths else kernel
        return self.moving(op.moved_bytes, kernel=kernel), self.moving(op.moved_backward_bytes, kernel=backward)

    def matmul(self, m: int, n: int, k: int) -> float:
        """``(m, k) @ (k, n)``."""
        flops = 2 * m * n * k
        if self._matmuls:
            return flops / _between(self._matmuls, _log(m, n, k))
        chip = self.machine.chip
        width = {"fp32": 4, "tf32": 4, "fp8": 1, "fp4": 1}.get(self.dtype, 2)
        moving = (m * n + m * k + k * n) * width / (chip.memory_bandwidth * BANDWIDTH_SHARE)
        # max: a matmul streams its operands while it computes
        return max(flops / (chip.peak(self.dtype) * MATMUL_SHARE), moving) + LAUNCH_SECONDS

    def _attention(self, op: Op, *, heads: int) -> tuple[float, float]:
        forward, backward = self._attentions
        if forward:
            sequences, tokens, dim = op.shape
            place = _log(sequences * heads, tokens, dim)
            return op.causal_flops / _between(forward, place), 2 * op.causal_flops / _between(backward, place)
        low: Dtype = "bf16" if self.dtype in ("fp8", "fp4") else self.dtype  # attention stays in 16 bits
        seconds = op.causal_flops / (self.machine.chip.peak(low) * ATTENTION_SHARE)
        return seconds + LAUNCH_SECONDS, 2.5 * seconds + LAUNCH_SECONDS  # flash backward computes scores once more

    def moving(self, moved: int, *, kernel: str) -> float:
        """A memory-bound kernel that reads and writes ``moved`` bytes."""
        for name in (f"{kernel} {self.dtype}", f"{kernel} fp32", "copy fp32"):
            if name in self._bandwidths and moved:
                return moved / _between(self._bandwidths[name], _log(moved))
        return moved / (self.machine.chip.memory_bandwidth * BANDWIDTH_SHARE) + LAUNCH_SECONDS


def _log(*sizes: int) -> tuple[float, ...]:
    return tuple(math.log2(size) for size in sizes)


def _between(rates: dict[tuple[float, ...], float], place: Sequence[float]) -> float:
    """The rate at ``place``: of the nearest measured ones, weighted by inverse squared distance in the logarithm."""
    nearest = sorted((math.dist(place, known), rate) for known, rate in rates.items())[: 2 * len(place)]
    if nearest[0][0] < 1e-9:
        return nearest[0][1]
    return _mean((rate, distance**-2) for distance, rate in nearest)


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    """Geometric mean, which is the straight line in the logarithm."""
    pairs = list(weighted)
    total = sum(weight for _, weight in pairs)
    return math.exp(sum(weight * math.log(rate) for rate, weight in pairs) / total)
