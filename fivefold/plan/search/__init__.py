"""The best layouts first, and why the others lost: every legal layout, pruned by bounds that cannot be wrong.

The answer is that of trying them all (``branch_and_bound.py``). Equal times are ranked by memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fivefold.job import Job, Recipe
from fivefold.layout.legal import unfit
from fivefold.layout.search_result import By, Found, Miss, Point, Ranked
from fivefold.layout.spec import divisors
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.plan.predict import Planner
from fivefold.plan.search.bounds import Bounds
from fivefold.plan.search.branch_and_bound import Candidate, Hunt, Report
from fivefold.plan.search.rejections import miss
from fivefold.plan.search.space import Space
from fivefold.record import Mistake

MISSES = 3  # that are shown where nothing fits


def search(
    *,
    model: Model,
    machine: Machine,
    job: Job,
    by: By = "time",
    top: int = 10,
    recipes: Sequence[Recipe] = (),
    worlds: Sequence[int] = (),
    levels: int = 1,
    report: Report | None = None,
    **narrowed: Any,
) -> Found:
    """The ``top`` layouts by time, cost or memory, and the fastest under each of ``levels`` shares of the memory.

    ``recipes``: precisions to try beside the job's. ``worlds``: numbers of ranks; all of the machine, and by cost
    every number that divides it. ``narrowed``: as ``Space`` takes them.
    """
    begin = time.perf_counter()
    if (reason := next(unfit(model, job), None)) is not None:
        raise Mistake(reason)
    jobs = [job, *(job.replace(precision=recipe) for recipe in recipes if recipe != job.precision)]
    worlds = worlds or (divisors(machine.ranks)[::-1] if by == "cost" else (machine.ranks,))
    spaces = [(each, Space(model, each, world=world, **narrowed)) for each in jobs for world in worlds]
    if not any(len(space.stems.dp) for _, space in spaces):
        raise Mistake(_no_layout(model, machine, job))
    hunt = Hunt(machine, by=by, top=top, levels=levels, report=report)
    hunt.total = sum(int(space.leaves_of(space.stems).sum()) for _, space in spaces)
    planners = _through(hunt, spaces, model=model, machine=machine)
    best = sorted(hunt.best, key=lambda found: found[:4])
    return Found(
        by=by,
        best=tuple(_ranked(found, machine) for found in best),
        front=tuple(_front(hunt.fitting)),
        reasons=hunt.losses.reasons(machine, best[0].estimate if best else None),
        misses=() if best else tuple(_misses(spaces, planners, model=model, machine=machine)),
        tried=hunt.total,
        evaluated=hunt.evaluated,
        seconds=time.perf_counter() - begin,
    )


def fits_any(*, model: Model, machine: Machine, job: Job) -> bool:
    """Whether any layout over all ranks fits: as ``search`` would find one, but it ends with the first."""
    space = Space(model, job, world=machine.ranks)
    hunt = Hunt(machine, by="memory", top=1, levels=0, any_will_do=True)
    _through(hunt, [(job, space)], model=model, machine=machine)
    return bool(hunt.best)


def _through(
    hunt: Hunt, spaces: Sequence[tuple[Job, Space]], known: Mapping[Job, Planner] | None = None, *, model: Model,
    machine: Machine,
) -> dict[Job, Planner]:  # fmt: skip
    """With a planner for each job, which takes over what those ``known`` have counted."""
    planners: dict[Job, Planner] = {}
    for job, space in spaces:
        if len(space.stems.dp):
            if job not in planners:
                counts = known[job].counts if known else None
                planners[job] = Planner(model=model, machine=machine, job=job, counts=counts)
            hunt.sweep(Bounds(planners[job], space))
    return planners


def _misses(
    spaces: Sequence[tuple[Job, Space]], planners: Mapping[Job, Planner], *, model: Model, machine: Machine
) -> Iterator[Miss]:
    """The smallest layouts, as if there were memory enough."""
    endless = machine.replace(chip=machine.chip.replace(memory_bytes=2**60))
    hunt = Hunt(endless, by="memory", top=MISSES, levels=0)
    _through(hunt, spaces, planners, model=model, machine=endless)
    for found in hunt.best:
        yield miss(found.estimate, model=model, machine=machine, job=found.planner.job)


def _front(found: Sequence[Candidate]) -> Iterator[Point]:
    """From the fastest to the smallest."""
    smallest = None
    for each in sorted(found, key=lambda each: (each.seconds, each.peak_bytes)):
        if smallest is None or each.peak_bytes < smallest:
            smallest = each.peak_bytes
            yield Point(
                layout=each.text,
                precision=each.planner.job.precision.name,
                world=each.estimate.layout.world,
                memory_bytes=each.peak_bytes,
                step_seconds=each.seconds,
            )


def _ranked(found: Candidate, machine: Machine) -> Ranked:
    step = found.planner.step(found.estimate.layout)
    hours = step.time.step_seconds * step.world / 3600
    price = machine.dollars_per_rank_hour
    return Ranked(step=step, gpu_hours=hours, dollars=None if price is None else hours * price)


def _no_layout(model: Model, machine: Machine, job: Job) -> str:
    ranks = machine.ranks
    near = -(-job.global_batch // ranks) * ranks
    return (
        f"no layout spreads {model.name} with global batch {job.global_batch} over all {ranks} ranks of "
        f"{machine.name}; try gbs {near}, or fewer ranks"
    )
