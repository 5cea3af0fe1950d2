"""The step record: memory, FLOPs, traffic and time of one training step.

The planner (*predicted*), the dry run (*dry run*) and the real run (*measured*) all produce this record, so that any
two can be compared. Its JSON form is a stable interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from fivefold.display import Shown
from fivefold.record import Record
from fivefold.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model

Kind = Literal["predicted", "dry run", "measured"]
Verdict = Literal["fits", "tight", "does not fit"]
FITS_RISK = 0.05  # probability of running out of memory up to which a layout fits
TIGHT_RISK = 0.5  # probability up to which it is tight; beyond, it will more likely than not run out


def judge(risk: float) -> Verdict:
    """Return the verdict on a probability of running out of memory."""
    return "fits" if risk <= FITS_RISK else "tight" if risk <= TIGHT_RISK else "does not fit"


class StageMemory(Record):
    """Bytes on the rank with the highest peak of one pipeline stage."""

    stage: NonNegativeInt  # pipeline stage
    parameters_bytes: NonNegativeInt  # weights, and the fp32 master copy if there is one
    gradients_bytes: NonNegativeInt  # reduced gradients, as the optimizer sees them
    optimizer_bytes: NonNegativeInt  # moments and step counts
    activations_bytes: NonNegativeInt  # saved for the backward pass, at the peak
    temporary_bytes: NonNegativeInt  # everything else at the peak: gathers, buckets, logits, workspace
    peak_bytes: NonNegativeInt  # highest peak of tensors
    peak_cause: str = ""  # where in a step it is

    @property
    def states_bytes(self) -> int:
        """Return the sum of parameters, gradients and optimizer state."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


class Interval(Record):
    """The range to expect around a predicted figure, in its unit.

    Half of the runs of a new source are expected between ``low_50`` and ``high_50``, nine tenths between ``low_90`` and
    ``high_90``, by the errors of comparable published runs. The bounds are corrected for the bias of the predictions.
    """

    low_90: NonNegativeFloat  # lower bound of the 90 % interval
    low_50: NonNegativeFloat  # lower bound of the 50 % interval
    middle: NonNegativeFloat  # median
    high_50: NonNegativeFloat  # upper bound of the 50 % interval
    high_90: NonNegativeFloat  # upper bound of the 90 % interval
    error: NonNegativeFloat  # mean of |predicted / measured - 1|
    sources: NonNegativeInt  # publications with runs of exactly this class
    runs: NonNegativeInt  # published runs of exactly this class
    outside: tuple[str, ...] = ()  # properties in which the run is outside the range of all measured runs


class Memory(Record):
    """Memory of the rank that needs the most. ``reserved_bytes``: all that the allocator (on CPU: the process) holds.

    ``driver_bytes``: as shown by nvidia-smi, with the CUDA context and NCCL's buffers. ``verdict`` and ``fits`` follow
    from ``risk``. An old record that has only ``fits`` gets its verdict from it.
    """

    peak_bytes: NonNegativeInt  # highest peak of tensors on a rank
    reserved_bytes: NonNegativeInt | None = None  # memory that PyTorch reserves there; on a CPU that of the process
    driver_bytes: NonNegativeInt | None = None  # memory of the process in nvidia-smi
    capacity_bytes: NonNegativeInt | None = None  # memory of the device (``Chip.memory_bytes``)
    risk: float | None = Field(None, ge=0, le=1)  # probability of running out of memory
    verdict: Verdict | None = None  # follows from ``risk``
    fits: bool | None = None  # whether the verdict is "fits"
    host_bytes: NonNegativeInt | None = None  # host memory of each node that offloading takes
    interval: Interval | None = None  # range to expect for ``peak_bytes``
    reserved_interval: Interval | None = None  # range to expect for ``reserved_bytes``
    driver_interval: Interval | None = None  # range to expect for ``driver_bytes``
    stages: tuple[StageMemory, ...]  # the rank with the highest peak of each stage

    @model_validator(mode="before")
    @classmethod
    def _judge(cls, values: object) -> object:
        """Fill in ``verdict`` and ``fits`` from whichever of the fields are given."""
        if not isinstance(values, dict):
            return values
        risk = values.get("risk")
        verdict = values.get("verdict")
        fits = values.get("fits")
        if isinstance(risk, int | float):
            verdict = judge(risk)
        elif verdict is None and isinstance(fits, bool):
            verdict = "fits" if fits else "does not fit"
        return values if verdict is None else {**values, "verdict": verdict, "fits": verdict == "fits"}


