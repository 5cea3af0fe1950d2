"""Runs one block of each kind and records it; the others replay the recording, which speeds up the dry run.

    forward    events … make y                           backward   events · deliver a weight's gradient · … make dx
    W          events of one deferred weight gradient    end        frees of storages that the autograd graph holds

Only the inside of a block is replayed: weight gathers, gradient collection and pipeline messages run as in training.
A block's inputs and outputs are tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fivefold.dry_run.record.recorder import TapeRecorder
from fivefold.dry_run.record.recording import (
    DELIVER,
    PUT_OFF,
    BlockRecording,
    EventChunk,
    Events,
    G,
    Made,
    NotReplayable,
    TensorShape,
    X,
    cut_recording,
    plan_steps,
)
from fivefold.dry_run.record.tape import ALLOC, KERNEL, Tape
from fivefold.layout.spec import Layout
from fivefold.layout.stages import recomputed_layers
from fivefold.model.spec import Model
from fivefold.planner.counts.operations.layer import get_kind
from fivefold.trainer.build import Built
from fivefold.trainer.model.float8.cast import Cast
from fivefold.trainer.model.linear import WgradStore, Work
from fivefold.trainer.model.transformer import Head
from fivefold.trainer.parallel.gradients import Gradients
from fivefold.trainer.parallel.pipeline import end_stage, run_backward


def play_like_blocks(built: Built, *, model: Model, layout: Layout, recorder: TapeRecorder) -> None:
    """Make each block of this rank replay the recording of its kind, which is created when the first of the kind runs.

    The head replays a recording of its first micro-batch, unless it predicts several tokens.
    """
    split = any(action.kind in ("B", "W") for row in built.table.rows for action in row)
    known_recordings: dict[Hashable, dict[bool, BlockRecording] | None] = {}
    is_recomputed = recomputed_layers(model.layers, layout)
    for layer, block in enumerate(built.module.blocks):
        kind = get_kind(model, layer), is_recomputed[layer]
        block.forward = Player(
            block,
            layer=layer,
            kind=kind,
            known=known_recordings,
            split=split,
            wgrad_store=built.wgrad_store,
            recorder=recorder,
        ).forward
    for unit in built.units:
        unit.gradients.accumulate = SumPlayer(unit.gradients, recorder).accumulate  # type: ignore[method-assign]
    head = built.module.head
    if model.mtp is not None:  # the head then contains blocks, and has more inputs
        return
    head.forward = Player(  # type: ignore[method-assign,assignment]
        head,
        layer=-1,
        kind="head",
        known=known_recordings,
        split=split,
        wgrad_store=built.wgrad_store,
        recorder=recorder,
    ).forward


class Player:
    """A replacement of one block's forward: records the first block of its kind (``known``, by kind), else replays."""

    def __init__(
        self,
        block: nn.Module,
        *,
        layer: int,
        kind: Hashable,
        known: dict[Hashable, dict[bool, BlockRecording] | None],
        split: bool,
        wgrad_store: WgradStore,
        recorder: TapeRecorder,
    ) -> None:
        self.block, self.inner, self.layer, self.kind, self.known = block, block.forward, layer, kind, known
        self.split, self.wgrad_store, self.recorder = split, wgrad_store, recorder
        self.weights = {name: weight for name, weight in block.named_parameters() if hasattr(weight, "collect")}
        self.ends = isinstance(block, Head)
        self.keeps = isinstance(block, Head) and block.chunked  # the backward needs the targets too
        if isinstance(block, Head) and block.out.matrix.requires_grad:
            self.weights["out"] = block.out.matrix  # may be the embedding's weight, if tied
        self._cached_steps: dict[tuple[int, int], tuple[Tape, list[Any]]] = {}
        self._dummies: dict[str, Tensor | Cast] = {}

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Record the block if its kind is new; then replay it, or run it if it is not replayable."""
        if not x.requires_grad:  # the first block over a frozen embedding, whose backward is its own
            first: Tensor = self.inner(x, *rest)
            return first
        if self.kind not in self.known:
            try:
                recordings_of_kind = {
                    way: self._record(x, rest, split=way) for way in ((False, True) if self.split else (False,))
                }
                self.known[self.kind] = recordings_of_kind
            except NotReplayable:
                self.known[self.kind] = None
        recordings = self.known[self.kind]
        if recordings is None:
            y: Tensor = self.inner(x, *rest)
        else:
            y = _ReplayBlock.apply(x, self, recordings, rest if self.keeps else ())  # type: ignore[no-untyped-call]
        return y

    # Recording

    def _record(self, like: Tensor, rest: Sequence[Any], *, split: bool) -> BlockRecording:
        """Run forward and backward of this block on a separate tape; ``split``: with deferred weight gradients."""
        with (
            self.recorder.use_separate_tape() as tape,
            torch.enable_grad(),
            self._intercepted_gradients(tape) as gradients,
        ):
            spans, ids, y, dx = self._run_once(like, rest, split=split)
        return cut_recording(tape, spans, ids=ids, y=y, dx=dx, gradients=tuple(gradients))

    def _run_once(
        self, like: Tensor, rest: Sequence[Any], *, split: bool
    ) -> tuple[list[tuple[int, int]], dict[int, int], Made, Made]:
        """Run once; return the tape ranges (forward, backward, end, each W), the ids of x and dy, y, and dx."""
        recorder, spans, noted_gradients = self.recorder, list[tuple[int, int]](), dict[str, Any]()
        leaf = torch.empty_like(like).requires_grad_()
        x: Tensor = _InputGradient.apply(leaf, partial(_note_gradient, noted_gradients, recorder))  # type: ignore[no-untyped-call]
        x_id, start = recorder.id_of(x), recorder.place()
        y = self.inner(x, *rest)
        spans.append((start, recorder.place()))
        output = recorder.id_of(y), TensorShape.from_tensor(y)
        inbox = [torch.empty_like(y)]
        g_id = recorder.id_of(inbox[0])
        end = end_stage(y, inbox)
        del x, y
        seed = torch.ones_like(end)
        self.wgrad_store.deferring, start = split, recorder.place()
        with recorder.places.enter_module(""):
            run_backward(end, seed)
        self.wgrad_store.deferring = False
        spans.append((start, noted_gradients["place"]))
        start = recorder.place()
        del end
        spans.append((start, recorder.place()))
        works = self.wgrad_store.take()[::-1]
        while works:
            start = recorder.place()
            with recorder.places.enter_module(""):
                works.pop()()
            spans.append((start, recorder.place()))
        return spans, {x_id: X, g_id: G}, output, noted_gradients["dx"]

    @contextmanager
    def _intercepted_gradients(self, tape: Tape) -> Iterator[list[tuple[str, tuple[TensorShape, ...]]]]:
        """Discard weight gradients, but mark on ``tape`` where they are made or deferred; yields names and shapes."""
        gradients: list[tuple[str, tuple[TensorShape, ...]]] = []
        former = {name: weight.collect for name, weight in self.weights.items()}
        deferred = count()

        def spy(name: str, gradient: Tensor | Cast) -> None:
            """Note a weight gradient on the tape instead of accumulating it."""
            self.recorder.place()
            tape.add(DELIVER, len(gradients), tape.site(self.recorder.site_here()))
            parts = gradient[:2] if isinstance(gradient, Cast) else (gradient,)
            gradients.append((name, tuple(TensorShape.from_tensor(part) for part in parts)))
            if self.wgrad_store.deferring and self.weights[name].waits:  # type: ignore[attr-defined]
                do(partial(_let_go, gradient))  # it stays allocated until W

        def do(work: Work) -> None:
            if self.wgrad_store.deferring:
                tape.add(PUT_OFF, next(deferred))
            WgradStore.run_or_defer(self.wgrad_store, work)

        self.wgrad_store.run_or_defer = do  # type: ignore[method-assign]
        for name, weight in self.weights.items():
            weight.collect = partial(spy, name)
        try:
            yield gradients
        finally:
            del self.wgrad_store.run_or_defer
            for name, weight in self.weights.items():
                weight.collect = former[name]

    # Replaying

    def play(self, played: ReplayedMicroBatch, part: int) -> None:
        """Replay one part of the recording: 0 forward, 1 backward, 2 end, from 3 on the deferred weight gradients."""
        for step in self._steps(played.recording, part):
            if isinstance(step, EventChunk):
                self.recorder.play(
                    step.renumber(first_id=played.first_id, first_handle=played.first_handle),
                    live_bytes=step.live_bytes,
                )
                continue
            kind, argument, path = step
            if kind == DELIVER:
                name, shapes = played.recording.gradients[argument]
                with self.recorder.places.enter_module(path):
                    self.weights[name].collect(self._dummy(name, shapes))
            elif kind == PUT_OFF:
                self.wgrad_store.run_or_defer(partial(self.play, played, 3 + argument))
            elif kind == ALLOC:
                played.made = self.recorder.make(
                    (played.recording.y if part == 0 else played.recording.dx)[1].empty, site=argument
                )
            elif argument == X:
                played.x = None
            elif played.g is not None:
                self.recorder.free_early(played.g)
                played.g = None

    def _dummy(self, name: str, shapes: tuple[TensorShape, ...]) -> Tensor | Cast:
        if name not in self._dummies:
            with self.recorder.hide_storages():
                dummies = [shape.empty() for shape in shapes]
                self._dummies[name] = dummies[0] if len(dummies) == 1 else Cast(*dummies)
        return self._dummies[name]

    def _steps(self, recording: BlockRecording, part: int) -> list[Any]:
        """Return the chunks and steps of a part for the current tape; cached, as all micro-batches share them."""
        tape, key = self.recorder.tape, (id(recording), part)
        cached = self._cached_steps.get(key)
        if cached is None or cached[0] is not tape:
            events = (recording.forward, recording.backward, recording.end, *recording.works)[part]
            cached = self._cached_steps[key] = (
                tape,
                list(plan_steps(events, recording, part, tape=tape, layer=self.layer)),
            )
        return cached[1]


def _let_go(_gradient: Tensor | Cast) -> None:
    """Do nothing: this is the work of a gradient that only waits for W, and is freed after this call."""


class ReplayedMicroBatch:
    """The state of one micro-batch in a replayed block: its tensors, its first storage id and its first handle.

    It starts with the recording without deferral; the backward picks the right one (their forwards are equal).
    """

    def __init__(self, recordings: dict[bool, BlockRecording], x: Tensor, recorder: TapeRecorder) -> None:
        self.recording = recordings[False]
        # detached, or the deferred dW would keep the graph of earlier blocks and their saved tensors alive
        self.x: Tensor | None = x.detach()
        self.g: Tensor | None = None
        self.made: Tensor | None = None
        self.first_id = recorder.reserve_ids(max(recording.ids for recording in recordings.values()))
        self.first_handle = recorder.reserve_handles(max(recording.handles for recording in recordings.values()))

    def take(self) -> Tensor:
        """Return the tensor that was created last (y or dx), and drop it here."""
        tensor, self.made = self.made, None
        assert tensor is not None
        return tensor


class SumPlayer:
    """A replacement of ``Gradients.accumulate``: adding to an earlier sum does the same for every micro-batch."""

    def __init__(self, gradients: Gradients, recorder: TapeRecorder) -> None:
        self.gradients, self.inner, self.recorder = gradients, gradients.accumulate, recorder
        self._events: dict[tuple[int, str], Events] = {}  # by weight and running module, on the current tape
        self._tape: Tape | None = None

    def accumulate(self, index: int, gradient: Tensor | Cast | None) -> None:
        """Run the first sum of each weight on a tape, and replay its kernels for the others."""
        recorder = self.recorder
        if recorder.tape is not self._tape:
            self._tape, self._events = recorder.tape, {}
        key = index, recorder.places.find_running_module()
        if not self.gradients.has_sum(index):
            self.inner(index, gradient)
        elif key in self._events:
            recorder.play(self._events[key], live_bytes=0)
        else:
            start = recorder.place()
            self.inner(index, gradient)
            events = np.array(recorder.tape.events[4 * start : 4 * recorder.place()], dtype=np.int64).reshape(-1, 4)
            if (events[:, 0] == KERNEL).all():  # else it allocates
                self._events[key] = events


class _GraphEnd:
    """An object held by the autograd graph: replays the end part when the graph is freed."""

    def __init__(self, player: Player, played: ReplayedMicroBatch) -> None:
        self.player, self.played = player, played

    def __del__(self) -> None:
        self.player.play(self.played, 2)


class _ReplayBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, player: Player, recordings: dict[bool, BlockRecording], kept: Sequence[Any]
    ) -> Tensor:
        ctx.player, ctx.recordings, ctx.kept = player, recordings, kept
        ctx.played = played = ReplayedMicroBatch(recordings, x, player.recorder)
        player.play(played, 0)
        return played.take()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        player, played = ctx.player, ctx.played
        played.recording = recording = ctx.recordings[player.wgrad_store.deferring]
        played.g = None if player.ends else gradient  # the head's gradient is held by the caller of backward
        ctx.end = _GraphEnd(player, played)
        player.play(played, 1)
        ctx.played = None
        if recording.dx[0] == G:
            return gradient, None, None, None
        return played.take(), None, None, None


class _InputGradient(torch.autograd.Function):
    """An input boundary of a recording: forward copies x; backward passes dx to ``arrived`` and stops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrived: Callable[[Tensor], None]) -> Tensor:
        ctx.arrived = arrived
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.arrived(gradient)
        return None, None


def _note_gradient(gradients: dict[str, Any], recorder: TapeRecorder, gradient: Tensor) -> None:
    gradients["place"], gradients["dx"] = (
        recorder.place(),
        (recorder.id_of(gradient), TensorShape.from_tensor(gradient)),
    )
