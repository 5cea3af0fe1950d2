"""Show the result of a search: the best layouts, why others were rejected, and the front of time over memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter

from rich.console import RenderableType
from rich.text import Text

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.rendering.grid import Column, Grid, make_grid, show_change, show_share
from fivefold.rendering.interval import render_intervals, show_speed_interval
from fivefold.rendering.layout_legend import explain_layouts
from fivefold.rendering.robust import list_sources, make_scenario_grid, render_regrets, summarize
from fivefold.rendering.sections import AnswerSection, render_sections
from fivefold.results.search_result import (
    Batch,
    Change,
    Finalist,
    FineTune,
    Point,
    Proposal,
    QuestionAnswer,
    Ranked,
    Reason,
    SearchResult,
    Walk,
    Why,
)
from fivefold.step import judge
from fivefold.units import show_bytes, show_cause, show_count, show_risk, show_seconds

MIN_RANKED_ROWS = 5  # of the table of the best layouts, if there are as many
MIN_SAVED_SHARE = 0.05  # of the memory of the point before it, by which a point of the front is shown
NEXT_TO_NO_HOURS = "< 0.001"  # GPU hours of a step
PROPOSAL = "Proposal"  # the title of its section
MAX_UNFIT_CHANGES = 3  # number of changes listed that do not fit but would help most


def render_page(result: SearchResult, *, precision: str | None = None) -> RenderableType:
    """Return the page: proposal, best layouts, near misses, the front if it has several points, reasons.

    ``precision``: that of the question's job, which the page does not repeat if all layouts have it.
    """
    return render_sections(list_sections(result, precision=precision))


def list_sections(result: SearchResult, *, precision: str | None = None) -> Iterator[AnswerSection]:
    """Yield the sections of the page."""
    precisions = {ranked.precision for ranked in result.best} | ({precision} if precision else set())
    is_mixed = len(precisions) > 1
    gap = f"The best layout is {result.gap_line()}." if result.gap_line() else ""
    yield AnswerSection((Text(result.describe_work(), style="dim"), *_list_lines(gap, style="yellow")))
    if result.proposal:
        yield _build_proposal(result.proposal, result.superlative, with_precision=is_mixed)
    if robust := result.robust:
        layout = Text(robust.rows[0].layout, style="bold cyan")
        yield AnswerSection((Text(summarize(robust), overflow="fold"), render_regrets(robust)), "Most robust", layout)
        sources = (Text(line, style="dim", overflow="fold") for line in list_sources(robust))
        yield AnswerSection((make_scenario_grid(robust), *sources), "If the run differs from the prediction")
    gain = f"\n{result.describe_gain()}" if result.describe_gain() else ""
    tight = result.describe_tight() if result.tight else ""
    notes = (*_list_lines(gain, style="bold"), *_list_lines(tight, style="yellow"))
    if robust:
        yield AnswerSection(notes, "As predicted")
    elif notes:
        yield AnswerSection(notes)
    if result.best:
        yield _build_ranking(result, with_precision=is_mixed)
    if result.finalists:
        yield AnswerSection((render_finalists(result.finalists),), "Measured")
    if result.binding_constraint:
        yield AnswerSection((Text(f"\n{result.binding_constraint}", overflow="fold"),))
    for miss in result.misses:
        line = f"{miss.layout}  {miss.shortage}: {show_cause(miss.cause)}"
        fixes = (Text(f"  would fit with {fix}", overflow="fold") for fix in miss.fixes)
        yield AnswerSection(tuple(fixes), line)
    if len(result.front) > 1:
        points = _distinguish(result.front)
        least = f"each needs {MIN_SAVED_SHARE:.0%} less memory than the one above, or more"
        shares = f"{least}; --json has all {len(result.front)}"
        remark = shares if len(points) < len(result.front) else ""
        yield AnswerSection((make_front_grid(result, points),), "Pareto front of peak memory and step time", remark)
    if result.reasons:
        yield AnswerSection((make_grid(REASONS, result.reasons),), result.reasons_title)


def _list_lines(*lines: str, style: str = "") -> list[Text]:
    """Return the lines that are not empty, of which long ones wrap."""
    return [Text(line, style=style, overflow="fold") for line in lines if line]


def _build_ranking(result: SearchResult, *, with_precision: bool) -> AnswerSection:
    """Return the table of the best layouts, its legend, and what is expected of the proposal or the first layout."""
    rows = select_rows(result.best, result.proposal.choice if result.proposal else None)
    similar = len(result.best) - len(rows)
    not_shown = (
        f"not shown: {similar} of these {len(result.best)} layouts, which differ from a better one only in virtual or "
        "uneven stages, group sizes, the order of axes, or what is recomputed; --top N ranks more, --json has all"
    )
    legend = explain_layouts(format_ranked(ranked) for _, ranked in rows)
    expected = render_intervals((result.proposal.choice if result.proposal else result.best[0]).step)
    subject = "\nThe proposal" if result.proposal else "\nThe first layout of the table"
    return AnswerSection(
        (
            make_best_grid(rows, own=result.own, with_precision=with_precision),
            *_list_lines(not_shown if similar else "", legend, style="dim"),
            *([Text.assemble(subject, expected)] if expected else []),
        ),
        result.title if result.proposal else "",
    )


def describe_fitting_change(change: Change | None) -> str:
    """Return what to do about a layout that does not fit: the single change that fits at the least step time."""
    if change is None:
        other = "try `fivefold search` for another layout, or `fivefold ask gpus` for more GPUs"
        return f"no single change makes it fit: {other}"
    peak, slower = show_bytes(change.memory_bytes), f"{1 / change.faster - 1:+.1%}"
    return (
        f"it would fit with {change.change}: {change.layout}, peak memory {peak}, step time {slower}; "
        "`fivefold ask changes` lists the others"
    )


def walk(single_changes: Walk, *, top: int) -> RenderableType:
    """Return the page of single changes: the current layout, the ``top`` changes that help most, and the best found."""
    return render_sections(list_walk_sections(single_changes, top=top))


def list_walk_sections(single_changes: Walk, *, top: int) -> Iterator[AnswerSection]:
    """Yield the sections of the page of single changes."""
    start, path = single_changes.start, single_changes.path
    fits = {"yes": "fits", "tight": "tight", "no": "does not fit"}[start.answer]
    figures = f"step time {show_seconds(start.step_seconds)}, peak memory {show_bytes(start.memory_bytes)}, {fits}"
    yield AnswerSection((Text.assemble((start.layout, "bold cyan"), overflow="fold"), Text(figures)))
    yield AnswerSection((make_grid(CHANGES, choose_changes(single_changes.changes, top)),), "One change")
    if len(path) > 1:
        title = "The best change, then the best one after it, and so on"
        yield AnswerSection((make_grid(CHANGES, path),), title)
    if path:
        faster = start.step_seconds / path[-1].step_seconds - 1
        speed = f"{abs(faster):.1%} {'faster' if faster >= 0 else 'slower'}"
        yield AnswerSection((Text(f"result: {path[-1].layout}, {speed}", overflow="fold"),))
    else:
        yield AnswerSection((Text("\nno single change helps"),))


def choose_changes(change_list: Sequence[Change], top: int) -> list[Change]:
    """Return the ``top`` changes, and a few of the faster changes that do not fit."""
    faster = [change for change in change_list[top:] if not change.fits and change.faster > 1]
    return [*change_list[:top], *sorted(faster, key=lambda change: -change.faster)[:MAX_UNFIT_CHANGES]]


def _build_proposal(proposal: Proposal, superlative: str, *, with_precision: bool) -> AnswerSection:
    """Return the proposed layout, simpler and faster ones with their difference, and the reason for each choice."""
    step = proposal.choice.step
    seconds = show_seconds(step.time.step_seconds)
    peak = show_bytes(step.memory.peak_bytes)
    risk = "" if step.memory.risk is None else f" ({show_risk(step.memory.risk)} risk of running out)"
    figures = f"step time {seconds}, peak memory {peak}{risk}, MFU {step.mfu.causal:.1%}"
    precision = f" in {proposal.choice.precision}" if with_precision else ""
    parts: tuple[Text | Grid, ...] = (
        Text(f"{figures}; {proposal.describe(superlative)}"),
        *_list_lines(proposal.remark, style="yellow"),
        *_list_lines(*list_alternatives(proposal, superlative)),
        make_grid(CHOICES, proposal.why),
    )
    return AnswerSection(parts, PROPOSAL, Text.assemble((format_ranked(proposal.choice), "bold cyan"), precision))


def list_alternatives(proposal: Proposal, superlative: str) -> list[str]:
    """Return a line for each layout that the proposal is compared with: simpler, faster, or in the job's precision."""
    stack = proposal.choice.step.stack
    return [
        f"{label}  {_append_reduce(other.layout, other.reduce, stack=stack)}: {other.describe_difference()}"
        for label, other in proposal.list_alternatives(superlative)
    ]


