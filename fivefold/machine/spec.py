"""The machine record: the chip, the number of chips, and the links between them from near to far.

All rates are per chip and direction, in SI units; peaks are dense (no sparsity).
A calibrated machine (``fivefold calibrate``) carries its measurements.
"""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from fivefold.bounded_types import Bytes, Degree, Dollars, Rate, Seconds, Share, Watts
from fivefold.record import Record
from fivefold.units import Dtype

WIDENING: tuple[Dtype, ...] = ("fp4", "fp8", "fp16", "bf16", "tf32", "fp32", "fp64")
MATMUL_SHARE = 0.75  # share of the peak, for a chip without measurements: between B200 (0.72) and A100 (0.81)
LAUNCH_SECONDS = 67e-6  # ``Chip.launch_seconds`` of an x86 host
NCCL_STEP_SECONDS = 4e-6  # between nodes over InfiniBand (NVIDIA/nccl issue 652: ``catalog._build_nic``)
BUSY_CORES, BUSY_SHARE = 0.2, 0.02  # other programs that use more disturb a calibration: at least, and of all cores
UNRELIABLE_SPREAD = 0.5  # spread between rounds that tells the same where nothing counts other programs
UNSTATED_SOURCE = "not stated"  # default source of a figure of a user's machine
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p", "broadcast"]


class Chip(Record):
    """One accelerator (or one process's share of a CPU)."""

    name: str  # as in the catalog, or a name of your own
    generation: str = (
        ""  # predictions for one generation have similar errors (``planner/time/errors.py``); default: the name
    )
    peak_flops: dict[Dtype, Rate] = Field(min_length=1)  # dense FLOP/s of the matrix units, by number format
    block_scales: bool = False  # the matrix units apply the scales of blocks of operands (MXFP8, NVFP4)
    fp8_in_any_layout: bool = False  # matmuls in fp8 read operands as they are or transposed; else copies are made
    memory_bytes: Bytes  # as ``torch.cuda`` reports it (``total_memory``)
    memory_bandwidth: Rate  # bytes/s
    power_watts: Watts | None = None  # power cap
    multiprocessors: Degree = 108  # streaming multiprocessors (SMs), or compute units
    matmul_share: dict[Dtype, Share] = {}  # share of the peak that large matmuls sustain in a training step
    flops_per_joule: dict[Dtype, Rate] = {}  # large matmuls on real data; with power_watts it caps their rate
    attention_share: Share = 0.8  # rate of flash attention forward over the sustained matmul rate
    attention_backward_share: Share = 0.73  # the same for its backward
    fp8_attention_share: Share = 1.0  # rate of flash attention in fp8 over that in 16 bits, forward
    fp8_attention_backward_share: Share = 1.0  # the same for its backward
    # flash attention's forward takes as long for the exponentials of a score as for matmuls of this many dims, and one
    # hides the other; 0: it takes the time of both (``Constants.softmax_dim``)
    hidden_softmax_dim: float = Field(0.0, ge=0, le=2**14)
    flash2_share: Share = 1.0  # rate of FlashAttention-2 over that of the chip's best attention kernels
    bandwidth_share: Share = 0.9  # share of the memory bandwidth that element-wise kernels sustain
    # Host time of one operation or message of eager PyTorch, including views, casts and hooks: small layers of vTrain's
    # 830 single-node runs take 3.3 ms per layer and micro-batch at any width (EPYC 7742).
    # Fitted to those runs at the minimum of their error: docs/explanation/how-a-step-costs/constants.md.
    launch_seconds: Seconds = LAUNCH_SECONDS
    source: str = UNSTATED_SOURCE  # source of the data-sheet figures
    share_source: str = "what kernels reach is the default"  # source of the sustained shares

    def peak(self, dtype: Dtype) -> float:
        """Return the peak dense FLOP/s of ``dtype``, or of the next wider format that the chip has."""
        format = self.find_format(dtype)
        return self.peak_flops[format] if format else max(self.peak_flops.values())

    def find_format(self, dtype: Dtype) -> Dtype | None:
        """Return the format whose matrix units compute ``dtype``: its own or the next wider one that the chip has."""
        return _find_nearest_wider(dtype, self.peak_flops)

    def has_units(self, dtype: Dtype) -> bool:
        """Tell whether the chip has matrix units for ``dtype``, and needs no wider format."""
        return self.find_format(dtype) == dtype

    def sustained_flops(self, dtype: Dtype) -> float:
        """Return the FLOP/s that large matmuls in ``dtype`` sustain in a step: a share of the peak, capped by power.

        Without a measurement for ``dtype``, that of the next wider format is used.
        """
        format = dtype if dtype in self.matmul_share else _find_nearest_wider(dtype, self.matmul_share)
        rate = self.peak(dtype) * (self.matmul_share[format] if format else MATMUL_SHARE)
        capped_format = dtype if dtype in self.flops_per_joule else _find_nearest_wider(dtype, self.flops_per_joule)
        if capped_format is None or self.power_watts is None:
            return rate
        return min(rate, self.power_watts * self.flops_per_joule[capped_format])


