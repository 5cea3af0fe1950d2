"""``fivefold report``: a run, steps, a search, a sweep or a new answer as one HTML file to share."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.atomic_file import replace_file
from fivefold.cli.options import print_line
from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.layout.batch import fill_batch
from fivefold.requests.commands import ReportOptions
from fivefold.requests.configs import build_request, describe_notes, load_config
from fivefold.requests.job import list_job_options, load_job
from fivefold.requests.machines import load_machine
from fivefold.step import FITS_RISK

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.planner.predict import Planner
    from fivefold.rendering.report import Drawing, Provenance
    from fivefold.results.run_folder import RunFolder
    from fivefold.step import Step
    from fivefold.trainer.run import Run

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
NAME = "report.html"
FRONT_MEMORY_LIMITS = 6  # memory limits for the Pareto front: more would take longer than the search itself


@accept_request(ReportOptions)
def report(request: ReportOptions, job: Job, stated: frozenset[str]) -> None:
    """Write one self-contained HTML file: the proposed layout and why, memory, time, and predicted next to measured."""
    from fivefold.job import Job as Default

    what, out, gpus, ignore = request.what, request.out, request.gpus, request.ignore
    if out is not None and out.suffix not in (".html", ".htm"):
        raise UserError(f"--out {out}: a report is .html; print it to PDF from a browser")
    if request.from_file is not None:
        if what or job != Default() or gpus is None:
            raise UserError(
                f"--from {request.from_file} gives model, layout and job; add only the machine, such as --gpus h100:64"
            )
        title, parts, commands = _report_config(request.from_file, gpus, ignore)
        folder = Path()
    elif ignore:
        raise UserError(f"--ignore {' '.join(ignore)} is valid with --from FILE only: it names keys of a config")
    elif not what:
        raise UserError(
            "nothing to report; write fivefold report RUN, or FILE…, or MODEL MACHINE [LAYOUT], "
            "or --from FILE --gpus h100:64"
        )
    elif all(_is_written(Path(word)) for word in what):
        if job != Default():
            raise UserError(
                "a result file already contains its job; drop the job options, or give MODEL MACHINE LAYOUT"
            )
        title, parts, commands = _report_files([Path(word) for word in what])
        commands.append(shlex.join(["fivefold", "report", *what]))
        folder = Path(what[0]) if len(what) == 1 and Path(what[0]).is_dir() else Path()
    else:
        title, parts, commands = _report_question(what, job, request.risk, stated=stated)
        commands.append(format_command("report", what, job, risk=request.risk))
        folder = Path()
    path = out or folder / NAME
    _write(path, title, parts, commands)
    print_line(f"wrote {path}")


def _is_written(path: Path) -> bool:
    """Tell whether a path is the output of a command, rather than a model's config or folder."""
    model = path.name == "config.json" or (path.is_dir() and (path / "config.json").exists())
    return not model and (path.suffix in SUFFIXES or path.is_dir())


def write_run_report(run: RunFolder, drawing: Drawing | None, settings: Run) -> Path:
    """Write the report of a run into its folder, with the run file that reproduces it."""
    from fivefold.rendering import report as page
    from fivefold.results import run_folder

    fields = json.dumps(settings.dump_changes(), indent=1)
    commands = [f"fivefold train run.json --layout {run.measured.layout!r}", "# run.json:", *fields.splitlines()]
    path = run.folder / NAME
    measured = run.measured
    parts = page.report_run(run, drawing, run_folder.list_lanes(run.folder))
    _write(path, _format_title(measured.model, measured.machine, measured.world), parts, commands)
    return path


def _write(path: Path, title: str, parts: list[str], commands: list[str]) -> None:
    from fivefold.rendering.report import render_document

    with replace_file(path, contents="the report") as file:
        file.write_text(render_document(title, parts, asked=_describe_provenance(commands)), encoding="utf-8")


