"""The report: one HTML file with the question, the answer, the reasons, and the commands that reproduce it.

The file fetches and runs nothing: it can be mailed, opened without a network, and printed. ``render_document``
builds it from the parts that ``report_step``, ``report_run``, ``report_search`` and ``report_rows`` write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fivefold.rendering import html, memory, pipeline
from fivefold.rendering.drawing import memory as areas
from fivefold.rendering.drawing import pipeline as timeline
from fivefold.rendering.drawing.style import read_css
from fivefold.rendering.drawing.svg import add_titles, draw_legend
from fivefold.rendering.elements import (
    STYLE,
    build_figures,
    build_heading,
    build_paragraph,
    build_table,
    convert_grid,
    escape_text,
    fold,
)
from fivefold.rendering.losses import draw_losses, list_loss_curves
from fivefold.rendering.point_charts import draw_cloud, render_front
from fivefold.rendering.question import describe_step
from fivefold.rendering.step_view import has_pipeline, list_key_figures, view_operations, view_step
from fivefold.rendering.sweep.settings import describe_rows
from fivefold.rendering.sweep.table import WORDS, make_best_grid
from fivefold.results.run_folder import RunFolder
from fivefold.results.search_result import SearchResult
from fivefold.results.spans import Level
from fivefold.results.sweep_row import SweepRow
from fivefold.step import Step
from fivefold.units import show_count

MAX_SETTINGS = 80  # maximum number of settings of a sweep
PAGE = """
:root{color-scheme:light dark}body{margin:0 auto;max-width:60rem;padding:1.2rem}
body{background:var(--card);color:var(--text)}
.fivefold h2{border-top:1px solid var(--rule);padding-top:1rem}
@media print{@page{margin:14mm}body{max-width:none;padding:0;color-scheme:light}.fivefold :is(h2,h3){break-after:avoid}
 .fivefold svg,.fivefold table,.fivefold .barred{break-inside:avoid}.fivefold details:not([open]){display:none}
 *{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


class Drawing(NamedTuple):
    """The data of a step's pictures: spans of every pipeline rank, live bytes of the rank with the highest peak."""

    rows: pipeline.Rows
    names: Sequence[str]
    levels: Sequence[Level]
    rank: int
    capacity_bytes: int
    pp: int
    drawn: str = ""


class Provenance(NamedTuple):
    """The commands that reproduce a report, and the environment in which it was made."""

    commands: Sequence[str]
    environment: Mapping[str, str]


def render_document(title: str, parts: Sequence[str], *, asked: Provenance) -> str:
    """Return the text of the file."""
    commands = "\n".join(asked.commands)
    reproduction = [
        build_heading("To make it again", level=2),
        f"<pre>{escape_text(commands)}</pre>",
        build_heading("Environment", level=2),
        build_table(("", " "), list(asked.environment.items()), left=("", " ")),
    ]
    return render_page(title, "".join([build_heading(title, level=1), *parts, *reproduction]))


def render_page(title: str, body: str) -> str:
    """Return HTML as a page of its own."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape_text(title)} · Fivefold</title><style>{read_css()}{STYLE}{PAGE}</style></head>"
        f'<body><main class="fivefold">{body}</main></body></html>\n'
    )


def report_step(step: Step, drawing: Drawing | None = None) -> list[str]:
    """Return the parts of a step: the question, then memory, time and its other figures."""
    return [
        *render_question(step),
        build_heading("The step", level=2),
        build_figures(list_key_figures(step)),
        *html.render_expectation(step),
        *render_resources(step, drawing),
    ]


def render_resources(step: Step, drawing: Drawing | None) -> list[str]:
    """Return memory and time, each with its picture, then traffic and work."""
    capacity = drawing.capacity_bytes if drawing else None
    parts = html.draw_memory(step, capacity_bytes=capacity, level=2)
    if drawing and drawing.levels:
        remark = memory.describe_peak(drawing.levels, rank=drawing.rank, capacity_bytes=drawing.capacity_bytes)
        memory_picture = areas.draw_memory(drawing.levels, rank=drawing.rank, capacity_bytes=drawing.capacity_bytes)
        parts += [build_heading("Memory over time", remark), add_titles(memory_picture)]
        parts.append(draw_legend((name, name) for name in areas.list_legend_entries(drawing.levels)))
    bound = f"most time in {step.time.longest_part}" if step.time.longest_part else ""
    parts += [build_heading("Time", bound, level=2), html.render_time([step])]
    if drawing and drawing.rows:
        remark = pipeline.describe_step(step.time, drawing.rows)
        parts += [
            build_heading("Pipeline" if has_pipeline(step) else "A rank over time", remark),
            *_draw_timeline(drawing.rows, drawing.names, pp=drawing.pp, label=remark),
        ]
        parts += [build_paragraph(drawing.drawn, kind="soft")] if drawing.drawn else []
    view = view_step(step)
    parts += [html.render_section(view.traffic), html.render_section(view.work)]
    return [*parts, *render_operations(step)]


def render_question(step: Step, *, by_search: bool = False) -> list[str]:
    """Return what was asked: model, machine, layout (unless it was ``found``), and the job with all fields folded."""
    job = step.job
    sequence = int(str(job.get("sequence", 0)))
    batch = int(str(job.get("global_batch", 0)))
    rows = [
        ("model", f"{step.model}, {show_count(step.work.parameters)} parameters"),
        ("machine", f"{step.machine}, {step.world:,} rank{'s' if step.world > 1 else ''}"),
        ("layout", "to be found" if by_search else step.layout),
        ("batch", f"{batch:,} sequences of {sequence:,} tokens, {show_count(sequence * batch)} tokens a step"),
        ("job", describe_step(step)),
    ]
    return [
        build_heading("What was asked", level=2),
        html.render_remarks(step),
        build_table(("", " "), rows, left=("", " ")),
        fold("every field of the job", f"<pre>{escape_text(json.dumps(job, indent=1))}</pre>"),
    ]


def render_operations(step: Step) -> list[str]:
    """Return the operations that take longest."""
    longest = sorted(step.operations, key=lambda op: -op.times * (op.forward_seconds + op.backward_seconds))[:12]
    remark = "that take longest; each, on one rank and micro-batch"
    return [html.render_section(view_operations(longest, remark))] if longest else []


def report_run(
    run: RunFolder, drawing: Drawing | None = None, lanes: Mapping[str, pipeline.Rows] | None = None
) -> list[str]:
    """Return the parts of a finished run: predicted, dry run and measured side by side, the error, the losses.

    ``lanes``: spans of every rank by kind of step, of a traced run.
    """
    parts = [
        *render_question(run.measured),
        build_heading("What was measured", level=2),
        build_figures(list_key_figures(run.measured)),
    ]
    parts += [build_paragraph(line, kind="bad") for line in run.measured.findings]
    parts += html.compare_html(run.predicted, run.steps)
    if lanes:
        names = [f"{kind} {rank}" for kind, rows in lanes.items() for rank in range(len(rows))]
        rows = [row for rank_rows in lanes.values() for row in rank_rows]
        picture = _draw_timeline(rows, names, pp=min(map(len, lanes.values())), label="one step, three times")
        parts += [build_heading("One step", "predicted, dry run and measured, by rank"), *picture]
    parts += render_losses(run.log)
    parts += [
        build_heading("What was predicted", level=2),
        build_figures(list_key_figures(run.predicted)),
        *html.render_expectation(run.predicted),
    ]
    return [*parts, *render_resources(run.predicted, drawing)]


def render_losses(log: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the curve of the loss, and the events of the run."""
    parts = []
    if any(len(curve.points) > 1 for curve in list_loss_curves(log)):
        loss_picture = draw_losses(log)
        parts = [
            build_heading("Loss", level=2),
            build_paragraph(loss_picture.title, kind="soft"),
            add_titles(loss_picture.chart),
            draw_legend(loss_picture.looks),
        ]
    events = [(f"{line.get('step', 0):,}", line["event"]) for line in log if "event" in line][-40:]
    return [
        *parts,
        *([build_heading("Events"), build_table(("step", "event"), events, left=("event",))] if events else []),
    ]


def _draw_timeline(rows: pipeline.Rows, names: Sequence[str], *, pp: int, label: str) -> list[str]:
    picture = timeline.draw_pipeline(rows, label=label, names=names, pp=pp)
    return [add_titles(picture), draw_legend(timeline.list_legend_entries(rows))]


def report_search(result: SearchResult, drawing: Drawing | None = None) -> list[str]:
    """Return the parts of a search: the proposal and why, the best layouts, the front; then the proposal as a step."""
    choice = result.proposal.choice if result.proposal else result.best[0] if result.best else None
    parts = render_question(choice.step, by_search=True) if choice else []
    parts += [build_heading("What is proposed, and why", level=2), *html.render_search_parts(result)]
    parts += render_front(result, within="report")
    return [*parts, *(render_resources(choice.step, drawing) if choice else [])]


def report_rows(rows: Sequence[SweepRow]) -> list[str]:
    """Return the parts of a sweep: rows by outcome, the best of each setting, throughput against memory."""
    counts = {status: sum(row.status == status for row in rows) for status in WORDS}
    outcomes = ", ".join(f"{counts[status]:,} {word}" for status, word in WORDS.items() if counts[status])
    parts = [build_paragraph(f"{len(rows):,} rows: {outcomes}"), build_paragraph(describe_rows(rows), kind="soft")]
    fitting = [row for row in rows if row.status == "fits" and row.peak_bytes and row.tokens_per_second_per_gpu]
    if fitting:
        parts += [
            build_heading("The best layout of each setting", "by MFU, causal", level=2),
            convert_grid(make_best_grid(rows, most=MAX_SETTINGS)),
            *draw_cloud(fitting, within="report", level=2),
        ]
    reasons: dict[str, int] = {}
    for row in rows:
        if row.status == "invalid":
            reasons[row.why] = reasons.get(row.why, 0) + 1
    common_reasons = sorted(reasons.items(), key=lambda reason_count: -reason_count[1])[:12]
    return [
        *parts,
        *(
            [
                build_heading("Refused", level=2),
                build_table(("rows", "why"), [(f"{count:,}", line) for line, count in common_reasons], left=("why",)),
            ]
            if common_reasons
            else []
        ),
    ]
