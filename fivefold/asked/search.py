"""What a search is asked besides its nouns: which layouts are alike, what memory they may take, what else is tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.asked.words import parse_bytes
from fivefold.record import Mistake
from fivefold.units import show_bytes

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.search_result import By, Walk
    from fivefold.layout.where import Where
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.stack.spec import Reduce

ALIKE = 0.02  # share of the best time by which layouts differ that no prediction tells apart


def limited(machine: Machine, memory: str | None) -> Machine:
    """The machine with as much memory as gives a layout ``memory`` of it; a ``Mistake`` if it has not so much."""
    from fivefold.plan.count.memory.allocator import room_bytes, with_room

    if memory is None:
        return machine
    limit, room = parse_bytes(memory, option="--memory"), room_bytes(machine)
    if not 0 < limit <= room:
        more = "" if limit <= 0 else f"; for a larger card write {machine.name.split()[0]}:{machine.ranks} memory=…"
        raise Mistake(f"--memory {memory}: a rank of {machine.name} has room for {show_bytes(room)}{more}")
    return with_room(machine, limit)


def others(job: Job) -> tuple[Reduce, ...]:
    """How often else our engine could reduce gradients; another software does as it does, and a job as it says."""
    return ("step",) if (job.stack.name, job.stack.reduce) == ("fivefold", "micro_batch") else ()


def walk(model: Model, machine: Machine, job: Job, *, start: str, by: str, where: Where) -> Walk:
    """One change at a time from the layout ``start``."""
    from fivefold.layout.spec import Layout
    from fivefold.plan.predict import planner
    from fivefold.plan.search.neighbours import walk as run

    if by == "robust":
        raise Mistake("--keep ranks changes by time or memory; drop --by robust, or --keep")
    least: By = "memory" if by == "memory" else "time"
    return run(planner(model, machine, job), Layout.parse(start), by=least, where=where)
