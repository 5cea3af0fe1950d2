"""What a search is asked besides its nouns: which layouts are alike, what memory they may take, what else is tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.asked.words import parse_bytes
from fivefold.record import Mistake
from fivefold.units import show_bytes

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.machine.spec import Machine
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
