"""The step as a record: memory, work, traffic and time of one training step.

A *predicted* (planner), a *rehearsed* (dry run) and a *measured* (real run) step are this same record, so
that two of them can stand side by side. As JSON it is the product's contract.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from fivefold.record import Record

Kind = Literal["predicted", "rehearsed", "measured"]


class StageMemory(Record):
    """Bytes on the fullest rank of one pipeline stage."""

    stage: NonNegativeInt
    parameters_bytes: NonNegativeInt  # weights, and the master copy where it is apart
    gradients_bytes: NonNegativeInt  # reduced gradients, as the optimizer sees them
    optimizer_bytes: NonNegativeInt  # moments and step counts
    activations_bytes: NonNegativeInt  # kept for backward at the peak
    temporary_bytes: NonNegativeInt  # everything else at the peak: gathers, buckets, logits, workspace
    peak_bytes: NonNegativeInt
    peak_cause: str = ""

    @property
    def states_bytes(self) -> int:
        """Parameters, gradients and optimizer together."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


class Memory(Record):
    """Of the fullest rank; ``reserved_bytes`` is what the allocator (on CPU: the process) holds in all.

    ``driver_bytes``, as nvidia-smi shows: with the CUDA context and what NCCL holds.
    """

    peak_bytes: NonNegativeInt
    reserved_bytes: NonNegativeInt | None = None
    driver_bytes: NonNegativeInt | None = None
    fits: bool | None = None
    stages: tuple[StageMemory, ...]


class Work(Record):
    """FLOPs of the whole step over all ranks, counted three ways (``docs/notation.md`` §4)."""

    parameters: NonNegativeInt
    active_parameters: NonNegativeInt
    model_flops_causal: NonNegativeInt
    model_flops_full: NonNegativeInt
    hardware_flops: NonNegativeInt


class Traffic(Record):
    """What one rank sends per step over one axis by one collective, on a ring."""

    axis: str
    collective: str
    messages: NonNegativeInt
    bytes: NonNegativeInt


class Operation(Record):
    """One operation of the forward pass on one rank and micro-batch; it occurs ``times`` times (layers)."""

    name: str
    times: PositiveInt
    flops: NonNegativeInt  # forward, attention as the full square
    kept_bytes: NonNegativeInt  # tensors that nothing before it keeps for the backward
    forward_seconds: NonNegativeFloat
    backward_seconds: NonNegativeFloat


class Time(Record):
    """Seconds of one step on the slowest rank; the parts add up to ``step_seconds``."""

    step_seconds: NonNegativeFloat
    compute_seconds: NonNegativeFloat
    bubble_seconds: NonNegativeFloat = 0.0
    exposed_seconds: dict[str, NonNegativeFloat] = {}  # communication that nothing hides, by axis
    optimizer_seconds: NonNegativeFloat = 0.0
    error: NonNegativeFloat | None = None  # relative error to expect
    bound_by: str = ""


class Mfu(Record):
    """Model FLOPs utilisation under each of the three counts, of the chip's dense peak."""

    causal: NonNegativeFloat
    full: NonNegativeFloat
    hardware: NonNegativeFloat


class Step(Record):
    """One training step of ``model`` on ``machine`` under ``layout`` and ``job``."""

    kind: Kind
    model: str
    machine: str
    layout: str
    job: dict[str, object]
    stack: str = "fivefold"  # the software that runs it
    world: PositiveInt
    memory: Memory
    work: Work
    traffic: tuple[Traffic, ...]
    time: Time
    tokens_per_second_per_gpu: NonNegativeFloat
    mfu: Mfu
    operations: tuple[Operation, ...] = ()  # of a predicted step


def sent_bytes(collective: str, *, payload: int, ranks: int) -> int:
    """Bytes one rank sends on a ring for a full tensor of ``payload`` bytes, rounded down (docs/notation.md §5)."""
    if ranks == 1:
        return 0
    if collective == "all_reduce":
        return 2 * (ranks - 1) * payload // ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) * payload // ranks
    return payload  # p2p, broadcast, reduce: pipelined


def utilisation(work: Work, *, seconds: float, world: int, peak_flops: float) -> Mfu:
    """The three MFUs of a step of ``seconds`` on ``world`` chips of ``peak_flops`` each."""
    available = seconds * world * peak_flops
    return Mfu(
        causal=work.model_flops_causal / available,
        full=work.model_flops_full / available,
        hardware=work.hardware_flops / available,
    )
