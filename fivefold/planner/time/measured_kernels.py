"""Seconds of a kernel on a calibrated machine, interpolated between measured shapes in log space.

The rate at a shape is the geometric mean of the nearest measured rates, weighted by inverse squared distance; a
measured shape returns its own time. The curves are those measured with as many concurrent processes as the layout has
ranks. Within a training step kernels take longer than repeated by themselves, as ``calibrate`` measures, too:

    seconds in a step = factor of the kind · seconds of the curves + seconds per kernel · kernels

One set of factors for each number of concurrent processes and each dtype (``machine.spec.StepFactor``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fivefold.machine.spec import Calibration, KernelKind, Machine, StepFactor
from fivefold.planner.counts.operations.launches import EXPERT_LAUNCHES
from fivefold.planner.counts.operations.op import Op
from fivefold.planner.time.eager_kernels import count_eager_passes
from fivefold.units import Dtype

Place = tuple[float, ...]


class MeasuredKernels:
    """Measured rates of ``machine`` by shape, in ``dtype``, with ``ranks`` of its processes running at the same time.

    FLOP/s for matmuls and attention, bytes/s for memory-bound kernels; ``Place`` is a shape in log2.
    """

    def __init__(self, machine: Machine, *, ranks: int, dtype: Dtype) -> None:
        calibration = machine.calibration
        assert calibration is not None
        self.dtype = dtype
        counts = sorted({point.ranks for point in calibration.matmuls})
        ranks = next((n for n in counts if n >= ranks), counts[-1] if counts else ranks)
        self.matmuls: dict[Place, float] = {}
        self.attentions: tuple[dict[Place, float], dict[Place, float]] = ({}, {})
        self.bandwidths: dict[str, dict[Place, float]] = {}
        for m in calibration.matmuls:
            if (m.ranks, m.dtype) == (ranks, dtype):
                self.matmuls[_make_log_place(m.m, m.n, m.k)] = 2 * m.m * m.n * m.k / m.seconds
        for a in calibration.attentions:
            if (a.ranks, a.dtype) == (ranks, dtype):
                place = _make_log_place(a.sequences * a.heads, a.tokens, a.head_dim)
                flops = 2 * a.sequences * a.heads * a.head_dim * a.tokens**2
                self.attentions[0][place] = flops / a.forward_seconds
                self.attentions[1][place] = 2 * flops / a.backward_seconds
        for k in calibration.kernels:
            if k.ranks == ranks and k.dtype in (dtype, "fp32"):
                curve = self.bandwidths.setdefault(f"{k.kernel} {k.dtype}", {})
                curve[_make_log_place(k.moved_bytes)] = k.moved_bytes / k.seconds

    def matmul(self, m: int, n: int, k: int) -> float:
        """Return the seconds of ``(m, k) @ (k, n)``."""
        return 2 * m * n * k / _interpolate(self.matmuls, _make_log_place(m, n, k))

    def attention(self, causal_flops: int, *, shape: tuple[int, int, int], heads: int) -> tuple[float, float]:
        """Return the seconds of causal attention, forward and backward; ``shape`` is (sequences, tokens, head dim)."""
        sequences, tokens, dim = shape
        place = _make_log_place(sequences * heads, tokens, dim)
        forward, backward = self.attentions
        return causal_flops / _interpolate(forward, place), 2 * causal_flops / _interpolate(backward, place)

    def memory_bound_seconds(self, moved: float, *, kernel: str) -> float:
        """Return the seconds of a kernel that reads and writes ``moved`` bytes, by its own or the copy's curve.

        Return 0 if neither was measured.
        """
        for name in (f"{kernel} {self.dtype}", f"{kernel} fp32", "copy fp32"):
            if name in self.bandwidths and moved:
                return moved / _interpolate(self.bandwidths[name], _make_log_place(moved))
        return 0.0

    def get_uncached_bandwidth(self, *, kernel: str) -> float:
        """Return the bytes/s of a kernel whose tensors are in no cache: the rate of the largest that was measured.

        It is that of the kernel's own curve or the copy's, and 0 if neither was measured.
        """
        for name in (f"{kernel} {self.dtype}", f"{kernel} fp32", "copy fp32"):
            if name in self.bandwidths:
                return self.bandwidths[name][max(self.bandwidths[name])]
        return 0.0


def _make_log_place(*sizes: float) -> Place:
    return tuple(math.log2(size) for size in sizes)


def _interpolate(rates: dict[Place, float], place: Sequence[float]) -> float:
    """Return the rate at ``place``.

    It is the mean of the nearest measured ones, weighted by inverse squared distance in log space.
    """
    nearest = sorted((math.dist(place, known), rate) for known, rate in rates.items())[: 2 * len(place)]
    if nearest[0][0] < 1e-9:
        return nearest[0][1]
    return _average_rates((rate, distance**-2) for distance, rate in nearest)


def _average_rates(weighted: Iterable[tuple[float, float]]) -> float:
    """Return the weighted geometric mean of (rate, weight) pairs: a straight line in log space."""
    pairs = list(weighted)
    total_weight = sum(weight for _, weight in pairs)
    return math.exp(sum(weight * math.log(rate) for rate, weight in pairs) / total_weight)


class KernelCount(NamedTuple):
    """The kernels that the host launches for an operation on a CPU, in the forward and in the backward."""

    forward: int
    backward: int


def find_kernel_kind(op: Op) -> KernelKind:
    """Return the kind of kernels that compute an operation."""
    if op.kind == "matmul":
        return "experts" if op.batch > 1 else "matmul"
    if op.name.startswith("moe.") and not op.name.startswith(("moe.experts.", "moe.shared.")):
        return "routing"
    return op.kind if op.kind in ("attention", "embedding", "loss") else "memory"


def count_kernels(op: Op, *, width: int) -> KernelCount:
    """Return the number of PyTorch's kernels that the trainer runs for an operation on elements of ``width`` bytes.

    A linear layer has one for each product, also of each expert. A norm, a rotation or a scan is several. In the
    backward one more adds each weight's gradient to its sum.
    """
    sums = len(op.wgrad_numels)
    if op.kind == "matmul":
        return KernelCount(op.batch, op.batch * op.backward_products + sums)
    forward, backward = EXPERT_LAUNCHES.get(op.name, op.launches)
    if (forward, backward) == (1, 1):
        eager = count_eager_passes(op, width=width)
        forward, backward = (0, 0) if op.kind == "message" else (eager.kernels, eager.backward_kernels)
    return KernelCount(forward, backward * min(1, op.backward_products) + sums)


def count_messages(op: Op) -> KernelCount:
    """Return the number of collectives that the host starts for an operation, on several ranks."""
    message = op.message
    if message is None:
        return KernelCount(0, 0)
    backward = bool(message.backward) * message.backward_parts + bool(message.regather)
    return KernelCount(message.times * bool(message.forward), message.times * backward)


def find_factors(calibration: Calibration | None, *, ranks: int, dtype: Dtype) -> dict[KernelKind, StepFactor]:
    """Return the factors by kind for ``ranks`` concurrent processes, or the nearest larger number that was measured."""
    factors = [factor for factor in calibration.steps if factor.dtype == dtype] if calibration is not None else []
    counts = sorted({factor.ranks for factor in factors})
    measured_ranks = next((count for count in counts if count >= ranks), counts[-1] if counts else ranks)
    return {factor.kind: factor for factor in factors if factor.ranks == measured_ranks}
