"""Records when the regions of a step begin and end on one rank, as a flat list of marks; read into spans afterwards.

    begin F0.0 · begin norm1 · end · begin attention.qkv · begin attention.q · end · …        two list appends each

Where two micro-batches run in turn (``parallel/interleave.py``) each has its own lane of nested regions. The time up to
a mark belongs to the lane that made the mark, as only one runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fivefold.layout.schedule.action import Action
from fivefold.results.spans import Message, RankStep, Span, SpanKind
from fivefold.step import sent_bytes
from fivefold.trainer.measure.clock import Clock
from fivefold.trainer.parallel.interleave import Interleaver
from fivefold.trainer.parallel.mesh import traffic_axis

END = -2  # code of the end of a region; with the lane's bit −2 or −1


class Label(NamedTuple):
    """What a region is."""

    kind: SpanKind
    name: str
    way: str = ""
    action: Action | None = None


class Marks(NamedTuple):
    """What was recorded in one step; read only when the run is over, as that takes as long as many operations."""

    step: int
    moments: list[float]  # of each mark, on the rank's own clock
    codes: list[int]
    messages: list[Heard]

    @property
    def seconds(self) -> float:
        """Wall time of the step."""
        return self.moments[-1] - self.moments[0]


class Recorder:
    """Marks of one rank. ``interleaver``: tells the lanes apart."""

    def __init__(self, clock: Clock, *, interleaver: Interleaver | None = None) -> None:
        self.clock, self.interleaver = clock, interleaver
        self._mark = clock.mark
        self._marks: list[Any] = []
        self._codes: list[int] = []
        self._labels: list[Label] = []
        self._codes_of: dict[Label, int] = {}
        self._messages: list[Heard] = []

    def label(self, kind: SpanKind, name: str, way: str = "", action: Action | None = None) -> int:
        """The code of a label."""
        label = Label(kind, name, way, action)
        code = self._codes_of.get(label)
        if code is None:
            code = self._codes_of[label] = 2 * len(self._labels)
            self._labels.append(label)
        return code

    def begin(self, label: int) -> None:
        """A region begins."""
        self._codes.append(label if self.interleaver is None else label + self.interleaver.running)
        self._marks.append(self._mark())

    def end(self) -> None:
        """The innermost region ends."""
        self._marks.append(self._mark())
        self._codes.append(END if self.interleaver is None else END + self.interleaver.running)

    def put_off(self) -> int:
        """The label of work that is put off until W: that of the operation in which it is, if one has just begun."""
        code = self._codes[-1]
        around = self._labels[code >> 1] if code >= 0 else None
        if around is None or around.kind != "op":
            return self.label("call", "weights", "weight")
        return self.label("op", around.name, "weight")

    def wrap(self, label: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as a region."""

        def timed(*inputs: Any, **options: Any) -> Any:
            self.begin(label)
            try:
                return function(*inputs, **options)
            finally:
                self.end()

        return timed

    def post(
        self, axis: str, ranks: tuple[int, ...], collective: str, payload: int,
        *, to: tuple[int, ...] = (), source: tuple[int, ...] = (),
    ) -> Heard:  # fmt: skip
        """A message is about to be started (``parallel/listener.py``)."""
        name = f"{traffic_axis(axis)} {collective}"
        heard = Heard(self, self.label("wait", name), axis, ranks, collective, payload, to, source)
        self._messages.append(heard)
        heard.begun = self.here()
        self.begin(self.label("post", name))
        return heard

    def here(self) -> int:
        """Index of the next mark."""
        return len(self._marks)

    def cut(self, step: int) -> Marks:
        """Return all marks and drop them: the first and the last are of the step itself."""
        found = Marks(step, self.clock.seconds(self._marks), self._codes, self._messages)
        self._marks, self._codes, self._messages = [], [], []
        return found

    def read(self, marks: Marks, *, offset: float) -> RankStep:
        """The spans and messages of a step. ``offset``: to add to the clock."""
        begin = marks.moments[0]
        reader = _Reader(self._labels, [each - begin for each in marks.moments])
        for at, code in enumerate(marks.codes):
            reader.add(at, code)
        messages = tuple(heard.message(reader) for heard in marks.messages if heard.ended >= 0)
        return RankStep(marks.step, begin + offset, reader.spans(), messages)


class Heard:
    """A message while it is listened to: indices of its marks."""

    __slots__ = ("about", "begun", "early", "ended", "label", "recorder", "started", "waiting")

    def __init__(self, recorder: Recorder, label: int, *about: Any) -> None:
        self.recorder, self.label, self.about = recorder, label, about
        self.begun = self.started = self.waiting = self.ended = -1
        self.early = False

    def posted(self) -> None:
        """The call that starts it has returned."""
        self.started = self.recorder.here()
        self.recorder.end()

    def waits(self, completed: bool) -> None:
        """The rank begins to wait for it."""
        self.early, self.waiting = completed, self.recorder.here()
        self.recorder.begin(self.label)

    def done(self) -> None:
        """The wait is over."""
        self.ended = self.recorder.here()
        self.recorder.end()

    def message(self, reader: _Reader) -> Message:
        """As data."""
        axis, ranks, collective, payload, to, source = self.about
        count = len(to) if collective == "p2p" else 1
        begun, posted, waits, done = (reader.seconds[at] for at in (self.begun, self.started, self.waiting, self.ended))
        sent = sent_bytes(collective, payload=payload, ranks=len(ranks))
        return Message(
            traffic_axis(axis), axis, ranks, collective, payload, sent, count, to, source, begun, posted, waits,
            done, self.early, reader.begun[self.waiting],
        )  # fmt: skip


class _Reader:
    """Nests the regions of a list of marks and adds up the seconds that each has to itself."""

    def __init__(self, labels: list[Label], seconds: list[float]) -> None:
        self.labels, self.seconds = labels, seconds
        self.begun: dict[int, int] = {}  # mark → index of the region that it begins
        self._rows: list[list[Any]] = []  # label, start, end, own, within
        self._open: tuple[list[int], list[int]] = ([], [])

    def add(self, at: int, code: int) -> None:
        """Read mark ``at``."""
        lane, now = code & 1, self.seconds[at]
        stack = self._open[lane]
        inside = stack[-1] if stack else self._pair() if lane else -1
        if inside >= 0:
            self._rows[inside][3] += now - self.seconds[at - 1]
        if code < 0:
            self._rows[stack.pop()][2] = now
            return
        self.begun[at] = len(self._rows)
        stack.append(len(self._rows))
        self._rows.append([self.labels[code >> 1], now, now, 0.0, inside])

    def _pair(self) -> int:
        """Index of the open action, in whose first lane the other has begun."""
        return next(index for index in reversed(self._open[0]) if self._rows[index][0].action is not None)

    def spans(self) -> tuple[Span, ...]:
        """Every region, in order of start."""
        found = []
        for label, start, end, own, within in self._rows:
            of, span = label.action, Span(label.kind, label.name, start, end, way=label.way, own=own, within=within)
            if of is not None:
                span = span._replace(
                    stage=of.stage, micro_batch=of.micro_batch, backward_stage=of.backward_stage,
                    backward_micro_batch=of.backward_micro_batch,
                )  # fmt: skip
            found.append(span)
        return tuple(found)
