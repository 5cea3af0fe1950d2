"""Like blocks are rehearsed once: one is run with tensors and recorded, the others play the recording.

    forward    events … y is made                        backward   events · gradient of a weight is delivered · … dx
    W          events of one put-off product              end        what lives as long as the graph

Only what happens inside of a block is played: weights are gathered, gradients collected and messages of the pipeline
sent by the code that does so in a run. What comes in and goes out are tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fivefold.check.dryrun.recorder import Recorder
from fivefold.check.dryrun.tape import ALLOC, FREE, KERNEL, START, WAIT, Tape
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.train.build import Built
from fivefold.train.linear import Later, Work
from fivefold.train.parallel.pipeline import exit_of, run_back

Events = NDArray[np.int64]  # [n, 4]
DELIVER, PUT_OFF, NOTHING = 100, 101, 102  # in recordings: a weight's gradient is there; a product is put off
X, G = 0, 1  # ids of what enters forward and backward; those of what is made inside follow


class Unlike(Exception):
    """A block does something that cannot be played: it must run."""


class Shape(NamedTuple):
    """Of a tensor that is made as the events say."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        """Of this one."""
        return cls(tensor.size(), tensor.stride(), tensor.dtype)

    def empty(self) -> Tensor:
        """One like it."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


Made = tuple[int, Shape]  # id and shape of a tensor that leaves


class Recording(NamedTuple):
    """One forward and backward of a block. Events have ids from ``G`` + 1 on, and places in the lists of ``tape``."""

    tape: Tape
    forward: Events
    backward: Events
    works: tuple[Events, ...]  # put off
    end: Events
    ids: int
    handles: int
    y: Made
    dx: Made
    gradients: tuple[tuple[str, Shape], ...]  # as delivered


def play_like_blocks(built: Built, *, model: Model, layout: Layout, recorder: Recorder) -> None:
    """Make every block of this rank play the recording of one like it, made when the first of them runs."""
    split = any(action.kind in ("B", "W") for row in built.table.rows for action in row)
    known: dict[Hashable, dict[bool, Recording] | None] = {}
    for layer, block in enumerate(built.module.blocks):
        kind = model.is_moe(layer), layer % layout.recompute_every == 0
        player = Player(block, layer=layer, kind=kind, known=known, split=split, later=built.later, recorder=recorder)
        block.forward = player.forward


