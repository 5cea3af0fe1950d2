"""Show the analysis of traces of a real run: where the time of each rank went, kernels, messages, the critical path.

rank  step    compute  exposed  waiting  overlapped  copies   host  queued
   0  42.1 ms   81.2%    12.0%     3.1%        64 %    0.2%   5.1%    1.5%
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import RenderableType
from rich.text import Text

from fivefold.errors import UserError
from fivefold.rendering import charts
from fivefold.rendering.compare import render_table as compared
from fivefold.rendering.grid import Grid
from fivefold.rendering.palette import BLUE, GREEN, GREY, ORANGE, RED, get_colour
from fivefold.rendering.sections import AnswerSection, render_sections
from fivefold.rendering.step_view import BarPart
from fivefold.results.advice import StepAdvice
from fivefold.results.step_comparison import QuantityComparison
from fivefold.results.trace_report import Activity, Breakdown, KernelLine, MessageLine, PathPart, TraceReport
from fivefold.step import Step
from fivefold.units import show_bytes, show_seconds

ADVICE = "Advice"  # the title of the section with what to change first
MAX_RANKS = 64  # maximum number of ranks listed or drawn one by one
SLOTS = 1280  # time slots of the critical path's picture: two for each of its pixels
MAX_NAME_CHARACTERS = 72  # maximum characters of a kernel's name
TIME_PARTS = {  # field → name, and kind whose colour it has
    "compute_seconds": ("compute", "F"),
    "exposed_seconds": ("exposed communication", "messages"),
    "memcpy_alone_seconds": ("copies", "W"),
    "idle_waiting_seconds": ("queued idle", "BW"),
    "idle_host_seconds": ("host-bound idle", "update"),
}
ACTIVITY_COLOURS = {"compute": BLUE, "communication": RED, "memcpy": GREEN, "waiting": ORANGE, "host": GREY}


class PathPiece(NamedTuple):
    """A piece of the critical path, in seconds from the start of its step."""

    rank: int
    activity: Activity
    start: float
    end: float


def render_page(
    report: TraceReport,
    *,
    rows: Sequence[QuantityComparison] = (),
    predicted: Step | None = None,
    advice: StepAdvice | None = None,
) -> RenderableType:
    """Return the page; ``rows``: the comparison with the step ``predicted``."""
    return render_sections(list_sections(report, rows=rows, predicted=predicted, advice=advice))


def list_sections(
    report: TraceReport,
    *,
    rows: Sequence[QuantityComparison] = (),
    predicted: Step | None = None,
    advice: StepAdvice | None = None,
) -> Iterator[AnswerSection]:
    """Yield the sections of the page, the headline first and advice last."""
    ranks = report.average_steps()
    yield AnswerSection(
        (*_build_headline(report, ranks), *(Text(f"! {line}", style="yellow") for line in report.remarks))
    )
    averaged = f"mean of {len(report.steps)} steps" if len(report.steps) > 1 else report.steps[0]
    left_out = len(ranks) - MAX_RANKS
    more = (Text(f"and {left_out} more ranks (--json has all)", style="dim"),) if left_out > 0 else ()
    yield AnswerSection(
        (_build_breakdown(ranks), *more), "Where the time goes", f"by rank, {averaged}; shares of the step"
    )
    yield AnswerSection(
        (_build_kernel_table(report.categories, named=False),),
        "What runs",
        "by category, of a rank and step; kernels side by side count each",
    )
    yield AnswerSection(
        (_build_kernel_table(report.kernels, named=True),),
        "Longest kernels" if report.device == "GPU" else "Longest operators",
    )
    if report.messages:
        remark = "of a rank and step; rates from the last arrival on, where it is known"
        yield AnswerSection((_build_message_table(report.messages),), "Messages", remark)
    if report.path:
        remark = f"{show_seconds(report.path_seconds)} over all ranks, by what it waits for"
        yield AnswerSection(tuple(_render_path(report)), "Critical path", remark)
    if rows:
        about = f"{predicted.model} on {predicted.machine} · {predicted.layout}" if predicted else ""
        yield AnswerSection((compared(rows),), "Compared with the prediction", about)
    if advice is not None:
        yield AnswerSection((Text(str(advice)),), ADVICE)


def split_step(breakdown: Breakdown) -> list[BarPart]:
    """Return the parts of a step for a stacked bar."""
    parts = ((name, look, getattr(breakdown, field)) for field, (name, look) in TIME_PARTS.items())
    return [BarPart(name, look, seconds, show_seconds(seconds)) for name, look, seconds in parts]


def describe_ranks(ranks: Sequence[Breakdown]) -> str:
    """Return the title: the share of compute, and what takes most of the rest."""
    window_seconds = sum(breakdown.window_seconds for breakdown in ranks)
    sums = {name: sum(getattr(breakdown, field) for breakdown in ranks) for field, (name, _) in TIME_PARTS.items()}
    compute = sums.pop("compute")
    largest = max(sums, key=lambda name: sums[name])
    share = f", {largest} {sums[largest] / window_seconds:.0%}" if sums[largest] else ""
    return f"Compute fills {compute / window_seconds:.0%} of a step{share}"


def _build_headline(report: TraceReport, ranks: Sequence[Breakdown]) -> tuple[Text, Text]:
    """Return which ranks were traced, and the time of a step."""
    traced_ranks = (
        f"{len(report.ranks)} of {report.world} ranks"
        if len(report.ranks) < report.world
        else ("1 rank" if report.world == 1 else f"{report.world} ranks")
    )
    seconds = (f"{show_seconds(report.step_seconds)} per step", "bold cyan")
    return (
        Text(f"traced  {traced_ranks} on {report.device}s\n", style="dim"),
        Text.assemble(seconds, f"  ·  {describe_ranks(ranks)}"),
    )


def _build_breakdown(ranks: Sequence[Breakdown]) -> Grid:
    """Return the table of where the time of each rank goes."""
    headings = (
        "rank",
        "step",
        "compute",
        "in optimizer",
        "exposed",
        "in waits",
        "overlapped",
        "copies",
        "host-bound idle",
        "queued idle",
    )
    return Grid(headings, tuple(_format_breakdown_row(breakdown) for breakdown in ranks[:MAX_RANKS]), words=())


def _format_breakdown_row(breakdown: Breakdown) -> tuple[str, ...]:
    """Return the cells of one rank: its step, and shares of it."""

    def share(seconds: float | None) -> str:
        return "–" if seconds is None or not breakdown.window_seconds else f"{seconds / breakdown.window_seconds:.1%}"

    overlap = (
        "–"
        if breakdown.overlap is None
        else f"{breakdown.overlap:.0%} of {show_seconds(breakdown.communication_seconds)}"
    )
    return (
        str(breakdown.rank),
        show_seconds(breakdown.window_seconds),
        share(breakdown.compute_seconds),
        share(breakdown.optimizer_seconds),
        share(breakdown.exposed_seconds),
        share(breakdown.waiting_seconds),
        overlap,
        share(breakdown.memcpy_alone_seconds),
        share(breakdown.idle_host_seconds),
        share(breakdown.idle_waiting_seconds),
    )


def _build_kernel_table(lines: Sequence[KernelLine], *, named: bool) -> Grid:
    """Return the table of kernels by category, or also by name."""
    headings = ("category", *(("name",) if named else ()), "calls", "seconds", "longest")
    rows = tuple(
        (
            line.category,
            *((shorten_name(line.name),) if named else ()),
            f"{line.calls:,.4g}",
            show_seconds(line.seconds),
            show_seconds(line.longest_seconds),
        )
        for line in lines
    )
    return Grid(headings, rows, words=("category", "name"))


def shorten_name(name: str) -> str:
    """Return a kernel's name without its return type, in at most ``MAX_NAME_CHARACTERS`` that keep both ends."""
    name = name.removeprefix("void ")
    if len(name) <= MAX_NAME_CHARACTERS:
        return name
    end = MAX_NAME_CHARACTERS // 3
    return f"{name[: MAX_NAME_CHARACTERS - end - 1]}…{name[-end:]}"


