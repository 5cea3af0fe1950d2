"""Seconds of one operation on one chip: forward, backward to its input, backward to its weight.

    matmul, attention: FLOPs ÷ rate     memory-bound: bytes ÷ bandwidth

On a calibrated machine the rate is read off its measurements (``measured.py``), otherwise it follows from the chip
(``roofline.py``). A fused kernel adds the weight's gradient where it sums; plain kernels do so in a pass of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.job import Job
from fivefold.machine.spec import Machine
from fivefold.plan.count.ops import Op
from fivefold.plan.price import roofline
from fivefold.plan.price.measured import Measured
from fivefold.units import Dtype

KERNELS = {
    "norm": "rms_norm",
    "rope": "rope",
    "activation": "swiglu",
    "add": "add",
    "embedding": "copy",
    "loss": "cross_entropy",
}
# As PyTorch's separate kernels (a norm: widen, square, mean, scale, narrow, weight; rotary: two products, a swap and a
# sum of each half; SwiGLU: silu and product), and how much more they move than one that does it all.
FUSED_INTO_SUM = ("attention.dropout", "mlp.dropout")  # of the two branches: one kernel with the sum that follows
PLAIN_KERNELS = {"norm": 6, "rope": 6, "activation": 2, "loss": 4}
PLAIN_BYTES = {"norm": 3.5, "rope": 3.0, "activation": 1.6, "loss": 1.0}


class OpTime(NamedTuple):
    """Seconds, and kernels that the host must launch, forward and backward."""

    forward: float
    backward: float  # gradient of the input
    weight: float = 0.0  # gradient of the weight
    kernels: int = 1
    backward_kernels: int = 1


class Prices:
    """What operations cost on ``machine`` under ``job`` while ``ranks`` of its processes work side by side."""

    def __init__(self, machine: Machine, *, ranks: int, job: Job) -> None:
        self.machine, self.job, self.chip = machine, job, machine.chip
        self.dtype: Dtype = job.precision.compute
        self.wide: Dtype = "bf16" if job.precision.narrow else self.dtype  # attention, head and router
        self.measured = Measured(machine, ranks=ranks, dtype=self.dtype) if machine.calibration else None
        self.plain = job.kernels == "plain" and not job.compile and machine.backend == "nccl"

    def operation(self, op: Op, *, heads: int) -> OpTime:
        """``heads`` of attention on this rank."""
        if op.kind == "matmul":
            return self._linear(op)
        if op.kind == "attention":
            forward, backward = self._attention(op, heads=heads)
            return OpTime(forward, backward)
        if op.kind == "message":
            return OpTime(0.0, 0.0, kernels=0, backward_kernels=0)
        if op.kind == "cast":
            return OpTime(self.moving(op.moved_bytes), self.moving(op.moved_backward_bytes))
        kernel = KERNELS[op.kind]
        kernels, share = (PLAIN_KERNELS.get(op.kind, 1), PLAIN_BYTES.get(op.kind, 1.0)) if self.plain else (1, 1.0)
        if op.name in FUSED_INTO_SUM and not self.plain:
            mask = sum(size for name, size in op.writes.items() if name.endswith(".mask"))
            return OpTime(self.moving(mask), self.moving(op.moved_backward_bytes), kernels=0)
        forward, backward = int(op.moved_bytes * share), int(op.moved_backward_bytes * share)
        if op.kind == "add" and self.measured is None:
            backward = 0  # the gradient is handed on; where two meet, the sum is fused into what follows
        return OpTime(
            self.moving(forward, kernel=kernel),
            self.moving(backward, kernel=f"{kernel}_backward") if backward else 0.0,
            kernels=kernels,
            backward_kernels=kernels if backward else 0,
        )

    def _linear(self, op: Op) -> OpTime:
        m, n, k = op.shape
        narrow = self.job.precision.narrow and op.name not in ("head.out", "moe.router")
        dtype = self.dtype if narrow else self.wide
        forward = self.matmul(m, n, k, dtype=dtype, batch=op.batch)
        into = self.matmul(m, k, n, dtype=dtype, batch=op.batch)
        weight = self.matmul(n, k, m, dtype=dtype, batch=op.batch)
        recipe, numel = self.job.precision, n * k * op.batch
        if self.measured is None:
            sums = self.moving(numel * (2 * recipe.summed_bytes + (recipe.gradients_bytes if self.plain else 0)))
            # max: the fused kernel reads and writes the sums while it computes
            weight = weight + sums if self.plain else max(weight, sums)
        if narrow:  # the gradient of the output is cast before both products
            into += self.moving(m * n * op.batch * (recipe.gradients_bytes + 2))
        return OpTime(forward, into, weight, 1, 2)

    def matmul(self, m: int, n: int, k: int, *, dtype: Dtype, batch: int = 1) -> float:
        """``(m, k) @ (k, n)``, ``batch`` of them."""
        if self.measured is not None and self.measured.matmuls:
            return batch * self.measured.matmul(m, n, k)
        return roofline.matmul(self.chip, m=m, n=n, k=k, dtype=dtype, batch=batch)

    def _attention(self, op: Op, *, heads: int) -> tuple[float, float]:
        if self.measured is not None and self.measured.attentions[0]:
            return self.measured.attention(op.causal_flops, shape=op.shape, heads=heads)
        if self.job.attention == "unfused":
            return self._batched(op, heads=heads)
        _, tokens, dim = op.shape
        forward, backward = (
            roofline.attention(
                self.chip, flops=op.causal_flops, tokens=tokens, keys=tokens, head_dim=dim, dtype=self.wide,
                kind=self.job.attention, backward=back,
            )
            for back in (False, True)
        )  # fmt: skip
        return forward, backward

    def _batched(self, op: Op, *, heads: int) -> tuple[float, float]:
        """One of the two batched products of written-out attention: the whole square."""
        sequences, tokens, dim = op.shape
        batch, m = sequences * heads, op.flops // (2 * sequences * heads * tokens * dim)
        first = op.name.endswith("scores")
        n, k = (tokens, dim) if first else (dim, tokens)
        forward = self.matmul(m, n, k, dtype=self.wide, batch=batch)
        back = self.matmul(m, k, n, dtype=self.wide, batch=batch) + self.matmul(n, k, m, dtype=self.wide, batch=batch)
        return forward, back

    def moving(self, moved: int, *, kernel: str = "copy") -> float:
        """A memory-bound kernel that reads and writes ``moved`` bytes."""
        if self.measured is not None:
            names = self.measured.bandwidths
            if kernel.endswith("_backward") and f"{kernel} {self.dtype}" not in names:
                kernel = kernel.removesuffix("_backward")
            found = self.measured.moving(moved, kernel=kernel)
            if found:
                return found
        return roofline.moving(self.chip, moved_bytes=moved)
