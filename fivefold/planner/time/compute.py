"""Seconds of one operation on one chip: forward, gradient of its input (dx), gradient of its weight (dW).

    matmul, attention: FLOPs ÷ rate     memory-bound: bytes ÷ bandwidth     scan of chunks: the larger of the two

On a calibrated machine the rate is interpolated from its measurements (``measured_kernels.py``), otherwise it follows
from the chip (``roofline.py``). Fused kernels add dW to the accumulated gradients within the matmul. Unfused kernels
and Fivefold's own engine do so in a separate pass. The experts of Fivefold's engine are one kernel (``grouped_mm``),
those of Transformer Engine one kernel each.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

from fivefold.job import LOSS_CHUNK_ELEMENTS, LOSS_CHUNK_ROWS, Job
from fivefold.machine.spec import Chip, Machine
from fivefold.planner.counts.operations.launches import EXPERT_BIAS_LAUNCHES, EXPERT_LAUNCHES
from fivefold.planner.counts.operations.linear import count_read_passes
from fivefold.planner.counts.operations.local_shapes import get_activation_width
from fivefold.planner.counts.operations.op import Op, list_gradient_sums
from fivefold.planner.time import roofline
from fivefold.planner.time.constants import PUBLISHED, Constants
from fivefold.planner.time.eager_kernels import (
    PLAIN,
    PLAIN_LOSS_KERNELS,
    ROPE_APART,
    EagerKernelCost,
    count_eager_passes,
)
from fivefold.planner.time.measured_kernels import (
    MeasuredKernels,
    count_kernels,
    count_messages,
    find_factors,
    find_kernel_kind,
)
from fivefold.units import Dtype, ceil_div

KERNELS = {
    "norm": "rms_norm",
    "rope": "rope",
    "activation": "swiglu",
    "scan": "swiglu",
    "add": "add",
    "embedding": "copy",
    "loss": "cross_entropy",
}
MAX_HEAD_NORM_DIM = 256  # Transformer Engine's kernels for norms of 512 columns and more leave fewer sums
NORM_BLOCKS = 16  # thread blocks of 128 threads on a multiprocessor
FUSED_INTO_SUM = ("attention.dropout", "mlp.dropout")  # fused with the residual addition that follows


class OpTime(NamedTuple):
    """Seconds of one operation, and the number of kernels that the host launches for it, forward and backward."""

    forward: float
    backward: float  # gradient of the input
    weight: float = 0.0  # gradient of the weight
    kernels: float = 1
    backward_kernels: float = 1


def find_slowest_chip(machine: Machine, constants: Constants = PUBLISHED) -> Chip:
    """Return the slowest chip of a machine, whose pace all of its ranks keep; a calibrated machine's was measured.

    Its FLOPs per joule are as far below the mean as the expected largest of n normal deviates. Chips that no power cap
    holds back run at one clock.
    """
    chip, n = machine.chip, machine.ranks
    if machine.calibration is not None or n == 1:
        return chip
    slowdown = 1 + constants.chip_spread * expect_largest_deviate(n)
    return chip.replace(flops_per_joule={dtype: rate / slowdown for dtype, rate in chip.flops_per_joule.items()})


def expect_largest_deviate(n: int) -> float:
    """Return the expected largest of n standard normal deviates (Blom 1958: the quantile (n - 0.375) / (n + 0.25))."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def _is_plain_rms_norm(op: Op) -> bool:
    """Return whether a norm is PyTorch's single operations, which save the normalized input."""
    return any(name.endswith(".normal") for name in op.writes)


