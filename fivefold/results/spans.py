"""A step's timeline as data: what each rank runs when (spans), its messages, and its live bytes over time (levels).

    rank 0   F0.0  F0.1         BW0.0  BW0.1  reduce  update
    rank 1         F1.0  BW1.0  F1.1   BW1.1  reduce  update

The planner, a dry run or the trace of a real run produces it; ``show`` draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

# actions of the schedule; ends of a step; events that a trace records within them
SpanKind = Literal[
    "F", "B", "W", "BW", "FB", "reduce", "update", "step", "data", "evaluate", "op", "call", "post", "wait", "host"
]
ACTIONS = ("F", "B", "W", "BW", "FB")
REFERENCE = "reference "  # begins the names of forwards of DPO's reference, which keep nothing for a backward


class Span(NamedTuple):
    """One thing that a rank runs from ``start`` to ``end``, in seconds from the start of the step.

    For a planned or dry-run action, the last ``messages`` seconds are exposed communication over ``axes``; in reality
    it
    is spread over the operations of the span. A traced action has none, but nested spans: ``op``, an operation under
    the planner's name; ``call``, the host code around operations; ``post`` and ``wait`` of a message.
    """

    kind: SpanKind
    name: str  # an action as the schedule writes it: F0.3 is stage 0, micro-batch 3
    start: float
    end: float
    messages: float = 0.0
    axes: tuple[str, ...] = ()
    stage: int = -1
    micro_batch: int = -1
    backward_stage: int = -1  # set for an ``FB``, else -1, like the next field
    backward_micro_batch: int = -1
    way: str = ""  # for an operation: forward, backward (dx, or all), weight (dW), recomputed
    own: float = 0.0  # seconds outside all nested spans
    within: int = -1  # index of the span that contains it; -1: none

    @property
    def seconds(self) -> float:
        """Return the duration in seconds."""
        return self.end - self.start


def iterate_enclosing(spans: Sequence[Span], span: Span) -> Iterator[Span]:
    """Yield ``span`` and the spans around it, from the inside out."""
    while True:
        yield span
        if span.within < 0:
            return
        span = spans[span.within]


class TracedMessage(NamedTuple):
    """One message of a traced rank, or several point-to-point messages that start together. Seconds as in ``Span``."""

    axis: str  # the axis to which its traffic is attributed
    group: str  # name of the process group's axis
    ranks: tuple[int, ...]  # of the group
    collective: str  # as in ``step.Traffic``
    payload: int  # bytes of the full tensor
    bytes: int  # sent by this rank, as ``step.Traffic`` counts
    number: int  # messages that the traffic counts: receives are not counted
    to: tuple[int, ...]  # p2p: ranks that this one sends to
    source: tuple[int, ...]  # p2p: ranks that it receives from
    begun: float  # the call that starts it begins
    posted: float  # that call returns
    waits: float  # the rank begins to wait
    done: float  # the wait ends
    early: bool  # it ended before the wait: its own end lies between ``posted`` and ``waits``
    span: int  # index of the span of its wait

    @property
    def name(self) -> str:
        """Return its name in tables."""
        return f"{self.axis} {self.collective}"


class RankStep(NamedTuple):
    """One traced step of one rank: its spans in order of start, the first being the step itself, and its messages."""

    step: int
    begin: float  # on the clock of rank 0, in seconds; spans count from here
    spans: tuple[Span, ...]
    messages: tuple[TracedMessage, ...]

    @property
    def seconds(self) -> float:
        """Return the wall time in seconds."""
        return self.spans[0].end

    def actions(self) -> tuple[Span, ...]:
        """Return the actions of the schedule."""
        return tuple(span for span in self.spans if span.kind in ACTIONS)

    def row(self) -> tuple[Span, ...]:
        """Return the sequential parts of the step like a planner's row; posts and waits in a span are its messages."""
        inside: dict[int, list[Span]] = {}
        outermost: list[int] = []  # for each span: its ancestor directly below the step
        for index, span in enumerate(self.spans):
            outermost.append(index if span.within <= 0 else outermost[span.within])
            if span.kind in ("post", "wait"):
                inside.setdefault(outermost[-1], []).append(span)
        row_spans = []
        for index, span in enumerate(self.spans):
            if span.within == 0 and span.kind in (*ACTIONS, "reduce", "update", "data"):
                messages = inside.get(index, [])
                axes = tuple(dict.fromkeys(message_span.name.split()[0] for message_span in messages))
                row_spans.append(span._replace(messages=sum(message_span.own for message_span in messages), axes=axes))
        return tuple(row_spans)


class RankTrace(NamedTuple):
    """The traced steps of one rank. ``clock_error``: seconds by which its times may deviate from rank 0's clock."""

    rank: int
    world: int
    stage: int  # its pipeline stage
    clock_offset: float  # seconds that were added to the rank's own clock
    clock_error: float
    steps: tuple[RankStep, ...]
    evaluations: tuple[Span, ...] = ()  # between steps, on the clock of rank 0

    def operations(self) -> Iterator[Span]:
        """Yield every operation of every step."""
        return (span for step in self.steps for span in step.spans if span.kind == "op")


class Level(NamedTuple):
    """Live bytes of a rank at ``seconds``; interpolate linearly between two levels."""

    seconds: float
    states_bytes: int  # weights and optimizer
    gradients_bytes: int
    activations_bytes: int  # saved for the backward, of all live micro-batches
    gathers_bytes: int  # gathered weights that are freed after use, with their message buffers
    logits_bytes: int
    temporary_bytes: int
    cause: str = ""

    @property
    def live_bytes(self) -> int:
        """Return the sum of all kinds, in bytes."""
        return sum(self[1:7])
