"""Prices the kernels and messages of a tape in seconds, with the planner's cost models.

matmul (rows, columns, inner, batch)   →  planner/time/compute.py      attention: half of the square if causal
moving: bytes ÷ bandwidth              →  the same                   message: planner/time/network.py, by its ranks
launch: the host's seconds per kernel and message, as in planner/time/unit_time.py

On a GPU the trainer's norms, rotary embeddings, activations and losses are one kernel each (``trainer/model/kernels``,
``CURVES``). Its other functions, such as routing and the chunks of a scan, are PyTorch's operations, one kernel each,
unless torch.compile fuses them.
"""

from __future__ import annotations

from fivefold.dry_run.record.tape import Kernel, Tape, TapeMessage
from fivefold.dry_run.time.streams import Costs
from fivefold.job import Job
from fivefold.layout.mesh import RankGroup
from fivefold.machine.spec import Machine
from fivefold.planner.time import roofline
from fivefold.planner.time.compute import Prices
from fivefold.planner.time.constants import PUBLISHED, Constants
from fivefold.planner.time.network import Network
from fivefold.units import Dtype

# Function of the trainer → the calibrated kernel curve that prices its elementwise operations; others: "copy".
CURVES = {
    "_RmsNorm.forward": "rms_norm", "_RmsNorm.backward": "rms_norm_backward", "turn": "rope", "turn_pairs": "rope",
    "_LayerNorm.forward": "rms_norm", "_LayerNorm.backward": "rms_norm_backward",
    "_Gated.forward": "swiglu", "_Gated.backward": "swiglu_backward",
    "_FusedGated.forward": "swiglu", "_FusedGated.backward": "swiglu_backward",
    "_FusedPlain.forward": "swiglu", "_FusedPlain.backward": "swiglu_backward",
    "nats": "cross_entropy", "_CrossEntropy.backward": "cross_entropy_backward",
    "_Norm.forward": "rms_norm", "_Norm.backward": "rms_norm_backward",
    "_FusedRotate.forward": "rope", "_FusedRotate.backward": "rope_backward", "_Rotate.backward": "rope_backward",
    "residual": "add", "update": "adamw",
}  # fmt: skip
DTYPES: dict[str, Dtype] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "uint8": "fp4",
}
FUSED_KERNELS = "fivefold/trainer/model/kernels/"
COUNT_DTYPES = ("int64", "int32", "uint8")  # messages of these dtypes hold counts, for which the host waits


