"""Score predictions against published runs: ``python -m benchmarks.published [SOURCE ...]``. Needs no torch."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fivefold.cli.errors import run_with_exit_code
from fivefold.cli.options import print_line, show

if TYPE_CHECKING:
    from benchmarks.published import Report
    from benchmarks.published.leave_one_source_out import FactorFit

Field = Literal["chip", "generation", "nodes", "model", "kind", "precision", "software", "recomputed"]
Sources = Annotated[list[str] | None, typer.Argument(help="Data files by name; without any, all of them.")]


def score_published(
    sources: Sources = None,
    excluded: Annotated[bool, typer.Option("--excluded", help="Also list what is left out, and why.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Every run with its prediction.")] = False,
    by: Annotated[Field | None, typer.Option(help="Errors by this instead of by source.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As the table of docs/explanation/how-a-step-costs/published.md.")
    ] = False,
    halves: Annotated[bool, typer.Option("--halves", help="Calibrate on every second run, score the others.")] = False,
    left_out: Annotated[
        Path | None, typer.Option(help="Set the constants again without each source, into this file; goes on with it.")
    ] = None,
    ratios: Annotated[
        bool,
        typer.Option("--ratios", help="Errors of ratios: pairs that differ in one thing; with --rows, by source too."),
    ] = False,
    learn: Annotated[Path | None, typer.Option(help="Write what to expect of each class of runs here.")] = None,
    learn_ratios: Annotated[Path | None, typer.Option(help="Write the errors of ratios by kind here.")] = None,
    charts: Annotated[
        Path | None, typer.Option(help="Draw predicted against measured, and errors over ranks, into this folder.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print data as JSON.")] = False,
) -> None:
    """Score predictions against what others measured and published: every accuracy claim, made anew."""
    from benchmarks.published import SOURCES, run

    names = tuple(sources) if sources else SOURCES
    if halves:
        _halves(names, json=json)
        return
    fits = _refit(names, left_out) if left_out else None
    report = run(names, fits=fits)
    if ratios and not json:
        _print_ratios(report, markdown=markdown, rows=rows)
    else:
        _print(report, excluded=excluded, rows=rows, by=by, markdown=markdown, json=json)
    if charts:
        _draw(report, charts)
    if learn:
        from benchmarks.published import intervals

        intervals.write(intervals.learn(report.scores), learn)
        print_line(f"wrote {learn}")
    if learn_ratios:
        from benchmarks.published.ratios import learn_ratios as learn_errors
        from benchmarks.published.ratios import write_ratios

        write_ratios(learn_errors(report.pairs), learn_ratios)
        print_line(f"wrote {learn_ratios}")


def _print(report: Report, *, excluded: bool, rows: bool, by: Field | None, markdown: bool, json: bool) -> None:
    """Print the scores: a table, Markdown or JSON, grouped by a field if asked."""
    from benchmarks.published import table as page
    from benchmarks.published.score import summarise

    summaries = summarise(report.scores, by=by) if by else report.summaries
    if json:
        show(report.replace(summaries=summaries).model_dump_json(indent=2))
    elif markdown:
        show(page.markdown(summaries, first=by or "source"))
    else:
        left_out = [(refusal.source, refusal.rule) for refusal in report.excluded] if excluded else []
        show(page.table(summaries, excluded=left_out, first=by or "source"))
        if rows:
            show(page.runs([(s.source, s.row, s.layout, s.quantity, s.predicted, s.measured) for s in report.scores]))


def _print_ratios(report: Report, *, markdown: bool, rows: bool) -> None:
    """Print the errors of ratios by kind of difference, or with ``rows`` by source."""
    from benchmarks.published import table as page
    from benchmarks.published.ratios import summarize_sources

    if rows:
        errors = summarize_sources(report.pairs)
        show(page.ratios_by_source_markdown(errors) if markdown else page.ratios_by_source(errors))
        return
    show(page.ratios_markdown(report.ratios) if markdown else page.ratios(report.ratios))


def _refit(sources: tuple[str, ...], path: Path) -> tuple[FactorFit, ...]:
    """Return the constants without each of ``sources``; those that ``path`` has already are kept."""
    from benchmarks.published import leave_one_source_out
    from fivefold.rendering.progress import show_progress

    with show_progress("without") as progress:
        return leave_one_source_out.refit(sources, path, report=progress)


def _halves(sources: tuple[str, ...], *, json: bool) -> None:
    from benchmarks.published import cases_of
    from benchmarks.published import table as page
    from benchmarks.published.tune import halves as calibrated

    calibrations = [half._asdict() | {"factors": half.factors._asdict()} for half in calibrated(cases_of(sources))]
    show(json_module.dumps(calibrations, indent=2) if json else page.halves(calibrations))


def _draw(report: Report, folder: Path) -> None:
    """Write the charts of a report into a folder."""
    from benchmarks.published import charts as published_charts
    from fivefold.errors import UserError
    from fivefold.rendering.charts import save

    if folder.exists() and not folder.is_dir():
        raise UserError(f"--charts {folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    points = [
        (s.source, s.row, s.quantity, s.ranks, s.predicted, s.measured)
        for s in report.scores
        if s.quantity in ("time", "peak") and s.ranks
    ]
    for quantity, picture in published_charts.pictures(points).items():
        save(picture, folder / f"{quantity}.svg")
        print_line(f"drew {folder / quantity}.svg")


def main() -> None:
    """Run the command line; expected errors are one line."""
    app = typer.Typer(name="benchmarks.published", pretty_exceptions_enable=False, add_completion=False)
    app.command()(score_published)
    sys.exit(run_with_exit_code(lambda: app(standalone_mode=False)))


if __name__ == "__main__":
    main()