def select_rows(best: Sequence[Ranked], proposed: Ranked | None = None) -> list[tuple[int, Ranked]]:
    """Return the layouts, each with its place in the ranking, that differ from all before it in more than details.

    The ``proposed`` one is among them in any case. If they are fewer than ``MIN_RANKED_ROWS``, the best of the others
    are added.
    """
    places, similar, outlines = set[int](), list[int](), set[tuple[object, ...]]()
    for place, ranked in enumerate(best, start=1):
        outline = Layout.parse(ranked.step.layout).outline, ranked.precision, ranked.reduce
        if outline not in outlines or ranked == proposed:
            places.add(place)
        else:
            similar.append(place)
        outlines.add(outline)
    places.update(similar[: max(0, MIN_RANKED_ROWS - len(places))])
    return [(place, best[place - 1]) for place in sorted(places)]


def make_best_grid(
    best: Iterable[tuple[int, Ranked]], *, own: Ranked | None = None, with_precision: bool = False
) -> Grid:
    """Return the table of ranked layouts, each given with its place, and what they cost where the machine has a price.

    ``own``: the layout of a config, in the first row. The column of precisions is left out if there is one precision,
    unless ``with_precision``, and that of GPU hours on CPUs that take next to none.
    """
    rows: list[tuple[int | str, Ranked]] = [*([("yours", own)] if own else []), *best]
    layouts = [ranked for _, ranked in rows]
    without = {"dollars"} if layouts[-1].dollars is None else set()
    if not with_precision and len({ranked.precision for ranked in layouts}) == 1:
        without.add("precision")
    if {format_gpu_hours(ranked.gpu_hours) for ranked in layouts} == {NEXT_TO_NO_HOURS}:
        without.add("GPU hours/step")
    return make_grid([column for column in RANKED if column.heading not in without], rows)