class Pricer:
    """A price model of kernels and messages of ``job`` on ``machine`` while ``world`` ranks run concurrently."""

    def __init__(self, *, machine: Machine, job: Job, world: int, constants: Constants = PUBLISHED) -> None:
        self.machine, self.job, self.constants = machine, job, constants
        self.prices = Prices(machine, ranks=world if machine.calibration else 1, job=job, constants=constants)
        self.network = Network(machine, constants)
        share = constants.compiled_launch_share if job.stack.is_compiled else 1
        self.kernel_launch_seconds = machine.chip.launch_seconds * share if machine.has_gpus else 0.0
        self.launches_elementwise = self.prices.plain or self.prices.eager  # the host launches each operation
        # one launch for a function: measured so, compiled, or on a host, where launches are not counted
        self.launches_functions = not machine.has_gpus or job.stack.is_compiled or self.prices.measured is not None
        if job.stack.cuda_graphs == "full":
            self.kernel_launch_seconds = 0.0

    def price_tape(self, tape: Tape) -> Costs:
        """Return the seconds of every kernel and message in the tape's lists."""
        messages_slow_compute = self.machine.has_gpus and not self.job.stack.launch_blocking
        return Costs(
            kernels=[self.price_kernel(kernel, line=tape.sites[kernel.site].line) for kernel in tape.kernels],
            kernel_launches=[
                self.kernel_launch_seconds * self._count_launches(kernel, line=tape.sites[kernel.site].line)
                for kernel in tape.kernels
            ],
            messages=[self.price_message(message, rank=tape.rank) for message in tape.messages],
            compute_slowdown=[
                self.constants.hidden_message_slowdown * (messages_slow_compute and _slows_compute(message))
                for message in tape.messages
            ],
            host_waits=[message.dtype in COUNT_DTYPES for message in tape.messages],
            message_launch_seconds=self.kernel_launch_seconds,
            is_blocking=self.job.stack.launch_blocking and self.machine.has_gpus,
        )

    def price_kernel(self, kernel: Kernel, *, line: str = "") -> float:
        """Return a kernel's seconds on the device, or those that it waits for the host.

        ``line``: its site's line, which selects the calibrated curve.
        """
        if kernel.kind == "matmul":
            rows, columns, inner, batch = kernel.shape
            aligned = roofline.ALIGNED if self.job.stack.is_compiled else kernel.aligned  # compiled: rows are padded
            return self.prices.matmul(
                rows, columns, inner, dtype=self._choose_dtype(kernel), batch=batch, aligned=aligned
            )
        if kernel.kind == "host":
            return kernel.moved_bytes / self.constants.host_memory_bandwidth
        if kernel.kind == "host_link":
            return kernel.moved_bytes / (self.constants.host_link_share * self.constants.host_link_bandwidth)
        if kernel.kind.startswith("attention"):
            return self._price_attention(kernel)
        launches = self._count_launches(kernel, line=line)
        if self.prices.eager or launches > 1:
            extra_seconds = (launches - 1) * self.constants.smallest_kernel_seconds
            return self.prices.memory_bound_seconds(max(kernel.moved_bytes, kernel.unfused_bytes)) + extra_seconds
        curve = CURVES.get(line.rpartition(" ")[2], "copy")
        return self.prices.memory_bound_seconds(kernel.moved_bytes, kernel=curve)

    def _count_launches(self, kernel: Kernel, *, line: str) -> int:
        """Return the number of GPU kernels of a tape's kernel, which may stand for several operations of a function."""
        if self.launches_elementwise:
            return kernel.launches
        if self.launches_functions or line.startswith(FUSED_KERNELS) or line.rpartition(" ")[2] in CURVES:
            return 1
        return kernel.launches

    def _choose_dtype(self, kernel: Kernel) -> Dtype:
        """Return the dtype of the matrix units: tf32 for fp32 if the job computes in tf32."""
        dtype, recipe = DTYPES[kernel.dtype], self.job.precision
        return recipe.compute if dtype == "fp32" and recipe.number_format.rounds_operands else dtype

    def _price_attention(self, kernel: Kernel) -> float:
        """Return an attention kernel's seconds.

        Queries = keys: causal, half the square; else a ring block, in full; under a window only the visible pairs are
        counted.
        """
        sequences, queries, keys, dim = kernel.shape
        is_backward = kernel.kind.endswith("backward")
        is_causal = queries == keys and "window" not in kernel.kind
        flops = kernel.flops // (2 if is_backward else 1) // (2 if is_causal else 1)
        measured = self.prices.measured
        if measured is not None and measured.attentions[0]:
            return measured.attention(flops, shape=(sequences, queries, dim), heads=1)[is_backward]
        return roofline.estimate_attention(
            self.prices.chip,
            flops=flops,
            tokens=queries,
            keys=keys,
            head_dim=dim,
            dtype=self._choose_dtype(kernel),
            kind=self.job.stack.attention,
            backward=is_backward,
            constants=self.constants,
        )

    def price_message(self, message: TapeMessage, *, rank: int) -> float:
        """Return a message's seconds on the links between its ranks; 0 for a group of one."""
        members = message.members
        if len(members) == 1:
            return 0.0
        group = RankGroup(len(members), members[1] - members[0])
        if message.collective == "p2p" and not self.machine.calibration:
            span = self.machine.links[0].span
            distance = abs(message.peer - rank)
            same_node = message.peer // span == rank // span
            group = RankGroup(2, distance if same_node else max(distance, span))
        return self.network.seconds(message.collective, message.payload, group)


def _slows_compute(message: TapeMessage) -> bool:
    """Return whether a message slows concurrent compute, as in the planner: pp messages do not.

    Of the send and the receive of a p2p exchange only the receive counts.
    """
    return message.axis != "pp" and (message.collective != "p2p" or message.receives)
