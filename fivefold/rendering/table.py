"""Print a step or a machine as text for a terminal of any width.

12.3 ms per step · 41.6 k tokens/s per GPU · MFU 38.1 % causal weights      2.00 GiB  12.5 %  ███ activations  8.10 GiB
50.6 %  ███████████
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fivefold.machine.spec import Machine
from fivefold.rendering.grid import Grid
from fivefold.rendering.interval import render_intervals
from fivefold.rendering.question import count_ranks, describe_step
from fivefold.rendering.stages import StageTable
from fivefold.rendering.step_view import STYLES, Parts, Section, format_verdict, view_step
from fivefold.step import Kind, Memory, Step
from fivefold.units import show_bytes, show_count, show_flops, show_rate, show_seconds

BAR_WIDTH = 30
KINDS: dict[Kind, str] = {"predicted": "predicted", "dry run": "dry run", "measured": "measured"}


def step(step: Step, *, stated: Collection[str] | None = None) -> RenderableType:
    """Return the page of a step: headline, memory, time, traffic and work.

    ``stated``: fields of the job that the user gave, as ``describe_job`` takes them.
    """
    view, stages = view_step(step), step.memory.stages
    page: list[RenderableType] = [show_headline(step, stated=stated)]
    page += [show_section(view.memory)] if view.memory else []
    if len(stages) > 1:
        by_stage = StageTable(stages)
        page += [build_heading("Memory by pipeline stage", by_stage.legend), by_stage]
    return Group(*page, show_section(view.time), show_section(view.traffic), show_section(view.work))


def render_operations(step: Step) -> RenderableType:
    """Return a table of FLOPs, kept bytes and seconds by operation, for one micro-batch on one rank."""
    return show_section(view_step(step).operations)


def show_section(section: Section) -> RenderableType:
    """Return a section of a page: its heading, then its table, bars or pairs."""
    body = section.body
    if isinstance(body, Parts):
        content: RenderableType = show_bars(body)
    elif isinstance(body, Grid):
        content = body if body.rows else Text("none")
    else:
        content = _show_pairs(body)
    return Group(build_heading(section.title, section.remark), content)


def describe_machine(machine: Machine) -> str:
    """Describe a machine in one line: peaks, memory and bandwidth of a rank, and the outermost link."""
    peaks = ", ".join(f"{dtype} {show_flops(rate)}FLOP/s" for dtype, rate in machine.chip.peak_flops.items())
    link = machine.links[-1]
    spread = machine.calibration.spread if machine.calibration else None
    noise = "" if spread is None else f"; nine tenths of the measured times repeat within {spread:.0%}"
    return (
        f"{count_ranks(machine.ranks)}, each {peaks}; {show_bytes(machine.chip.memory_bytes)} at "
        f"{show_rate(machine.chip.memory_bandwidth)}; {link.name} {show_rate(link.bandwidth)}{noise}"
    )


def render_remarks(lines: Iterable[str]) -> Text:
    """Return remarks, one per line, to stand above the figures that they concern."""
    return Text("".join(f"{line}\n" for line in lines), style="yellow", overflow="fold")


def show_headline(step: Step, *, stated: Collection[str] | None = None) -> Text:
    """Return the question, the remarks, and the step's time, speed, MFU, memory and verdict."""
    return Text.assemble(
        (f"{KINDS[step.kind]}  {step.model} on {step.machine}, {count_ranks(step.world)}\n", "dim"),
        (f"{describe_step(step, stated=stated)}\n", "dim"),
        (f"{step.layout}\n", "bold"),
        render_remarks(step.remarks),
        "\n",
        (f"step time {show_seconds(step.time.step_seconds)}", "bold cyan"),
        f"  ·  {_format_speed(step)}  ·  {_format_mfu(step)}\n",
        _format_verdict(step.memory),
        render_intervals(step),
        overflow="fold",
    )


def _format_speed(step: Step) -> str:
    speed = step.tokens_per_second_per_gpu
    return f"{show_count(speed)} tokens/s per GPU" if speed else "tokens/s not known"


def _format_mfu(step: Step) -> str:
    if not step.hfu:  # the chip was not named
        return "MFU not known"
    return f"MFU {step.mfu.causal:.1%} causal, {step.mfu.non_causal:.1%} non-causal; HFU {step.hfu:.1%}"


def _format_verdict(memory: Memory) -> Text:
    reserved = f", {show_bytes(memory.reserved_bytes)} reserved" if memory.reserved_bytes is not None else ""
    driver = f", {show_bytes(memory.driver_bytes)} with the driver" if memory.driver_bytes is not None else ""
    host = f", {show_bytes(memory.host_bytes)} of host memory per node" if memory.host_bytes else ""
    figures = f"peak memory {show_bytes(memory.peak_bytes)}{reserved}{driver}{host}"
    if memory.verdict is None:
        return Text(figures)
    return Text.assemble(figures, "  ·  ", (format_verdict(memory), STYLES[memory.verdict]))


def build_heading(title: str, remark: str | Text = "") -> Text:
    """Return the heading of a section, with an optional remark next to it, dim unless it is styled."""
    styled = remark if isinstance(remark, Text) else Text(remark, style="dim")
    return Text.assemble("\n", (title, "bold"), *(("  ", styled) if remark else ()), overflow="fold")


def show_bars(parts: Parts) -> Table:
    """Return a row per part: its size, its share of the total, and a bar of that share."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=11, overflow="fold")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    for part in parts.parts:
        share = min(part.size / parts.total, 1.0) if parts.total else 0.0
        bar = Bar(1.0, 0.0, share, width=BAR_WIDTH, color="cyan")
        grid.add_row(Text(part.name), part.text, f"{share:.1%}", bar)
    return grid


def _show_pairs(pairs: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(overflow="fold")
    grid.add_column(justify="right", overflow="fold")
    for label, text in pairs:
        grid.add_row(label, text)
    return grid