class Player:
    """Stands for the forward of one block."""

    def __init__(
        self, block: nn.Module, *, layer: int, kind: Hashable, known: dict[Hashable, dict[bool, Recording] | None],
        split: bool, later: Later, recorder: Recorder,
    ) -> None:  # fmt: skip
        self.block, self.inner, self.layer, self.kind, self.known = block, block.forward, layer, kind, known
        self.split, self.later, self.recorder = split, later, recorder
        self._laid: dict[tuple[int, int], tuple[Tape, list[Any]]] = {}
        self._dummies: dict[str, Tensor] = {}

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """The block's."""
        if self.kind not in self.known:
            try:
                ways = {way: self._record(x, rest, split=way) for way in ((False, True) if self.split else (False,))}
                self.known[self.kind] = ways
            except Unlike:
                self.known[self.kind] = None
        recordings = self.known[self.kind]
        if recordings is None:
            y: Tensor = self.inner(x, *rest)
        else:
            y = _Played.apply(x, self, recordings)  # type: ignore[no-untyped-call]
        return y

    # Recording

    def _record(self, like: Tensor, rest: Sequence[Any], *, split: bool) -> Recording:
        """Forward and backward of this block beside the step, which knows nothing of it."""
        with self.recorder.aside() as tape, torch.enable_grad(), self._spied(tape) as gradients:
            spans, ids, y, dx = self._tried(like, rest, split=split)
        return _recording(tape, spans, ids=ids, y=y, dx=dx, gradients=tuple(gradients))

    def _tried(
        self, like: Tensor, rest: Sequence[Any], *, split: bool
    ) -> tuple[list[tuple[int, int]], dict[int, int], Made, Made]:
        """Places between which lie the forward, the backward, the end and the works; ids of what enters; y and dx."""
        recorder, spans, found = self.recorder, list[tuple[int, int]](), dict[str, Any]()
        leaf = torch.empty_like(like).requires_grad_()
        x: Tensor = _Stop.apply(leaf, partial(_note, found, recorder))  # type: ignore[no-untyped-call]
        x_id, start = recorder.id_of(x), recorder.place()
        y = self.inner(x, *rest)
        spans.append((start, recorder.place()))
        made = recorder.id_of(y), Shape.of(y)
        inbox = [torch.empty_like(y)]
        g_id = recorder.id_of(inbox[0])
        end = exit_of(y, inbox)
        del x, y
        seed = torch.ones_like(end)
        self.later.deferring, start = split, recorder.place()
        with recorder.inside(""):
            run_back(end, seed)
        self.later.deferring = False
        spans.append((start, found["place"]))
        start = recorder.place()
        del end
        spans.append((start, recorder.place()))
        works = self.later.take()[::-1]
        while works:
            start = recorder.place()
            works.pop()()
            spans.append((start, recorder.place()))
        return spans, {x_id: X, g_id: G}, made, found["dx"]

    @contextmanager
    def _spied(self, tape: Tape) -> Iterator[list[tuple[str, Shape]]]:
        """Gradients of this block's weights go nowhere; where they are delivered, and products put off, is marked."""
        gradients: list[tuple[str, Shape]] = []
        weights = {name: weight for name, weight in self.block.named_parameters() if hasattr(weight, "collect")}
        former = {name: weight.collect for name, weight in weights.items()}
        put_off: list[Work] = []

        def spy(name: str, gradient: Tensor) -> None:
            self.recorder.place()
            tape.add(DELIVER, len(gradients), tape.site(self.recorder.site_here()))
            gradients.append((name, Shape.of(gradient)))

        def do(work: Work) -> None:
            if self.later.deferring:
                tape.add(PUT_OFF, len(put_off))
                put_off.append(work)
            Later.do(self.later, work)

        self.later.do = do  # type: ignore[method-assign]
        for name, weight in weights.items():
            weight.collect = partial(spy, name)
        try:
            yield gradients
        finally:
            del self.later.do  # type: ignore[method-assign]
            put_off.clear()
            for name, weight in weights.items():
                weight.collect = former[name]

    # Playing

    def play(self, played: Played, part: int) -> None:
        """One part of the recording: 0 forward, 1 backward, 2 the end, then the works."""
        for step in self._steps(played.recording, part):
            if isinstance(step, _Chunk):
                self.recorder.play(step.laid(played), live_bytes=step.live_bytes)
                continue
            kind, argument, path = step
            if kind == DELIVER:
                name, shape = played.recording.gradients[argument]
                with self.recorder.inside(path):
                    self.block.get_parameter(name).collect(self._dummy(name, shape))  # type: ignore[attr-defined]
            elif kind == PUT_OFF:
                self.later.do(partial(self.play, played, 3 + argument))
            elif kind == ALLOC:
                played.made = self.recorder.make(
                    (played.recording.y if part == 0 else played.recording.dx)[1].empty, site=argument
                )
            elif argument == X:
                played.x = None
            elif played.g is not None:
                self.recorder.free_early(played.g)
                played.g = None

    def _dummy(self, name: str, shape: Shape) -> Tensor:
        if name not in self._dummies:
            with self.recorder.hiding():
                self._dummies[name] = shape.empty()
        return self._dummies[name]

    def _steps(self, recording: Recording, part: int) -> list[Any]:
        """The events of a part in chunks, with what is done between them, for the tape that is written now."""
        tape, key = self.recorder.tape, (id(recording), part)
        laid = self._laid.get(key)
        if laid is None or laid[0] is not tape:
            events = (recording.forward, recording.backward, recording.end, *recording.works)[part]
            laid = self._laid[key] = tape, list(_laid(events, recording, part, tape=tape, layer=self.layer))
        return laid[1]


class Played:
    """One micro-batch through a block that plays."""

    def __init__(self, recording: Recording, x: Tensor, recorder: Recorder) -> None:
        self.recording = recording
        self.x: Tensor | None = x
        self.g: Tensor | None = None
        self.made: Tensor | None = None
        self.first_id = recorder.reserve_ids(recording.ids)
        self.first_handle = recorder.reserve_handles(recording.handles)

    def take(self) -> Tensor:
        """What was made."""
        made, self.made = self.made, None
        assert made is not None
        return made


class _End:
    """Dies with the graph."""

    def __init__(self, player: Player, played: Played) -> None:
        self.player, self.played = player, played

    def __del__(self) -> None:
        self.player.play(self.played, 2)


class _Played(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, player: Player, recordings: dict[bool, Recording]) -> Tensor:
        ctx.player, ctx.recordings = player, recordings
        ctx.played = played = Played(recordings[False], x, player.recorder)
        player.play(played, 0)
        return played.take()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        player, played = ctx.player, ctx.played
        played.recording = recording = ctx.recordings[player.later.deferring]
        played.g = gradient
        ctx.end = _End(player, played)
        player.play(played, 1)
        ctx.played = None
        if recording.dx[0] == G:
            return gradient, None, None
        return played.take(), None, None


