"""Records as HTML for notebooks: a step, a search, a run, rows, a dry run, traces.

Jupyter and marimo call ``_repr_html_`` of a record, which names its function here (``fivefold/display.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fivefold.rendering.budget import make_budget_grid, show_difference, split_by_cause
from fivefold.rendering.compare import render_table as compare_table
from fivefold.rendering.comparison import (
    describe_comparison,
    describe_ratios,
    describe_shared,
    explain_differences,
    make_difference_grid,
)
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
from fivefold.rendering.grid import Grid, make_grid
from fivefold.rendering.interval import render_intervals
from fivefold.rendering.layout_legend import explain_layouts
from fivefold.rendering.palette import get_colour
from fivefold.rendering.point_charts import render_front
from fivefold.rendering.question import count_ranks, describe_step
from fivefold.rendering.robust import make_scenario_grid, render_regrets, summarize
from fivefold.rendering.search import CHOICES, REASONS, format_ranked, list_alternatives, make_best_grid
from fivefold.rendering.step_view import MEMORY_PARTS, Parts, Section, list_key_figures, list_memory_parts, view_step
from fivefold.results.step_comparison import compare, describe_assumption
from fivefold.units import show_bytes, show_cause, show_seconds

if TYPE_CHECKING:
    from fivefold.results.comparison import Comparison
    from fivefold.results.playbook import Playbook
    from fivefold.results.run_estimate import Offers
    from fivefold.results.run_folder import RunFolder
    from fivefold.results.search_result import Proposal, Robustness, SearchResult, Walk
    from fivefold.results.trace_report import Traced
    from fivefold.step import Step

MAX_ROWS = 60  # maximum rows of a table


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
    columns = [split_by_cause(step_of_column.time) for step_of_column in steps]
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
    """Return the proposal with its reasons, the best layouts, and why others were rejected."""
    fits = "" if what.best else f"; {what.describe_unfit()}"
    job_parts = [build_paragraph(describe_step(what.best[0].step), kind="soft")] if what.best else []
    parts = [*job_parts, build_paragraph(f"{what.tried:,} layouts, {what.evaluated:,} evaluated{fits}", kind="soft")]
    parts += [build_paragraph(remark) for remark in what.remarks]
    parts += [build_paragraph(f"The best layout is {what.gap_line()}.")] if what.gap_line() else []
    parts += _render_proposal(what.proposal, what.superlative) if what.proposal else []
    parts += [build_paragraph(gain)] if (gain := what.describe_gain()) else []
    parts += _render_robustness(what.robust) if what.robust else []
    if what.best:
        parts += [
            build_heading(what.title if what.proposal else "The best layouts"),
            convert_grid(make_best_grid(what.best, own=what.own)),
        ]
        legend = explain_layouts(map(format_ranked, what.best))
        parts += [build_paragraph(legend, kind="soft")] if legend else []
    for miss in what.misses:
        needed = show_bytes(miss.needs_bytes)
        available = show_bytes(miss.has_bytes)
        line = f"{miss.layout} needs {needed} of {available}: {show_cause(miss.cause)}"
        fixes = "".join(f"<br>would fit with {escape_text(fix)}" for fix in miss.fixes)
        parts.append(build_paragraph(Raw(f"<b>{escape_text(line)}</b>{fixes}")))
    if what.reasons:
        parts.append(fold("Why the other layouts lost", convert_grid(make_grid(REASONS, what.reasons))))
    return parts


def _render_proposal(what: Proposal, superlative: str) -> list[str]:
    return [
        build_heading("Proposal", "; ".join(filter(None, [what.describe(superlative), what.remark]))),
        build_paragraph(Raw(f"<b><code>{escape_text(what.layout)}</code></b>")),
        build_figures(list_key_figures(what.choice.step)),
        render_time([what.choice.step]),
        *map(build_paragraph, list_alternatives(what, superlative)),
        convert_grid(make_grid(CHOICES, what.why)),
    ]


def _render_robustness(what: Robustness) -> list[str]:
    """Return the layout with the smallest regret, and the regret of layouts in each scenario."""
    return [
        build_heading("Most robust", summarize(what)),
        build_paragraph(Raw(f"<b><code>{escape_text(what.rows[0].layout)}</code></b>")),
        convert_grid(render_regrets(what)),
        convert_grid(make_scenario_grid(what)),
    ]


def render_single_changes(changes: Walk) -> str:
    """Return a layout's single changes as HTML, with the tables of the terminal."""
    from fivefold.rendering import search as page

    return join_parts(convert_terminal(page.walk(changes, top=10)))


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
    """Return the variants, which is the best, and what differs."""
    lines = [
        (
            variant.name,
            " ".join(variant.facts) or "nothing else",
            variant.error or (variant.step.line() if variant.step else ""),
        )
        for variant in what.variants
    ]
    variants = build_table(("", "differs in", "predicted"), lines, left=("", "differs in", "predicted"))
    shared_parts = map(build_paragraph, describe_shared(what))
    return join_parts(
        *shared_parts,
        variants,
        build_paragraph(Raw(f"<b>{escape_text(describe_comparison(what))}</b>")),
        *map(build_paragraph, (*explain_differences(what), *describe_ratios(what))),
        convert_grid(make_difference_grid(what)),
    )


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
    """Return where the time of each traced step went, and the prediction next to it."""
    rows = [
        (
            str(row.rank),
            row.step,
            *map(
                show_seconds,
                (
                    row.window_seconds,
                    row.compute_seconds,
                    row.exposed_seconds,
                    row.memcpy_alone_seconds,
                    row.idle_seconds,
                ),
            ),
        )
        for row in what.breakdown[:MAX_ROWS]
    ]
    headings = ("rank", "step", "window", "compute", "exposed", "copies alone", "idle")
    parts = [build_paragraph(what.line(), kind="soft"), build_table(headings, rows, left=("step",))]
    if what.against:
        parts += [build_heading("Predicted next to traced"), convert_grid(compare_table(what.against))]
    if what.advice is not None:
        parts += [build_heading("Advice"), build_paragraph(str(what.advice))]
    return join_parts(*parts, *(build_paragraph(line, kind="soft") for line in what.remarks))
