"""Seconds of one operation on one chip: forward, gradient of its input (dx), gradient of its weight (dW).

    matmul, attention: FLOPs ÷ rate     memory-bound: bytes ÷ bandwidth

On a calibrated machine the rate is interpolated from its measurements (``measured.py``), otherwise it follows from the
chip (``roofline.py``). Fused kernels add dW to the gradient sums in the matmul; plain ones and our engine in a separate
pass. The experts of our engine are one kernel (``grouped_mm``), Transformer Engine's are one each.
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.job import LOSS_CHUNK_ELEMENTS, LOSS_CHUNK_ROWS, Job
from fivefold.machine.spec import Machine
from fivefold.planner.counts.operations.local_shapes import activation_width
from fivefold.planner.counts.operations.op import Op
from fivefold.planner.time import roofline
from fivefold.planner.time.constants import PUBLISHED, Constants
from fivefold.planner.time.eager_kernels import ROPE_APART, Passes, eager_passes
from fivefold.planner.time.measured import Measured
from fivefold.units import Dtype, ceil_div

KERNELS = {
    "norm": "rms_norm",
    "rope": "rope",
    "activation": "swiglu",
    "add": "add",
    "embedding": "copy",
    "loss": "cross_entropy",
}
FUSED_INTO_SUM = ("attention.dropout", "mlp.dropout")  # one kernel together with the residual sum that follows


class OpTime(NamedTuple):
    """Seconds of one operation, and the number of kernels that the host launches for it, forward and backward."""

    forward: float
    backward: float  # gradient of the input
    weight: float = 0.0  # gradient of the weight
    kernels: float = 1
    backward_kernels: float = 1


class Prices:
    """Seconds of operations on ``machine`` under ``job``, with ``ranks`` of its processes side by side."""

    def __init__(self, machine: Machine, *, ranks: int, job: Job, constants: Constants = PUBLISHED) -> None:
        self.machine, self.job, self.chip, self.constants = machine, job, machine.chip, constants
        self._matmuls: dict[tuple[int, int, int, Dtype, int, int], float] = {}
        self.dtype: Dtype = job.precision.compute
        self.wide: Dtype = "bf16" if job.precision.narrow else self.dtype  # attention, head and router
        self.measured = Measured(machine, ranks=ranks, dtype=self.dtype) if machine.calibration else None
        self.plain = job.stack.kernels == "plain" and not job.stack.compiles and machine.backend == "nccl"
        self.eager = job.stack.kernels == "eager" and self.measured is None and machine.backend == "nccl"
        # as the engine runs it on a GPU: one kernel for all experts, sums of gradients and of branches apart
        added = job.stack.weight_gradients in ("summed", "placeholders")  # by the matmul: Megatron
        self.ours = job.stack.kernel_facts.separate_adds and not added and self.measured is None

    def operation(self, op: Op, *, heads: int) -> OpTime:
        """Seconds of ``op``; ``heads``: attention heads on this rank."""
        if op.kind == "matmul":
            return self._linear(op)
        time = self._other(op, heads=heads)
        if not self.ours or not op.parameters or op.kind == "loss":
            return time
        # a table's gradient is as large as the table
        made = op.parameters * self.job.precision.table_gradients_bytes if op.kind == "embedding" else 0
        backward = time.backward + self.moving(made) + self._summing(op.parameters)
        return time._replace(backward=backward, backward_kernels=time.backward_kernels + 1)

    def _other(self, op: Op, *, heads: int) -> OpTime:
        if op.kind == "attention":
            forward, backward = self._attention(op, heads=heads)
            return OpTime(forward, backward)
        if op.name in self.constants.moe_kernels and self.measured is None:
            return self._permutation(op)
        if op.kind == "message":
            return OpTime(0.0, 0.0, kernels=0, backward_kernels=0)
        if op.kind == "cast":
            return OpTime(self.moving(op.moved_bytes), self.moving(op.moved_backward_bytes))
        if op.kind == "loss" and self.job.stack.loss == "chunked":
            return self._chunked_loss(op)
        if self.eager and op.kind in KERNELS and op.name not in FUSED_INTO_SUM:
            return self._in_passes(op, eager_passes(op, width=activation_width(self.job)))
        if op.kind == "rope" and self.job.stack.rope == "apart" and self.measured is None:
            return self._in_passes(op, ROPE_APART)
        if op.kind == "loss" and self.job.stack.loss == "fused" and self.measured is None:
            rate, rounds = self.constants.loss_bytes_per_second * self.chip.multiprocessors, self._rounds(*op.shape[:2])
            apart = (rounds - 1) * self.constants.smallest_kernel_seconds
            return OpTime(
                max(self.moving(op.moved_bytes), op.moved_bytes / rate) + apart,
                max(self.moving(op.moved_backward_bytes), op.moved_backward_bytes / rate),
                kernels=rounds,
            )
        kernel = KERNELS[op.kind]
        kernels, share = 1.0, 1.0
        if self.plain:
            kernels, share = (
                table.get(op.kind, 1.0) for table in (self.constants.plain_kernels, self.constants.plain_bytes)
            )
        if op.name in FUSED_INTO_SUM and not self.plain:
            mask = sum(size for name, size in op.writes.items() if name.endswith(".mask"))
            return OpTime(self.moving(mask), self.moving(op.moved_backward_bytes), kernels=0)
        forward, backward = int(op.moved_bytes * share), int(op.moved_backward_bytes * share)
        if op.kind == "add" and self.measured is None and not self.ours:
            backward = 0  # the gradient is handed on; where two meet, the sum is fused into what follows
        return OpTime(
            self.moving(forward, kernel=kernel),
            self.moving(backward, kernel=f"{kernel}_backward") if backward else 0.0,
            kernels=kernels,
            backward_kernels=kernels if backward else 0,
        )

    def _in_passes(self, op: Op, passes: Passes) -> OpTime:
        """Seconds of an operation that PyTorch's kernels compute one after another."""
        rounds = self._rounds(*op.shape[:2]) if op.kind == "loss" else 1
        small = self.constants.smallest_kernel_seconds
        forward = self.moving(int(passes.forward * op.moved_bytes)) + (rounds * passes.kernels - 1) * small
        backward = self.moving(int(passes.backward * op.moved_backward_bytes)) + (passes.backward_kernels - 1) * small
        return OpTime(forward, backward, 0.0, rounds * passes.kernels, passes.backward_kernels)

    def _permutation(self, op: Op) -> OpTime:
        """Seconds of the router's top-k, and of permuting tokens by expert and back."""
        forward, backward = self.constants.moe_kernels[op.name]
        if op.kind == "activation":  # top-k: many kernels on few bytes
            small = self.constants.smallest_kernel_seconds
            return OpTime(
                self.moving(op.moved_bytes) + (forward - 1) * small,
                self.moving(op.moved_backward_bytes) + (backward - 1) * small, 0.0, forward, backward,
            )  # fmt: skip
        moved, moved_back = op.moved_bytes, op.moved_backward_bytes
        if op.kind == "message":  # after an all-to-all, tokens are sorted by expert; fused dispatchers do it on the way
            sorts = self.job.stack.dispatcher == "all_to_all"
            whole = self.moving(2 * sum(op.writes.values())) if sorts else 0.0
            return OpTime(whole, whole, 0.0, forward, backward)
        scattered, scattered_back = (int(self.constants.permutation_bytes * each) for each in (moved, moved_back))
        return OpTime(self.moving(scattered), self.moving(scattered_back), 0.0, forward, backward)

    def _chunked_loss(self, op: Op) -> OpTime:
        """Seconds of the chunked loss, all in the backward: per chunk three products, the loss and the dW sum."""
        rows, vocab, width = op.shape
        chunk = min(rows, LOSS_CHUNK_ROWS)
        shapes = (chunk, vocab, width), (chunk, width, vocab), (vocab, width, chunk)
        products = sum(self.matmul(*shape, dtype=self.wide, aligned=self._aligned(vocab, width)) for shape in shapes)
        seconds = self.moving(op.moved_backward_bytes, kernel=KERNELS["loss"])
        if self.measured is None:
            rate = self.constants.loss_bytes_per_second * self.chip.multiprocessors
            seconds = max(seconds, op.moved_backward_bytes / rate)
            recipe = self.job.precision  # each chunk reads and writes dW; at the end it is added to the gradient sums
            shown = 1 - self.constants.hidden_sums_share
            products += shown * self.moving(2 * vocab * width * recipe.table_gradients_bytes)
            products += (self._rounds(chunk, vocab) - 1) * self.constants.smallest_kernel_seconds
            seconds += self._summing(vocab * width)
        launches = ceil_div(rows, chunk) * (4 + self._rounds(chunk, vocab))
        return OpTime(0.0, rows / chunk * products + seconds, kernels=0, backward_kernels=launches)

    def _rounds(self, rows: int, vocab: int) -> int:
        """Of the loss: our engine widens a few rows at a time."""
        ours = self.ours and self.job.stack.kernels != "triton"
        return ceil_div(rows, max(1, LOSS_CHUNK_ELEMENTS // vocab)) if ours else 1

    def _linear(self, op: Op) -> OpTime:
        """Seconds of a linear layer, or of the experts' grouped one (``op.batch`` > 1), with its casts."""
        m, n, k = op.shape
        narrow = self.job.precision.narrow and op.name not in ("head.out", "moe.router")
        dtype = self.dtype if narrow else self.wide
        aligned = self._aligned(n, k)  # tokens are nobody's row
        forward = self.matmul(m, n, k, dtype=dtype, batch=op.batch, aligned=aligned)
        into = self.matmul(m, k, n, dtype=dtype, batch=op.batch, aligned=aligned)
        wide = self.job.precision.wide_gradients
        weight = self.matmul(n, k, m, dtype=self.wide if wide else dtype, batch=op.batch, aligned=aligned)
        recipe, numel = self.job.precision, n * k * op.batch
        each = self.constants.expert_kernels[narrow]
        if self.measured is None:
            weight += self._summing(numel)
        if op.batch > 1 and not self.ours and self.job.stack.graphs != "full" and self.measured is None:
            apart = self.constants.smallest_kernel_seconds * (op.batch * each - 1)  # whole graphs hold fused kernels
            forward, into, weight = forward + apart, into + apart, weight + apart
            if len(op.gradient_widths) > 1 and op.name == "moe.experts.down":
                forward += self.moving(self.constants.expert_bias_bytes[0] * m * n * op.batch)
                into += self.moving(self.constants.expert_bias_bytes[1] * m * n * op.batch)
        if any(op.moved_by_casts):
            casts = (self.moving(moved) for moved in op.moved_by_casts)
            forward, into, weight = (a + b for a, b in zip((forward, into, weight), casts, strict=True))
        elif narrow:  # the gradient of the output is cast before dx and dW
            into += self.moving(m * n * op.batch * (recipe.gradients_bytes + 2))
        launches = 1 + op.batch * each // self.constants.experts_per_launch if op.batch > 1 and not self.ours else 1
        cast = op.casts  # of which each is a kernel
        before = bool(cast.x) + bool(cast.weight)
        after = sum(map(bool, (cast.gradient, cast.transposed, cast.columns, cast.gradient_columns)))
        return OpTime(forward, into, weight, launches + before, 2 * launches + after + self.ours)

    def _summing(self, numel: int) -> float:
        """A weight's gradient of ``numel`` elements added to the sums: within the matmul that makes it, or after it."""
        recipe, apart = self.job.precision, self.plain or self.ours
        sums = self.moving(numel * (2 * recipe.summed_bytes + (recipe.gradients_bytes if apart else 0)))
        return sums if apart else (1 - self.constants.hidden_sums_share) * sums

    def _aligned(self, *rows: int) -> int:
        """By how many elements rows of these widths are aligned; torch.compile pads them (``shape_padding``)."""
        return roofline.ALIGNED if self.job.stack.compiles else roofline.alignment(*rows)

    def matmul(self, m: int, n: int, k: int, *, dtype: Dtype, batch: int = 1, aligned: int = roofline.ALIGNED) -> float:
        """Seconds of ``batch`` products ``(m, k) @ (k, n)`` on rows that are ``aligned`` so."""
        if self.measured is not None and self.measured.matmuls:
            return batch * self.measured.matmul(m, n, k)
        key = m, n, k, dtype, batch, aligned
        if key not in self._matmuls:
            found = roofline.matmul(
                self.chip, m=m, n=n, k=k, dtype=dtype, batch=batch, aligned=aligned, constants=self.constants
            )
            self._matmuls[key] = found
        return self._matmuls[key]

    def _attention(self, op: Op, *, heads: int) -> tuple[float, float]:
        """Seconds forward and backward."""
        if self.measured is not None and self.measured.attentions[0]:
            return self.measured.attention(op.causal_flops, shape=op.shape, heads=heads)
        if self.job.stack.attention == "unfused":
            return self._batched(op, heads=heads)
        _, tokens, dim = op.shape
        forward, backward = (
            roofline.attention(
                self.chip, flops=op.causal_flops, tokens=tokens, keys=tokens, head_dim=dim, dtype=self.wide,
                kind=self.job.stack.attention, backward=back, constants=self.constants,
            )
            for back in (False, True)
        )  # fmt: skip
        return forward, backward

    def _batched(self, op: Op, *, heads: int) -> tuple[float, float]:
        """Seconds, forward and backward, of one of the two batched matmuls of unfused attention, on the full square."""
        sequences, tokens, dim = op.shape
        batch, m = sequences * heads, max(1, op.flops // (2 * sequences * heads * tokens * dim))
        first = op.name.endswith("scores")
        n, k = (tokens, dim) if first else (dim, tokens)
        aligned = self._aligned(tokens, dim)
        forward, *back = (
            self.matmul(*shape, dtype=self.wide, batch=batch, aligned=aligned)
            for shape in ((m, n, k), (m, k, n), (n, k, m))
        )
        return forward, sum(back)

    def moving(self, moved: float, *, kernel: str = "copy") -> float:
        """Seconds of a memory-bound kernel that reads and writes ``moved`` bytes."""
        if self.measured is not None:
            names = self.measured.bandwidths
            if kernel.endswith("_backward") and f"{kernel} {self.dtype}" not in names:
                kernel = kernel.removesuffix("_backward")
            found = self.measured.moving(moved, kernel=kernel)
            if found:
                return found
        return roofline.moving(self.chip, moved_bytes=moved, constants=self.constants)
