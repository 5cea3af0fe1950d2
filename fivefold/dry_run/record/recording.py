"""Recordings of one block's forward and backward, and their translation to the ids and sites of another block.

    recorded    ALLOC 1 · KERNEL 0 · FREE 1        replayed    ALLOC 5001 · KERNEL 17 · FREE 5001, of layer 12

Between chunks of events are steps that replay executes: deliver a gradient, defer a weight gradient, make a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.dry_run.record.tape import ALLOC, FREE, KERNEL, START, WAIT, Tape

Events = NDArray[np.int64]  # [n, 4]
# further kinds of events: a weight gradient is computed, or deferred; the event is dropped
DELIVER_GRADIENT, DEFER_GRADIENT, DROPPED = 100, 101, 102
# storage ids of the forward's input and of the output's gradient; storages allocated inside are numbered from 2
INPUT_ID, OUTPUT_GRADIENT_ID = 0, 1


class NotReplayable(Exception):
    """An error: the block frees or waits for something older than itself, or leaves storages behind."""


class TensorShape(NamedTuple):
    """The size, stride (in elements) and dtype of a tensor that replay creates."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorShape:
        """Return the shape of ``tensor``."""
        return cls(tensor.size(), tensor.stride(), tensor.dtype)

    def empty(self) -> Tensor:
        """Return an empty tensor of this shape."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


BlockOutput = tuple[int, TensorShape]  # storage id and shape of a tensor that leaves the block: y or dx


class BlockRecording(NamedTuple):
    """One block's forward and backward. Storage ids begin at 2; sites etc. index the lists of ``tape``."""

    tape: Tape
    forward: Events
    backward: Events
    deferred_wgrads: tuple[Events, ...]  # deferred weight gradients, each the events of one W
    end: Events  # events when the autograd graph is freed
    ids: int
    handles: int
    y: BlockOutput
    dx: BlockOutput
    gradients: tuple[
        tuple[str, tuple[TensorShape, ...]], ...
    ]  # weight's name, its gradient's tensors, in order of delivery


def cut_recording(
    tape: Tape,
    spans: list[tuple[int, int]],
    *,
    ids: dict[int, int],
    y: BlockOutput,
    dx: BlockOutput,
    gradients: tuple[tuple[str, tuple[TensorShape, ...]], ...],
) -> BlockRecording:
    """Cut ``spans`` (first, end) out of ``tape`` and renumber their ids and handles; may raise ``NotReplayable``."""
    events: Events = np.array(tape.events, dtype=np.int64).reshape(-1, 4)
    handles: dict[int, int] = {}
    events_of_spans = [events[start:stop].copy() for start, stop in spans]
    allocated = set(events[events[:, 0] == ALLOC, 1].tolist())  # storages allocated during the recording
    freed = set[int]()
    for span_events in events_of_spans:
        for event in span_events:
            kind = event[0]
            if kind == ALLOC:
                event[1] = ids.setdefault(int(event[1]), len(ids))
            elif kind == FREE and int(event[1]) in ids:
                event[1] = ids[int(event[1])]
                freed.add(int(event[1]))
            elif kind == FREE:
                if int(event[1]) not in allocated:
                    raise NotReplayable
                event[0] = DROPPED
            elif kind == START:
                event[1] = handles.setdefault(int(event[1]), len(handles))
                event[3] = ids.get(int(event[3]), -1)
            elif kind == WAIT:
                if int(event[1]) not in handles:
                    raise NotReplayable
                event[1] = handles[int(event[1])]
    if y[0] not in ids or dx[0] not in ids or set(range(2, len(ids))) - freed - {ids[y[0]], ids[dx[0]]}:
        raise NotReplayable
    forward, backward, end, *deferred_wgrads = [
        span_events[span_events[:, 0] != DROPPED] for span_events in events_of_spans
    ]
    return BlockRecording(
        tape,
        forward,
        backward,
        tuple(deferred_wgrads),
        end,
        len(ids) - 2,
        len(handles),
        (ids[y[0]], y[1]),
        (ids[dx[0]], dx[1]),
        gradients,
    )


