"""How much longer kernels take within a training step than repeated by themselves, as ``calibrate`` measured it.

    seconds in a step = factor of the kind · seconds of the curves + seconds per kernel · kernels

One set of factors for each number of concurrent processes and each dtype (``machine.spec.StepFactor``).
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.machine.spec import Calibration, KernelKind, StepFactor
from fivefold.planner.counts.operations.op import Op
from fivefold.units import Dtype


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


def count_kernels(op: Op) -> KernelCount:
    """Return the number of kernels of an operation: of linear layers one for each product, of experts for each too."""
    if op.kind == "message":
        return KernelCount(0, 0)
    if op.kind != "matmul":
        return KernelCount(1, min(1, op.backward_products))
    return KernelCount(op.batch, op.batch * op.backward_products)


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
