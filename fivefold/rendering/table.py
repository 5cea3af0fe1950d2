"""Shows a step, a machine or a list of layouts as text for a terminal of any width.

12.3 ms per step · 41.6 k tokens/s per GPU · MFU 38.1 % causal
weights      2.00 GiB  12.5 %  ███
activations  8.10 GiB  50.6 %  ███████████
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fivefold.machine.spec import Machine
from fivefold.rendering.grid import Grid
from fivefold.rendering.interval import expectation
from fivefold.rendering.question import count_ranks, describe_step
from fivefold.rendering.stages import Stages
from fivefold.rendering.verdict import STYLES, judgement
from fivefold.step import Memory, Mfu, StageMemory, Step, Time, Verdict
from fivefold.units import show_bytes, show_count, show_seconds

PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")  # fields ``<part>_bytes`` of a stage

BAR_WIDTH = 30


def step(step: Step) -> RenderableType:
    """Return the page of a step: headline, memory, time, traffic and work."""
    stages = step.memory.stages
    fullest = max(stages, key=lambda stage: stage.peak_bytes, default=None)
    page: list[RenderableType] = [_headline(step)]
    if fullest is not None:
        where = f" of stage {fullest.stage}" if len(stages) > 1 else ""
        page += [heading(f"Memory of the fullest rank{where}", fullest.peak_cause), _memory_bars(fullest)]
    if len(stages) > 1:
        by_stage = Stages(stages)
        page += [heading("Memory by pipeline stage", by_stage.unit), by_stage]
    page += [heading("Time", f"bound by {step.time.bound_by}" if step.time.bound_by else ""), _time_bars(step.time)]
    page += [heading("Traffic", "what one rank sends per step"), _traffic_table(step)]
    page += [heading("Work", "of the whole step over all ranks"), _work(step)]
    return Group(*page)


def operations(step: Step) -> RenderableType:
    """Return a table of FLOPs, kept bytes and seconds by operation, for one micro-batch on one rank."""
    headings = ("operation", "times", "FLOPs", "kept", "forward", "backward")
    rows = tuple(
        (
            op.name,
            str(op.times),
            show_count(op.flops),
            show_bytes(op.kept_bytes),
            show_seconds(op.forward_seconds),
            show_seconds(op.backward_seconds),
        )
        for op in step.operations
    )
    return Group(heading("Operations", "each, on one rank and micro-batch"), Grid(headings, rows, words=("operation",)))


def machine(machine: Machine) -> str:
    """Describe a machine in one line: peaks, memory and bandwidth of a rank, and the outermost link."""
    peaks = ", ".join(f"{dtype} {show_count(rate)}FLOP/s" for dtype, rate in machine.chip.peak_flops.items())
    link = machine.links[-1]
    spread = machine.calibration.spread if machine.calibration else None
    noise = "" if spread is None else f"; nine tenths of the points agree to {spread:.0%}"
    return (
        f"{machine.ranks} ranks, each {peaks}; {show_bytes(machine.chip.memory_bytes)} at "
        f"{show_bytes(machine.chip.memory_bandwidth)}/s; {link.name} {show_bytes(link.bandwidth)}/s{noise}"
    )


def layouts(steps: Sequence[Step], *, refused: Iterable[tuple[str, str]] = (), limit: int = 10) -> RenderableType:
    """Return a table of ``steps``, best first, as given; then up to ``limit`` refusals, as (layout, reason)."""
    headings = ("rank", "layout", "step", "tokens/s/GPU", "MFU", "peak", "bound by")
    rows = tuple(
        (
            str(rank),
            found.layout,
            show_seconds(found.time.step_seconds),
            show_count(found.tokens_per_second_per_gpu),
            f"{found.mfu.causal:.1%}",
            _peak(found.memory),
            found.time.bound_by or "–",
        )
        for rank, found in enumerate(steps, start=1)
    )
    grid = Grid(headings, rows, words=("layout", "bound by"))
    page: list[RenderableType] = [grid if rows else Text("No layout is left.", style="bold")]
    reasons = list(refused)
    if reasons:
        page.append(heading("Refused"))
        page += [Text.assemble((layout, "dim"), "  ", reason, overflow="fold") for layout, reason in reasons[:limit]]
    if len(reasons) > limit:
        page.append(Text(f"and {len(reasons) - limit} more", style="dim"))
    return Group(*page)


def remarks(lines: Iterable[str]) -> Text:
    """Return remarks, one per line, to stand before the figures that they are of."""
    return Text("".join(f"{line}\n" for line in lines), style="yellow", overflow="fold")


def _headline(step: Step) -> Text:
    return Text.assemble(
        (f"{step.kind}  {step.model} on {step.machine}, {count_ranks(step.world)}\n", "dim"),
        (f"{describe_step(step)}\n", "dim"),
        (f"{step.layout}\n", "bold"),
        remarks(step.remarks),
        "\n",
        (f"{show_seconds(step.time.step_seconds)} per step", "bold cyan"),
        f"  ·  {show_count(step.tokens_per_second_per_gpu)} tokens/s per GPU  ·  {_mfu(step.mfu)}\n",
        _verdict(step.memory),
        expectation(step),
        overflow="fold",
    )


def _mfu(mfu: Mfu) -> str:
    if not mfu.hardware:  # of a chip that was not named
        return "MFU not known"
    return f"MFU {mfu.causal:.1%} causal, {mfu.full:.1%} full, {mfu.hardware:.1%} hardware"


def _verdict(memory: Memory) -> Text:
    reserved = f", {show_bytes(memory.reserved_bytes)} reserved" if memory.reserved_bytes is not None else ""
    driver = f", {show_bytes(memory.driver_bytes)} with the driver" if memory.driver_bytes is not None else ""
    host = f", {show_bytes(memory.host_bytes)} of host memory per node" if memory.host_bytes else ""
    figures = f"{show_bytes(memory.peak_bytes)} at the peak{reserved}{driver}{host}"
    if memory.verdict is None:
        return Text(figures)
    return Text.assemble(figures, "  ·  ", (judgement(memory), STYLES[memory.verdict]))


def _peak(memory: Memory) -> Text:
    size = show_bytes(memory.peak_bytes)
    words: dict[Verdict | None, str] = {"tight": " tight", "does not fit": " too big"}
    return Text(size + words.get(memory.verdict, ""), style=STYLES[memory.verdict] if memory.verdict else "")


def heading(title: str, remark: str = "") -> Text:
    """Return the heading of a section, with an optional remark beside it."""
    return Text.assemble("\n", (title, "bold"), (f"  {remark}" if remark else "", "dim"), overflow="fold")


def _memory_bars(stage: StageMemory) -> Table:
    parts = {part: getattr(stage, f"{part}_bytes") for part in PARTS}
    return _bars(parts, whole=stage.peak_bytes, show=show_bytes)


def _time_bars(time: Time) -> Table:
    exposed = {f"{axis}, exposed": seconds for axis, seconds in time.exposed_seconds.items()}
    others = {"bubble": time.bubble_seconds, **exposed, "optimizer": time.optimizer_seconds}
    others |= {"data": time.data_seconds, "host": time.host_seconds}
    parts = {"compute": time.compute_seconds, **{name: seconds for name, seconds in others.items() if seconds}}
    return _bars(parts, whole=time.step_seconds, show=show_seconds)


def _bars(parts: dict[str, float], *, whole: float, show: Callable[[float], str]) -> Table:
    """Return a row per part: its size, its share of ``whole``, and a bar of that share."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=11, overflow="fold")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    for part, size in parts.items():
        share = min(size / whole, 1.0) if whole else 0.0
        grid.add_row(Text(part), show(size), f"{share:.1%}", Bar(1.0, 0.0, share, width=BAR_WIDTH, color="cyan"))
    return grid


def _traffic_table(step: Step) -> RenderableType:
    if not any(item.messages or item.bytes for item in step.traffic):
        return Text("none")
    rows = ((item.axis, item.collective, f"{item.messages:,}", show_bytes(item.bytes)) for item in step.traffic)
    return Grid(("axis", "collective", "messages", "sent"), tuple(rows), words=("axis", "collective"))


def _work(step: Step) -> Table:
    work = step.work
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(overflow="fold")
    grid.add_column(justify="right", overflow="fold")
    active = f", {show_count(work.active_parameters)} active" if work.active_parameters != work.parameters else ""
    grid.add_row("parameters", show_count(work.parameters) + active)
    grid.add_row("model FLOPs, causal", show_count(work.model_flops_causal))
    grid.add_row("model FLOPs, full", show_count(work.model_flops_full))
    grid.add_row("hardware FLOPs", show_count(work.hardware_flops))
    if step.tokens_per_second_per_gpu:
        grid.add_row("GPU-hours per 1 T tokens", show_count(1e12 / step.tokens_per_second_per_gpu / 3600))
    return grid
