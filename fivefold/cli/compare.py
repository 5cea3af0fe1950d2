"""``fivefold compare``: several layouts, machines, stacks, precisions or run files, side by side. No torch."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.job_options import takes_job
from fivefold.cli.options import AsJson, load_machine, say, show
from fivefold.record import Mistake

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.plan.compare import Case

FILES = (".toml", ".json")


@takes_job
def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL MACHINE… LAYOUT… | RUN.toml…", help="One model, machines, layouts; or run files."
        ),
    ],
    job: Job,
    stacks: Annotated[str, typer.Option(help="Several softwares: fivefold,megatron-core.")] = "",
    precisions: Annotated[str, typer.Option(help="Several precisions: bf16,fp8.")] = "",
    charts: Annotated[Path | None, typer.Option("--charts", help="Write time.svg and memory.svg there.")] = None,
    json: AsJson = False,
) -> None:
    """Predicted steps side by side: every layout on every machine, by every software, in every precision."""
    from fivefold.plan.compare import compare as run
    from fivefold.show import charts as pictures
    from fivefold.show import comparison as page

    found = run(cases(words, job, stacks=stacks, precisions=precisions))
    show(found.model_dump_json(indent=2) if json else page.page(found))
    if charts:
        if charts.exists() and not charts.is_dir():
            raise Mistake(f"--charts {charts}: is a file; name a folder")
        charts.mkdir(parents=True, exist_ok=True)
        for name, chart in page.charts(found).items():
            pictures.save(chart, (charts / name).with_suffix(".svg"))
        say(f"wrote time.svg and memory.svg to {charts}")


def cases(words: list[str], job: Job, *, stacks: str, precisions: str) -> list[Case]:
    """What is compared: run files, or every combination of what the words name."""
    return _run_files(words, job, stacks + precisions) or _cases(words, job, stacks, precisions)


def _cases(words: list[str], job: Job, stacks: str, precisions: str) -> list[Case]:
    """Every combination of the machines, layouts, softwares and precisions."""
    from fivefold.layout.spec import Layout
    from fivefold.machine.catalog import is_named
    from fivefold.model.catalog import resolve
    from fivefold.plan.compare import Case, in_precision, run_by

    names = [word for word in words[1:] if is_named(word)]
    texts = [word for word in words[1:] if not is_named(word)]
    if not names or not texts:
        lacks = "machine" if not names else "layout"
        raise Mistake(f"compare needs a {lacks}: fivefold compare llama3-8b h100:8 'dp8 zero1' 'dp4 tp2 zero1'")
    model, machines = resolve(words[0]), [load_machine(name) for name in names]
    layouts = [Layout.parse(text) for text in texts]
    jobs = [run_by(job, stack) for stack in _list(stacks, "--stacks")] or [job]
    jobs = [in_precision(each, name) for each in jobs for name in _list(precisions, "--precisions")] or jobs
    return [Case(model, machine, layout, each) for each, machine, layout in product(jobs, machines, layouts)]


def _run_files(words: list[str], job: Job, others: str) -> list[Case]:
    """What run files say, if all words are such files: with ``layout = "auto"`` the fastest that fits."""
    from fivefold.cli.plan import fastest
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve
    from fivefold.plan.compare import Case
    from fivefold.train.run import Run

    if not all(Path(word).suffix in FILES for word in words):
        return []
    if job != Job() or others:
        raise Mistake("a run file says its own job; drop the options, or compare a model, machines and layouts")
    found = []
    for run in (Run.load(Path(word)) for word in words):
        model, machine = resolve(run.model), load_machine(run.machine)
        layout = fastest(model, machine, run.job) if run.layout == "auto" else Layout.parse(run.layout)
        found.append(Case(model, machine, layout, run.job))
    return found


def _list(text: str, option: str) -> list[str]:
    if text and not all(word.strip() for word in text.split(",")):
        raise Mistake(f"{option} {text!r} is not a list; write such as a,b")
    return [word.strip() for word in text.split(",") if word.strip()]