class Prices:
    """Seconds of operations on ``machine`` under ``job``, with ``ranks`` of its processes running at the same time."""

    def __init__(self, machine: Machine, *, ranks: int, job: Job, constants: Constants = PUBLISHED) -> None:
        self.machine, self.job, self.constants = machine, job, constants
        self.chip = find_slowest_chip(machine, constants)
        self._matmuls: dict[tuple[int, int, int, Dtype, int, int], float] = {}
        self.dtype: Dtype = job.precision.compute
        # of attention, head and router
        self.high_precision_dtype: Dtype = "bf16" if job.precision.is_low_precision else self.dtype
        self.measured = MeasuredKernels(machine, ranks=ranks, dtype=self.dtype) if machine.calibration else None
        shares = {"rowwise": constants.rowwise_matmul_share, "blocks": constants.block_scales_share}
        self._scaled_matmul_share = shares.get(job.precision.scaling, 1.0)
        self._transposes_casts = not (
            self.chip.fp8_in_any_layout and job.precision.has_one_scale and not job.stack.is_compiled
        )  # torchao's casts write both copies on every chip (roofline_utils.py, as in ``count_read_passes``)
        self.step_factors = find_factors(machine.calibration, ranks=ranks, dtype=self.dtype)
        self.plain = job.stack.kernels == "plain" and not job.stack.is_compiled and machine.has_gpus
        self.eager = job.stack.kernels == "eager" and self.measured is None and machine.has_gpus
        # the trainer on a GPU: one kernel for all experts; separate kernels add gradients and branches
        self.ours = job.stack.kernel_facts.separate_adds and not job.stack.adds_in_wgrad and self.measured is None
        self.launches_scans = self.ours and machine.backend == "nccl"  # PyTorch's operations, one by one
        self.launches_dropouts = self.launches_scans and not job.stack.is_compiled  # the same
        self.autograd = not job.stack.kernel_facts.fuses_linears and self.measured is None
        # The gradients of biases, and of a LayerNorm's weight, are kernels that read the output's gradient again
        # (pytorch/pytorch@v2.13.0:tools/autograd/derivatives.yaml, addmm; aten/src/ATen/native/cuda/
        # layer_norm_kernel.cu; NVIDIA/Megatron-LM: grad_output.sum(dim=0)); Transformer Engine fuses them.
        self.sums_rows_apart = self.autograd and job.stack.wgrad_accumulation != "fused_dummy"

    def add_gradient_sums(self, ops: Sequence[Op], times: list[OpTime]) -> list[OpTime]:
        """Return the seconds of the operations of a unit with those of autograd's sums of gradients.

        A tensor that n operations read has n gradients, which autograd adds one after another as they are computed
        (pytorch/pytorch@v2.13.0:torch/csrc/autograd/input_buffer.cpp, accumulate): each sum reads two tensors and
        writes one. torch.compile adds them in the kernel that uses them, which reads one more tensor.
        """
        summed, passes = list(times), 1 if self.job.stack.is_compiled else 3
        for index, n_bytes in list_gradient_sums(ops) if self.autograd else ():
            seconds = self.memory_bound_seconds(passes * n_bytes)
            kernels = summed[index].backward_kernels + (not self.job.stack.is_compiled)
            summed[index] = summed[index]._replace(backward=summed[index].backward + seconds, backward_kernels=kernels)
        return summed

    def operation(self, op: Op) -> OpTime:
        """Return the seconds of ``op``; ``heads``: attention heads on this rank."""
        time = self.price_repeated(op)
        return self._scale_to_step(op, time) if self.step_factors else time

    def _scale_to_step(self, op: Op, isolated_time: OpTime) -> OpTime:
        """Return the seconds of ``op`` within a step on a calibrated machine.

        ``isolated_time``: the time on the measured curves.
        """
        forward, backward, weight = isolated_time.forward, isolated_time.backward, isolated_time.weight
        if factor := self.step_factors.get(find_kernel_kind(op)):
            kernels = count_kernels(op, width=get_activation_width(self.job))
            host_seconds = factor.backward_kernel_seconds * kernels.backward
            weight_share = 0.5 if backward and weight else float(weight > 0)
            forward = factor.forward * forward + factor.forward_kernel_seconds * kernels.forward
            backward = factor.backward * backward + (1 - weight_share) * host_seconds
            weight = factor.backward * weight + weight_share * host_seconds
        if op.message is not None and (factor := self.step_factors.get("message")):
            messages = count_messages(op)
            forward += factor.forward_kernel_seconds * messages.forward
            backward += factor.backward_kernel_seconds * messages.backward
        return isolated_time._replace(forward=forward, backward=backward, weight=weight)

    def price_repeated(self, op: Op) -> OpTime:
        """Return the seconds of the kernels of ``op`` as a microbenchmark of each kernel measures them."""
        time = self._price_linear(op) if op.kind == "matmul" else self._price_other(op)
        if not op.backward_products:  # nothing that it reads needs a gradient
            return time._replace(backward=0.0, weight=0.0, backward_kernels=0)
        if op.kind == "matmul":
            return time
        if not self.ours or not op.parameters or op.kind == "loss":
            return time
        # a table's gradient is as large as the table
        gradient_bytes = op.parameters * self.job.precision.table_gradients_bytes if op.kind == "embedding" else 0
        backward = time.backward + self.memory_bound_seconds(gradient_bytes) + self._price_accumulation(op.parameters)
        return time._replace(backward=backward, backward_kernels=time.backward_kernels + max(1, len(op.wgrad_numels)))

    def _price_other(self, op: Op) -> OpTime:
        """Return the time of an operation that is not a matmul."""
        if op.kind == "attention":
            forward, backward = self._price_attention(op)
            return OpTime(forward, backward)
        if op.kind == "scan" and (op.flops or (self.launches_scans and any(op.launched_bytes))):
            return self._scan(op)
        if self.launches_dropouts and op.name.endswith("dropout"):
            return self._price_dropout(op)
        if op.name in self.constants.moe_kernels and self.measured is None:
            return self._price_permutation(op)
        if op.kind == "message":
            return OpTime(0.0, 0.0, kernels=0, backward_kernels=0)
        if op.kind == "cast":
            moved_bytes = op.moved_bytes - op.transposed_bytes * (not self._transposes_casts)
            return OpTime(self.memory_bound_seconds(moved_bytes), self.memory_bound_seconds(op.moved_backward_bytes))
        if op.kind == "loss" and self.job.stack.loss_facts.chunked:
            return self._price_chunked_loss(op)
        if self.eager and op.kind in KERNELS and op.name not in FUSED_INTO_SUM:
            return self._price_eager_kernels(op, count_eager_passes(op, width=get_activation_width(self.job)))
        if op.kind == "rope" and self.job.stack.rope == "unfused" and self.measured is None:
            return self._price_eager_kernels(op, ROPE_APART)
        if op.kind == "loss" and self.job.stack.loss_facts.in_place and self.measured is None:
            rate = self.constants.loss_bytes_per_second * self.chip.multiprocessors
            rounds = self._count_rounds(*op.shape[:2])
            launch_seconds = (rounds - 1) * self.constants.smallest_kernel_seconds
            return OpTime(
                max(self.memory_bound_seconds(op.moved_bytes), op.moved_bytes / rate) + launch_seconds,
                max(self.memory_bound_seconds(op.moved_backward_bytes), op.moved_backward_bytes / rate),
                kernels=rounds,
            )
        width = get_activation_width(self.job)
        if self.machine.has_gpus and any(name.endswith(".silu") for name in op.writes):  # act(gate) is a tensor
            return self._price_eager_kernels(op, PLAIN["activation" if len(op.reads) > 1 else "halves", width])
        kernel = KERNELS[op.kind]
        is_layer_norm = op.kind == "norm" and (self.plain or len(op.wgrad_numels) == 2) and not _is_plain_rms_norm(op)
        # PyTorch has one kernel for a LayerNorm and for an activation without a gate
        is_one_kernel = is_layer_norm or (op.kind == "activation" and len(op.reads) == 1)
        if self.plain and not is_one_kernel and (op.kind, width) in PLAIN:
            return self._price_eager_kernels(op, PLAIN[op.kind, width])
        is_one_dropout = any(op.launched_bytes)  # of other software: one kernel
        kernels, backward_kernels = op.launches if op.kind == "activation" and not is_one_dropout else (1, 1)
        if self.plain and op.kind == "loss":
            kernels = backward_kernels = PLAIN_LOSS_KERNELS
        if op.name in FUSED_INTO_SUM and not self.plain:
            mask = sum(size for name, size in op.writes.items() if name.endswith(".mask"))
            return OpTime(
                self.memory_bound_seconds(mask), self.memory_bound_seconds(op.moved_backward_bytes), kernels=0
            )
        forward, backward = op.moved_bytes, op.moved_backward_bytes
        if is_layer_norm and self.sums_rows_apart:
            backward = backward * 5 // 3  # x and its gradient are read again for the gradients of weight and bias
        if op.kind == "add" and self.measured is None and not self.ours:
            backward = 0  # the gradient is passed on; sums of two: ``add_gradient_sums``
        if op.kind == "norm" and self.job.stack.is_compiled and self.measured is None:
            backward = int(backward / self.constants.compiled_norm_share)
        backward_seconds = self.memory_bound_seconds(backward, kernel=f"{kernel}_backward") if backward else 0.0
        return OpTime(
            self.memory_bound_seconds(forward, kernel=kernel),
            backward_seconds + self._sum_head_norm_gradients(op),
            kernels=kernels,
            backward_kernels=backward_kernels if backward else 0,
        )

    def _sum_head_norm_gradients(self, op: Op) -> float:
        """Return the seconds in which Transformer Engine's RMSNorm over a head sums the gradient of its weight.

        Each of its thread blocks, of four rows at a time, leaves a sum. One more kernel adds them up in few threads
        (NVIDIA/TransformerEngine@d0067d0: normalization/rmsnorm/rmsnorm_bwd_semi_cuda_kernel.cu, general).
        """
        is_transformer_engine = self.job.stack.family == "megatron" and self.machine.has_gpus and self.measured is None
        if not is_transformer_engine or op.kind != "norm" or len(op.wgrad_numels) != 1:
            return 0.0
        (dim,) = op.wgrad_numels
        if dim > MAX_HEAD_NORM_DIM:
            return 0.0
        rows = max(op.writes.values()) // (dim * get_activation_width(self.job))
        blocks = min(ceil_div(rows, 4), NORM_BLOCKS * self.chip.multiprocessors)
        return blocks * self.constants.head_norm_block_seconds

    def _scan(self, op: Op) -> OpTime:
        """Return the seconds of a scan: its matmuls of chunks, all at once, and its bytes.

        The trainer computes in fp32, and launches PyTorch's operations one by one for each group of chunks
        (``Op.launches``), which move ``Op.launched_bytes``. Other kernels, in Triton, multiply in the dtype of the
        activations at a rate of their own; most of their bytes are those of kernels that do not multiply: convolution,
        states, gate and norm. The chain of states from group to group is priced as if it were parallel too. On a
        calibrated machine, bytes or matmuls count, whichever take longer.
        """
        is_triton = op.fused and self.measured is None and self.machine.has_gpus
        moved, launched = (op.moved_bytes, op.moved_backward_bytes), op.launched_bytes
        launches_parts = self.launches_scans and any(launched) and not op.fused
        seconds_per_flop = self._estimate_scan_seconds_per_flop(op, is_triton=is_triton) if op.flops else 0.0
        products = [flops * seconds_per_flop for flops in (op.flops, op.backward_flops or 2 * op.flops)]
        copies = [*map(self.memory_bound_seconds, launched if launches_parts else moved)]
        combine = sum if is_triton or launches_parts else max
        seconds = [combine(pair) for pair in zip(copies, products, strict=True)]
        if is_triton:
            seconds = [sum(pair) for pair in zip(seconds, self._price_convolution_and_gate(op), strict=True)]
        kernels = op.launches if self.launches_scans else (1, 1)
        min_kernel = self.constants.smallest_kernel_seconds
        forward, backward = (seconds[way] + (kernels[way] - 1) * min_kernel for way in (0, 1))
        return OpTime(forward, backward, kernels=kernels[0], backward_kernels=kernels[1])

    def _price_convolution_and_gate(self, op: Op) -> tuple[float, float]:
        """Return the seconds of a fused Mamba-2's convolution and of its gate with the norm, forward and backward.

        Each takes as long as its bytes, or as its instructions on each multiprocessor if they take longer. The backward
        computes the convolution again.
        """
        width, multiprocessors = get_activation_width(self.job), self.chip.multiprocessors
        convolution, backward_convolution = (
            max(self.memory_bound_seconds(passes * width * op.convolved), op.convolved / (rate * multiprocessors))
            for passes, rate in zip((2, 3), self.constants.convolved_elements_per_second, strict=True)
        )
        gate, backward_gate = (self.memory_bound_seconds(passes * width * op.gated) for passes in (3, 5))
        gate_rate = self.constants.gated_elements_per_second * multiprocessors
        return convolution + gate, convolution + backward_convolution + max(backward_gate, op.gated / gate_rate)

    def _estimate_scan_seconds_per_flop(self, op: Op, *, is_triton: bool) -> float:
        """Return the seconds of a FLOP of a scan's matmuls."""
        if is_triton:
            scan_rate = self.constants.scan_flops_per_second[not op.convolved] * self.chip.multiprocessors
            return 1 / min(scan_rate, self.chip.sustained_flops(self.high_precision_dtype))
        rows, columns, inner = op.shape
        dtype: Dtype = "fp32" if self.ours and not op.fused else self.high_precision_dtype
        product = self.matmul(rows, columns, inner, dtype=dtype, batch=op.batch)
        return product / (2 * rows * columns * inner * op.batch)

    def _price_dropout(self, op: Op) -> OpTime:
        """Return the seconds of a dropout of the trainer: PyTorch's operations draw its mask from counters."""
        min_kernel = self.constants.smallest_kernel_seconds
        forward, backward = (
            self.memory_bound_seconds(moved) + (kernels - 1) * min_kernel
            for moved, kernels in zip(op.launched_bytes, op.launches, strict=True)
        )
        return OpTime(forward, backward, kernels=op.launches[0], backward_kernels=op.launches[1])

    def _price_eager_kernels(self, op: Op, cost: EagerKernelCost) -> OpTime:
        """Return the seconds of an operation that PyTorch's kernels compute one after another."""
        rounds = self._count_rounds(*op.shape[:2]) if op.kind == "loss" else 1
        min_kernel = self.constants.smallest_kernel_seconds
        forward = (
            self.memory_bound_seconds(int(cost.forward * op.moved_bytes)) + (rounds * cost.kernels - 1) * min_kernel
        )
        backward = (
            self.memory_bound_seconds(int(cost.backward * op.moved_backward_bytes))
            + (cost.backward_kernels - 1) * min_kernel
        )
        return OpTime(forward, backward, 0.0, rounds * cost.kernels, cost.backward_kernels)

    def _price_permutation(self, op: Op) -> OpTime:
        """Return the seconds of the router's top-k, and of permuting tokens by expert and back."""
        forward, backward = (EXPERT_LAUNCHES if self.ours else self.constants.moe_kernels)[op.name]
        if op.kind == "activation":  # top-k: many kernels on few bytes
            min_kernel = self.constants.smallest_kernel_seconds
            return OpTime(
                self.memory_bound_seconds(op.moved_bytes) + (forward - 1) * min_kernel,
                self.memory_bound_seconds(op.moved_backward_bytes) + (backward - 1) * min_kernel,
                0.0,
                forward,
                backward,
            )
        moved, moved_back = op.moved_bytes, op.moved_backward_bytes
        if (
            op.kind == "message"
        ):  # after an all-to-all, tokens are sorted by expert; fused dispatchers sort as they send
            sorts = self.job.stack.dispatcher == "all_to_all"
            sort_seconds = self.memory_bound_seconds(2 * sum(op.writes.values())) if sorts else 0.0
            return OpTime(sort_seconds, sort_seconds, 0.0, forward, backward)
        if self.job.stack.token_permutation == "scatter_add":
            copied = max(moved, moved_back)  # bytes of all copies of the tokens, read and written
            gathered = self.memory_bound_seconds(copied)
            added = copied / (2 * get_activation_width(self.job)) / self.constants.scatter_add_elements_per_second
            times = (gathered, added) if op.name == "moe.dispatch" else (added, gathered)
            return OpTime(*times, 0.0, forward, backward)
        scattered, scattered_back = (int(self.constants.permutation_bytes * n_bytes) for n_bytes in (moved, moved_back))
        return OpTime(
            self.memory_bound_seconds(scattered), self.memory_bound_seconds(scattered_back), 0.0, forward, backward
        )

    def _price_chunked_loss(self, op: Op) -> OpTime:
        """Return the seconds of the chunked loss, all in the backward.

        A chunk has three matmuls, the loss and the dW sum.
        """
        rows, vocab, width = op.shape
        chunk = min(rows, LOSS_CHUNK_ROWS)
        shapes = (chunk, vocab, width), (chunk, width, vocab), (vocab, width, chunk)
        products = sum(  # no dW of a frozen head
            self.matmul(*shape, dtype=self.high_precision_dtype, aligned=self._get_alignment(vocab, width))
            for shape in shapes[: 1 + op.backward_products]
        )
        seconds = self.memory_bound_seconds(op.moved_backward_bytes, kernel=KERNELS["loss"])
        if self.measured is None:
            rate = self.constants.loss_bytes_per_second * self.chip.multiprocessors
            seconds = max(seconds, op.moved_backward_bytes / rate)
            recipe = self.job.precision  # each chunk reads and writes dW; at the end it is added to the gradient sums
            exposed_share = 1 - self.constants.hidden_sums_share
            if op.parameters:
                products += exposed_share * self.memory_bound_seconds(2 * vocab * width * recipe.table_gradients_bytes)
            products += (self._count_rounds(chunk, vocab) - 1) * self.constants.smallest_kernel_seconds
            seconds += self._price_accumulation(vocab * width) if op.parameters else 0.0
        launches = ceil_div(rows, chunk) * (4 + self._count_rounds(chunk, vocab))
        return OpTime(0.0, rows / chunk * products + seconds, kernels=0, backward_kernels=launches)

    def _count_rounds(self, rows: int, vocab: int) -> int:
        """Return the number of chunks of the loss: the trainer casts a few rows to fp32 at a time."""
        uses_own_kernels = self.ours and self.job.stack.kernels != "triton"
        return ceil_div(rows, max(1, LOSS_CHUNK_ELEMENTS // vocab)) if uses_own_kernels else 1

    def _price_linear(self, op: Op) -> OpTime:
        """Return the seconds of a linear layer, or of the experts' grouped one (``op.batch`` > 1), with its casts."""
        forward, dgrad, wgrad = self._price_products(op)
        makes_dgrad = op.differentiates != ()
        launches_experts = not self.ours and self.job.stack.cuda_graphs != "full" and self.measured is None
        kernels_per_expert = self.constants.expert_kernels[op.low_precision]
        if op.batch > 1 and launches_experts:  # full CUDA graphs hold fused kernels
            launch_overhead = self.constants.smallest_kernel_seconds * (op.batch * kernels_per_expert - 1)
            forward, dgrad, wgrad = forward + launch_overhead, dgrad + launch_overhead, wgrad + launch_overhead
        bias_kernels = (0, 0)
        if len(op.wgrad_numels) > 1 and op.name == "moe.experts.down" and launches_experts:
            bias_kernels, (bias_forward, bias_backward) = self._price_expert_biases(op)
            forward, dgrad = forward + bias_forward, dgrad + bias_backward
        if any(op.moved_cast_bytes):
            casts = self._cast_seconds(op)
            forward, dgrad, wgrad = (a + b for a, b in zip((forward, dgrad, wgrad), casts, strict=True))
        elif op.low_precision:
            dgrad += self._price_gradient_cast(op)
        drawn, applied = op.launches if self.launches_dropouts and any(op.launched_bytes) else (0, 0)
        if drawn:  # the mask of an adapter's input
            forward += self.memory_bound_seconds(op.launched_bytes[0]) + drawn * self.constants.smallest_kernel_seconds
        dequantizing = op.dequantizing_kernels
        if dequantizing > 1:
            overhead = (dequantizing - 1) * self.constants.smallest_kernel_seconds
            forward, dgrad = forward + overhead, dgrad + overhead * makes_dgrad
        launches = (
            1 + op.batch * kernels_per_expert // self.constants.experts_per_launch
            if op.batch > 1 and not self.ours
            else 1
        )
        cast_sizes = op.casts  # each cast is a kernel
        forward_casts = bool(cast_sizes.x) + bool(cast_sizes.weight)
        backward_casts = sum(
            map(bool, (cast_sizes.gradient, cast_sizes.transposed, cast_sizes.columns, cast_sizes.gradient_columns))
        )
        return OpTime(
            forward,
            dgrad,
            wgrad,
            launches + forward_casts + dequantizing + drawn + bias_kernels[0],
            op.backward_products * launches
            + backward_casts
            + bias_kernels[1]
            + dequantizing * makes_dgrad
            + applied
            + self._count_sums(op),
        )

    def _price_products(self, op: Op) -> tuple[float, float, float]:
        """Return the seconds of y, dx and dW of a linear layer, with the sums of its gradients; 0 if it has none."""
        m, n, k = op.shape
        recipe = self.job.precision
        dtype = self.dtype if op.low_precision else self.high_precision_dtype
        wgrad_dtype = self.high_precision_dtype if recipe.wide_gradients else dtype
        aligned = self._get_alignment(n, k)  # the number of tokens is never a row length
        forward = self.matmul(m, n, k, dtype=dtype, batch=op.batch, aligned=aligned)
        dgrad = self.matmul(m, k, n, dtype=dtype, batch=op.batch, aligned=aligned)
        wgrad = self.matmul(n, k, m, dtype=wgrad_dtype, batch=op.batch, aligned=aligned)
        if self.measured is None:
            wgrad += self._price_accumulation(n * k * op.batch)
        makes_dgrad = op.differentiates != ()  # else no layer below is trained
        if op.backward_products == makes_dgrad:  # the weight is frozen
            wgrad = 0.0
        elif len(op.wgrad_numels) > 1 and op.batch == 1 and (self.sums_rows_apart or self.ours):  # the bias's gradient
            wgrad += self.memory_bound_seconds(m * n * recipe.gradients_bytes)
        return forward, dgrad if makes_dgrad else 0.0, wgrad

    def _price_expert_biases(self, op: Op) -> tuple[tuple[int, int], tuple[float, float]]:
        """Return the kernels of experts' biases, forward and backward, and their seconds beyond the first launch."""
        m, n, _ = op.shape
        (per_expert, shared), (backward_per_expert, backward_shared) = EXPERT_BIAS_LAUNCHES
        kernels = per_expert * op.batch + shared, backward_per_expert * op.batch + backward_shared
        forward, backward = (
            self.memory_bound_seconds(n_bytes * m * n * op.batch)
            + (n_kernels - 1) * self.constants.smallest_kernel_seconds
            for n_bytes, n_kernels in zip(self.constants.expert_bias_bytes, kernels, strict=True)
        )
        return kernels, (forward, backward)

    def _price_gradient_cast(self, op: Op) -> float:
        """Return the seconds to cast the gradient of the output to low precision, with a copy for dW."""
        m, n, _ = op.shape
        recipe, numel = self.job.precision, m * n * op.batch
        copies = 1 + (op.backward_products > (op.differentiates != ()) and self._transposes_casts)
        read_bytes = count_read_passes(self.job) * numel * get_activation_width(self.job)
        return self.memory_bound_seconds(read_bytes + copies * recipe.number_format.count_bytes(numel))

    def _count_sums(self, op: Op) -> int:
        """Return the kernels of the trainer that add a linear layer's gradients to the sums, and that make a bias's."""
        return len(op.wgrad_numels) + (len(op.wgrad_numels) > 1) if self.ours else 0

    def _cast_seconds(self, op: Op) -> tuple[float, ...]:
        """Return the seconds of the casts before y, dx and dW.

        torchao's casts with a scale for each column (those for dW, and the weight's for dx) read the tensor twice: for
        the scales, and across its rows.
        """
        recipe, (forward, dgrad, wgrad) = self.job.precision, op.moved_cast_bytes
        is_torchao = recipe.scaling == "rowwise" and not self.job.stack.kernel_facts.fuses_linears
        if is_torchao and not recipe.wide_gradients and self.measured is None:
            _, n, k = op.shape
            dgrad += self._count_extra_column_bytes(3 * n * k * op.batch)
            wgrad += self._count_extra_column_bytes(wgrad)
        return tuple(map(self.memory_bound_seconds, (forward, dgrad, wgrad)))

    def _count_extra_column_bytes(self, moved: int) -> int:
        """Return the bytes, at full bandwidth, that casts with column scales take beyond ``moved``.

        One pass moves 3 bytes an element, of which it reads 2; the pass for the scales reads these 2.
        """
        return int(moved * (2 / 3 + 1 / self.constants.column_cast_share - 1))

    def _price_accumulation(self, numel: int) -> float:
        """Return the seconds to accumulate a gradient of ``numel`` elements in its matmul, or after it by the trainer.

        Whether other software has kernels for it depends on the layout (``count_accumulated_bytes``).
        """
        recipe = self.job.precision
        if self.ours:
            return self.memory_bound_seconds(numel * (2 * recipe.summed_bytes + recipe.gradients_bytes))
        if not self.job.stack.adds_in_wgrad:
            return 0.0
        return (1 - self.constants.hidden_sums_share) * self.memory_bound_seconds(2 * numel * recipe.summed_bytes)

    def estimate_sums(self, op: Op, time: OpTime) -> float:
        """Return the part of an operation's ``time`` in which the trainer adds gradients to their sums, in a step.

        Of the trainer on a calibrated computer, where it is a kernel for each weight; its factors contain them.
        """
        factor = self.step_factors.get("memory")
        if factor is None or not self.job.stack.is_own_trainer or not op.backward_products:
            return 0.0
        recipe = self.job.precision
        moved_bytes = sum(op.wgrad_numels) * (2 * recipe.summed_bytes + recipe.gradients_bytes)
        seconds = factor.backward * self.memory_bound_seconds(moved_bytes)
        seconds += factor.backward_kernel_seconds * len(op.wgrad_numels)
        return min(seconds, time.backward + time.weight)

    def _get_alignment(self, *rows: int) -> int:
        """Return the elements that rows of these widths are aligned to; torch.compile pads them (``shape_padding``)."""
        return roofline.ALIGNED if self.job.stack.is_compiled else roofline.find_alignment(*rows)

    def matmul(self, m: int, n: int, k: int, *, dtype: Dtype, batch: int = 1, aligned: int = roofline.ALIGNED) -> float:
        """Return the seconds of ``batch`` products ``(m, k) @ (k, n)`` on rows aligned to ``aligned`` elements."""
        if self.measured is not None and self.measured.matmuls:
            return batch * self.measured.matmul(m, n, k)
        key = m, n, k, dtype, batch, aligned
        if key not in self._matmuls:
            seconds = roofline.estimate_matmul(
                self.chip, m=m, n=n, k=k, dtype=dtype, batch=batch, aligned=aligned, constants=self.constants
            )
            if dtype == "fp8":
                seconds /= self._scaled_matmul_share
            self._matmuls[key] = seconds
        return self._matmuls[key]

    def _price_attention(self, op: Op) -> tuple[float, float]:
        """Return the seconds of the attention core, forward and backward."""
        in_fp8 = self.job.stack.fp8_attention and self.job.precision.is_low_precision
        if self.measured is not None and self.measured.attentions[0]:
            sequences, tokens, dim = op.shape
            blocks = 1 + op.message.times if op.message is not None else 1  # of a ring, each with its own kernels
            shape = (sequences, ceil_div(tokens, blocks), dim)
            forward, backward = self.measured.attention(op.causal_flops, shape=shape, heads=op.batch)
            if in_fp8:  # measured in 16 bits
                forward /= self.chip.fp8_attention_share
                backward /= self.chip.fp8_attention_backward_share
            return forward, backward
        if self.job.stack.attention_facts.materializes_scores:
            return self._price_batched_matmul(op)
        _, tokens, dim = op.shape
        # What a query loses at the ends of its keys is the same in a window: the keys are those of a causal mask that
        # lets through as many pairs a query.
        keys = min(tokens, 2 * tokens * op.causal_flops // op.flops) if op.flops else tokens
        forward, backward = (
            roofline.estimate_attention(
                self.chip,
                flops=op.causal_flops,
                tokens=tokens,
                keys=keys,
                head_dim=dim,
                dtype="fp8" if in_fp8 else self.high_precision_dtype,
                kind=self.job.stack.attention,
                backward=is_backward,
                constants=self.constants,
            )
            for is_backward in (False, True)
        )
        return forward, backward

    def _price_batched_matmul(self, op: Op) -> tuple[float, float]:
        """Return the seconds of one batched matmul of unfused attention, forward and backward, on the full square."""
        sequences, tokens, dim = op.shape
        batch = sequences * op.batch
        m = max(1, op.flops // (2 * batch * tokens * dim))
        is_scores = op.name.endswith("scores")
        n, k = (tokens, dim) if is_scores else (dim, tokens)
        aligned = self._get_alignment(tokens, dim)
        forward, *backward = (
            self.matmul(*shape, dtype=self.high_precision_dtype, batch=batch, aligned=aligned)
            for shape in ((m, n, k), (m, k, n), (n, k, m))
        )
        return forward, sum(backward)

    def memory_bound_seconds(self, moved: float, *, kernel: str = "copy") -> float:
        """Return the seconds of a memory-bound kernel that reads and writes ``moved`` bytes."""
        if self.measured is not None:
            names = self.measured.bandwidths
            if kernel.endswith("_backward") and f"{kernel} {self.dtype}" not in names:
                kernel = kernel.removesuffix("_backward")
            measured_seconds = self.measured.memory_bound_seconds(moved, kernel=kernel)
            if measured_seconds:
                return measured_seconds
        return roofline.estimate_memory_bound(self.chip, moved_bytes=moved, constants=self.constants)

    def uncached_seconds(self, moved: float, *, kernel: str) -> float:
        """Return the seconds of a memory-bound kernel that reads and writes ``moved`` bytes, none of them in a cache.

        The curves of a calibrated machine repeat a kernel on the same tensors, and so find small ones in its caches.
        """
        if self.measured is not None and (bandwidth := self.measured.get_uncached_bandwidth(kernel=kernel)):
            return moved / bandwidth
        return self.memory_bound_seconds(moved, kernel=kernel)
