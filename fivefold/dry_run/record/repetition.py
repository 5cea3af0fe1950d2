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
from fivefold.layout.schedule.action import Action, Part, list_parts
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


def shorten_row(row: Sequence[P2PStep]) -> Repetition | None:
    """Leave out as many actions of a rank's ``row`` as possible; None if too few periods are equal."""
    code_of_action: dict[Hashable, int] = {}
    action_codes = np.array(
        [code_of_action.setdefault(_shift_step(step, -step.action.micro_batch), len(code_of_action)) for step in row]
    )
    micro_batch = np.array([step.action.micro_batch for step in row])
    longest: Repetition | None = None
    for period in range(1, min(len(row) // (RUN_PERIODS + 1), MAX_PERIOD) + 1):
        shifts = np.where(
            action_codes[:-period] == action_codes[period:], micro_batch[period:] - micro_batch[:-period], 0
        )
        start = 0
        for shift, shifts_in_run in groupby(shifts.tolist()):
            length = len(list(shifts_in_run))
            copies = length // period - RUN_PERIODS
            if shift > 0 and copies * period > (longest.copies * longest.period if longest else 0):
                longest = _leave_out(row, start + RUN_PERIODS * period, period, shift, copies) or longest
            start += length
    return longest


def _leave_out(row: Sequence[P2PStep], cut: int, period: int, shift: int, copies: int) -> Repetition | None:
    """Return ``row`` without ``copies`` periods from ``cut`` on; None if the rest is not a schedule by itself.

    A schedule runs every pass once, and the same micro-batches forward and backward. The share of a stage's forwards
    that remain must be equal for all stages, as what one micro-batch costs is scaled by it.
    """
    rest = (_shift_step(step, -copies * shift) for step in row[cut + copies * period :])
    shortened = (*row[:cut], *rest)
    counts = [Counter(part for step in steps for part in list_parts(step.action)) for steps in (row, shortened)]
    forwards, backwards, weights = ({part[1:] for part in counts[1] if part[0] == kind} for kind in "FBW")
    if not forwards == backwards == weights or set(counts[1].values()) != {1}:
        return None
    full, remaining = (Counter(stage for kind, stage, _ in count if kind == "F") for count in counts)
    shares = {(remaining[stage], full[stage]) for stage in full}
    return Repetition(shortened, cut, period, shift, copies, shares.pop()) if len(shares) == 1 else None


def _shift_step(step: P2PStep, shift: int) -> P2PStep:
    """Return ``step`` with all its micro-batches ``shift`` later."""
    kind, stage, micro_batch, backward_stage, backward = step.action
    action = Action(kind, stage, micro_batch + shift, backward_stage, backward + shift if kind == "FB" else backward)
    return P2PStep(action, _shift_messages(step.post_receives, shift), _shift_messages(step.wait_sends, shift))


def _shift_messages(messages: Sequence[Part], shift: int) -> tuple[Part, ...]:
    return tuple((kind, stage, micro_batch + shift) for kind, stage, micro_batch in messages)


Label = tuple[str, int, int]  # F, B, W, an arriving message, or the time before an action; stage; micro-batch
Key = tuple[int, ...]  # of a storage: ALLOC, bytes, site, count of equal ones; of a message: START, message, count
Name = tuple[Label, Key]
Names = dict[tuple[int, int], Name]  # by (ALLOC, storage id) or (START, handle)
START_OF_STEP, END_OF_STEP = ("start", -1, -1), ("end", -1, -1)


class ActionLog:
    """Notes where on the tape of a step the parts of ``row`` begin: each F, B and W, and the time before an action."""

    def __init__(self, row: Sequence[P2PStep]) -> None:
        self._row = row
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the former step."""
        self.parts: list[tuple[int, Label, tuple[Part, ...]]] = []  # first event, label, receives posted in it
        self.ends = [0]  # event after the start of the step and after each action
        self._n_begun = 0
        self._pending_labels: list[Label] = []
        self._log_gap(0, START_OF_STEP)

    def log_action_begin(self, event: int) -> None:
        """Note that the next action of the row begins with ``event``."""
        kind, stage, micro_batch, backward_stage, backward = self._row[self._n_begun].action
        self._n_begun += 1
        self._pending_labels = [("F", stage, micro_batch), ("BW", backward_stage, backward)]
        if kind != "FB":
            self._pending_labels = [(kind, stage, micro_batch)]
        self.parts.append((event, self._pending_labels.pop(0), ()))

    def log_pass_end(self, event: int) -> None:
        """Note that an F, B or W has ended before ``event``."""
        if self._pending_labels:
            self.parts.append((event, self._pending_labels.pop(0), ()))
            return
        self.ends.append(event)
        if self._n_begun < len(self._row):
            action = self._row[self._n_begun].action
            self._log_gap(event, (f"before {action.kind}", action.stage, action.micro_batch))
        else:
            self.parts.append((event, END_OF_STEP, ()))

    def _log_gap(self, event: int, label: Label) -> None:
        self.parts.append((event, label, self._row[self._n_begun].post_receives))


def insert_copies(tape: Tape, log: ActionLog, repetition: Repetition, *, recorder: TapeRecorder) -> None:
    """Insert the periods into ``tape`` that its shortened row leaves out. Raises ``NotRepeatable``."""
    _, cut, period, shift, copies, _ = repetition
    start, middle, end = (log.ends[cut - periods_back * period] for periods_back in (2, 1, 0))
    events = list(tape)
    names = _name_storages_and_messages(events, log, cut=end, skipped_micro_batches=copies * shift)
    template = _Template(tape, events[middle:end], names, shift=shift, copies=copies, recorder=recorder)
    if template.describe(events[start:middle], periods=-1) != template.describe(events[middle:end], periods=0):
        raise NotRepeatable
    columns = np.array(tape.events, dtype=np.int64).reshape(-1, 4)
    repeated = [columns[:end], *template.list_copies(), template.translate(events[end:])]
    result = np.concatenate(repeated)
    _check_storages(columns, result)
    tape.events = array("q", result.tobytes())


def _name_storages_and_messages(
    events: Sequence[Event], log: ActionLog, *, cut: int, skipped_micro_batches: int
) -> Names:
    """Name all storages and messages.

    From event ``cut`` on, micro-batches are ``skipped_micro_batches`` later than in the log.
    """
    names: Names = {}
    counts: Counter[Hashable] = Counter()
    for (begin, label, receives), (end, *_) in pairwise([*log.parts, (len(events), END_OF_STEP, ())]):
        shift = skipped_micro_batches if begin >= cut else 0
        label = _shift_label(label, shift)
        arriving = iter(_shift_messages(receives, shift))

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


def _shift_label(label: Label, shift: int) -> Label:
    phase, stage, micro_batch = label
    return label if micro_batch < 0 else (phase, stage, micro_batch + shift)


class _Template:
    """The last period that ran: ``events`` of ``tape``, to be copied ``copies`` times, each ``shift`` later."""

    def __init__(
        self, tape: Tape, events: Sequence[Event], names: Names, *, shift: int, copies: int, recorder: TapeRecorder
    ) -> None:
        self.tape, self.events, self.names, self.shift, self.copies = tape, events, names, shift, copies
        self.numbers = {name: number for (_, number), name in names.items()}
        self.created_names = {
            kind: [names[kind, event[1]] for event in events if event[0] == kind] for kind in (ALLOC, START)
        }
        self.first_numbers = {  # of the first copy
            ALLOC: recorder.reserve_ids(copies * len(self.created_names[ALLOC])),
            START: recorder.reserve_handles(copies * len(self.created_names[START])),
        }
        positioned = [(*name, position) for group in self.created_names.values() for position, name in enumerate(group)]
        self.kinds = {(label[:2], key) for label, key, _ in positioned}
        self.positions = {
            (label[:2], key, label[2] % shift): (label[2], position) for label, key, position in positioned
        }
        if len(self.positions) < len(positioned):
            raise NotRepeatable

    def describe(self, events: Sequence[Event], *, periods: int) -> list[Hashable]:
        """Describe ``events`` without ids and as if they were ``periods`` earlier."""
        described: list[Hashable] = []
        for event in events:
            kind, first, second, _ = event
            names = tuple(self._shift_name(kind, number, -periods) for _, kind, number in _list_references(event))
            if kind == SCOPE:
                scope = self.tape.scopes[first]
                described.append((kind, scope._replace(micro_batch=scope.micro_batch - periods * self.shift)))
            elif kind == START:
                described.append((kind, second, names))
            else:
                described.append((kind, first if kind == KERNEL else 0, names))
        return described

    def _shift_name(self, kind: int, number: int, periods: int) -> Name | int:
        """Return the name of a storage or message ``periods`` later; if it is not of a micro-batch, its number."""
        label, key = self.names[kind, number]
        if (label[:2], key) not in self.kinds:
            return number
        return _shift_label(label, periods * self.shift), key

    def _find_copy_and_position(self, name: Name) -> tuple[int, int]:
        """Return the number of the copy that creates ``name`` (the template is 0, earlier periods below), and where."""
        label, key = name
        try:
            micro_batch, position = self.positions[label[:2], key, label[2] % self.shift]
        except KeyError:
            raise NotRepeatable from None
        return (label[2] - micro_batch) // self.shift, position

    def _shift_number(self, kind: int, number: int, periods: int) -> int:
        """Return the number, ``periods`` later, of a storage or message."""
        name = self._shift_name(kind, number, periods)
        if isinstance(name, int):
            return name
        copy, position = self._find_copy_and_position(name)
        if copy > 0:
            return self.first_numbers[kind] + (copy - 1) * len(self.created_names[kind]) + position
        if name not in self.numbers:
            raise NotRepeatable
        return self.numbers[name]

    def list_copies(self) -> Iterator[NDArray[np.int64]]:
        """Yield the events [n, 4] of each copy."""
        columns = np.array(self.events, dtype=np.int64).reshape(-1, 4)
        scopes = np.flatnonzero(columns[:, 0] == SCOPE)
        references = [
            (row, *reference) for row, event in enumerate(self.events) for reference in _list_references(event)
        ]
        references = [reference for reference in references if not isinstance(self._shift_name(*reference[2:], 0), int)]
        positions = [self._find_copy_and_position(self.names[reference[2:]]) for reference in references]
        origins = np.array([copy for copy, _ in positions])  # relative to the copy that refers to them
        counts = np.array([len(self.created_names[kind]) for *_, kind, _ in references])
        firsts = np.array([self.first_numbers[kind] for *_, kind, _ in references]) + [
            position for _, position in positions
        ]
        rows, event_columns = np.array([reference[:2] for reference in references]).reshape(-1, 2).T
        for copy in range(1, self.copies + 1):
            copied = columns.copy()
            copied[rows, event_columns] = firsts + (copy + origins - 1) * counts
            for reference in np.flatnonzero(copy + origins < 1):  # before the copies
                copied[rows[reference], event_columns[reference]] = self._shift_number(*references[reference][2:], copy)
            copied[scopes, 1] = [self._shift_scope(scope, copy) for scope in columns[scopes, 1].tolist()]
            yield copied

    def translate(self, events: Sequence[Event]) -> NDArray[np.int64]:
        """Return the ``events`` that ran after the period as they are after the copies."""
        columns = np.array(events, dtype=np.int64).reshape(-1, 4)
        new = {(kind, first) for kind, first, *_ in events if kind in (ALLOC, START)}
        for row, event in enumerate(events):
            for column, kind, number in _list_references(event):
                if (kind, number) not in new:
                    columns[row, column] = self._shift_number(kind, number, self.copies)
            if event[0] == SCOPE:
                columns[row, 1] = self._shift_scope(event[1], self.copies)
        return columns

    def _shift_scope(self, scope: int, periods: int) -> int:
        value = self.tape.scopes[scope]
        if value.micro_batch < 0:
            return scope
        return self.tape.scope(value._replace(micro_batch=value.micro_batch + periods * self.shift))


def _list_references(event: Event) -> list[tuple[int, int, int]]:
    """Return (column, ALLOC or START, number) of the storages and messages of an event."""
    kind, first, _, third = event
    if kind in (ALLOC, FREE):
        return [(1, ALLOC, first)]
    if kind == START:
        return [(1, START, first)] + ([(3, ALLOC, third)] if third >= 0 else [])
    return [(1, START, first)] if kind == WAIT else []


def _check_storages(executed: NDArray[np.int64], result: NDArray[np.int64]) -> None:
    """Raise ``NotRepeatable`` unless storages are freed once, after their allocation, and those that stay are equal."""

    def list_lasting(columns: NDArray[np.int64]) -> list[int]:
        """Return the sorted sizes of allocations that stay; raise ``NotRepeatable`` if frees match none."""
        allocated, freed = (np.flatnonzero(columns[:, 0] == kind) for kind in (ALLOC, FREE))
        allocated = allocated[np.argsort(columns[allocated, 1])]
        positions = np.searchsorted(columns[allocated, 1], columns[freed, 1])
        is_known = positions < len(allocated)
        if (
            not is_known.all()
            or (columns[allocated[positions], 1] != columns[freed, 1]).any()
            or (allocated[positions] > freed).any()
            or len(np.unique(positions)) < len(positions)
            or len(np.unique(columns[allocated, 1])) < len(allocated)
        ):
            raise NotRepeatable
        sizes: list[int] = np.delete(columns[allocated, 2], positions).tolist()
        return sorted(sizes)

    if list_lasting(executed) != list_lasting(result):
        raise NotRepeatable