def make_front_grid(result: SearchResult, points: Sequence[Point]) -> Grid:
    """Return the table of ``points`` of the Pareto front."""
    stack = result.best[0].step.stack if result.best else ""
    columns: tuple[Column[Point], ...] = (
        Column("peak memory", attrgetter("memory_bytes"), show_bytes),
        Column("step time", attrgetter("step_seconds"), show_seconds),
        Column("precision", attrgetter("precision"), is_text=True),
        Column("layout", lambda point: _append_reduce(point.layout, point.reduce, stack=stack), is_text=True),
    )
    return make_grid(columns, points)


def _distinguish(front: Sequence[Point]) -> list[Point]:
    """Return the points of a front, the fastest first, of which each saves a notable share of the memory of the last.

    A point that takes as long as the last one, as it is shown, takes its place.
    """
    points: list[Point] = []
    for point in front:
        if points and show_seconds(points[-1].step_seconds) == show_seconds(point.step_seconds):
            points.pop()
        elif points and point.memory_bytes > (1 - MIN_SAVED_SHARE) * points[-1].memory_bytes:
            continue
        points.append(point)
    return points


def _format_dollars(dollars: float) -> str:
    return f"{dollars:,.2f}" if dollars >= 1 or not dollars else f"{dollars:.2g}"


def render_finalists(finalist_list: Sequence[Finalist]) -> Grid:
    """Return a table of the layouts that were trained for a few steps, the fastest first."""
    return make_grid(FINALISTS, enumerate(finalist_list, start=1))


def _compute_error(finalist: Finalist) -> float | None:
    return finalist.predicted_seconds / finalist.measured_seconds - 1 if finalist.measured_seconds else None


def format_ranked(ranked: Ranked) -> str:
    """Return the layout, with how often it reduces gradients if its software does otherwise by default."""
    return _append_reduce(ranked.step.layout, ranked.reduce, stack=ranked.step.stack)


def _append_reduce(layout: str, reduce: str, *, stack: str) -> str:
    """Append how often gradients are reduced, which a search tries for the trainer only; other software has one way."""
    return _format_layout(layout, reduce) if stack == Job().stack.name else layout


def _format_layout(layout: str, reduce: str) -> str:
    """Return a layout, with the job's field that says how often it reduces gradients unless it has its default."""
    is_default = reduce == "micro_batch" or not {"zero2", "zero3"} & {word.partition("/")[0] for word in layout.split()}
    return layout if is_default else f"{layout} (--set reduce={reduce})"


def format_gpu_hours(hours: float) -> str:
    """Format the GPU hours of one step to three digits, without an exponent."""
    if 0 < hours < 0.001:
        return NEXT_TO_NO_HOURS
    return f"{hours:.3g}" if hours < 999.5 else f"{hours:,.0f}"


def _format_signed(size: int) -> str:
    return ("+" if size > 0 else "−" if size < 0 else "") + show_bytes(abs(size))


