"""Repeats equal micro-batches: a rank runs a few of them, and its tape gets the events of all.

    schedule   F0 B0 F1 B1 F2 B2 F3 B3 ... F62 B62 F63 B63
    run        F0 B0 F1 B1 F2 B2 F3 B3                          F63 and B63 run with the number 3
    tape       F0 B0 F1 B1 F2 B2, then 60 copies of the events of F2 B2, then those of F63 B63

A row of a schedule has a *period*: actions that return with later micro-batches (F B of 1F1B, 2 · pp · v actions of an
interleaved schedule). A period is copied if the events of two that ran are equal, up to ids of storages and messages.
An id stands for "the n-th storage of this size from this line in F of stage 1, micro-batch 5": in a copy that is
three periods later, the one of micro-batch 8.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.dry_run.record.recorder import TapeRecorder
from fivefold.dry_run.record.tape import ALLOC, FREE, KERNEL, SCOPE, START, WAIT, Event, Tape
from fivefold.layout.schedule.action import Action, Part, parts
from fivefold.layout.schedule.p2p import P2PStep

RUN_PERIODS = 3  # the first may differ; the second has to equal the third
MAX_PERIOD = 4096  # actions


class NotRepeatable(Exception):
    """An error: two periods differ, or storages would be freed twice or never."""


class Repetition(NamedTuple):
    """A shortened row of a schedule: before ``row[cut]``, ``copies`` periods of ``period`` actions are left out.

    ``shift``: micro-batches by which a period is later than the one before it. ``run_share``: micro-batches that each
    stage of the rank runs, and those of the full row.
    """

    row: tuple[P2PStep, ...]
    cut: int
    period: int
    shift: int
    copies: int
    run_share: tuple[int, int]


def shorten(row: Sequence[P2PStep]) -> Repetition | None:
    """Leave out as many actions of a rank's ``row`` as possible; None if too few periods are equal."""
    codes: dict[Hashable, int] = {}
    code = np.array([codes.setdefault(_move(step, -step.action.micro_batch), len(codes)) for step in row])
    micro_batch = np.array([step.action.micro_batch for step in row])
    best: Repetition | None = None
    for period in range(1, min(len(row) // (RUN_PERIODS + 1), MAX_PERIOD) + 1):
        shifts = np.where(code[:-period] == code[period:], micro_batch[period:] - micro_batch[:-period], 0)
        start = 0
        for shift, run in groupby(shifts.tolist()):
            length = len(list(run))
            copies = length // period - RUN_PERIODS
            if shift > 0 and copies * period > (best.copies * best.period if best else 0):
                best = _leave_out(row, start + RUN_PERIODS * period, period, shift, copies) or best
            start += length
    return best


def _leave_out(row: Sequence[P2PStep], cut: int, period: int, shift: int, copies: int) -> Repetition | None:
    """Return ``row`` without ``copies`` periods from ``cut`` on; None if the rest is not a schedule by itself."""
    rest = (_move(step, -copies * shift) for step in row[cut + copies * period :])
    shortened = (*row[:cut], *rest)
    counts = [Counter(part for step in steps for part in parts(step.action)) for steps in (row, shortened)]
    forwards, backwards, weights = ({part[1:] for part in counts[1] if part[0] == kind} for kind in "FBW")
    if not forwards == backwards == weights or set(counts[1].values()) != {1}:
        return None
    full, run = (Counter(stage for kind, stage, _ in count if kind == "F") for count in counts)
    shares = {(run[stage], full[stage]) for stage in full}
    return Repetition(shortened, cut, period, shift, copies, shares.pop()) if len(shares) == 1 else None


def _move(step: P2PStep, shift: int) -> P2PStep:
    """Return ``step`` with all its micro-batches ``shift`` later."""
    kind, stage, micro_batch, backward_stage, backward = step.action
    action = Action(kind, stage, micro_batch + shift, backward_stage, backward + shift if kind == "FB" else backward)
    return P2PStep(action, _later(step.post_receives, shift), _later(step.wait_sends, shift))


def _later(messages: Sequence[Part], shift: int) -> tuple[Part, ...]:
    return tuple((kind, stage, micro_batch + shift) for kind, stage, micro_batch in messages)


Label = tuple[str, int, int]  # F, B, W, an arriving message, or the time before an action; stage; micro-batch
Key = tuple[int, ...]  # of a storage: ALLOC, bytes, site, count of equal ones; of a message: START, message, count
Name = tuple[Label, Key]
Names = dict[tuple[int, int], Name]  # by (ALLOC, storage id) or (START, handle)
START_OF_STEP, END_OF_STEP = ("start", -1, -1), ("end", -1, -1)


class PartLog:
    """Notes where on the tape of a step the parts of ``row`` begin: each F, B and W, and the time before an action."""

    def __init__(self, row: Sequence[P2PStep]) -> None:
        self._row = row
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the former step."""
        self.parts: list[tuple[int, Label, tuple[Part, ...]]] = []  # first event, label, receives posted in it
        self.ends = [0]  # event after the start of the step and after each action
        self._begun = 0
        self._coming: list[Label] = []
        self._wait(0, START_OF_STEP)

    def action_begins(self, event: int) -> None:
        """Note that the next action of the row begins with ``event``."""
        kind, stage, micro_batch, backward_stage, backward = self._row[self._begun].action
        self._begun += 1
        self._coming = [("F", stage, micro_batch), ("BW", backward_stage, backward)]
        if kind != "FB":
            self._coming = [(kind, stage, micro_batch)]
        self.parts.append((event, self._coming.pop(0), ()))

    def pass_ended(self, event: int) -> None:
        """Note that an F, B or W has ended before ``event``."""
        if self._coming:
            self.parts.append((event, self._coming.pop(0), ()))
            return
        self.ends.append(event)
        if self._begun < len(self._row):
            action = self._row[self._begun].action
            self._wait(event, (f"before {action.kind}", action.stage, action.micro_batch))
        else:
            self.parts.append((event, END_OF_STEP, ()))

    def _wait(self, event: int, label: Label) -> None:
        self.parts.append((event, label, self._row[self._begun].post_receives))


def repeat(tape: Tape, log: PartLog, repetition: Repetition, *, recorder: TapeRecorder) -> None:
    """Insert the periods into ``tape`` that its shortened row leaves out. Raises ``NotRepeatable``."""
    _, cut, period, shift, copies, _ = repetition
    start, middle, end = (log.ends[cut - back * period] for back in (2, 1, 0))
    events = list(tape)
    names = _name_all(events, log, cut=end, left_out=copies * shift)
    template = _Template(tape, events[middle:end], names, shift=shift, copies=copies, recorder=recorder)
    if template.describe(events[start:middle], periods=-1) != template.describe(events[middle:end], periods=0):
        raise NotRepeatable
    columns = np.array(tape.events, dtype=np.int64).reshape(-1, 4)
    repeated = [columns[:end], *template.list_copies(), template.translate(events[end:])]
    result = np.concatenate(repeated)
    _check_storages(columns, result)
    tape.events = array("q", result.tobytes())


def _name_all(events: Sequence[Event], log: PartLog, *, cut: int, left_out: int) -> Names:
    """Name all storages and messages; from event ``cut`` on, micro-batches are ``left_out`` later than in the log."""
    names: Names = {}
    counts: Counter[Hashable] = Counter()
    for (begin, label, receives), (end, *_) in pairwise([*log.parts, (len(events), END_OF_STEP, ())]):
        later = left_out if begin >= cut else 0
        label, arriving = _label_later(label, later), iter(_later(receives, later))

        def name(label: Label, *key: int) -> Name:
            counts[label, key] += 1
            return label, (*key, counts[label, key])

        for kind, first, second, third in events[begin:end]:
            if kind == ALLOC:
                names[ALLOC, first] = name(label, ALLOC, second, third)
            elif kind == START:
                part = next(arriving, None)
                if part is None:
                    names[START, first] = name(label, START, second)
                else:
                    _, (_, size, site, _) = names[ALLOC, third]
                    arrival = f"arrival of {part[0]}", part[1], part[2]
                    names[START, first] = name(arrival, START, second)
                    names[ALLOC, third] = name(arrival, ALLOC, size, site)
    return names


def _label_later(label: Label, shift: int) -> Label:
    what, stage, micro_batch = label
    return label if micro_batch < 0 else (what, stage, micro_batch + shift)


class _Template:
    """The last period that ran: ``events`` of ``tape``, to be copied ``copies`` times, each ``shift`` later."""

    def __init__(
        self, tape: Tape, events: Sequence[Event], names: Names, *, shift: int, copies: int, recorder: TapeRecorder
    ) -> None:
        self.tape, self.events, self.names, self.shift, self.copies = tape, events, names, shift, copies
        self.numbers = {name: number for (_, number), name in names.items()}
        self.created = {
            kind: [names[kind, event[1]] for event in events if event[0] == kind] for kind in (ALLOC, START)
        }
        self.first_numbers = {  # of the first copy
            ALLOC: recorder.reserve_ids(copies * len(self.created[ALLOC])),
            START: recorder.reserve_handles(copies * len(self.created[START])),
        }
        named = [(*name, place) for group in self.created.values() for place, name in enumerate(group)]
        self.kinds = {(label[:2], key) for label, key, _ in named}
        self.places = {(label[:2], key, label[2] % shift): (label[2], place) for label, key, place in named}
        if len(self.places) < len(named):
            raise NotRepeatable

    def describe(self, events: Sequence[Event], *, periods: int) -> list[Hashable]:
        """Describe ``events`` without ids and as if they were ``periods`` earlier."""
        described: list[Hashable] = []
        for event in events:
            kind, first, second, _ = event
            names = tuple(self._moved_name(kind, number, -periods) for _, kind, number in _references(event))
            if kind == SCOPE:
                scope = self.tape.scopes[first]
                described.append((kind, scope._replace(micro_batch=scope.micro_batch - periods * self.shift)))
            elif kind == START:
                described.append((kind, second, names))
            else:
                described.append((kind, first if kind == KERNEL else 0, names))
        return described

    def _moved_name(self, kind: int, number: int, periods: int) -> Name | int:
        """Return the name of a storage or message ``periods`` later; if it is not of a micro-batch, its number."""
        label, key = self.names[kind, number]
        if (label[:2], key) not in self.kinds:
            return number
        return _label_later(label, periods * self.shift), key

    def _copy_and_place(self, name: Name) -> tuple[int, int]:
        """Return the number of the copy that creates ``name`` (the template is 0, earlier periods below), and where."""
        label, key = name
        try:
            micro_batch, place = self.places[label[:2], key, label[2] % self.shift]
        except KeyError:
            raise NotRepeatable from None
        return (label[2] - micro_batch) // self.shift, place

    def _number_in(self, kind: int, number: int, periods: int) -> int:
        """Return the number, ``periods`` later, of a storage or message."""
        name = self._moved_name(kind, number, periods)
        if isinstance(name, int):
            return name
        copy, place = self._copy_and_place(name)
        if copy > 0:
            return self.first_numbers[kind] + (copy - 1) * len(self.created[kind]) + place
        if name not in self.numbers:
            raise NotRepeatable
        return self.numbers[name]

    def list_copies(self) -> Iterator[NDArray[np.int64]]:
        """Yield the events [n, 4] of each copy."""
        columns = np.array(self.events, dtype=np.int64).reshape(-1, 4)
        scopes = np.flatnonzero(columns[:, 0] == SCOPE)
        cells = [(row, *cell) for row, event in enumerate(self.events) for cell in _references(event)]
        cells = [cell for cell in cells if not isinstance(self._moved_name(*cell[2:], 0), int)]
        places = [self._copy_and_place(self.names[cell[2:]]) for cell in cells]
        origins = np.array([copy for copy, _ in places])  # relative to the copy that refers to them
        counts = np.array([len(self.created[kind]) for *_, kind, _ in cells])
        firsts = np.array([self.first_numbers[kind] for *_, kind, _ in cells]) + [place for _, place in places]
        rows, positions = np.array([cell[:2] for cell in cells]).reshape(-1, 2).T
        for copy in range(1, self.copies + 1):
            copied = columns.copy()
            copied[rows, positions] = firsts + (copy + origins - 1) * counts
            for cell in np.flatnonzero(copy + origins < 1):  # before the copies
                copied[rows[cell], positions[cell]] = self._number_in(*cells[cell][2:], copy)
            copied[scopes, 1] = [self._scope_later(scope, copy) for scope in columns[scopes, 1].tolist()]
            yield copied

    def translate(self, events: Sequence[Event]) -> NDArray[np.int64]:
        """Return the ``events`` that ran after the period as they are after the copies."""
        columns = np.array(events, dtype=np.int64).reshape(-1, 4)
        new = {(kind, first) for kind, first, *_ in events if kind in (ALLOC, START)}
        for row, event in enumerate(events):
            for column, kind, number in _references(event):
                if (kind, number) not in new:
                    columns[row, column] = self._number_in(kind, number, self.copies)
            if event[0] == SCOPE:
                columns[row, 1] = self._scope_later(event[1], self.copies)
        return columns

    def _scope_later(self, scope: int, periods: int) -> int:
        value = self.tape.scopes[scope]
        if value.micro_batch < 0:
            return scope
        return self.tape.scope(value._replace(micro_batch=value.micro_batch + periods * self.shift))


def _references(event: Event) -> list[tuple[int, int, int]]:
    """Return (column, ALLOC or START, number) of the storages and messages of an event."""
    kind, first, _, third = event
    if kind in (ALLOC, FREE):
        return [(1, ALLOC, first)]
    if kind == START:
        return [(1, START, first)] + ([(3, ALLOC, third)] if third >= 0 else [])
    return [(1, START, first)] if kind == WAIT else []


def _check_storages(ran: NDArray[np.int64], result: NDArray[np.int64]) -> None:
    """Raise ``NotRepeatable`` unless storages are freed once, after their allocation, and those that stay are equal."""

    def list_lasting(columns: NDArray[np.int64]) -> list[int]:
        allocated, freed = (np.flatnonzero(columns[:, 0] == kind) for kind in (ALLOC, FREE))
        allocated = allocated[np.argsort(columns[allocated, 1])]
        places = np.searchsorted(columns[allocated, 1], columns[freed, 1])
        is_known = places < len(allocated)
        if (
            not is_known.all()
            or (columns[allocated[places], 1] != columns[freed, 1]).any()
            or (allocated[places] > freed).any()
            or len(np.unique(places)) < len(places)
            or len(np.unique(columns[allocated, 1])) < len(allocated)
        ):
            raise NotRepeatable
        sizes: list[int] = np.delete(columns[allocated, 2], places).tolist()
        return sorted(sizes)

    if list_lasting(ran) != list_lasting(result):
        raise NotRepeatable
