"""A process for long work: reads a question as JSON from stdin, writes one line of JSON per event.

    {"begun": true} {"progress": [done, total, doing]} … {"result": …}        or {"mistake": "one line"}

A search and a sweep also send what they find, as they find it: {"finds": […]}, of a search [score, layout, seconds,
bytes, precision, reduce] of each layout that fits, of a sweep its rows. They report that they have begun: from then on
SIGINT ends them early, with what has been found so far as the result, or, if nothing has been found, with {"stopped":
"one line"}.
A memory limit protects the computer from unreasonable questions.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, get_args

from fivefold.errors import RunFailure, StopSignal, UserError
from fivefold.machine.catalog import resolve
from fivefold.requests.commands import Question
from fivefold.requests.offers import apply_prices
from fivefold.results.sweep_row import SweepRow
from fivefold.web import answers
from fivefold.web.answers import Report
from fivefold.web.dropped import DroppedFiles
from fivefold.web.folder import ServedFolder
from fivefold.web.question import (
    ChosenQuestion,
    DryrunQuestion,
    ExplainQuestion,
    PlaybookQuestion,
    RatiosQuestion,
    ResolvedRequest,
    SearchQuestion,
    SweepStart,
    TraceQuestion,
    parse_layout,
)

if TYPE_CHECKING:
    from fivefold.planner.search.incumbents import EvaluatedLayout

MEMORY_BYTES = 24 * 2**30  # limit of the address space
EVERY_SECONDS = 0.1  # between two reports of progress


def answer_from_stdin() -> None:
    """Answer the question on stdin with the command in the first argument."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    request = json.load(sys.stdin)
    verb = sys.argv[1]
    progress = ProgressReporter()
    if verb in SEARCHES:
        signal.signal(signal.SIGINT, progress.stop)
        write_event(begun=True)
    try:
        result = VERBS[verb](request, progress)
        progress.send_finds()
        write_event(result=result)
    except StopSignal:
        write_event(stopped="Stopped before any layout was found that fits.")
    except (UserError, RunFailure) as error:
        write_event(mistake=str(error))
    except MemoryError:
        write_event(
            mistake=f"needs more than the {MEMORY_BYTES >> 30} GiB that a question of the page may take; ask for less"
        )


class ProgressReporter:
    """Reports progress at intervals, and ends the work there if it is to stop."""

    def __init__(self) -> None:
        self.last, self.doing, self.is_stopping = 0.0, "", False
        self.seen: set[tuple[str, str, str]] = set()
        self.finds: list[Any] = []

    def stop(self, *_: object) -> None:
        """Raise ``StopSignal`` at the next report: the handler of a signal."""
        self.is_stopping = True

    def __call__(self, done: int, total: int, doing: str = "") -> None:
        """Report ``done`` of ``total``; ``doing``: the current activity, where it says more than the numbers."""
        if self.is_stopping:
            raise StopSignal("SIGINT")
        if monotonic() - self.last >= EVERY_SECONDS or doing != self.doing:
            self.last, self.doing = monotonic(), doing
            write_event(progress=[done, total, doing])
            self.send_finds()

    def on_fit(self, evaluated: EvaluatedLayout) -> None:
        """Note a layout that fits, to send it with the next report; a second search may find it again."""
        job = evaluated.planner.job
        key = (evaluated.text, job.precision.name, job.stack.reduce)
        if key not in self.seen:
            self.seen.add(key)
            self.finds.append((evaluated.score, key[0], evaluated.seconds, evaluated.peak_bytes, *key[1:]))

    def on_rows(self, rows: Sequence[SweepRow]) -> None:
        """Note rows of a sweep, to send them with the next report."""
        self.finds += (row.model_dump(exclude_defaults=True) for row in rows)

    def send_finds(self) -> None:
        """Send what was noted since the last time."""
        if self.finds:
            write_event(finds=self.finds)
            self.finds = []


def write_event(**event: Any) -> None:
    """Write one event to stdout."""
    print(json.dumps(event), flush=True)


def read_question(payload: dict[str, Any], kind: Any) -> tuple[Any, ResolvedRequest]:
    """Return the question, and the records that it names."""
    question = kind.read(payload["question"], origin="question")
    folder, local = read_folders(payload)
    return question, question.resolve(folder=folder, local=local)


def read_folders(payload: dict[str, Any]) -> tuple[ServedFolder, Path]:
    """Return the folder for files of requests, and the local machine file."""
    return ServedFolder(Path(payload["root"])), Path(payload["local"])


def search(payload: dict[str, Any], report: Report) -> Any:
    """Search: the data of ``fivefold search --json``, and the progress of each of its searches."""
    question, resolved = read_question(payload, SearchQuestion)
    (folder, local), numbers = read_folders(payload), count(1)

    def begin(name: str) -> None:
        number = next(numbers)
        report(number, 0, f"search {number}: {name}")

    result = answers.search(
        question,
        resolved,
        machine=lambda name: resolve(name, local=local, find=folder.path),
        report=report,
        done=begin,
        fitted=report.on_fit if isinstance(report, ProgressReporter) else None,
    )
    return result.model_dump(mode="json")


def ask(payload: dict[str, Any], report: Report, *, about: Question) -> Any:
    """Answer a question: the data of ``fivefold ask --json``."""
    chosen = payload | {"question": payload["question"] | {"question": about}}
    question, nouns = read_question(chosen, ChosenQuestion)
    report(0, 0, "steps are predicted")
    replies = answers.answer_question(question, nouns, folder=read_folders(payload)[0])
    return [reply.model_dump(mode="json") for reply in replies]


