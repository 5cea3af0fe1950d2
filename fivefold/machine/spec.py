"""The machine as a record: a chip, the links between chips from near to far, and how many there are.

All rates are per chip and one direction, in SI units; peaks are dense (no sparsity).
A machine that was measured (``fivefold calibrate``) carries the measurements themselves.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from fivefold.record import Record
from fivefold.sizes import Bytes, Degree, Dollars, Rate, Seconds, Share, Watts
from fivefold.units import Dtype

WIDENING: tuple[Dtype, ...] = ("fp4", "fp8", "fp16", "bf16", "tf32", "fp32", "fp64")
MATMUL_SHARE = 0.75  # of the peak, for a chip that nobody measured: between B200 (0.72) and A100 (0.81)
OWN = "its owner's figure"  # where a figure is from, unless it is said
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p", "broadcast"]


class Chip(Record):
    """One accelerator (or one process's share of a CPU)."""

    name: str
    peak_flops: dict[Dtype, Rate] = Field(min_length=1)  # FLOP/s per number format of the matrix units
    memory_bytes: Bytes
    memory_bandwidth: Rate  # bytes/s
    power_watts: Watts | None = None
    multiprocessors: Degree = 108
    matmul_share: dict[Dtype, Share] = {}  # of the peak, that large matmuls sustain inside a training step
    flops_per_joule: dict[Dtype, Rate] = {}  # of large matmuls on real numbers: caps them by power_watts
    attention_share: Share = 0.8  # of what matmuls sustain: flash attention, forward
    attention_backward_share: Share = 0.73
    flash2_share: Share = 1.0  # of the chip's own attention kernels, that FlashAttention-2 reaches
    bandwidth_share: Share = 0.9
    # Of the host, for one operation or message of eager PyTorch with the views, casts and hooks around it: narrow
    # layers of vTrain's 830 single-node runs take 3.3 ms per layer and micro-batch whatever their width (EPYC 7742).
    # Set on those runs, at the minimum of their error: docs/how-a-step-costs/constants.md.
    launch_seconds: Seconds = 67e-6
    source: str = OWN
    share_source: str = "what kernels reach is the default"

    def peak(self, dtype: Dtype) -> float:
        """Peak FLOP/s of ``dtype``, or of the nearest wider format that the chip has."""
        found = dtype if dtype in self.peak_flops else _nearest_wider(dtype, self.peak_flops)
        return self.peak_flops[found] if found else max(self.peak_flops.values())

    def sustained(self, dtype: Dtype) -> float:
        """FLOP/s that large matmuls in ``dtype`` hold through a step: the share of the peak, or what the power allows.

        A figure that nobody measured is that of a wider format.
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
    """One tier of the network: groups of up to ``span`` neighbouring ranks are joined at this rate."""

    name: str
    span: Degree
    bandwidth: Rate  # bytes/s per rank, one direction, as in the data sheet
    sustained: float = Field(1.0, ge=1e-6, le=1)  # what a ring of large messages reaches of it
    reduction_bandwidth: Rate | None = None  # bytes/s per rank while the switch adds (NVLink SHARP)
    latency_seconds: Seconds = 4e-6  # one step of a small message; NCCL's between nodes
    direct: bool = False  # wires from each rank to each: of a span of s, a group of n uses n - 1 of s - 1
    source: str = OWN


class MatmulPoint(Record):
    """``(m, k) @ (k, n)`` took ``seconds`` while ``ranks`` processes did the same side by side."""

    dtype: Dtype
    ranks: PositiveInt
    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    seconds: PositiveFloat


class AttentionPoint(Record):
    """Causal flash attention of ``sequences`` x ``tokens``, forward and backward."""

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
    """A memory-bound kernel of the trainer (or a plain copy) that reads and writes ``moved_bytes``."""

    kernel: str
    dtype: Dtype
    ranks: PositiveInt
    moved_bytes: PositiveInt
    seconds: PositiveFloat


class CollectivePoint(Record):
    """A collective over ``ranks`` processes; ``bytes`` is the full tensor."""

    collective: Collective
    ranks: PositiveInt
    bytes: PositiveInt
    seconds: PositiveFloat


class Calibration(Record):
    """What was measured, when, and with which versions."""

    date: str
    torch: str
    cores: PositiveInt
    matmuls: tuple[MatmulPoint, ...] = ()
    attentions: tuple[AttentionPoint, ...] = ()
    kernels: tuple[KernelPoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()


class Machine(Record):
    """``ranks`` chips in nodes of ``ranks_per_node``."""

    name: str
    chip: Chip
    ranks: Degree
    ranks_per_node: Degree
    links: tuple[Link, ...] = Field(min_length=1)  # nearest first; the last one joins everything
    backend: Literal["nccl", "gloo"] = "nccl"
    dollars_per_rank_hour: Dollars | None = None
    calibration: Calibration | None = None

    @model_validator(mode="after")
    def _legal(self) -> Self:
        spans = [link.span for link in self.links]
        if spans != sorted(spans):
            raise ValueError(f"links must go from near to far, but their spans are {spans}")
        return self

    def __hash__(self) -> int:  # the chip holds a dict, which has none
        return hash((self.name, self.ranks))

    @property
    def nodes(self) -> int:
        """Nodes in use, the last one perhaps in part."""
        return -(-self.ranks // self.ranks_per_node)

    def link(self, span: int) -> Link:
        """The nearest tier that joins ``span`` neighbouring ranks."""
        return next((link for link in self.links if link.span >= span), self.links[-1])