class EventChunk:
    """A chunk of consecutive events, translated to the target tape except for ids and handles."""

    def __init__(self, events: Events) -> None:
        kinds = events[:, 0]
        self.events = events
        self.has_storage_id = np.isin(kinds, (ALLOC, FREE))
        self.has_handle = np.isin(kinds, (START, WAIT))
        self.has_inner_payload = (kinds == START) & (events[:, 3] > OUTPUT_GRADIENT_ID)
        self.input_payload_rows = np.flatnonzero((kinds == START) & (events[:, 3] == INPUT_ID))
        self.sizes: dict[int, int] = {}
        self.live_bytes = 0

    def renumber(self, *, first_id: int, first_handle: int) -> Events:
        """Return the events with the ids and handles of one micro-batch."""
        renumbered = self.events.copy()
        renumbered[self.has_storage_id, 1] += first_id - OUTPUT_GRADIENT_ID - 1
        renumbered[self.has_handle, 1] += first_handle
        renumbered[self.has_inner_payload, 3] += first_id - OUTPUT_GRADIENT_ID - 1
        renumbered[self.input_payload_rows, 3] = -1
        return renumbered


def plan_steps(events: Events, recording: BlockRecording, part: int, *, tape: Tape, layer: int) -> Iterator[Any]:
    """Yield ``EventChunk``s for ``layer`` and, between them, steps to execute: (kind, argument, module path)."""
    indices = _translate_to_tape(recording, tape=tape, layer=layer)
    sizes = _list_sizes(recording)
    special_storage = recording.y[0] if part == 0 else recording.dx[0] if part == 1 else -1
    chunk: list[list[int]] = []
    live = 0

    def finish_chunk() -> Iterator[EventChunk]:
        nonlocal live
        if chunk:
            finished = EventChunk(np.array(chunk, dtype=np.int64))
            finished.live_bytes, live = live, 0
            chunk.clear()
            yield finished

    for kind, first, second, third in events.tolist():
        is_step = (
            kind in (DELIVER_GRADIENT, DEFER_GRADIENT)
            or (kind == ALLOC and first == special_storage)
            or (kind == FREE and first <= OUTPUT_GRADIENT_ID)
        )
        if is_step:
            yield from finish_chunk()
            path = tape.sites[indices.sites[second]].module if kind == DELIVER_GRADIENT else ""
            yield kind, indices.sites[third] if kind == ALLOC else first, path
        elif kind == FREE and first in (recording.y[0], recording.dx[0]):
            continue  # a real tensor in replay: its finalizer records the FREE
        elif kind == ALLOC:
            chunk.append([kind, first, second, indices.sites[third]])
            live += second
        elif kind == FREE:
            chunk.append([kind, first, 0, 0])
            live -= sizes[first]
        elif kind == KERNEL:
            chunk.append([kind, indices.kernels[first], 0, 0])
        elif kind == START:
            chunk.append([kind, first, indices.messages[second], third])
        else:
            chunk.append([kind, first, second, third])
    yield from finish_chunk()


class _TranslatedIndices(NamedTuple):
    """The indices of a recording's sites, kernels and messages on another tape."""

    sites: list[int]
    kernels: list[int]
    messages: list[int]


def _translate_to_tape(recording: BlockRecording, *, tape: Tape, layer: int) -> _TranslatedIndices:
    """Add the sites, kernels and messages of a recording to ``tape``, renamed to layer ``layer``."""
    sites = []
    for site in recording.tape.sites:
        first, dot, rest = site.module.partition(".")
        if first == "blocks":
            _, dot, rest = rest.partition(".")
            site = site._replace(module=f"blocks.{layer}{dot}{rest}")
        sites.append(tape.site(site))
    kernels = [tape.kernel(kernel._replace(site=sites[kernel.site])) for kernel in recording.tape.kernels]
    messages = [tape.message(message._replace(site=sites[message.site])) for message in recording.tape.messages]
    return _TranslatedIndices(sites, kernels, messages)


def _list_sizes(recording: BlockRecording) -> dict[int, int]:
    parts = (recording.forward, recording.backward, recording.end, *recording.deferred_wgrads)
    return {first: second for part in parts for kind, first, second, _ in part.tolist() if kind == ALLOC}
