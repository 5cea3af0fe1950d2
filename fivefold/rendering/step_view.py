"""The view of a step as data: key figures, parts of its memory and time, tables of traffic, work and operations.

``table`` prints it on a terminal, ``html`` in notebooks and reports, the web templates on a page. To show a new figure
of a step, add its field to ``fivefold.step`` and one line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from fivefold.rendering.grid import Column, Grid, make_grid
from fivefold.step import Memory, Operation, StageMemory, Step, Traffic, Verdict, Work
from fivefold.units import show_bytes, show_cause, show_count, show_flops, show_risk, show_seconds

STYLES: dict[Verdict, str] = {"fits": "green", "tight": "bold yellow", "does not fit": "bold red"}  # in a terminal
MEMORY_PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "temporary",
)  # fields ``<part>_bytes`` of a stage
VERDICT_TONES: dict[Verdict, str] = {"fits": "good", "tight": "warn", "does not fit": "bad"}
TRAFFIC: tuple[Column[Traffic], ...] = (
    Column("axis", attrgetter("axis"), is_text=True),
    Column("collective", attrgetter("collective"), is_text=True),
    Column("calls", attrgetter("calls"), "{:,}".format),
    Column("sent", attrgetter("bytes"), show_bytes),
)
OPERATIONS: tuple[Column[Operation], ...] = (
    Column("operation", attrgetter("name"), is_text=True),
    Column("times", attrgetter("times")),
    Column("FLOPs", attrgetter("flops"), show_flops),
    Column("saved", attrgetter("kept_bytes"), show_bytes),
    Column("forward", lambda operation: operation.forward_seconds or None, show_seconds),
    Column("backward", lambda operation: operation.backward_seconds or None, show_seconds),
)


class BarPart(NamedTuple):
    """One part of a total. ``look``: the class that colours it; ``text``: its size in its unit."""

    name: str
    look: str
    size: float
    text: str

    def share(self, total: float) -> str:
        """Return the part's share of ``total`` in per cent."""
        return f"{self.size / total:.1%}" if total else "–"


class Parts(NamedTuple):
    """Parts that add up to ``total``, each drawn as a bar."""

    parts: Sequence[BarPart]
    total: float


class Figure(NamedTuple):
    """A key figure: its name, its value in its unit, a remark on it, and a tone (good, warn, bad)."""

    name: str
    text: str
    remark: str = ""
    tone: str = ""


class Section(NamedTuple):
    """A titled section of a page; pairs are (label, text)."""

    title: str
    remark: str
    body: Grid | Parts | tuple[tuple[str, str], ...]


class StepView(NamedTuple):
    """All sections of a step. ``memory`` is that of the rank with the highest peak, and None if no stage is known."""

    figures: Sequence[Figure]
    memory: Section | None
    time: Section
    traffic: Section
    work: Section
    operations: Section


def view_step(step: Step) -> StepView:
    """Return the view of a step."""
    stages = step.memory.stages
    bound = f"most time in {step.time.longest_part}" if step.time.longest_part else ""
    traffic = step.traffic if any(item.calls or item.bytes for item in step.traffic) else ()
    return StepView(
        list_key_figures(step),
        _view_memory(max(stages, key=lambda stage: stage.peak_bytes), has_several_stages=len(stages) > 1)
        if stages
        else None,
        Section("Time", bound, Parts(list_time_parts(step), step.time.step_seconds)),
        Section("Communication", _describe_sender(step), make_grid(TRAFFIC, traffic)),
        Section("Work", "of one step, all ranks together", list_work(step)),
        view_operations(step.operations, "of one micro-batch on one rank, without messages and kernel launches"),
    )


def _describe_sender(step: Step) -> str:
    """Return whose messages ``step.traffic`` counts, and which axes communicate only on other ranks."""
    axes = {item.axis for item in step.traffic}
    text = "what one rank of the first stage sends per step" if "pp" in axes else "what one rank sends per step"
    if "cp" in axes:  # gradients are summed, and states sharded, over the ranks of both
        text += "; dp: over the ranks of dp and cp"
    elsewhere = [axis for axis, seconds in step.time.exposed_seconds.items() if seconds and axis not in axes]
    return text + (f"; {' and '.join(elsewhere)}: only ranks of other stages" if elsewhere and "pp" in axes else "")


def view_operations(operations: Iterable[Operation], remark: str) -> Section:
    """Return the table of these operations, for one micro-batch on one rank."""
    return Section("Operations", remark, make_grid(OPERATIONS, operations))


def list_key_figures(step: Step) -> tuple[Figure, ...]:
    """Return the step's time, peak and whether it fits, MFU, and speed."""
    memory = step.memory
    bound = f"most time in {step.time.longest_part}" if step.time.longest_part else ""
    return (
        Figure("step time", show_seconds(step.time.step_seconds), bound),
        Figure("peak memory", show_bytes(memory.peak_bytes), format_verdict(memory), find_verdict_tone(memory)),
        Figure("MFU, causal", f"{step.mfu.causal:.1%}", f"{step.mfu.non_causal:.1%} non-causal; HFU {step.hfu:.1%}"),
        Figure("tokens/s per GPU", show_count(step.tokens_per_second_per_gpu)),
    )


