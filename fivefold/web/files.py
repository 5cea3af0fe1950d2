"""Reads the files of the pages Trace and Explain, in a process of its own, and renders what they tell as HTML."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fivefold.errors import UserError
from fivefold.planner.predict import predict
from fivefold.rendering import explanation, trace_report
from fivefold.rendering.drawing.bars import draw_stacked
from fivefold.rendering.elements import Raw
from fivefold.rendering.sections import AnswerSection
from fivefold.results.trace_report import TraceReport
from fivefold.web.answers import Report
from fivefold.web.dropped import MAX_FILE_BYTES, PREFIX, DroppedFiles
from fivefold.web.folder import ServedFolder
from fivefold.web.pages.render import render_fragment
from fivefold.web.question import FilesQuestion, ResolvedRequest, TraceQuestion

MAX_BARS = 16  # ranks whose step is drawn as a bar


def list_files(question: FilesQuestion, *, folder: ServedFolder, dropped: DroppedFiles) -> list[Path]:
    """Return the files of a question: dropped ones, and files or folders below the served folder."""
    if not question.files:
        raise UserError(
            "no file is given; drop one on the page, or name one below the folder that `fivefold web` serves"
        )
    paths: list[Path] = []
    for text in question.files:
        path = dropped.path(text) if text.startswith(PREFIX) else folder.path(text, limit=MAX_FILE_BYTES)
        files = [file for file in sorted(path.iterdir()) if file.is_file()] if path.is_dir() else [path]
        paths += [folder.path(folder.name(file), limit=MAX_FILE_BYTES) for file in files] if path.is_dir() else files
    return paths


def trace(question: TraceQuestion, resolved: ResolvedRequest, files: list[Path], report: Report) -> str:
    """Return the report of traces, as ``fivefold trace`` prints it but its advice first, with a bar for each rank."""
    from fivefold.profiling.trace_advice import advise
    from fivefold.profiling.traces import read
    from fivefold.profiling.traces.prediction import compare_with_prediction, find_axes

    layout = question.parse_layout(resolved.machine) if question.against else None
    predicted = (
        predict(model=resolved.model, machine=resolved.machine, layout=layout, job=resolved.job) if layout else None
    )
    result = read(
        files,
        step=question.step,
        machine=resolved.machine if layout else None,
        axes=find_axes(layout) if layout else None,
        progress=lambda name, done, total: report(done, total, f"reading {name}"),
    )
    rows = compare_with_prediction(predicted, result.report, messages=result.lowest) if predicted else []
    advice = advise(result.report, predicted)
    first, *rest = trace_report.list_sections(result.report, rows=rows, predicted=predicted, advice=advice)
    first_words = [section for section in rest if section.title == trace_report.ADVICE]
    bars = AnswerSection((), "The step of each rank", picture=draw_ranks(result.report))
    return _render([first, *first_words, bars, *(section for section in rest if section not in first_words)])


def explain(question: FilesQuestion, resolved: ResolvedRequest, files: list[Path], report: Report) -> str:
    """Return what is known of failed runs, as ``fivefold explain`` prints it."""
    from fivefold.diagnosis.explain import explain as read
    from fivefold.diagnosis.explain.prediction import compare_largest

    report(0, 0, "reading the files")
    explanations = read(files)
    comparison = None
    if question.against:
        layout = question.parse_layout(resolved.machine)
        comparison = compare_largest(
            explanations, model=resolved.model, machine=resolved.machine, layout=layout, job=resolved.job
        )
    return _render(explanation.list_sections(explanations, comparison=comparison))


def draw_ranks(report: TraceReport) -> Raw:
    """Return a bar for each of the first ranks: the parts of its mean step."""
    ranks = report.average_steps()[:MAX_BARS]
    total = max(rank.window_seconds for rank in ranks) or 1.0
    bars = {
        f"rank {rank.rank}": draw_stacked(
            trace_report.split_step(rank), total=total, label=f"parts of the step of rank {rank.rank}"
        )
        for rank in ranks
    }
    looks = [(look, name) for name, look in trace_report.TIME_PARTS.values()]
    return Raw(render_fragment("rank_bars.html", bars=bars, looks=looks))


def _render(sections: Iterable[AnswerSection]) -> str:
    return render_fragment("sections.html", sections=list(sections), remarks=(), to=None)