def _find_nearest_wider(dtype: Dtype, known: dict[Dtype, float]) -> Dtype | None:
    return next((wider for wider in WIDENING[WIDENING.index(dtype) :] if wider in known), None)


class Link(Record):
    """A tier of the network, which connects groups of up to ``span`` neighboring ranks."""

    name: str  # such as NVLink or InfiniBand
    span: Degree  # number of neighboring ranks that the link connects
    bandwidth: Rate  # bytes/s per rank, one direction, as in the data sheet
    sustained: float = Field(1.0, ge=1e-6, le=1)  # share of the bandwidth that a ring reaches with large messages
    reduction_bandwidth: Rate | None = None  # bytes/s per rank of in-switch reductions (NVLink SHARP)
    latency_seconds: Seconds = NCCL_STEP_SECONDS  # per step of a small message
    direct: bool = False  # all-to-all wiring: a group of n in a span of s uses n - 1 of s - 1 links
    source: str = UNSTATED_SOURCE  # source of the figures


class MatmulPoint(Record):
    """Measured seconds of ``(m, k) @ (k, n)`` while ``ranks`` processes ran the same concurrently."""

    dtype: Dtype
    ranks: PositiveInt
    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    seconds: PositiveFloat


class AttentionPoint(Record):
    """Measured seconds of causal flash attention over ``sequences`` x ``tokens``, forward and backward."""

    dtype: Dtype
    ranks: PositiveInt
    sequences: PositiveInt
    tokens: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    forward_seconds: PositiveFloat
    backward_seconds: PositiveFloat


class KernelPoint(Record):
    """Measured seconds of a memory-bound kernel (or a copy) that reads and writes ``moved_bytes`` in total."""

    kernel: str
    dtype: Dtype
    ranks: PositiveInt
    moved_bytes: PositiveInt
    seconds: PositiveFloat


class CollectivePoint(Record):
    """Measured seconds of a collective over ``ranks`` processes on ``nodes`` hosts; ``bytes``: size of the full tensor.

    ``busy_seconds``: the part in which it keeps a core busy, which concurrent compute cannot use; None: all.
    """

    collective: Collective
    ranks: PositiveInt
    bytes: PositiveInt
    seconds: PositiveFloat
    nodes: PositiveInt = 1
    busy_seconds: PositiveFloat | None = None


KernelKind = Literal["matmul", "experts", "attention", "embedding", "loss", "memory", "routing", "message", "update"]


class StepFactor(Record):
    """The seconds of one kind of kernels within a training step, relative to the curves of kernels that are repeated.

    seconds in a step = ``forward`` or ``backward`` · seconds of the curves + ``..._kernel_seconds`` · kernels; in a
    step, inputs have left the caches and the host works between two kernels. ``ranks`` processes ran concurrently.
    """

    kind: KernelKind  # kind of kernels
    ranks: PositiveInt  # concurrent processes
    dtype: Dtype  # number format of the matrix multiplications
    forward: NonNegativeFloat  # factor of the curves in a forward pass; of the update: its factor
    backward: NonNegativeFloat  # factor of the curves in a backward pass
    forward_kernel_seconds: NonNegativeFloat = 0.0  # added for each kernel; of the update: for each weight
    backward_kernel_seconds: NonNegativeFloat = 0.0  # added for each kernel; of the update: for each step


class StepOverhead(Record):
    """The seconds of a training step on a CPU that its processor time does not tell: of the clock, the host, and waits.

    ``ranks`` processes ran concurrently. Other programs, threads that wait for each other and threads that carry
    messages take the cores from the work. Between two operations the host runs Python and autograd, which is part of
    the work. Messages have the seconds that they take if their ranks arrive together; ``planner/time/step_overhead.py``
    adds the wait for the last rank.
    """

    ranks: PositiveInt  # concurrent processes
    host_share: NonNegativeFloat  # seconds that the clock counts beyond each second of the processor's work
    forward_gap_seconds: NonNegativeFloat = 0.0  # of the host for each operation of a forward, processor time
    backward_gap_seconds: NonNegativeFloat = 0.0  # of the host for each operation of a backward, processor time
    start_seconds: NonNegativeFloat = 0.0  # standard deviation of the moments at which ranks begin a step
    drift_seconds: NonNegativeFloat = 0.0  # the same of their arrival at a message after a second of work; grows as √t


