"""What a search is asked besides its nouns: which layouts are alike, what memory they may take, what else is tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fivefold.record import Mistake
from fivefold.requests.commands import ALIKE, SearchRequest
from fivefold.requests.words import parse_bytes
from fivefold.step import FITS_RISK
from fivefold.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.where import Where
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.results.objectives import By
    from fivefold.results.search_result import Finalist, SearchResult, Walk
    from fivefold.stack.spec import Reduce


def admitted(where: str) -> Where:
    """The constraints of ``--where``."""
    from fivefold.layout.where import Where

    return Where.parse(where)


def alike_within(request: SearchRequest) -> float | None:
    """Return the share of the best time within which layouts are alike; None for the ranking alone."""
    return None if request.exact else ALIKE if request.within is None else request.within


def limited(machine: Machine, memory: str | None) -> Machine:
    """The machine with chips of ``memory``; a ``Mistake`` if they have not so much."""
    if memory is None:
        return machine
    limit, has = parse_bytes(memory, option="--memory"), machine.chip.memory_bytes
    if not 0 < limit <= has:
        more = "" if limit <= 0 else f"; for a larger card write {machine.name.split()[0]}:{machine.ranks} memory=…"
        raise Mistake(f"--memory {memory}: a rank of {machine.name} has {show_bytes(has)}{more}")
    return machine.replace(chip=machine.chip.replace(memory_bytes=limit))


def others(job: Job) -> tuple[Reduce, ...]:
    """How often else our engine could reduce gradients; another software does as it does, and a job as it says."""
    return ("step",) if (job.stack.name, job.stack.reduce) == ("fivefold", "micro_batch") else ()


def walk(
    model: Model, machine: Machine, job: Job, *, start: str, by: str, where: Where, risk: float = FITS_RISK
) -> Walk:
    """One change at a time from the layout ``start``."""
    from fivefold.layout.spec import Layout
    from fivefold.planner.predict import planner
    from fivefold.planner.search.neighbours import walk as run

    if by == "robust":
        raise Mistake("--keep ranks changes by time or memory; drop --by robust, or --keep")
    least: By = "memory" if by == "memory" else "time"
    return run(planner(model, machine, job, risk), Layout.parse(start), by=least, where=where)


def found_layouts(
    model: Model, machine: Machine, job: Job, *, also: Sequence[str], measure: int = 0, **options: Any
) -> SearchResult:  # fmt: skip
    """What ``plan.search`` finds with ``options``, with a bar on the terminal.

    ``also``: other precisions to try; ``measure``: of the best, how many are trained for a few steps.
    """
    from fivefold.job import recipe
    from fivefold.planner.search import search as run
    from fivefold.rendering.progress import bar

    best = ""

    def improved(layout: str, score: float) -> None:
        nonlocal best
        said = {"time": show_seconds(score), "memory": show_bytes(score)}.get(options.get("by", "time"), "")
        best = f", best so far {layout} {said}"

    with bar("searching") as progress:
        found = run(
            model=model, machine=machine, job=job, recipes=[recipe(name) for name in also], reduces=others(job),
            report=lambda done, total: progress(f"layouts{best}", done, total), improved=improved, **options,
        )  # fmt: skip
    if measure and found.best:
        finalists, _ = measured_best(model, machine, job, count=measure)
        return found.replace(finalists=tuple(finalists))
    return found


def measured_best(model: Model, machine: Machine, job: Job, *, count: int) -> tuple[list[Finalist], Machine]:
    """The best layouts by measured seconds; what was measured of their units is kept where ``local`` is."""
    from fivefold.machine.toml import read, write
    from fivefold.rendering.progress import bar
    from fivefold.requests.machines import local_file
    from fivefold.sweeps.finalists import measure_best

    with bar("measuring") as progress:
        found, known = measure_best(model=model, machine=machine, job=job, count=count, report=progress)
    path = local_file()
    if path.exists() and machine.calibration is not None and machine.calibration == read(path).calibration:
        write(read(path).replace(calibration=known.calibration), path)
    return found, known