def _build_message_table(lines: Sequence[MessageLine]) -> Grid:
    """Return the table of messages: calls, bytes, time and bandwidth of each group and collective."""
    has_links = any(line.link for line in lines)
    headings = (
        "group",
        "ranks",
        "collective",
        "calls",
        "bytes",
        "seconds",
        "waiting",
        "algbw",
        "busbw",
        *(("of the link",) if has_links else ()),
    )
    rows = tuple(_format_message_row(line, linked=has_links) for line in lines)
    return Grid(headings, rows, words=("group", "collective"))


def _format_message_row(line: MessageLine, *, linked: bool) -> tuple[str, ...]:
    """Return the cells of one kind of message; ``linked``: with its share of the link's bandwidth."""

    def format_rate(value: float | None) -> str:
        return "–" if value is None else f"{value / 1e9:.3g} GB/s"

    share = "–"
    if line.bus_bandwidth is not None and line.link_bandwidth:
        share = f"{line.bus_bandwidth / line.link_bandwidth:.2g} × {line.link}"
    waiting = "–" if line.waiting_seconds is None else show_seconds(line.waiting_seconds)
    size = "–" if line.bytes is None else show_bytes(line.bytes)
    cells = (
        line.axis or line.group,
        str(line.ranks or "–"),
        line.collective,
        f"{line.calls:,.4g}",
        size,
        show_seconds(line.seconds),
        waiting,
        format_rate(line.algorithm_bandwidth),
        format_rate(line.bus_bandwidth),
    )
    return (*cells, share) if linked else cells


def _render_path(report: TraceReport) -> Iterator[Text | Grid]:
    """Yield the critical path by activity, its longest pieces, and the rank that arrives last."""
    yield _build_path_grid(report.path[:12], report.path_seconds)
    named = [part for part in report.path_names if part.name]
    if named:
        yield Text("\nits longest pieces", style="dim")
        yield _build_path_grid(named, report.path_seconds)
    latest = max(report.arrivals, key=lambda arrival: arrival.others_waited_seconds, default=None)
    if latest is not None and latest.others_waited_seconds:
        yield Text(
            f"\nrank {latest.rank} is last to arrive at {latest.last:,} of its {latest.matched:,} messages; "
            f"the others wait {show_seconds(latest.others_waited_seconds)} for it in all"
        )


