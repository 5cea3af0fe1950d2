"""Records as HTML for notebooks: a step, a search, a run, rows, a dry run, traces.

Jupyter and marimo call ``_repr_html_`` of a record, which names its function here (``fivefold/display.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from fivefold.rendering import comparison, search, trace_report
from fivefold.rendering.budget import make_budget_grid, show_difference, split_by_cause
from fivefold.rendering.compare import render_table as compare_table
from fivefold.rendering.elements import (
    AXIS_COLOURS,
    TIME_COLOURS,
    Bar,
    Raw,
    build_figures,
    build_heading,
    build_paragraph,
    build_table,
    convert_grid,
    convert_terminal,
    draw_bars,
    escape_text,
    fold,
    join_parts,
)
from fivefold.rendering.grid import Grid
from fivefold.rendering.interval import render_intervals
from fivefold.rendering.palette import get_colour
from fivefold.rendering.point_charts import render_front
from fivefold.rendering.question import count_ranks, describe_step
from fivefold.rendering.sections import AnswerSection
from fivefold.rendering.step_view import MEMORY_PARTS, Parts, Section, list_key_figures, list_memory_parts, view_step
from fivefold.results.step_comparison import compare, describe_assumption
from fivefold.units import show_bytes, show_cause, show_seconds

if TYPE_CHECKING:
    from fivefold.results.comparison import Comparison
    from fivefold.results.playbook import Playbook
    from fivefold.results.run_estimate import Offers
    from fivefold.results.run_folder import RunFolder
    from fivefold.results.search_result import SearchResult, Walk
    from fivefold.results.trace_report import Traced
    from fivefold.step import Step


def render_step(what: Step) -> str:
    """Return the page of a step."""
    return join_parts(*render_step_parts(what))


def render_step_parts(what: Step) -> list[str]:
    """Return headline, memory, time, traffic and work."""
    view = view_step(what)
    parts = [render_headline(what), build_figures(view.figures)]
    parts += render_expectation(what)
    parts += [*draw_memory(what), build_heading(view.time.title, view.time.remark), render_time([what])]
    parts += [fold("Traffic and work", render_section(view.traffic) + render_section(view.work))]
    parts += [build_paragraph(line, kind="bad") for line in what.findings]
    return parts


def render_expectation(what: Step) -> list[str]:
    """Return paragraphs on where comparable published runs lie."""
    return [build_paragraph(line, kind="soft") for line in render_intervals(what).plain.splitlines() if line.strip()]


def render_headline(what: Step) -> str:
    """Return the kind of step, model, machine, job and layout, with remarks."""
    about = f"{what.kind} · {what.model} on {what.machine}, {count_ranks(what.world)}"
    paragraphs = build_paragraph(about, kind="soft") + build_paragraph(describe_step(what), kind="soft")
    return paragraphs + build_paragraph(Raw(f"<b><code>{escape_text(what.layout)}</code></b>")) + render_remarks(what)


def render_remarks(what: Step) -> str:
    """Return what is valid but perhaps not intended."""
    return "".join(build_paragraph(line, kind="bad") for line in what.remarks)


def draw_memory(what: Step, *, capacity_bytes: int | None = None, level: int = 3) -> list[str]:
    """Return a bar of the peak by category for each pipeline stage."""
    stages = what.memory.stages
    if not stages:
        return []
    fullest = max(stages, key=lambda stage: stage.peak_bytes)
    rows = [
        Bar(
            f"stage {stage.stage}" if len(stages) > 1 else "peak",
            {part.name: part.size for part in list_memory_parts(stage)},
            show_bytes(stage.peak_bytes),
        )
        for stage in stages
    ]
    limit = f"chip, {show_bytes(capacity_bytes)}" if capacity_bytes else ""
    remark = f"at the peak, in {show_cause(fullest.peak_cause)}" if fullest.peak_cause else "at the peak"
    colours = {part: get_colour(part) for part in MEMORY_PARTS}
    return [
        build_heading("Memory", remark, level=level),
        draw_bars(rows, colours, limit=capacity_bytes, limit_name=limit),
    ]


def render_time(steps: Sequence[Step]) -> str:
    """Return seconds by cause: a bar and a column for each step."""
    columns = [split_by_cause(step_of_column) for step_of_column in steps]
    names = [
        name
        for name in dict.fromkeys(name for column in columns for name in column)
        if any(column.get(name) for column in columns)
    ]
    rows = [
        Bar(
            step_of_column.kind,
            {name: column.get(name, 0.0) for name in names},
            show_seconds(step_of_column.time.step_seconds),
        )
        for step_of_column, column in zip(steps, columns, strict=True)
    ]
    cells = [
        (
            name,
            *(
                _share(column.get(name, 0.0), step_of_column)
                for step_of_column, column in zip(steps, columns, strict=True)
            ),
        )
        for name in names
    ]
    headings = ("cause", *(step_of_column.kind for step_of_column in steps))
    return draw_bars(rows, map_time_colours(names)) + build_table(headings, cells, left=("cause",))


def map_time_colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each cause; each axis of communication has its own."""
    axes = [name for name in names if name not in TIME_COLOURS]
    axis_colours = {name: AXIS_COLOURS[index % len(AXIS_COLOURS)] for index, name in enumerate(axes)}
    return {name: TIME_COLOURS.get(name) or axis_colours[name] for name in names}


