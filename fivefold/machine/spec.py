"""The machine as a record: a chip, the links between chips from near to far, and how many there are.

All rates are per chip and one direction, in SI units; peaks are dense (no sparsity).
A machine that was measured (``fivefold calibrate``) carries the measurements themselves.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from fivefold.record import Record
from fivefold.units import Dtype

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p", "broadcast"]


class Chip(Record):
    """One accelerator (or one process's share of a CPU)."""

    name: str
    peak_flops: dict[Dtype, PositiveFloat]  # FLOP/s per number format of the matrix units
    memory_bytes: PositiveInt
    memory_bandwidth: PositiveFloat  # bytes/s
    power_watts: PositiveFloat | None = None
    source: str

    def peak(self, dtype: Dtype) -> float:
        """Peak FLOP/s of ``dtype``, or of the nearest wider format that the chip has."""
        order: tuple[Dtype, ...] = ("fp4", "fp8", "fp16", "bf16", "tf32", "fp32", "fp64")
        wider = order[order.index(dtype) :]
        for candidate in wider:
            if candidate in self.peak_flops:
                return self.peak_flops[candidate]
        return max(self.peak_flops.values())


class Link(Record):
    """One tier of the network: groups of up to ``span`` neighbouring ranks are joined at this rate."""

    name: str
    span: PositiveInt
    bandwidth: PositiveFloat  # bytes/s per rank, one direction
    latency_seconds: NonNegativeFloat
    source: str


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
    ranks: PositiveInt
    ranks_per_node: PositiveInt
    links: tuple[Link, ...] = Field(min_length=1)  # nearest first; the last one joins everything
    backend: Literal["nccl", "gloo"] = "nccl"
    dollars_per_rank_hour: NonNegativeFloat | None = None
    calibration: Calibration | None = None

    @model_validator(mode="after")
    def _legal(self) -> Self:
        spans = [link.span for link in self.links]
        if spans != sorted(spans):
            raise ValueError(f"links must go from near to far, but their spans are {spans}")
        return self

    @property
    def nodes(self) -> int:
        """Nodes in use, the last one perhaps in part."""
        return -(-self.ranks // self.ranks_per_node)

    def link(self, span: int) -> Link:
        """The nearest tier that joins ``span`` neighbouring ranks."""
        return next((link for link in self.links if link.span >= span), self.links[-1])
