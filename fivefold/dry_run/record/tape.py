"""Tapes: the events of one rank's step in order (storages, kernels, messages and waits).

    ALLOC 7 4096 3 · KERNEL 12 · FREE 7 · START 1 5 · KERNEL 13 · WAIT 1 · …        four integers each

Written by ``recorder.py``; read by memory/ (levels, allocator), time/ (streams, traces) and match.py (deadlocks).
Sites, scopes, kernels and messages are stored once in lists, and referred to by their index.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from typing import NamedTuple, TypeVar

from fivefold.planner.time.roofline import ALIGNED

T = TypeVar("T", bound=Hashable)

ALLOC = 0  # storage id, bytes, site: a storage is allocated, or resized from 0
FREE = 1  # storage id
KERNEL = 2  # kernel
START = 3  # handle, message, storage id of the full tensor (-1: unknown): a message is issued
WAIT = 4  # handle: the compute stream waits until the message has arrived
SCOPE = 5  # scope: later events belong to it

Event = tuple[int, int, int, int]  # kind and up to three arguments; unused ones are 0


class CodeSite(NamedTuple):
    """A place in the code: module of the model, line of a file, torch operation."""

    module: str  # path as in named_modules; "" if none runs
    line: str  # file:line function
    operation: str  # such as aten::mm
    category: str = ""  # parameters, gradients, optimizer, gathers, inputs; "": classified by lifetime

    def __str__(self) -> str:
        operation = self.operation.partition("::")[2].partition(".")[
            0
        ]  # without its overload, as in empty.memory_format
        return " ".join(part for part in (self.module, operation, f"({self.line})") if part)


class Scope(NamedTuple):
    """The phase of the step, with stage and micro-batch (-1 if it has none)."""

    phase: str  # start, forward, backward, weights, pair, update; in the doctor also recompute
    stage: int = -1
    micro_batch: int = -1

    def __str__(self) -> str:
        micro_batch = f" of micro-batch {self.micro_batch}" if self.micro_batch >= 0 else ""
        return self.phase + micro_batch + (f", stage {self.stage}" if self.stage > 0 else "")


class Kernel(NamedTuple):
    """A kernel on the device, as it is priced, or an operation of the host that the device waits for.

    ``shape`` of a matmul: rows, columns, inner dim, batch; of attention: sequences · heads, queries, keys, head dim.
    """

    # matmul, attention, attention_backward, moving; host: in its memory; host_link: a copy from or to it
    kind: str
    shape: tuple[int, ...]  # moving: ()
    dtype: str
    flops: int  # attention counts the full square
    moved_bytes: int  # read and written
    launches: int  # torch operations that it represents: more than 1 if elementwise operations were fused
    site: int
    unfused_bytes: int = 0  # read and written by those operations one after another
    aligned: int = ALIGNED  # matmul: elements that all rows begin at a multiple of (roofline.py)


class TapeMessage(NamedTuple):
    """A message of this rank. ``members``: the ranks of the world that take part, in group order."""

    axis: str  # mesh axis
    group: str  # name of the communicator
    members: tuple[int, ...]
    collective: str  # as in step.Traffic; "p2p" for sends and receives
    dtype: str
    numel: int  # of the full tensor (docs/notation.md §5)
    payload: int  # bytes of the full tensor
    peer: int  # p2p: the other rank of the world; else -1
    receives: bool  # p2p: this rank receives from the peer
    site: int
    joins: bool = False  # p2p: in one batch_isend_irecv with the message before it


class Tape:
    """The events of one rank's step, and the lists that they index; ``host_bytes``: the peak of its host memory."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.host_bytes = 0
        self.events = array("q")
        self.sites: list[CodeSite] = []
        self.scopes: list[Scope] = []
        self.kernels: list[Kernel] = []
        self.messages: list[TapeMessage] = []
        self._indices: dict[tuple[int, Hashable], int] = {}

    def __getstate__(self) -> dict[str, object]:
        """Return all but the indices, whose keys hold only in this process."""
        return self.__dict__ | {"_indices": {}}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore the tape, with its indices."""
        self.__dict__.update(state)
        for known in (self.sites, self.scopes, self.kernels, self.messages):
            self._indices |= {(id(known), value): index for index, value in enumerate(known)}

    def __len__(self) -> int:
        return len(self.events) // 4

    def __iter__(self) -> Iterator[Event]:
        """Iterate over the events in order."""
        flat = iter(self.events)
        return zip(flat, flat, flat, flat, strict=True)

    def add(self, kind: int, first: int = 0, second: int = 0, third: int = 0) -> None:
        """Append an event."""
        self.events.extend((kind, first, second, third))

    def site(self, site: CodeSite) -> int:
        """Return the index of ``site`` in ``sites``, added if new."""
        return self._find_or_add(self.sites, site)

    def scope(self, scope: Scope) -> int:
        """Return the index of ``scope`` in ``scopes``, added if new."""
        return self._find_or_add(self.scopes, scope)

    def kernel(self, kernel: Kernel) -> int:
        """Return the index of ``kernel`` in ``kernels``, added if new."""
        return self._find_or_add(self.kernels, kernel)

    def message(self, message: TapeMessage) -> int:
        """Return the index of ``message`` in ``messages``, added if new."""
        return self._find_or_add(self.messages, message)

    def _find_or_add(self, known: list[T], value: T) -> int:
        key = id(known), value
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = len(known)
            known.append(value)
        return index