def find_verdict_tone(memory: Memory) -> str:
    """Return the tone of the verdict on a memory."""
    return VERDICT_TONES[memory.verdict] if memory.verdict else ""


def list_memory_parts(stage: StageMemory) -> list[BarPart]:
    """Return the parts of a stage's peak."""
    return split_bytes({part: getattr(stage, f"{part}_bytes") for part in MEMORY_PARTS})


def split_bytes(sizes: Mapping[str, float]) -> list[BarPart]:
    """Return bytes by category as parts, each in the colour of its category."""
    return [BarPart(name, name, size, show_bytes(size)) for name, size in sizes.items()]


def list_time_parts(step: Step, *, zeros: bool = False) -> list[BarPart]:
    """Return the parts of a step on the slowest rank: compute, and the others that are not zero, or all."""
    time = step.time
    exposed = [(f"exposed {axis} communication", "messages", seconds) for axis, seconds in time.exposed_seconds.items()]
    sizes = [
        ("compute", "F", time.compute_seconds),
        ("pipeline bubble" if has_pipeline(step) else "waits for other ranks", "bubble", time.bubble_seconds),
        *exposed,
        ("optimizer", "update", time.optimizer_seconds),
        ("data", "data", time.data_seconds),
        ("host", "host", time.host_seconds),
    ]
    return [
        BarPart(name, look, size, show_seconds(size))
        for name, look, size in sizes
        if size or zeros or name == "compute"
    ]


def has_pipeline(step: Step) -> bool:
    """Tell whether the layout of a step has several pipeline stages."""
    return any(keyword.startswith("pp") for keyword in step.layout.split())


def list_work(step: Step) -> tuple[tuple[str, str], ...]:
    """Return parameters, FLOPs of the full step, and GPU hours per 1 T tokens, as (label, text)."""
    work = step.work
    active = f", {show_count(work.active_parameters)} active" if work.active_parameters != work.parameters else ""
    trainable, vision = work.trainable_parameters, work.vision_parameters
    of_tower = vision is not None and trainable is not None and trainable >= work.parameters - vision
    total = work.parameters + (0 if of_tower or trainable is None else trainable)  # with the factors of adapters
    adapters = (
        []
        if trainable is None
        else [
            ("trainable parameters", f"{trainable:,} ({trainable / total:.2%} of all)"),
            ("FLOPs per parameter and token", _format_flops_per_parameter(step)),
        ]
    )
    lines = [
        ("parameters", show_count(work.parameters) + active),
        *adapters,
        *_list_vision(work),
        ("model FLOPs, causal", show_flops(work.model_flops_causal)),
        ("model FLOPs, non-causal", show_flops(work.model_flops_non_causal)),
        ("hardware FLOPs, PyTorch's count", show_flops(work.hardware_flops)),
    ]
    if step.tokens_per_second_per_gpu:
        lines.append(("GPU hours per 1 T tokens", show_count(1e12 / step.tokens_per_second_per_gpu / 3600)))
    return tuple(lines)


def _list_vision(work: Work) -> list[tuple[str, str]]:
    """Return the parameters of a vision tower with its projector, and its share of the model FLOPs."""
    if work.vision_parameters is None or work.vision_flops is None:
        return []
    share = work.vision_flops / work.model_flops_causal
    return [("vision tower", f"{show_count(work.vision_parameters)} parameters, {share:.1%} of causal FLOPs")]


def _format_flops_per_parameter(step: Step) -> str:
    """Return the model FLOPs per parameter and token: 6 if all weights are trained, about 4 if most are frozen."""
    tokens = step.tokens_per_second_per_gpu * step.world * step.time.step_seconds
    flops = step.work.model_flops_causal / (step.work.active_parameters * tokens)
    return f"{flops:.2f} with causal attention"


def _view_memory(fullest: StageMemory, *, has_several_stages: bool) -> Section:
    where = f" of stage {fullest.stage}" if has_several_stages else ""
    parts = Parts(list_memory_parts(fullest), fullest.peak_bytes)
    remarks = [f"peak in {show_cause(fullest.peak_cause)}"] if fullest.peak_cause else []
    if sum(part.size for part in parts.parts) > fullest.peak_bytes:
        remarks.append("the parts add up to more, as activations are freed while gradients are allocated")
    return Section(f"Peak memory per rank{where}", "; ".join(remarks), parts)


def format_verdict(memory: Memory) -> str:
    """Return the verdict and its reason, such as ``tight: 22 % risk of running out of 79.19 GiB``; "" without one."""
    if memory.verdict is None or memory.risk is None or memory.capacity_bytes is None:
        return memory.verdict or ""
    return f"{memory.verdict}: {show_risk(memory.risk)} risk of running out of {show_bytes(memory.capacity_bytes)}"