RANKED: tuple[Column[tuple[int | str, Ranked]], ...] = (
    Column("#", itemgetter(0)),
    Column("layout", lambda row: format_ranked(row[1]), is_text=True),
    Column("precision", lambda row: row[1].precision, is_text=True),
    Column("step time", lambda row: row[1].step.time.step_seconds, show_seconds),
    Column("peak memory", lambda row: row[1].step.memory.peak_bytes, show_bytes),
    Column("MFU", lambda row: row[1].step.mfu.causal, show_share),
    Column("tokens/s/GPU", lambda row: row[1].step.tokens_per_second_per_gpu, show_count, is_wide=True),
    Column("GPU hours/step", lambda row: row[1].gpu_hours, format_gpu_hours),
    Column("dollars", lambda row: row[1].dollars, _format_dollars),
    Column("most time in", lambda row: row[1].step.time.longest_part, is_text=True),
)
REASONS: tuple[Column[Reason], ...] = (
    Column("layouts", attrgetter("layouts"), "{:,}".format),
    Column("why", attrgetter("line"), is_text=True),
    Column("closest to fitting or winning", attrgetter("nearest"), is_text=True),
)
CHOICES: tuple[Column[Why], ...] = (
    Column("choice", attrgetter("choice"), is_text=True),
    Column("why", attrgetter("line"), is_text=True),
)
CHANGES: tuple[Column[Change], ...] = (
    Column("change", attrgetter("change"), is_text=True),
    Column("speed", lambda change: change.faster - 1, show_change),
    Column("90 % interval", lambda change: change.speed, show_speed_interval),
    Column("step time", attrgetter("step_seconds"), show_seconds),
    Column("memory change", lambda change: -change.saved_bytes, _format_signed),
    Column("fits", attrgetter("answer")),
    Column("peak memory", attrgetter("memory_bytes"), show_bytes, is_wide=True),
    Column("layout", attrgetter("layout"), is_text=True, is_wide=True),
)


def describe_fine_tunes(ways: Sequence[FineTune]) -> str:
    """Return what the columns of ``FINE_TUNES`` count."""
    text = "tokens/s of all GPUs; mbs: the largest, at most global batch / dp"
    methods = [way.method for way in ways]
    return f"{text}; second row of a method: without recomputation" if len({*methods}) < len(methods) else text


def _show_longest(way: FineTune) -> str:
    """Return the longest sequence that fits, or that none does, with the risk where it is close."""
    if way.longest_sequence:
        return f"{way.longest_sequence:,}"
    is_tight = way.risk is not None and judge(way.risk) == "tight"
    return f"tight: {show_risk(way.risk)} risk" if is_tight and way.risk is not None else "does not fit"


FINE_TUNES: tuple[Column[FineTune], ...] = (
    Column("method", attrgetter("method"), is_text=True),
    Column("longest at mbs1", _show_longest),
    Column("mbs at seq", lambda way: way.micro_batch or None),
    Column("tokens/s", lambda way: way.tokens_per_second if way.micro_batch else None, show_count),
    Column("layout", attrgetter("layout"), is_text=True),
    Column("peak", attrgetter("memory_bytes"), show_bytes),
    Column("with driver", attrgetter("driver_bytes"), show_bytes),
)
ANSWERS: tuple[Column[QuestionAnswer], ...] = (
    Column("question", attrgetter("question"), is_text=True),
    Column("answer", attrgetter("line"), is_text=True),
    Column("layout", lambda answer: answer.layout or None, is_text=True),
    Column("peak memory", attrgetter("memory_bytes"), show_bytes),
    Column("step time", attrgetter("step_seconds"), show_seconds),
)
BATCHES: tuple[Column[Batch], ...] = (
    Column("", lambda batch: "→" if batch.recommended else None, is_text=True, missing=""),
    Column("sequences", attrgetter("global_batch")),
    Column("tokens", attrgetter("tokens"), show_count),
    Column("fastest layout", lambda batch: batch.layout if batch.step_seconds else None, is_text=True, missing=""),
    Column("step time", attrgetter("step_seconds"), show_seconds, missing=""),
    Column("recommended by, or used by", lambda batch: "; ".join(batch.references), is_text=True),
    Column("micro-batches", attrgetter("micro_batches")),
    Column("steps", attrgetter("steps"), "{:,}".format),
)
BATCH_LAYOUTS = ("", "fastest layout", "step time")  # columns of BATCHES that are empty if a layout is given
FINALISTS: tuple[Column[tuple[int, Finalist]], ...] = (
    Column("#", itemgetter(0)),
    Column("layout", lambda row: row[1].layout, is_text=True),
    Column("predicted", lambda row: row[1].predicted_seconds, show_seconds),
    Column("measured", lambda row: row[1].measured_seconds, show_seconds),
    Column("error", lambda row: _compute_error(row[1]), show_change),
    Column("why", lambda row: row[1].why, is_text=True),
)
