"""One published run in our nouns: what was trained how, and what its authors measured.

A source's reader (one file each) turns its rows into cases. Facts of a software are those of its named stack
(``fivefold/stack``); the reader states what its runs did otherwise. The numbers of the price model are not its own
(docs/how-a-step-costs/constants.md).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple
from zlib import crc32

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine import catalog
from fivefold.machine.spec import Collective, Machine
from fivefold.model.spec import Model

Counter = Literal["allocated", "reserved", "driver"]
# reserved: by the allocator, of a row that also prints its peak; adapters: the peak of a run that trains them
Quantity = Literal["peak", "reserved", "states", "activations", "adapters"]

DATA = Path(__file__).parent / "data"


class Case(NamedTuple):
    """``rivals`` names those among which a ranking makes sense."""

    source: str  # the stem of its data file
    row: str
    model: Model
    machine: Machine
    layout: Layout
    job: Job
    step_seconds: float | None = None
    memory_bytes: float | None = None
    memory: Counter = "allocated"
    rivals: str = ""
    quantity: Quantity = "peak"  # of ``memory_bytes``; the last two of the first stage
    left_out: tuple[tuple[str, str], ...] = ()  # what else the row measured, as (quantity, the rule that leaves it out)
    held_out: bool = False  # no constant may be set on it, and no error learned from it
    listed: bool = False  # weights and gradients are sent one by one, as lists (``listed_weights.py``)
    composed: bool = False  # no step was run: its source's simulator added up kernels that it had timed alone
    release: str = ""  # of its software, as the source names it
    site: str = ""  # whose cluster it ran on, where a source has runs of several

    def with_reserved(self, reserved_bytes: float) -> Iterator[Case]:
        """Yield a second case of the row, of the bytes that the allocator reserved, if the row prints them."""
        if reserved_bytes:
            yield self._replace(
                row=f"{self.row} reserved",
                step_seconds=None,
                memory_bytes=reserved_bytes,
                memory="reserved",
                quantity="reserved",
                left_out=(),
            )


class Message(NamedTuple):
    """One published collective: its seconds on a full tensor of ``payload`` bytes (docs/notation.md §5)."""

    source: str
    row: str
    machine: Machine  # all of its ranks take part
    collective: Collective
    payload: int
    seconds: float
    held_out: bool = False


class Excluded(NamedTuple):
    """A row that is not scored, and the rule that says so."""

    source: str
    row: str
    rule: str


def is_held_out(row: str) -> bool:
    """Return whether a row is held out of every fit: the CRC-32 of its id is even (half of each source)."""
    return crc32(row.encode()) % 2 == 0


def rows(source: str) -> Iterator[dict[str, str]]:
    """Yield the rows of one data file, a cell that is missing being empty."""
    with (DATA / f"{source}.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield {key: (cell or "").strip() for key, cell in row.items() if key}


@lru_cache(maxsize=512)
def machine(chip: str, gpus: int, *, nic_gigabits: float | None = None, source: str = "") -> Machine:
    """Return ``gpus`` of the catalog's ``chip``.

    ``nic_gigabits`` per GPU where the source's cluster has another network.
    """
    resolved = catalog.resolve(f"{chip}:{gpus}", local=Path())
    if nic_gigabits is None:
        return resolved
    far = resolved.links[-1].replace(bandwidth=nic_gigabits * 1e9 / 8, source=source)
    return resolved.replace(links=(*resolved.links[:-1], far))
