"""The machine as a record: the chip, the number of chips, and the links between them from near to far.

All rates are per chip and direction, in SI units; peaks are dense (no sparsity).
A calibrated machine (``fivefold calibrate``) carries its measurements.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from fivefold.bounded_types import Bytes, Degree, Dollars, Rate, Seconds, Share, Watts
from fivefold.record import Record
from fivefold.units import Dtype

WIDENING: tuple[Dtype, ...] = ("fp4", "fp8", "fp16", "bf16", "tf32", "fp32", "fp64")
MATMUL_SHARE = 0.75  # of the peak, for a chip without measurements: between B200 (0.72) and A100 (0.81)
OWN = "its owner's figure"  # default source of a figure
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p", "broadcast"]


class Chip(Record):
    """One accelerator (or one process's share of a CPU)."""

    name: str  # as in the catalog, or a name of your own
    generation: str = ""  # chips of one generation err alike (``planner/time/errors.py``); without one: the name
    peak_flops: dict[Dtype, Rate] = Field(min_length=1)  # dense FLOP/s of the matrix units, by number format
    memory_bytes: Bytes  # as ``torch.cuda`` reports it (``total_memory``)
    memory_bandwidth: Rate  # bytes/s
    power_watts: Watts | None = None  # power cap
    multiprocessors: Degree = 108  # streaming multiprocessors (SMs), or compute units
    matmul_share: dict[Dtype, Share] = {}  # of the peak, sustained by large matmuls in a training step
    flops_per_joule: dict[Dtype, Rate] = {}  # of large matmuls on real data; with power_watts a cap on their rate
    attention_share: Share = 0.8  # flash attention forward, of the sustained matmul rate
    attention_backward_share: Share = 0.73  # the same of its backward
    flash2_share: Share = 1.0  # FlashAttention-2, of the rate of the chip's best attention kernels
    bandwidth_share: Share = 0.9  # of the memory bandwidth, sustained by element-wise kernels
    # Host time of one operation or message of eager PyTorch with the views, casts and hooks around it: narrow layers
    # of vTrain's 830 single-node runs take 3.3 ms per layer and micro-batch at any width (EPYC 7742).
    # Fitted to those runs at the minimum of their error: docs/explanation/how-a-step-costs/constants.md.
    launch_seconds: Seconds = 67e-6
    source: str = OWN  # where the figures of the data sheet are from
    share_source: str = "what kernels reach is the default"  # where the sustained shares are from

    def peak(self, dtype: Dtype) -> float:
        """Peak dense FLOP/s of ``dtype``, or of the nearest wider format that the chip has."""
        found = dtype if dtype in self.peak_flops else _nearest_wider(dtype, self.peak_flops)
        return self.peak_flops[found] if found else max(self.peak_flops.values())

    def sustained(self, dtype: Dtype) -> float:
        """FLOP/s that large matmuls in ``dtype`` sustain in a step: a share of the peak, capped by power.

        Without a measurement for ``dtype``, uses that of the nearest wider format.
        """
        found = dtype if dtype in self.matmul_share else _nearest_wider(dtype, self.matmul_share)
        rate = self.peak(dtype) * (self.matmul_share[found] if found else MATMUL_SHARE)
        cap = dtype if dtype in self.flops_per_joule else _nearest_wider(dtype, self.flops_per_joule)
        if cap is None or self.power_watts is None:
            return rate
        return min(rate, self.power_watts * self.flops_per_joule[cap])


def _nearest_wider(dtype: Dtype, known: dict[Dtype, float]) -> Dtype | None:
    return next((wider for wider in WIDENING[WIDENING.index(dtype) :] if wider in known), None)


class Link(Record):
    """One tier of the network, which connects groups of up to ``span`` neighbouring ranks."""

    name: str  # such as NVLink or InfiniBand
    span: Degree  # neighbouring ranks that the link connects
    bandwidth: Rate  # bytes/s per rank, one direction, as in the data sheet
    sustained: float = Field(1.0, ge=1e-6, le=1)  # share of it that a ring of large messages reaches
    reduction_bandwidth: Rate | None = None  # bytes/s per rank of in-switch reductions (NVLink SHARP)
    latency_seconds: Seconds = 4e-6  # per step of a small message; default: NCCL between nodes
    direct: bool = False  # all-to-all wiring: a group of n in a span of s uses n - 1 of s - 1 links
    source: str = OWN  # where the figures are from


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
    """Measured seconds of a memory-bound kernel (or a copy) that reads and writes ``moved_bytes`` in all."""

    kernel: str
    dtype: Dtype
    ranks: PositiveInt
    moved_bytes: PositiveInt
    seconds: PositiveFloat


class CollectivePoint(Record):
    """Measured seconds of a collective over ``ranks`` processes on ``nodes`` hosts; ``bytes``: size of the full tensor.

    ``busy_seconds``: of them those in which it keeps a core busy, which compute beside it cannot have; None: all.
    """

    collective: Collective
    ranks: PositiveInt
    bytes: PositiveInt
    seconds: PositiveFloat
    nodes: PositiveInt = 1
    busy_seconds: PositiveFloat | None = None


class UnitPoint(Record):
    """Measured seconds of one unit (embedding, block or head) of a rank in the trainer's own step, without messages.

    ``key``: of ``planner/time/profiled.py``. The backward holds the gradients of the weights, unless the schedule runs
    them as W. ``ranks`` processes ran side by side. ``over_curves``: seconds relative to those of the kernels' curves.
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
    """Measured seconds of a rank's step outside forward and backward: reductions' ends, norm, clip, update."""

    key: str
    label: str
    ranks: PositiveInt
    elements: PositiveInt  # updated by the rank
    seconds: PositiveFloat
    spread: NonNegativeFloat = 0.0


class Calibration(Record):
    """Measurements of one machine, with their date and torch version."""

    date: str  # of the measurement
    torch: str  # version of PyTorch
    cores: PositiveInt  # cores of the host
    matmuls: tuple[MatmulPoint, ...] = ()  # matrix multiplications
    attentions: tuple[AttentionPoint, ...] = ()  # attention kernels
    kernels: tuple[KernelPoint, ...] = ()  # memory-bound kernels
    collectives: tuple[CollectivePoint, ...] = ()  # collectives
    spread: NonNegativeFloat | None = None  # of nine tenths of the points, between their two best rounds; relative
    units: tuple[UnitPoint, ...] = ()  # blocks, embedding and head in the trainer's own step
    updates: tuple[UpdatePoint, ...] = ()  # optimizer updates in the trainer's own step


class Machine(Record):
    """``ranks`` chips in nodes of ``ranks_per_node``."""

    name: str  # for tables and messages
    chip: Chip  # the accelerator of each rank
    ranks: Degree  # chips in all
    ranks_per_node: Degree  # chips of one node
    links: tuple[Link, ...] = Field(min_length=1)  # nearest first; the last one joins everything
    backend: Literal["nccl", "gloo"] = "nccl"  # library of the collectives
    dollars_per_rank_hour: Dollars | None = None  # price of one chip for one hour
    calibration: Calibration | None = None  # measurements of ``fivefold calibrate``, used before the chip's shares

    @model_validator(mode="after")
    def _legal(self) -> Self:
        spans = [link.span for link in self.links]
        if spans != sorted(spans):
            raise ValueError(f"links must go from near to far, but their spans are {spans}")
        return self

    def __hash__(self) -> int:  # the chip holds a dict, which is not hashable
        return hash((self.name, self.ranks))

    @property
    def nodes(self) -> int:
        """Number of nodes, counting a partly used one."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def overlaps(self) -> bool:
        """Whether messages travel beside compute: by streams of a GPU, or by NICs between hosts."""
        return self.backend == "nccl" or self.nodes > 1

    def link(self, span: int) -> Link:
        """The nearest tier that connects ``span`` neighbouring ranks."""
        return next((link for link in self.links if link.span >= span), self.links[-1])