def _build_path_grid(parts: Sequence[PathPart], total_seconds: float) -> Grid:
    """Return the table of parts of the critical path, with their shares of it."""
    named = any(part.name for part in parts)
    rows = tuple(
        (
            str(part.rank),
            part.activity,
            *((shorten_name(part.name),) if named else ()),
            show_seconds(part.seconds),
            f"{part.seconds / total_seconds:.1%}" if total_seconds else "–",
        )
        for part in parts
    )
    return Grid(("rank", "what", *(("name",) if named else ()), "seconds", "share"), rows, words=("what", "name"))


def draw_breakdown(report: TraceReport) -> charts.Chart:
    """Return a bar per rank: where the time of its mean step goes."""
    alt = charts._import_altair()
    ranks = report.average_steps()[:MAX_RANKS]
    values = [
        {"rank": f"rank {breakdown.rank}", "part": name, "order": order, "ms": getattr(breakdown, field) * 1e3}
        for breakdown in ranks
        for order, (field, (name, _)) in enumerate(TIME_PARTS.items())
    ]
    picture = (
        alt.Chart(alt.Data(values=values))
        .mark_bar()
        .encode(
            x=alt.X("ms:Q", title="mean of a step, ms", stack="zero"),
            y=alt.Y(
                "rank:N",
                sort=[f"rank {breakdown.rank}" for breakdown in ranks],
                title=None,
                axis=charts._style_labels(alt),
            ),
            color=charts._encode_colour("part", {name: get_colour(look) for name, look in TIME_PARTS.values()}),
            order="order:Q",
        )
    )
    subtitle = f"{report.world} ranks on {report.device}s, {len(report.steps)} steps"
    return charts._finish(picture, title=describe_ranks(ranks), subtitle=subtitle, height=max(60, 30 * len(ranks)))


def draw_path(report: TraceReport, path: Sequence[PathPiece]) -> charts.Chart:
    """Return the critical path of the last step, on the line of the rank that it runs over."""
    alt = charts._import_altair()
    if not path:
        raise UserError("no step has a critical path; there is nothing to draw")
    pieces = _coarsen(path)
    values = [
        {"rank": f"rank {piece.rank}", "activity": piece.activity, "start": piece.start * 1e3, "end": piece.end * 1e3}
        for piece in pieces
    ]
    order = [f"rank {rank}" for rank in sorted({piece.rank for piece in pieces})]
    picture = (
        alt.Chart(alt.Data(values=values))
        .mark_bar()
        .encode(
            x=alt.X("start:Q", title="time, ms"),
            x2="end:Q",
            y=alt.Y("rank:N", sort=order, title=None, axis=charts._style_labels(alt)),
            color=charts._encode_colour("activity", ACTIVITY_COLOURS),
        )
    )
    path_seconds = path[-1].end
    work = sum(piece.end - piece.start for piece in path if piece.activity == "compute")
    title = f"Compute is {work / path_seconds:.0%} of the critical path of {show_seconds(path_seconds)}"
    subtitle = f"{report.steps[-1]}; of pieces too short to be drawn, what takes most of their time"
    return charts._finish(picture, title=title, subtitle=subtitle, height=max(60, 30 * len(order)))


def _coarsen(path: Sequence[PathPiece]) -> list[PathPiece]:
    """Return the path in ``SLOTS`` slots, each with what takes most of it; equal neighbours are one piece."""
    path_seconds = path[-1].end
    slots: list[dict[tuple[int, Activity], float]] = [{} for _ in range(SLOTS)]
    for piece in path:
        first = piece.start / path_seconds * SLOTS
        last = piece.end / path_seconds * SLOTS
        for slot in range(int(first), min(SLOTS, int(last) + 1)):
            key = (piece.rank, piece.activity)
            slots[slot][key] = slots[slot].get(key, 0.0) + min(last, slot + 1) - max(first, slot)
    pieces: list[PathPiece] = []
    for slot, sums in enumerate(slots):
        rank, activity = max(sums, key=lambda key: sums[key])
        if pieces and (pieces[-1].rank, pieces[-1].activity) == (rank, activity):
            pieces[-1] = pieces[-1]._replace(end=(slot + 1) / SLOTS * path_seconds)
        else:
            pieces.append(PathPiece(rank, activity, slot / SLOTS * path_seconds, (slot + 1) / SLOTS * path_seconds))
    return pieces


def save_charts(report: TraceReport, path: Sequence[PathPiece], folder: Path) -> None:
    """Write breakdown and path as .svg and .html into ``folder``."""
    pictures = {"breakdown": draw_breakdown(report), "critical-path": draw_path(report, path)}
    charts.save_all(pictures, folder, (".svg", ".html"))