class UnitPoint(Record):
    """Measured seconds of one unit (embedding, block or head) of a rank in the trainer's own step, without messages.

    ``key``: as in ``planner/time/profiled.py``. The backward includes weight gradients, unless the schedule runs them
    as W. ``ranks`` processes ran concurrently. ``over_curves``: seconds relative to those of the kernel curves.
    """

    key: str
    label: str  # for people
    ranks: PositiveInt
    forward_seconds: PositiveFloat
    backward_seconds: PositiveFloat
    weight_seconds: NonNegativeFloat = 0.0
    over_curves: PositiveFloat = 1.0
    spread: NonNegativeFloat = 0.0  # (slowest - fastest step) / median


class UpdatePoint(Record):
    """Measured seconds of a rank's step outside forward and backward: end of reductions, norm, clip, update."""

    key: str
    label: str
    ranks: PositiveInt
    elements: PositiveInt  # elements that the rank updates
    seconds: PositiveFloat
    spread: NonNegativeFloat = 0.0


class Calibration(Record):
    """Measurements of one machine, with their date and torch version."""

    date: str  # date of the measurement
    torch: str  # version of PyTorch
    cores: PositiveInt  # cores of the host
    matmuls: tuple[MatmulPoint, ...] = ()  # matrix multiplications
    attentions: tuple[AttentionPoint, ...] = ()  # attention kernels
    kernels: tuple[KernelPoint, ...] = ()  # memory-bound kernels
    collectives: tuple[CollectivePoint, ...] = ()  # collectives
    spread: NonNegativeFloat | None = None  # relative difference of the two best rounds; 90 % of the points have less
    cores_of_others: NonNegativeFloat | None = None  # cores that other programs kept busy meanwhile (CPUs of Linux)
    steps: tuple[StepFactor, ...] = ()  # kernels within a training step, relative to the curves
    overheads: tuple[StepOverhead, ...] = ()  # clock, host and waits of a training step
    units: tuple[UnitPoint, ...] = ()  # blocks, embedding and head in the trainer's own step
    updates: tuple[UpdatePoint, ...] = ()  # optimizer updates in the trainer's own step

    def describe_disturbance(self) -> str:
        """Return a warning if other programs have disturbed the measurement, or an empty text."""
        if self.cores_of_others is not None:
            is_disturbed = self.cores_of_others > max(BUSY_CORES, BUSY_SHARE * self.cores)
            cause = f"other programs kept {self.cores_of_others:.1f} of its {self.cores} cores busy"
        else:
            is_disturbed = self.spread is not None and self.spread > UNRELIABLE_SPREAD
            cause = f"a tenth of the points differ by {self.spread or 0:.0%} or more"
        if not is_disturbed:
            return ""
        return f"this computer was busy when it was calibrated: {cause}; repeat `fivefold calibrate` when it is idle"


class Machine(Record):
    """A machine: ``ranks`` chips in nodes of ``ranks_per_node``."""

    name: str  # name in tables and messages
    chip: Chip  # the accelerator of each rank
    ranks: Degree  # total number of chips
    ranks_per_node: Degree  # chips per node
    links: tuple[Link, ...] = Field(min_length=1)  # nearest first; the last one connects all ranks
    backend: Literal["nccl", "gloo"] = "nccl"  # library of the collectives
    dollars_per_rank_hour: Dollars | None = None  # price of one chip for one hour
    calibration: Calibration | None = None  # measurements of ``fivefold calibrate``, which replace the chip's shares

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if not self.name.strip():  # its first word names the machine in options and messages
            raise ValueError("name is empty; give one such as 'mine'")
        spans = [link.span for link in self.links]
        if spans != sorted(spans):
            raise ValueError(f"links must be listed from the smallest span to the largest, not {spans}")
        return self

    def __hash__(self) -> int:  # the chip holds a dict, which is not hashable
        return hash((self.name, self.ranks))

    @property
    def nodes(self) -> int:
        """Return the number of nodes, including a partly used one."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def has_gpus(self) -> bool:
        """Tell whether the ranks are GPUs, which communicate by NCCL; else they are processes of a CPU, with gloo."""
        return self.backend == "nccl"

    @property
    def can_overlap(self) -> bool:
        """Tell whether messages can overlap with compute: on streams of a GPU, or by NICs between hosts."""
        return self.has_gpus or self.nodes > 1

    def count_peak_flops(self, dtype: Dtype, *, ranks: int) -> float:
        """Return the FLOP/s that ``ranks`` ranks can have together.

        The peak of a rank of a CPU was measured while all ranks of its computer ran. Fewer ranks share all its cores.
        """
        busy = ranks if self.has_gpus else max(ranks, min(self.ranks_per_node, self.ranks))
        return busy * self.chip.peak(dtype)

    def link(self, span: int) -> Link:
        """Return the nearest tier that connects ``span`` neighboring ranks."""
        return next((link for link in self.links if link.span >= span), self.links[-1])
