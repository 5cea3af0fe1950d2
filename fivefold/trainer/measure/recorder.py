"""Records when the regions of a step begin and end on one rank, as a flat list of marks; read into spans afterwards.

    begin F0.0 · begin norm1 · end · begin attention.qkv · begin attention.q · end · …        two list appends each

If two micro-batches run in turn (``parallel/interleave.py``), each has its own lane of nested regions. The time up to
a mark belongs to the lane that made the mark, as only one runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fivefold.layout.schedule.action import Action
from fivefold.results.spans import RankStep, Span, SpanKind, TracedMessage
from fivefold.step import count_sent_bytes
from fivefold.trainer.measure.clock import Clock
from fivefold.trainer.parallel.interleave import Interleaver
from fivefold.trainer.parallel.mesh import name_traffic_axis

END = -2  # code of the end of a region; with the lane's bit −2 or −1


class Label(NamedTuple):
    """The label of a region: kind, name, direction (forward, backward, …) and pipeline action."""

    kind: SpanKind
    name: str
    way: str = ""
    action: Action | None = None


class Marks(NamedTuple):
    """The record of one step; read only when the run is over, as reading takes as long as many operations."""

    step: int
    moments: list[float]  # of each mark, on the rank's clock
    codes: list[int]
    messages: list[RecordedEvent]

    @property
    def seconds(self) -> float:
        """Return the wall time of the step."""
        return self.moments[-1] - self.moments[0]


class SpanRecorder:
    """A recorder of the marks of one rank. ``interleaver``: tells which lane is running."""

    def __init__(self, clock: Clock, *, interleaver: Interleaver | None = None) -> None:
        self.clock, self.interleaver = clock, interleaver
        self._mark = clock.mark
        self._marks: list[Any] = []
        self._codes: list[int] = []
        self._labels: list[Label] = []
        self._codes_of: dict[Label, int] = {}
        self._messages: list[RecordedEvent] = []

    def label(self, kind: SpanKind, name: str, way: str = "", action: Action | None = None) -> int:
        """Return the code of a label, a new one for a new label. Codes are even: the last bit is that of the lane."""
        label = Label(kind, name, way, action)
        code = self._codes_of.get(label)
        if code is None:
            code = self._codes_of[label] = 2 * len(self._labels)
            self._labels.append(label)
        return code

    def begin(self, label: int) -> None:
        """Mark the beginning of a region."""
        self._codes.append(label if self.interleaver is None else label + self.interleaver.running_index)
        self._marks.append(self._mark())

    def end(self) -> None:
        """Mark the end of the innermost region."""
        self._marks.append(self._mark())
        self._codes.append(END if self.interleaver is None else END + self.interleaver.running_index)

    def deferred_label(self) -> int:
        """Return the label of work deferred until W: that of the surrounding operation, if one has just begun."""
        code = self._codes[-1]
        label = self._labels[code >> 1] if code >= 0 else None
        if label is None or label.kind != "op":
            return self.label("call", "weights", "weight")
        return self.label("op", label.name, "weight")

    def wrap(self, label: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` so that its calls are regions."""

        def call(*inputs: Any, **options: Any) -> Any:
            self.begin(label)
            try:
                return function(*inputs, **options)
            finally:
                self.end()

        return call

    def post(
        self,
        axis: str,
        ranks: tuple[int, ...],
        collective: str,
        payload: int,
        *,
        to: tuple[int, ...] = (),
        source: tuple[int, ...] = (),
    ) -> RecordedEvent:
        """Record that a message is about to be started (``parallel/listener.py``)."""
        name = f"{name_traffic_axis(axis)} {collective}"
        event = RecordedEvent(self, self.label("wait", name), axis, ranks, collective, payload, to, source)
        self._messages.append(event)
        event.begun = self.next_mark()
        self.begin(self.label("post", name))
        return event

    def next_mark(self) -> int:
        """Return the index of the next mark."""
        return len(self._marks)

    def take_marks(self, step: int) -> Marks:
        """Return all marks since the last call, and clear them. The first and the last mark the step itself."""
        marks = Marks(step, self.clock.seconds(self._marks), self._codes, self._messages)
        self._marks, self._codes, self._messages = [], [], []
        return marks

    def read(self, marks: Marks, *, offset: float) -> RankStep:
        """Read the spans and messages of a step. ``offset``: seconds to add to the clock."""
        begin = marks.moments[0]
        reader = _Reader(self._labels, [moment - begin for moment in marks.moments])
        for index, code in enumerate(marks.codes):
            reader.add(index, code)
        messages = tuple(event.message(reader) for event in marks.messages if event.ended >= 0)
        return RankStep(marks.step, begin + offset, reader.spans(), messages)