def plan(payload: dict[str, Any], report: Report) -> Any:
    """Plan a run: the data of ``fivefold plan --json``."""
    from fivefold.requests.playbook import build_playbook

    question, resolved = read_question(payload, PlaybookQuestion)
    plan_result = build_playbook(
        resolved.model,
        apply_prices([resolved.machine], question.price)[0],
        resolved.job,
        tokens=question.tokens,
        batch=question.batch,
        where=question.where,
        assume=question.assume,
        risk=question.risk,
        stated=resolved.stated,
    )
    return plan_result.model_dump(mode="json")


def compute_ratios(payload: dict[str, Any], report: Report) -> Any:
    """Compute the data of ``fivefold ratios --json``."""
    from fivefold.planner.ratios import compute_ratios as run

    question, (model, machine, job, *_) = read_question(payload, RatiosQuestion)
    layout = parse_layout(question.layout, machine)
    return run(model, machine=machine, layout=layout, job=job).model_dump(mode="json")


def run_dry_run(payload: dict[str, Any], report: Report) -> Any:
    """Dry-run a step: ``data`` is that of ``fivefold dryrun --json``, ``html`` its pictures."""
    from fivefold.layout.validity import refuse
    from fivefold.planner.predict import predict

    question, (model, machine, job, *_) = read_question(payload, DryrunQuestion)
    layout = question.parse_layout(machine)
    refuse(layout, model=model, job=job, machine=machine)  # before torch is loaded
    report(0, 0, "PyTorch and the training code are loaded")
    from fivefold.dry_run import dryrun as run
    from fivefold.dry_run.report import dump_dry_run
    from fivefold.web.dry_run import render_html

    def begin(done: int, total: int) -> None:
        report(done, total, f"rank {done + 1} of {total} runs its step")

    dry_run = run(model=model, machine=machine, layout=layout, job=job, progress=begin)
    report(1, 1, "the pictures are drawn")
    predicted = None if dry_run.step is None else predict(model=model, machine=machine, layout=layout, job=job)
    return {
        "data": dump_dry_run(dry_run, predicted),
        "html": render_html(dry_run, machine=machine, predicted=predicted),
    }


def sweep(payload: dict[str, Any], report: Report) -> Any:
    """Predict the rows of a sweep into a file of the folder; a stopped one writes the rows that it has.

    A file that is there already is only written if its own journal is next to it, to go on with a stopped sweep.
    """
    from fivefold.sweeps import rows_file
    from fivefold.sweeps.journal import open_journal
    from fivefold.sweeps.sweep import SweepPlan, run

    (folder, local), question = read_folders(payload), SweepStart.read(payload["question"], origin="question")
    plan = SweepPlan.from_sweep(question.read_sweep(folder=folder, local=local), local=local)
    path = folder.path(question.rows)
    journal_path = path.with_name(f"{path.name}.journal")
    rows_file.check(path)
    if path.exists() and not journal_path.exists():
        raise UserError(f"{question.rows} already exists; name another file for the rows")
    with open_journal(journal_path) as journal:
        try:
            rows = run(
                plan,
                journal,
                trials=None,
                report=lambda _, done, total: report(done, total),
                on_rows=report.on_rows if isinstance(report, ProgressReporter) else lambda _: None,
            )
        except StopSignal:
            kept = [SweepRow(**value) for values in journal.list_values("predicted") for value in values]
            rows = [*{row.name: row for row in kept}.values()]  # two texts may name one layout
            rows_file.write(rows, path)
            return {"file": question.rows, "rows": len(rows), "stopped": True}
        rows_file.write(rows, path)
        journal.drop("predicted")
    return {"file": question.rows, "rows": len(rows), "stopped": False}


def read_trace(payload: dict[str, Any], report: Report) -> Any:
    """Analyze traces: ``html`` is what ``fivefold trace`` prints."""
    return _read_files(payload, TraceQuestion, "trace", report)


def explain(payload: dict[str, Any], report: Report) -> Any:
    """Explain what a failed run left: ``html`` is what ``fivefold explain`` prints."""
    return _read_files(payload, ExplainQuestion, "explain", report)


def _read_files(payload: dict[str, Any], kind: Any, verb: str, report: Report) -> Any:
    """Read traces or failure reports, and return the HTML of the answer."""
    from fivefold.web import files

    question, resolved = read_question(payload, kind)
    dropped = DroppedFiles(Path(payload["dropped"]) if payload["dropped"] else None)
    paths = files.list_files(question, folder=read_folders(payload)[0], dropped=dropped)
    try:
        return {"html": dropped.strip_folder(getattr(files, verb)(question, resolved, paths, report))}
    except (UserError, RunFailure) as error:
        raise UserError(dropped.strip_folder(str(error))) from None


VERBS: dict[str, Callable[[dict[str, Any], Report], Any]] = {
    "search": search,
    "dryrun": run_dry_run,
    "sweep": sweep,
    "trace": read_trace,
    "explain": explain,
    "plan": plan,
    "ratios": compute_ratios,
    **{f"ask {name}": partial(ask, about=name) for name in get_args(Question)},
}
SEARCHES = ("search", "sweep")  # commands that return what they have found so far when they are stopped

if __name__ == "__main__":
    answer_from_stdin()
