"""What one rank does in one step, as a list of events: storages, kernels, messages and who waits for them.

    ALLOC 7 4096 3 · KERNEL 12 · FREE 7 · START 1 5 · KERNEL 13 · WAIT 1 · …        four integers each

Written by ``recorder.py``, read by all that follows: memory over time, the allocator, streams, deadlocks, traces.
What repeats (sites, scopes, kernels, messages) is listed once and named by its place.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)

ALLOC = 0  # storage, bytes, site: it is born, or grows from nothing
FREE = 1  # storage
KERNEL = 2  # kernel
START = 3  # handle, message, storage that it carries or fills (the full tensor's; -1: none that is known)
WAIT = 4  # handle: the device goes on only when the message has come
SCOPE = 5  # scope: what follows belongs to it

Event = tuple[int, int, int, int]  # what is not used is 0


class Site(NamedTuple):
    """Where in the code: a module of the model, a line of a file, an operation of torch."""

    module: str  # as in named_modules, "" where none runs
    line: str  # file:line function
    operation: str  # such as aten::mm
    category: str = ""  # parameters, gradients, optimizer, gathers, inputs; "": a matter of how long it lives

    def __str__(self) -> str:
        return " ".join(word for word in (self.module, self.operation.partition("::")[2], f"({self.line})") if word)


class Scope(NamedTuple):
    """What the step is doing; a stage and a micro-batch where there are any, else -1."""

    phase: str  # start, forward, backward, weights, update
    stage: int = -1
    micro_batch: int = -1

    def __str__(self) -> str:
        at = f" of micro-batch {self.micro_batch}" if self.micro_batch >= 0 else ""
        return self.phase + at + (f", stage {self.stage}" if self.stage > 0 else "")


class Kernel(NamedTuple):
    """One kernel on the device, as a price wants it: of a matmul rows, columns, inner dim and number, of attention
    sequences·heads, queries, keys, head dim.
    """

    kind: str  # matmul, attention, attention_backward, moving
    shape: tuple[int, ...]  # moving: ()
    dtype: str
    flops: int  # attention counts the full square
    moved_bytes: int  # read and written
    launches: int  # operations of torch that it stands for: of elementwise ones, those of one function together
    site: int


class Message(NamedTuple):
    """One message of this rank. ``members``: the ranks of the world that take part, in order of the group."""

    axis: str  # the mesh axis whose traffic it is
    group: str  # the communicator: messages of one are in order
    members: tuple[int, ...]
    collective: str  # as in step.Traffic; p2p also of what is received
    dtype: str
    numel: int  # of the full tensor (docs/notation.md §5)
    payload: int  # its bytes
    peer: int  # p2p: the other rank of the world; else -1
    receives: bool  # p2p: from the peer
    site: int
    joins: bool = False  # p2p: in one go with the message before it (batch_isend_irecv)


class Tape:
    """The events of one rank's step, and the lists that they point into."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.events = array("q")
        self.sites: list[Site] = []
        self.scopes: list[Scope] = []
        self.kernels: list[Kernel] = []
        self.messages: list[Message] = []
        self._places: dict[tuple[int, Hashable], int] = {}

    def __len__(self) -> int:
        return len(self.events) // 4

    def __iter__(self) -> Iterator[Event]:
        """The events in order."""
        flat = iter(self.events)
        return zip(flat, flat, flat, flat, strict=True)

    def add(self, kind: int, first: int = 0, second: int = 0, third: int = 0) -> None:
        """One event."""
        self.events.extend((kind, first, second, third))

    def site(self, site: Site) -> int:
        """Its place in the list."""
        return self._place(self.sites, site)

    def scope(self, scope: Scope) -> int:
        """Its place in the list."""
        return self._place(self.scopes, scope)

    def kernel(self, kernel: Kernel) -> int:
        """Its place in the list."""
        return self._place(self.kernels, kernel)

    def message(self, message: Message) -> int:
        """Its place in the list."""
        return self._place(self.messages, message)

    def _place(self, known: list[T], value: T) -> int:
        key = id(known), value
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(known)
            known.append(value)
        return place