class Work(Record):
    """FLOPs of the full step over all ranks, counted three ways (``docs/notation.md`` §4)."""

    parameters: NonNegativeInt  # parameters of the model
    active_parameters: NonNegativeInt  # parameters that process one token
    # parameters of adapters over frozen weights; None: all are trained
    trainable_parameters: NonNegativeInt | None = None
    # parameters of the vision tower and its projector; None: not counted
    vision_parameters: NonNegativeInt | None = None
    vision_flops: NonNegativeInt | None = None  # FLOPs of the images, part of the model FLOPs
    model_flops_causal: NonNegativeInt  # FLOPs of a step with causal attention
    model_flops_non_causal: NonNegativeInt  # FLOPs of a step with full attention
    hardware_flops: NonNegativeInt  # FLOPs with recomputation, as PyTorch counts them

    def compute_mfu(self, available_flops: float) -> Mfu:
        """Return the MFU of a step in which all chips together could have computed ``available_flops``."""
        causal, non_causal = self.model_flops_causal, self.model_flops_non_causal
        return Mfu(causal=causal / available_flops, non_causal=non_causal / available_flops)


class Traffic(Record):
    """Bytes that one rank sends per step on one axis by one collective, with ring algorithms."""

    axis: str  # axis of the mesh
    collective: str  # kind of message
    calls: NonNegativeInt  # messages of a step
    bytes: NonNegativeInt  # bytes that the rank sends in a step


class Operation(Record):
    """One operation of the forward pass on one rank and micro-batch; it occurs ``times`` times (layers)."""

    name: str  # name of the operation, such as mlp.gate
    times: PositiveInt  # layers of the rank that run it
    flops: NonNegativeInt  # forward; attention counted without the causal mask
    causal_flops: NonNegativeInt = 0  # forward FLOPs within the causal mask
    moved_bytes: NonNegativeInt = 0  # bytes that the forward reads and writes
    kept_bytes: NonNegativeInt  # tensors that it saves for the backward, unless an earlier operation saves them
    forward_seconds: NonNegativeFloat  # seconds of one of them, for one micro-batch
    backward_seconds: NonNegativeFloat  # seconds of one of them, for one micro-batch


class Time(Record):
    """Seconds of one step on the slowest rank.

    Compute, bubble, exposed communication, optimizer, data and host add up to ``step_seconds``, and so do ``parts``, if
    there are any.
    """

    step_seconds: NonNegativeFloat  # step time
    compute_seconds: NonNegativeFloat  # compute of the slowest rank
    bubble_seconds: NonNegativeFloat = 0.0  # idle: waits until another rank takes part in a message
    exposed_seconds: dict[str, NonNegativeFloat] = {}  # exposed communication, by axis
    overlapped_seconds: dict[
        str, NonNegativeFloat
    ] = {}  # communication overlapped with compute, by axis; not in the sum
    optimizer_seconds: NonNegativeFloat = 0.0  # update of the weights
    data_seconds: NonNegativeFloat = 0.0  # waits for the batch
    host_seconds: NonNegativeFloat = 0.0  # between operations and messages: Python, autograd; predicted if calibrated
    parts: dict[str, NonNegativeFloat] = {}  # "attention.core backward", "tp all_gather", "bubble", "optimizer", …
    error: NonNegativeFloat | None = None  # expected relative error
    interval: Interval | None = None  # range to expect for ``step_seconds``
    longest_part: str = ""  # the operation or message that takes most, or "kernel launches (CPU-bound)"

    @property
    def split(self) -> dict[str, float]:
        """Return the parts that add up to ``step_seconds``: compute, exposed messages by axis, bubble, update, host."""
        messages = {f"{axis} communication": seconds for axis, seconds in self.exposed_seconds.items()}
        rest = {"bubble": self.bubble_seconds, "update": self.optimizer_seconds, "data": self.data_seconds}
        return {"compute": self.compute_seconds, **messages, **rest, "host": self.host_seconds}


