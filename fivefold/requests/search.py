"""The options of a search: which layouts count as equal, how much memory they may use, what else is tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.errors import UserError
from fivefold.requests.commands import UNRANKABLE_DIFFERENCE, SearchRequest
from fivefold.requests.words import parse_bytes
from fivefold.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.results.search_result import By, Finalist, SearchResult, Walk
    from fivefold.stack.spec import Reduce


def build_request(**fields: Any) -> SearchRequest:
    """Return the request of a function; fields that are not given have the defaults of the command."""
    return SearchRequest.model_construct(**{"model": "", "machine": ""} | fields)


def resolve_tolerance(request: SearchRequest) -> float | None:
    """Return the share of the best time within which layouts count as equal; None for a ranking only."""
    return None if request.exact else UNRANKABLE_DIFFERENCE if request.within is None else request.within


def limit_memory(machine: Machine, memory: str | None) -> Machine:
    """Return the machine with its chips limited to ``memory``; raises ``UserError`` if they have less."""
    if memory is None:
        return machine
    limit = parse_bytes(memory, option="--memory")
    capacity_bytes = machine.chip.memory_bytes
    if not 0 < limit <= capacity_bytes:
        hint = "" if limit <= 0 else f"; for a larger card write {machine.name.split()[0]}:{machine.ranks} memory=…"
        raise UserError(f"--memory {memory}: a rank of {machine.name} has {show_bytes(capacity_bytes)}{hint}")
    return machine.replace(chip=machine.chip.replace(memory_bytes=limit))


def list_other_reduces(job: Job) -> tuple[Reduce, ...]:
    """Return the other frequencies of gradient reduction to try, only for the trainer and if the job sets none."""
    return ("step",) if job.stack.is_own_trainer and job.stack.reduce == "micro_batch" else ()


def walk(request: SearchRequest, model: Model, machine: Machine, job: Job) -> Walk:
    """Try one change at a time from the layout that the request keeps."""
    from fivefold.layout.spec import Layout
    from fivefold.layout.where import Where
    from fivefold.planner.predict import get_planner
    from fivefold.planner.search.neighbours import walk as run

    if request.by == "robust":
        raise UserError("`--keep` compares changes by time or memory only; drop --by robust, or --keep")
    objective: By = "memory" if request.by == "memory" else "time"
    start = Layout.parse(request.keep or "", machine=machine)
    return run(get_planner(model, machine, job, request.risk), start, by=objective, where=Where.parse(request.where))


def search_layouts(request: SearchRequest, model: Model, machine: Machine, job: Job, **options: Any) -> SearchResult:
    """Search the best layouts of one machine; ``options`` of ``planner.search.search`` override those of the request.

    ``machine`` has the price and the memory of the request.
    """
    from fivefold.layout.where import Where
    from fivefold.planner.compare import with_precision
    from fivefold.planner.search import search as run

    arguments: dict[str, Any] = {
        "by": request.by,
        "top": request.top,
        "levels": request.front,
        "within": resolve_tolerance(request),
        "exact": request.exact,
        "where": Where.parse(request.where),
        "two_dimensional": request.two,
        "risk": request.risk,
        "recipes": [with_precision(job, name).precision for name in request.also],
        "reduces": list_other_reduces(job),
    }
    return run(model=model, machine=machine, job=job, **arguments | options)


def search_with_progress(
    request: SearchRequest, model: Model, machine: Machine, job: Job, *, measure: int = 0, **options: Any
) -> SearchResult:
    """Search as ``search_layouts`` does, with a progress bar.

    ``measure``: how many of the best are also trained for a few steps.
    """
    from fivefold.rendering.progress import show_progress

    best_text = ""

    def on_improved(layout: str, score: float) -> None:
        nonlocal best_text
        score_text = {"time": show_seconds(score), "memory": show_bytes(score)}.get(request.by, "")
        best_text = f", best so far {score_text} {layout}"

    with show_progress("searching") as progress:
        result = search_layouts(
            request,
            model,
            machine,
            job,
            report=lambda done, total: progress(f"layouts{best_text}", done, total),
            improved=on_improved,
            **options,
        )
    if measure and result.best:
        finalists, _ = measure_best(model, machine, job, count=measure)
        return result.replace(finalists=tuple(finalists))
    return result


def measure_best(model: Model, machine: Machine, job: Job, *, count: int) -> tuple[list[Finalist], Machine]:
    """Return the best layouts by measured time.

    The measured times of blocks, embedding and head are stored in the machine file of ``local``.
    """
    from fivefold.machine.toml import read, write
    from fivefold.rendering.progress import show_progress
    from fivefold.requests.machines import find_local_machine_file
    from fivefold.sweeps.finalists import measure_best

    with show_progress("measuring") as progress:
        finalists, measured_machine = measure_best(model=model, machine=machine, job=job, count=count, report=progress)
    path = find_local_machine_file()
    if path.exists() and machine.calibration is not None and machine.calibration == read(path).calibration:
        write(read(path).replace(calibration=measured_machine.calibration), path)
    return finalists, measured_machine
