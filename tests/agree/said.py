"""What is compared, and what ranks send, added up by axis and collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.traffic import list_messages
from fivefold.step import count_sent_bytes

Said = dict[tuple[str, str], tuple[int, int]]  # (axis, collective) → messages and bytes


class Compared(Protocol):
    """A model, a layout and a job."""

    @property
    def model(self) -> Model: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def job(self) -> Job: ...


def add_up(lines: Iterable[tuple[str, str, int, int]]) -> Said:
    """Add up lines of axis, collective, messages and bytes."""
    count: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for axis, collective, times, size in lines:
        count[axis, collective] += times
        sent[axis, collective] += size
    return {key: (count[key], sent[key]) for key in count if count[key]}


def count_planned(counts: Counts, layout: Layout, stages: Iterable[tuple[int, ...]], *, ranks: int = 1) -> Said:
    """Add up what the planner expects of ``ranks`` ranks of each pipeline rank, whose stages are given."""
    return add_up(
        (
            message.axis,
            message.collective,
            message.times * ranks,
            message.times * ranks * count_sent_bytes(message.collective, payload=message.payload, ranks=message.ranks),
        )
        for held in stages
        for message in list_messages(counts, layout, chunks=held)
    )