def _share(seconds: float, what: Step) -> str:
    step_seconds = what.time.step_seconds
    return f"{show_seconds(seconds)} ({seconds / step_seconds:.0%})" if step_seconds else show_seconds(seconds)


def render_search(what: SearchResult) -> str:
    """Return the page of a search."""
    return join_parts(*render_search_parts(what), *render_front(what, within="notebook"))


def render_search_parts(what: SearchResult) -> list[str]:
    """Return the terminal's sections, with a bar of the proposal's time."""
    parts = [build_paragraph(describe_step(what.best[0].step), kind="soft")] if what.best else []
    parts += [build_paragraph(remark) for remark in what.remarks]
    for section in search.list_sections(what):
        parts += convert_section(section)
        if section.title == search.PROPOSAL and what.proposal:
            step = what.proposal.choice.step
            parts += [build_figures(list_key_figures(step)), render_time([step])]
    return parts


def join_sections(sections: Iterable[AnswerSection]) -> str:
    """Return the page of an answer."""
    return join_parts(*(part for section in sections for part in convert_section(section)))


def convert_section(what: AnswerSection) -> list[str]:
    """Return a section of an answer: its heading, lines, tables and bars."""
    parts = [build_heading(what.title, convert_text(what.remark))] if what.title else []
    for part in what.parts:
        if isinstance(part, Grid):
            parts.append(convert_grid(part))
        elif isinstance(part, Parts):
            colours = {item.name: get_colour(item.look) for item in part.parts}
            parts.append(draw_bars([Bar("", {item.name: item.size for item in part.parts}, "")], colours))
        elif part.plain.strip():
            kind = {"dim": "soft", "yellow": "bad", "red": "bad"}.get(str(part.style), "")
            parts.append(build_paragraph(convert_text(part), kind=kind))
    return parts


def convert_text(text: str | Text) -> Raw:
    """Return lines of a terminal, with what is bold there."""
    styled = Text(text) if isinstance(text, str) else text
    pieces = [
        f"<b>{escape_text(piece.plain)}</b>" if "bold" in f"{piece.style} {piece.spans}" else escape_text(piece.plain)
        for piece in styled.divide(sorted({end for span in styled.spans for end in (span.start, span.end)}))
    ]
    return Raw("".join(pieces).strip().replace("\n", "<br>"))


def render_single_changes(changes: Walk) -> str:
    """Return the terminal's page of a layout's single changes."""
    return join_sections(search.list_walk_sections(changes, top=10))


def render_offers(what: Offers) -> str:
    """Return the terminal's page of one run on several machines."""
    from fivefold.rendering import run_estimate as page

    return join_parts(convert_terminal(page.render_offers(what)))


def render_playbook(what: Playbook) -> str:
    """Return the terminal's page of the procedure, then its last step and the run file."""
    from fivefold.rendering import playbook as page

    return join_parts(
        convert_terminal(page.render_page(what)),
        *render_step_parts(what.step),
        *(fold(name, f"<pre>{escape_text(text)}</pre>") for name, text in what.configs.items()),
        fold("the run file", f"<pre>{escape_text(what.run_file)}</pre>"),
    )


def render_comparison(what: Comparison) -> str:
    """Return the terminal's page of a comparison."""
    return join_sections(comparison.list_sections(what))


def render_run(what: RunFolder) -> str:
    """Return the page of a finished run."""
    return join_parts(
        render_headline(what.measured),
        build_figures(list_key_figures(what.measured)),
        *compare_html(what.predicted, what.steps),
    )


def compare_html(predicted: Step, steps: Sequence[Step]) -> list[str]:
    """Return predicted next to measured, quantity by quantity; time by cause; the parts of the error."""
    measured = steps[-1]
    parts = [
        build_heading("Predicted next to measured", describe_assumption(predicted)),
        convert_grid(compare_table(compare(predicted, measured))),
    ]
    if not measured.time.parts:
        return parts
    error = predicted.time.step_seconds - measured.time.step_seconds
    return [
        *parts,
        build_heading("Time"),
        render_time(steps),
        build_heading(
            "What the error consists of", f"{show_difference(error)} of {show_seconds(measured.time.step_seconds)}"
        ),
        convert_grid(make_budget_grid(predicted.time, measured.time)),
    ]


def render_section(what: Section) -> str:
    """Return a section of a view: its heading, then its table or pairs."""
    body = what.body
    if isinstance(body, Parts):
        raise TypeError(f"section {what.title!r} holds parts; draw them as bars")
    if isinstance(body, Grid):
        content = convert_grid(body) if body.rows else build_paragraph("none", kind="soft")
    else:
        content = build_table(("", " "), body, left=("",))
    return build_heading(what.title, what.remark) + content


def render_dry_run(what: Step | None, findings: Sequence[str]) -> str:
    """Return the dry-run step, and what would go wrong."""
    failures = [build_paragraph(f"would fail: {line}", kind="bad") for line in findings]
    return join_parts(*failures, *(render_step_parts(what) if what else []))


def render_traced(what: Traced) -> str:
    """Return the terminal's page of traces, with the prediction next to them."""
    sections = trace_report.list_sections(what, rows=what.against, predicted=what.predicted, advice=what.advice)
    return join_sections(sections)
