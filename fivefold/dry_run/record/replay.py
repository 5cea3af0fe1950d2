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
    DEFER_GRADIENT,
    DELIVER_GRADIENT,
    INPUT_ID,
    OUTPUT_GRADIENT_ID,
    BlockOutput,
    BlockRecording,
    EventChunk,
    Events,
    NotReplayable,
    TensorShape,
    cut_recording,
    plan_steps,
)
from fivefold.dry_run.record.tape import ALLOC, KERNEL, Tape
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_recomputed_layers
from fivefold.model.spec import Model
from fivefold.planner.counts.operations.layer import list_kinds
from fivefold.trainer.build import Built
from fivefold.trainer.model.float8.cast import Cast
from fivefold.trainer.model.linear import WgradStore, Work
from fivefold.trainer.model.transformer import Head
from fivefold.trainer.parallel.gradients import Gradients
from fivefold.trainer.parallel.pipeline import end_stage, run_backward


def replay_equal_blocks(built: Built, *, model: Model, layout: Layout, job: Job, recorder: TapeRecorder) -> None:
    """Make each block of this rank replay the recording of its kind, which is created when the first of the kind runs.

    The head replays a recording of its first micro-batch, unless it predicts several tokens.
    """
    split = any(action.kind in ("B", "W") for row in built.table.rows for action in row)
    known_recordings: dict[Hashable, dict[bool, BlockRecording] | None] = {}
    is_recomputed = list_recomputed_layers(model, layout)
    kinds = list_kinds(model, job)
    # blocks that hand on more than the stream, or read more, are run
    is_replayable = (
        model.per_layer_inputs is None
        and not model.shared_kv_layers
        and not any(map(model.lends_chosen, range(model.layers)))
        and not any(map(model.lends_experts, range(model.layers)))
    )
    for layer in built.module.layers if is_replayable else ():
        block = built.module.blocks[layer]
        kind = kinds[layer], is_recomputed[layer]
        block.forward = BlockReplayer(
            block,
            layer=layer,
            kind=kind,
            recordings_by_kind=known_recordings,
            split=split,
            wgrad_store=built.wgrad_store,
            recorder=recorder,
        ).forward
    for unit in built.units:
        unit.gradients.accumulate = GradientSumReplayer(unit.gradients, recorder).accumulate  # type: ignore[method-assign]
    head = built.module.head
    if model.mtp is not None:  # the head then contains blocks, and has more inputs
        return
    head.forward = BlockReplayer(  # type: ignore[method-assign,assignment]
        head,
        layer=-1,
        kind="head",
        recordings_by_kind=known_recordings,
        split=split,
        wgrad_store=built.wgrad_store,
        recorder=recorder,
    ).forward