class RecordedEvent:
    """A message that is being recorded: the indices of its marks."""

    __slots__ = ("about", "begun", "early", "ended", "label", "recorder", "started", "waiting")

    def __init__(self, recorder: SpanRecorder, label: int, *about: Any) -> None:
        self.recorder, self.label, self.about = recorder, label, about
        self.begun = self.started = self.waiting = self.ended = -1
        self.early = False

    def on_launched(self) -> None:
        """Record that the call that starts it has returned."""
        self.started = self.recorder.next_mark()
        self.recorder.end()

    def on_wait_begin(self, completed: bool) -> None:
        """Record that the rank begins to wait for it."""
        self.early, self.waiting = completed, self.recorder.next_mark()
        self.recorder.begin(self.label)

    def on_wait_end(self) -> None:
        """Record that the wait is over."""
        self.ended = self.recorder.next_mark()
        self.recorder.end()

    def message(self, reader: _Reader) -> TracedMessage:
        """Return the message as data."""
        axis, ranks, collective, payload, to, source = self.about
        count = len(to) if collective == "p2p" else 1
        begin, posted, wait, end = (reader.seconds[i] for i in (self.begun, self.started, self.waiting, self.ended))
        sent = count_sent_bytes(collective, payload=payload, ranks=len(ranks))
        return TracedMessage(
            name_traffic_axis(axis),
            axis,
            ranks,
            collective,
            payload,
            sent,
            count,
            to,
            source,
            begin,
            posted,
            wait,
            end,
            self.early,
            reader.begun[self.waiting],
        )


class _Reader:
    """A reader that nests the regions of a list of marks and adds up the seconds of each outside of its children."""

    def __init__(self, labels: list[Label], seconds: list[float]) -> None:
        self.labels, self.seconds = labels, seconds
        self.begun: dict[int, int] = {}  # mark → index of the region that it begins
        self._rows: list[list[Any]] = []  # label, start, end, own, within
        self._open: tuple[list[int], list[int]] = ([], [])

    def add(self, at: int, code: int) -> None:
        """Read mark ``at``."""
        lane, now = code & 1, self.seconds[at]
        stack = self._open[lane]
        parent = stack[-1] if stack else self._pair() if lane else -1
        if parent >= 0:
            self._rows[parent][3] += now - self.seconds[at - 1]
        if code < 0:
            self._rows[stack.pop()][2] = now
            return
        self.begun[at] = len(self._rows)
        stack.append(len(self._rows))
        self._rows.append([self.labels[code >> 1], now, now, 0.0, parent])

    def _pair(self) -> int:
        """Return the index of the open action of the first lane, in which the second lane has begun."""
        return next(index for index in reversed(self._open[0]) if self._rows[index][0].action is not None)

    def spans(self) -> tuple[Span, ...]:
        """Return every region, in order of start."""
        regions = []
        for label, start, end, own, within in self._rows:
            action = label.action
            span = Span(label.kind, label.name, start, end, way=label.way, own=own, within=within)
            if action is not None:
                span = span._replace(
                    stage=action.stage,
                    micro_batch=action.micro_batch,
                    backward_stage=action.backward_stage,
                    backward_micro_batch=action.backward_micro_batch,
                )
            regions.append(span)
        return tuple(regions)