def _describe_provenance(commands: list[str]) -> Provenance:
    """Return the commands of a report, and the versions and the system that wrote it."""
    from fivefold.rendering.report import Provenance
    from fivefold.version import __version__

    versions = {"fivefold": __version__, "Python": platform.python_version(), "system": _describe_system()}
    versions |= {"processors": str(os.cpu_count())}
    for package in ("torch", "numpy", "pydantic"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return Provenance(commands, versions)


def _describe_system() -> str:
    # Not `platform.platform()`: it starts `uname -p` and leaves its answer out.
    return "-".join(part for part in (platform.system(), platform.release(), platform.machine()) if part)


def _report_config(file: Path, gpus: str, ignore: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return the report of a config of any software, on the machine of ``--gpus``."""
    from fivefold.cli.arguments import resolve_machine
    from fivefold.rendering.elements import build_heading, build_paragraph

    config = load_config([str(file)], build_request(gpus), ignore=ignore)
    model, layout, job = config.model, config.layout, config.job
    machine = resolve_machine(gpus, layout.world)
    parts = _report_layout(model, machine, job, layout)
    notes = list(describe_notes(config.notes))
    for line in notes:
        print_line(f"fivefold: {line}")
    parts += [build_heading("Keys of the config"), *map(build_paragraph, notes)] if notes else []
    ignore_options = [word for keys in ignore for word in ("--ignore", keys)]
    options = ["--from", str(file), "--gpus", gpus, *ignore_options]
    commands = [shlex.join(["fivefold", verb, *options]) for verb in ("predict", "report")]
    return _format_title(model.name, machine.name, machine.ranks), parts, commands


def _report_question(
    what: Sequence[str], job: Job, risk: float, *, stated: frozenset[str]
) -> tuple[str, list[str], list[str]]:
    """Return the report of a model, a machine and perhaps a layout: the predicted step, or a search's proposal."""
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve
    from fivefold.planner.predict import get_planner
    from fivefold.rendering import report as page

    if len(what) == 1:
        if not Path(what[0]).exists():
            try:
                resolve(what[0])
            except UserError as error:
                raise UserError(f"no run folder or file {what[0]!r}, and {error}") from None
        raise UserError(f"report {what[0]} needs a machine; write for example: fivefold report {what[0]} h100:8")
    if len(what) > 3:
        raise UserError("a report needs a run's folder, files that a command wrote, or MODEL MACHINE [LAYOUT]")
    model, machine = resolve(what[0]), load_machine(what[1])
    if len(what) == 3:
        layout = Layout.parse(what[2], machine=machine)
        job = fill_batch(job, ranks=machine.ranks, stated=stated, layouts=[layout])
        parts = _report_layout(model, machine, job, layout)
        return _format_title(model.name, machine.name, machine.ranks), parts, [format_command("predict", what, job)]
    job = fill_batch(job, ranks=machine.ranks, stated=stated)
    from fivefold.planner.search import search
    from fivefold.rendering.elements import build_paragraph
    from fivefold.rendering.progress import show_progress
    from fivefold.rendering.question import describe_question
    from fivefold.requests.commands import UNRANKABLE_DIFFERENCE
    from fivefold.requests.search import list_other_reduces

    with show_progress("searching") as progress:
        result = search(
            model=model,
            machine=machine,
            job=job,
            within=UNRANKABLE_DIFFERENCE,
            reduces=list_other_reduces(job),
            levels=FRONT_MEMORY_LIMITS,
            risk=risk,
            report=lambda done, total: progress("layouts", done, total),
        )
    choice = result.proposal.choice if result.proposal else None
    proposal_drawing = None
    if choice is not None:
        proposed_job = get_job(choice.step)
        proposal_drawing = draw_step(
            get_planner(model, machine, proposed_job), Layout.parse(choice.step.layout), choice.step
        )
    commands = [format_command("search", what, job, risk=risk)]
    commands += [format_command("predict", [*what, choice.step.layout], get_job(choice.step))] if choice else []
    parts = [] if result.best else [build_paragraph(describe_question(model, machine, job))]
    return (
        _format_title(model.name, machine.name, machine.ranks),
        [*parts, *page.report_search(result, proposal_drawing)],
        commands,
    )


def _format_title(model: str, machine: str, ranks: int) -> str:
    return f"{model} on {ranks:,} × {machine}" if ranks > 1 else f"{model} on {machine}"


def _report_files(paths: list[Path]) -> tuple[str, list[str], list[str]]:
    """Return the title and HTML parts of the files' reports, one after another, and the commands that made them."""
    from fivefold.api.load import load
    from fivefold.rendering.elements import build_heading

    reports = [_report_file(path, load(path)) for path in paths]
    commands = [line for _, _, lines in reports for line in lines]
    if len(reports) == 1:
        return reports[0][0], reports[0][1], commands
    parts = [part for title, sections, _ in reports for part in (build_heading(title, level=1), *sections)]
    return f"{len(paths)} reports", parts, commands


def _report_file(path: Path, answer: Any) -> tuple[str, list[str], list[str]]:
    """Return the title, the page and the commands of what a file holds."""
    from fivefold.display import Rows
    from fivefold.rendering import report as page
    from fivefold.results import run_folder
    from fivefold.results.run_folder import RunFolder
    from fivefold.results.search_result import SearchResult
    from fivefold.step import Step

    if isinstance(answer, RunFolder):
        title, step_drawing, commands = _load_step(answer.predicted, "predict")
        return title, page.report_run(answer, step_drawing, run_folder.list_lanes(answer.folder)), commands
    if isinstance(answer, SearchResult):
        if not answer.best:
            return str(path), page.report_search(answer), []
        choice = answer.proposal.choice if answer.proposal else answer.best[0]
        title, step_drawing, commands = _load_step(choice.step, "search")
        return title, page.report_search(answer, step_drawing), commands
    if isinstance(answer, Step):
        title, step_drawing, commands = _load_step(answer, "dryrun" if answer.kind == "dry run" else "predict")
        return title, page.report_step(answer, step_drawing), commands
    return str(path), page.report_rows(answer) if isinstance(answer, Rows) else [answer._repr_html_()], []


def _load_step(step: Step, verb: str) -> tuple[str, Drawing | None, list[str]]:
    """Return title, drawing and command of a step that was read.

    The drawing is None if the step's names now stand for something else.
    """
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve
    from fivefold.planner.predict import get_planner

    title = _format_title(step.model, step.machine, step.world)
    step_job = get_job(step)
    names = [step.model, f"{step.machine}:{step.world}", step.layout]
    commands = [format_command(verb, names[:2] if verb == "search" else names, step_job)]
    try:
        model = resolve(names[0])
        machine = load_machine(names[1])
        layout = Layout.parse(names[2])
        step_planner = get_planner(model, machine, step_job)
        is_unchanged = step.kind != "predicted" or step_planner.step(layout).memory.peak_bytes == step.memory.peak_bytes
    except UserError:
        return title, None, commands
    return title, draw_step(step_planner, layout, step) if is_unchanged else None, commands


def _report_layout(model: Model, machine: Machine, job: Job, layout: Layout) -> list[str]:
    """Return the page of the predicted step of a layout."""
    from fivefold.planner.predict import get_planner, predict
    from fivefold.rendering import report as page

    step = predict(model=model, machine=machine, layout=layout, job=job)
    return page.report_step(step, draw_step(get_planner(model, machine, job), layout, step))


def draw_step(planner: Planner, layout: Layout, step: Step) -> Drawing:
    """Return the planned step's spans and the live bytes over time of the rank with the highest peak."""
    from fivefold.cli.pictures import CHART_MICRO_BATCHES, describe_limit, find_peak_stage
    from fivefold.planner.time.memory_over_time import list_levels
    from fivefold.planner.time.spans import build_spans
    from fivefold.rendering.report import Drawing

    rank, limit = find_peak_stage(step), CHART_MICRO_BATCHES // layout.v
    rows = build_spans(planner, layout, limit=limit)
    return Drawing(
        rows,
        [f"rank {index}" for index in range(len(rows))],
        list_levels(planner, layout, rank=rank, limit=limit),
        rank,
        planner.machine.chip.memory_bytes,
        layout.pp,
        describe_limit(planner, layout, limit),
    )


def get_job(step: Step) -> Job:
    """Return the job of a step."""
    from fivefold.job import Job

    return Job.read(dict(step.job), origin="job")


def format_command(verb: str, words: Sequence[str], job: Job, *, risk: float = FITS_RISK) -> str:
    """Return the command line that asks the same question; if options cannot express the job, it names a file."""
    words = words if risk == FITS_RISK else [*words, "--risk", f"{risk:g}"]
    options = list_job_options(job)
    arguments = ["fivefold", verb, *words, *(text for option in options for text in option)]
    named_options: dict[str, Any] = {name[2:]: value for name, value in options if name != "--set"}
    try:
        is_reproduced = load_job(settings=[value for name, value in options if name == "--set"], **named_options) == job
    except UserError:
        is_reproduced = False
    if is_reproduced:
        return shlex.join(arguments)
    return shlex.join(["fivefold", verb, *words, "--job", "job.json"]) + "    # with the job's fields, above"