class BlockReplayer:
    """A replacement of one block's forward: records the first block of its kind, replays it for the others."""

    def __init__(
        self,
        block: nn.Module,
        *,
        layer: int,
        kind: Hashable,
        recordings_by_kind: dict[Hashable, dict[bool, BlockRecording] | None],
        split: bool,
        wgrad_store: WgradStore,
        recorder: TapeRecorder,
    ) -> None:
        self.block, self.original, self.layer = block, block.forward, layer
        self.kind, self.recordings_by_kind = kind, recordings_by_kind
        self.split, self.wgrad_store, self.recorder = split, wgrad_store, recorder
        self.weights = {name: weight for name, weight in block.named_parameters() if hasattr(weight, "collect")}
        self.is_head = isinstance(block, Head)
        self.keeps_inputs = isinstance(block, Head) and block.chunked  # the backward needs the targets too
        if isinstance(block, Head) and block.out.matrix.requires_grad:
            self.weights["out"] = block.out.matrix  # may be the embedding's weight, if tied
        self._cached_steps: dict[tuple[int, int], tuple[Tape, list[Any]]] = {}
        self._dummies: dict[str, Tensor | Cast] = {}

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Record the block if its kind is new; then replay it, or run it if it is not replayable."""
        if not x.requires_grad:  # the first block over a frozen embedding, whose backward is its own
            first: Tensor = self.original(x, *rest)
            return first
        if self.kind not in self.recordings_by_kind:
            try:
                recordings_of_kind = {
                    is_split: self._record(x, rest, split=is_split)
                    for is_split in ((False, True) if self.split else (False,))
                }
                self.recordings_by_kind[self.kind] = recordings_of_kind
            except NotReplayable:
                self.recordings_by_kind[self.kind] = None
        recordings = self.recordings_by_kind[self.kind]
        if recordings is None:
            y: Tensor = self.original(x, *rest)
        else:
            y = _ReplayBlock.apply(x, self, recordings, rest if self.keeps_inputs else ())  # type: ignore[no-untyped-call]
        return y

    # Recording

    def _record(self, template: Tensor, rest: Sequence[Any], *, split: bool) -> BlockRecording:
        """Run forward and backward of this block on a separate tape; ``split``: weight gradients are deferred."""
        with (
            self.recorder.use_separate_tape() as tape,
            torch.enable_grad(),
            self._intercept_gradients(tape) as gradients,
        ):
            spans, ids, y, dx = self._run_once(template, rest, split=split)
        return cut_recording(tape, spans, ids=ids, y=y, dx=dx, gradients=tuple(gradients))

    def _run_once(
        self, template: Tensor, rest: Sequence[Any], *, split: bool
    ) -> tuple[list[tuple[int, int]], dict[int, int], BlockOutput, BlockOutput]:
        """Run once; return the tape ranges (forward, backward, end, each W), the ids of x and dy, y, and dx."""
        recorder = self.recorder
        spans = list[tuple[int, int]]()
        noted_gradients = dict[str, Any]()
        leaf = torch.empty_like(template).requires_grad_()
        x: Tensor = _InputGradient.apply(leaf, partial(_note_gradient, noted_gradients, recorder))  # type: ignore[no-untyped-call]
        x_id, start = recorder.storage_id(x), recorder.count_events()
        y = self.original(x, *rest)
        del x  # as the caller does: a block that does not keep its input frees it here
        spans.append((start, recorder.count_events()))
        output = recorder.storage_id(y), TensorShape.from_tensor(y)
        output_gradients = [torch.empty_like(y)]
        g_id = recorder.storage_id(output_gradients[0])
        end = end_stage(y, output_gradients)
        del y
        seed = torch.ones_like(end)
        self.wgrad_store.deferring, start = split, recorder.count_events()
        with recorder.call_sites.enter_module(""):
            run_backward(end, seed)
        self.wgrad_store.deferring = False
        spans.append((start, noted_gradients["place"]))
        start = recorder.count_events()
        del end
        spans.append((start, recorder.count_events()))
        works = self.wgrad_store.take()[::-1]
        while works:
            start = recorder.count_events()
            with recorder.call_sites.enter_module(""):
                works.pop()()
            spans.append((start, recorder.count_events()))
        return spans, {x_id: INPUT_ID, g_id: OUTPUT_GRADIENT_ID}, output, noted_gradients["dx"]

    @contextmanager
    def _intercept_gradients(self, tape: Tape) -> Iterator[list[tuple[str, tuple[TensorShape, ...]]]]:
        """Discard weight gradients, but mark on ``tape`` where they are made or deferred; yields names and shapes."""
        gradients: list[tuple[str, tuple[TensorShape, ...]]] = []
        collect_functions = {name: weight.collect for name, weight in self.weights.items()}
        deferred = count()

        def note_gradient(name: str, gradient: Tensor | Cast) -> None:
            """Note a weight gradient on the tape instead of accumulating it."""
            self.recorder.count_events()
            tape.add(DELIVER_GRADIENT, len(gradients), tape.site(self.recorder.module_site()))
            parts = gradient[:2] if isinstance(gradient, Cast) else (gradient,)
            gradients.append((name, tuple(TensorShape.from_tensor(part) for part in parts)))
            if self.wgrad_store.deferring and self.weights[name].waits:  # type: ignore[attr-defined]
                run_or_defer(partial(_do_nothing, gradient))  # it stays allocated until W

        def run_or_defer(work: Work) -> None:
            if self.wgrad_store.deferring:
                tape.add(DEFER_GRADIENT, next(deferred))
            WgradStore.run_or_defer(self.wgrad_store, work)

        self.wgrad_store.run_or_defer = run_or_defer  # type: ignore[method-assign]
        for name, weight in self.weights.items():
            weight.collect = partial(note_gradient, name)
        try:
            yield gradients
        finally:
            del self.wgrad_store.run_or_defer
            for name, weight in self.weights.items():
                weight.collect = collect_functions[name]

    # Replaying

    def replay(self, micro_batch: ReplayedMicroBatch, part: int) -> None:
        """Replay one part of the recording: 0 forward, 1 backward, 2 end, from 3 on the deferred weight gradients."""
        for step in self._plan_part(micro_batch.recording, part):
            if isinstance(step, EventChunk):
                self.recorder.append_events(
                    step.renumber(first_id=micro_batch.first_id, first_handle=micro_batch.first_handle),
                    live_bytes=step.live_bytes,
                )
                continue
            kind, argument, path = step
            if kind == DELIVER_GRADIENT:
                name, shapes = micro_batch.recording.gradients[argument]
                with self.recorder.call_sites.enter_module(path):
                    self.weights[name].collect(self._get_dummy(name, shapes))
            elif kind == DEFER_GRADIENT:
                self.wgrad_store.run_or_defer(partial(self.replay, micro_batch, 3 + argument))
            elif kind == ALLOC:
                micro_batch.created = self.recorder.create_tensor(
                    (micro_batch.recording.y if part == 0 else micro_batch.recording.dx)[1].empty, site=argument
                )
            elif argument == INPUT_ID:
                micro_batch.x = None
            elif micro_batch.g is not None:
                self.recorder.free_early(micro_batch.g)
                micro_batch.g = None

    def _get_dummy(self, name: str, shapes: tuple[TensorShape, ...]) -> Tensor | Cast:
        if name not in self._dummies:
            with self.recorder.hide_storages():
                dummies = [shape.empty() for shape in shapes]
                self._dummies[name] = dummies[0] if len(dummies) == 1 else Cast(*dummies)
        return self._dummies[name]

    def _plan_part(self, recording: BlockRecording, part: int) -> list[Any]:
        """Return the chunks and steps of a part for the current tape; cached, as all micro-batches share them."""
        tape, key = self.recorder.tape, (id(recording), part)
        cached = self._cached_steps.get(key)
        if cached is None or cached[0] is not tape:
            events = (recording.forward, recording.backward, recording.end, *recording.deferred_wgrads)[part]
            cached = self._cached_steps[key] = (
                tape,
                list(plan_steps(events, recording, part, tape=tape, layer=self.layer)),
            )
        return cached[1]


def _do_nothing(_gradient: Tensor | Cast) -> None:
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
        self.created: Tensor | None = None
        self.first_id = recorder.reserve_ids(max(recording.ids for recording in recordings.values()))
        self.first_handle = recorder.reserve_handles(max(recording.handles for recording in recordings.values()))

    def take(self) -> Tensor:
        """Return the tensor that was created last (y or dx), and drop it here."""
        tensor, self.created = self.created, None
        assert tensor is not None
        return tensor


class GradientSumReplayer:
    """A replacement of ``Gradients.accumulate``: adding to an earlier sum does the same for every micro-batch."""

    def __init__(self, gradients: Gradients, recorder: TapeRecorder) -> None:
        self.gradients, self.original, self.recorder = gradients, gradients.accumulate, recorder
        self._events: dict[tuple[int, str], Events] = {}  # by weight and running module, on the current tape
        self._tape: Tape | None = None

    def accumulate(self, index: int, gradient: Tensor | Cast | None) -> None:
        """Run the first sum of each weight on a tape, and replay its kernels for the others."""
        recorder = self.recorder
        if recorder.tape is not self._tape:
            self._tape, self._events = recorder.tape, {}
        key = index, recorder.call_sites.find_running_module()
        if not self.gradients.has_sum(index):
            self.original(index, gradient)
        elif key in self._events:
            recorder.append_events(self._events[key], live_bytes=0)
        else:
            start = recorder.count_events()
            self.original(index, gradient)
            events = np.array(recorder.tape.events[4 * start : 4 * recorder.count_events()], dtype=np.int64).reshape(
                -1, 4
            )
            if (events[:, 0] == KERNEL).all():  # else it allocates
                self._events[key] = events


class _GraphEnd:
    """An object held by the autograd graph: replays the end part when the graph is freed."""

    def __init__(self, replayer: BlockReplayer, micro_batch: ReplayedMicroBatch) -> None:
        self.replayer, self.micro_batch = replayer, micro_batch

    def __del__(self) -> None:
        self.replayer.replay(self.micro_batch, 2)


class _ReplayBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, replayer: BlockReplayer, recordings: dict[bool, BlockRecording], kept: Sequence[Any]
    ) -> Tensor:
        ctx.replayer, ctx.recordings, ctx.kept = replayer, recordings, kept
        ctx.micro_batch = micro_batch = ReplayedMicroBatch(recordings, x, replayer.recorder)
        replayer.replay(micro_batch, 0)
        return micro_batch.take()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        replayer, micro_batch = ctx.replayer, ctx.micro_batch
        micro_batch.recording = recording = ctx.recordings[replayer.wgrad_store.deferring]
        micro_batch.g = None if replayer.is_head else gradient  # the head's gradient is held by the caller of backward
        ctx.end = _GraphEnd(replayer, micro_batch)
        replayer.replay(micro_batch, 1)
        ctx.micro_batch = None
        if recording.dx[0] == OUTPUT_GRADIENT_ID:
            return gradient, None, None, None
        return micro_batch.take(), None, None, None


class _InputGradient(torch.autograd.Function):
    """An input boundary of a recording: forward copies x; backward passes dx to ``on_gradient`` and stops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_gradient: Callable[[Tensor], None]) -> Tensor:
        ctx.on_gradient = on_gradient
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.on_gradient(gradient)
        return None, None


def _note_gradient(gradients: dict[str, Any], recorder: TapeRecorder, gradient: Tensor) -> None:
    gradients["place"], gradients["dx"] = (
        recorder.count_events(),
        (recorder.storage_id(gradient), TensorShape.from_tensor(gradient)),
    )
