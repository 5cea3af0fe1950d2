"""Time a real step by unit and direction: forward, backward and W of embedding, blocks and head, and the rest.

    update │ F embed │ F block 0 │ F block 1 │ F head │ B head │ B block 1 │ … │ update

One clock runs from the first to the last moment of the step, and every boundary switches the label that it counts for:
hooks before and after a unit's forward, the arrival of the gradient of its output, and the actions of the schedule. So
nothing is omitted or counted twice. For messages that are really sent, the clock counts the time that the rank spends
on them.

On a CPU, compute counts by the processor time of the thread, which other programs do not lengthen, and messages by the
clock, as a wait uses no processor time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fivefold.layout.schedule.action import Action
from fivefold.trainer.engine import Engine

UPDATE, EXCLUDED, MESSAGE = ("update", ""), ("excluded", ""), "message"
Label = tuple[str, str]


class MeasuredUnitSeconds(NamedTuple):
    """The seconds of a step by (F, B, BW, W, update or message; unit), and how often each ran.

    W is by stage, a message by ``collective ranks bytes``. ``clock``: the same by the clock. ``step``: the full step by
    the clock, with every wait.
    """

    seconds: Counter[Label]
    times: Counter[Label]
    step: float = 0.0
    clock: Counter[Label] = Counter()


class UnitClock:
    """A clock that follows ``engine`` through one step at a time: ``start``, then ``engine.step``, then ``stop``."""

    def __init__(self, engine: Engine) -> None:
        self._cuda = engine.built.ranks.device.type == "cuda"
        self._marks: list[tuple[Label, Any]] = []
        self._times: Counter[Label] = Counter()
        self._kind = "BW"
        self._left = 0
        self._pipeline = engine.pipeline
        self._ends = [_name_end_units(layers, engine.layers) for layers in engine.layers]
        module = engine.built.module
        self._watch(module.embed, "embed")
        self._watch(module.head, "head")
        for layer, block in enumerate(module.blocks):
            self._watch(block, f"block {layer}")
        engine.pipeline.on_action, engine.pipeline.on_pass = self._on_action, self._on_pass

    def start(self) -> None:
        """Begin a step; time counts as the update until the first action."""
        self._marks.clear()
        self._times.clear()
        self._left = sum(2 if action.kind == "FB" else 1 for action, *_ in self._pipeline.row)
        self._mark(UPDATE)

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Count the time within this context for ``EXCLUDED``, which is not part of the step."""
        label = self.switch(EXCLUDED)
        yield
        self._mark(label)

    def switch(self, label: Label) -> Label:
        """Count for ``label`` from now on; return the label that was counted for before."""
        previous_label = self._marks[-1][0] if self._marks else UPDATE
        self._mark(label)
        return previous_label

    def follow(self, engine: Engine) -> None:
        """Count the messages that this rank really exchanges with the others.

        Messages that wait for another stage of a pipeline are excluded: they are a bubble, which is not measured here.
        """
        stages = engine.layout.pp > 1

        def post(axis: str, ranks: tuple[int, ...], collective: str, payload: int, **_ends: object) -> _Posted:
            label = MESSAGE, f"{collective} {len(ranks)} {payload}"
            return _Posted(self, EXCLUDED if stages and axis in ("pp", "world") else label)

        engine.built.ranks.listener.post = post

    def count(self, label: Label) -> None:
        """Count one more occurrence of ``label``."""
        self._times[label] += 1

    def stop(self) -> MeasuredUnitSeconds:
        """End the step and return its seconds."""
        self._mark(UPDATE)
        if self._cuda:
            torch.cuda.synchronize()
        seconds, clock = Counter[Label](), Counter[Label]()
        for (label, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[label] += self._measure(begin, end, waits=label[0] == MESSAGE)
            clock[label] += self._measure(begin, end, waits=True)
        seconds.pop(EXCLUDED, None)
        step = self._measure(self._marks[0][1], self._marks[-1][1], waits=True)
        return MeasuredUnitSeconds(seconds, Counter(self._times), step, clock)

    def _measure(self, begin: Any, end: Any, *, waits: bool) -> Any:
        """Return the seconds between two marks: on a CPU, without ``waits``, those of the processor."""
        if self._cuda:
            return begin.elapsed_time(end) / 1e3
        return (end[not waits] - begin[not waits]) / 1e9

    def _mark(self, label: Label) -> None:
        """Switch the clock to ``label``."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((label, event))
        else:
            self._marks.append((label, (time.perf_counter_ns(), time.thread_time_ns())))

    def _on_action(self, action: Action) -> None:
        self._kind = "B" if action.kind == "B" else "BW"
        if action.kind in ("F", "FB"):
            self._mark(("F", self._ends[action.stage][0]))
        elif action.kind == "W":
            self._times["W", str(action.stage)] += 1
            self._mark(("W", str(action.stage)))
        else:
            self._mark((self._kind, self._ends[action.stage][1]))

    def _on_pass(self) -> None:
        self._left -= 1
        if not self._left:
            self._mark(UPDATE)

    def _watch(self, unit: nn.Module, name: str) -> None:
        """Register hooks on ``unit`` that mark when its forward and its backward begin."""

        def on_forward_begin(_unit: nn.Module, _inputs: object) -> None:
            if not _is_recomputing():
                self._times["F", name] += 1
                self._mark(("F", name))

        def on_forward_end(_unit: nn.Module, _inputs: object, output: Tensor) -> None:
            if output.requires_grad and not _is_recomputing():
                output.register_hook(lambda _gradient: self._backward(name))

        unit.register_forward_pre_hook(on_forward_begin, prepend=True)
        unit.register_forward_hook(on_forward_end)

    def _backward(self, name: str) -> None:
        """Switch to the backward of a unit, when the gradient of its output has arrived."""
        self._times[self._kind, name] += 1
        self._mark((self._kind, name))


class _Posted:
    """A message under the clock (``parallel/listener.py``), while it is posted and while it is waited for."""

    def __init__(self, clock: UnitClock, label: Label) -> None:
        self._clock, self._label = clock, label
        clock.count(label)
        self._before = clock.switch(label)

    def on_launched(self) -> None:
        self._clock.switch(self._before)

    def on_wait_begin(self, _completed: bool) -> None:
        self._before = self._clock.switch(self._label)

    def on_wait_end(self) -> None:
        self._clock.switch(self._before)


def _is_recomputing() -> bool:
    """Return whether the forward that is running is part of a backward pass (recomputation)."""
    return torch._C._current_graph_task_id() != -1


def _name_end_units(layers: range, stages: Sequence[range]) -> tuple[str, str]:
    """Return the names of the first and the last unit of the stage that holds ``layers``."""
    first = "embed" if layers == stages[0] else f"block {layers.start}"
    last = "head" if layers == stages[-1] else f"block {layers.stop - 1}"
    return first, last