class _Stop(torch.autograd.Function):
    """The edge of a recording: a tensor of its own forward; backward tells ``arrived`` of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrived: Callable[[Tensor], None]) -> Tensor:
        ctx.arrived = arrived
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.arrived(gradient)
        return None, None


def _note(found: dict[str, Any], recorder: Recorder, gradient: Tensor) -> None:
    found["place"], found["dx"] = recorder.place(), (recorder.id_of(gradient), Shape.of(gradient))


def _recording(
    tape: Tape, spans: list[tuple[int, int]], *, ids: dict[int, int], y: Made, dx: Made,
    gradients: tuple[tuple[str, Shape], ...],
) -> Recording:  # fmt: skip
    """The spans of ``tape`` with ids of their own. ``Unlike`` where something that was there before is freed."""
    events: Events = np.array(tape.events, dtype=np.int64).reshape(-1, 4)
    handles: dict[int, int] = {}
    parts = [events[start:stop].copy() for start, stop in spans]
    ours = set(events[events[:, 0] == ALLOC, 1].tolist())  # also what only the recording made
    freed = set[int]()
    for part in parts:
        for event in part:
            kind = event[0]
            if kind == ALLOC:
                event[1] = ids.setdefault(int(event[1]), len(ids))
            elif kind == FREE and int(event[1]) in ids:
                event[1] = ids[int(event[1])]
                freed.add(int(event[1]))
            elif kind == FREE:
                if int(event[1]) not in ours:
                    raise Unlike
                event[0] = NOTHING
            elif kind == START:
                event[1] = handles.setdefault(int(event[1]), len(handles))
                event[3] = ids.get(int(event[3]), -1)
            elif kind == WAIT:
                if int(event[1]) not in handles:
                    raise Unlike
                event[1] = handles[int(event[1])]
    if y[0] not in ids or dx[0] not in ids or set(range(2, len(ids))) - freed - {ids[y[0]], ids[dx[0]]}:
        raise Unlike
    forward, backward, end, *works = [part[part[:, 0] != NOTHING] for part in parts]
    return Recording(tape, forward, backward, tuple(works), end, len(ids) - 2, len(handles),
                     (ids[y[0]], y[1]), (ids[dx[0]], dx[1]), gradients)  # fmt: skip


class _Chunk:
    """Events in a row, with sites and all else of the tape they are written to; ids and handles are still their own."""

    def __init__(self, events: Events) -> None:
        kinds = events[:, 0]
        self.events = events
        self.ids = np.isin(kinds, (ALLOC, FREE))
        self.handles = np.isin(kinds, (START, WAIT))
        self.carrying = (kinds == START) & (events[:, 3] > G)
        self.entering = np.flatnonzero((kinds == START) & (events[:, 3] == X))
        self.sizes: dict[int, int] = {}
        self.live_bytes = 0

    def laid(self, played: Played) -> Events:
        """With those of one micro-batch."""
        out = self.events.copy()
        out[self.ids, 1] += played.first_id - G - 1
        out[self.handles, 1] += played.first_handle
        out[self.carrying, 3] += played.first_id - G - 1
        out[self.entering, 3] = -1
        return out


def _laid(events: Events, recording: Recording, part: int, *, tape: Tape, layer: int) -> Iterator[Any]:
    """Chunks for ``layer``, and between them steps: kind, argument, path of the module."""
    lists, sizes = _lists(recording, tape=tape, layer=layer), _sizes(recording)
    special = recording.y[0] if part == 0 else recording.dx[0] if part == 1 else -1
    chunk: list[list[int]] = []
    live = 0

    def done() -> Iterator[_Chunk]:
        nonlocal live
        if chunk:
            found = _Chunk(np.array(chunk, dtype=np.int64))
            found.live_bytes, live = live, 0
            chunk.clear()
            yield found

    for kind, first, second, third in events.tolist():
        apart = kind in (DELIVER, PUT_OFF) or (kind == ALLOC and first == special) or (kind == FREE and first <= G)
        if apart:
            yield from done()
            path = tape.sites[lists.sites[second]].module if kind == DELIVER else ""
            yield kind, lists.sites[third] if kind == ALLOC else first, path
        elif kind == FREE and first in (recording.y[0], recording.dx[0]):
            continue  # a tensor: it is freed when it dies
        elif kind == ALLOC:
            chunk.append([kind, first, second, lists.sites[third]])
            live += second
        elif kind == FREE:
            chunk.append([kind, first, 0, 0])
            live -= sizes[first]
        elif kind == KERNEL:
            chunk.append([kind, lists.kernels[first], 0, 0])
        elif kind == START:
            chunk.append([kind, first, lists.messages[second], third])
        else:
            chunk.append([kind, first, second, third])
    yield from done()


class _Lists(NamedTuple):
    """Where sites, kernels and messages of a recording are on another tape."""

    sites: list[int]
    kernels: list[int]
    messages: list[int]


def _lists(recording: Recording, *, tape: Tape, layer: int) -> _Lists:
    sites = []
    for site in recording.tape.sites:
        first, dot, rest = site.module.partition(".")
        if first == "blocks":
            _, dot, rest = rest.partition(".")
            site = site._replace(module=f"blocks.{layer}{dot}{rest}")
        sites.append(tape.site(site))
    kernels = [tape.kernel(kernel._replace(site=sites[kernel.site])) for kernel in recording.tape.kernels]
    messages = [tape.message(message._replace(site=sites[message.site])) for message in recording.tape.messages]
    return _Lists(sites, kernels, messages)


def _sizes(recording: Recording) -> dict[int, int]:
    parts = (recording.forward, recording.backward, recording.end, *recording.works)
    return {first: second for part in parts for kind, first, second, _ in part.tolist() if kind == ALLOC}