class Mfu(Record):
    """Model FLOPs utilization of the chip's dense peak: attention counted with and without the causal mask."""

    causal: NonNegativeFloat  # MFU with causal attention FLOPs
    non_causal: NonNegativeFloat  # MFU with FLOPs of full attention


class Step(Shown):
    """One training step of ``model`` on ``machine`` under ``layout`` and ``job``.

    Its key figures are ``time.step_seconds``, ``memory.peak_bytes``, ``tokens_per_second_per_gpu`` and ``mfu.causal``.
    ``plot()``, ``save(path)`` and ``to_frame()`` give it as a chart, a file and a data frame.
    """

    drawn_by: ClassVar[str] = "fivefold.rendering.html:render_step"
    charted_by: ClassVar[str] = "fivefold.rendering.charts:draw_memory_bars"

    kind: Kind  # where its figures come from
    model: str  # name of the model
    machine: str  # name of the machine
    layout: str  # layout in canonical order
    job: dict[str, object]  # every field of the job
    stack: str = "fivefold"  # name of the training software
    world: PositiveInt  # ranks of the layout
    memory: Memory  # bytes of a rank, by pipeline stage
    work: Work  # parameters and FLOPs
    traffic: tuple[Traffic, ...]  # messages that one rank sends
    time: Time  # seconds of the step, by part
    tokens_per_second_per_gpu: NonNegativeFloat  # trained tokens per second and GPU
    mfu: Mfu  # share of the machine's peak FLOP/s
    hfu: NonNegativeFloat  # hardware FLOPs utilization: of what PyTorch's FLOP counter counts, with recomputation
    operations: tuple[Operation, ...] = ()  # only in a predicted step
    findings: tuple[str, ...] = ()  # only in a measured step: problems of the run, one line each
    remarks: tuple[str, ...] = ()  # warnings about settings that are valid but perhaps not intended, one line each

    def line(self) -> str:
        """Return model, machine and layout of the step, its time and its peak memory."""
        figures = f"{show_seconds(self.time.step_seconds)}, {show_bytes(self.memory.peak_bytes)}"
        ranks = f"{self.world:,} rank{'s' if self.world > 1 else ''}"
        return f"{self.kind}: {self.model} on {self.machine}, {ranks}, {self.layout}: {figures}"


def build_step(
    kind: Kind,
    *,
    model: Model,
    machine: Machine,
    layout: Layout,
    job: Job,
    memory: Memory,
    work: Work,
    traffic: tuple[Traffic, ...],
    time: Time,
    operations: tuple[Operation, ...] = (),
    findings: tuple[str, ...] = (),
    remarks: tuple[str, ...] = (),
) -> Step:
    """Return the step of a job, with its speed and MFU computed from its time."""
    available = time.step_seconds * machine.count_peak_flops(job.precision.compute, ranks=layout.world)
    return Step(
        kind=kind,
        model=model.name,
        machine=machine.name,
        layout=str(layout),
        job=job.model_dump(mode="json"),
        stack=job.stack.name,
        world=layout.world,
        memory=memory,
        work=work,
        traffic=traffic,
        time=time,
        tokens_per_second_per_gpu=job.tokens_per_step / time.step_seconds / layout.world,
        mfu=work.compute_mfu(available),
        hfu=work.hardware_flops / available,
        operations=operations,
        findings=findings,
        remarks=remarks,
    )


def count_sent_bytes(collective: str, *, payload: int, ranks: int) -> int:
    """Return the bytes one rank sends on a ring for a tensor of ``payload`` bytes (docs/notation.md §5)."""
    if ranks == 1:
        return 0
    if collective == "all_reduce":
        return 2 * (ranks - 1) * payload // ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) * payload // ranks
    return payload  # p2p, broadcast, reduce: pipelined
