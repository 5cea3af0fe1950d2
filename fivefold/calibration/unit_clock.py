"""Seconds of a real step by unit and direction: forward, backward and W of embedding, blocks and head, and the rest.

    update │ F embed │ F block 0 │ F block 1 │ F head │ B head │ B block 1 │ … │ update

One clock runs from the first to the last moment of the step, and every boundary switches what it counts for: hooks
before and after a unit's forward, the arrival of the gradient of its output, and the schedule's actions. So nothing is
left out and nothing is counted twice. Of messages that are really sent it counts what the rank spends on them.
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

UPDATE, ASIDE = ("update", ""), ("aside", "")
Label = tuple[str, str]


class UnitSeconds(NamedTuple):
    """Seconds of a step by (F, B, BW, W, update or message; unit), and how often each ran.

    W is by stage, a message by ``collective ranks bytes``.
    """

    seconds: Counter[Label]
    times: Counter[Label]


class UnitClock:
    """Follows ``engine`` through one step at a time: ``start``, then ``engine.step``, then ``stop``."""

    def __init__(self, engine: Engine) -> None:
        self._cuda = engine.built.ranks.device.type == "cuda"
        self._marks: list[tuple[Label, Any]] = []
        self._times: Counter[Label] = Counter()
        self._kind = "BW"
        self._left = 0
        self._pipeline = engine.pipeline
        self._ends = [_ends(layers, engine.layers) for layers in engine.layers]
        module = engine.built.module
        self._watch(module.embed, "embed")
        self._watch(module.head, "head")
        for layer, block in enumerate(module.blocks):
            self._watch(block, f"block {layer}")
        engine.pipeline.on_action, engine.pipeline.on_pass = self._on_action, self._on_pass

    def start(self) -> None:
        """Begin a step; it counts for the update until the first action."""
        self._marks.clear()
        self._times.clear()
        self._left = sum(2 if action.kind == "FB" else 1 for action, *_ in self._pipeline.row)
        self._mark(UPDATE)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within, the clock counts for ``ASIDE``, which is no part of the step."""
        label = self.switch(ASIDE)
        yield
        self._mark(label)

    def switch(self, label: Label) -> Label:
        """Count for ``label`` from now on; return what was counted for before."""
        before = self._marks[-1][0] if self._marks else UPDATE
        self._mark(label)
        return before

    def follow(self, engine: Engine) -> None:
        """Count messages, which this rank really exchanges with the others.

        Not those that wait for another stage of a pipeline: they are a bubble, and no part of what is measured.
        """
        stages = engine.layout.pp > 1

        def post(axis: str, ranks: tuple[int, ...], collective: str, payload: int, **_ends: object) -> _Posted:
            label = "message", f"{collective} {len(ranks)} {payload}"
            return _Posted(self, ASIDE if stages and axis in ("pp", "world") else label)

        engine.built.ranks.listener.post = post

    def count(self, label: Label) -> None:
        """One more occurrence of ``label``."""
        self._times[label] += 1

    def stop(self) -> UnitSeconds:
        """End the step and return its seconds."""
        self._mark(UPDATE)
        if self._cuda:
            torch.cuda.synchronize()
        found: Counter[Label] = Counter()
        for (label, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            found[label] += begin.elapsed_time(end) / 1e3 if self._cuda else (end - begin) / 1e9
        found.pop(ASIDE, None)
        return UnitSeconds(found, Counter(self._times))

    def _mark(self, label: Label) -> None:
        """Switch the clock to ``label``."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((label, event))
        else:
            self._marks.append((label, time.perf_counter_ns()))

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
        def before(_unit: nn.Module, _inputs: object) -> None:
            if not _recomputing():
                self._times["F", name] += 1
                self._mark(("F", name))

        def after(_unit: nn.Module, _inputs: object, output: Tensor) -> None:
            if output.requires_grad and not _recomputing():
                output.register_hook(lambda _gradient: self._backward(name))

        unit.register_forward_pre_hook(before, prepend=True)
        unit.register_forward_hook(after)

    def _backward(self, name: str) -> None:
        """The gradient of a unit's output has arrived: its backward begins."""
        self._times[self._kind, name] += 1
        self._mark((self._kind, name))


class _Posted:
    """A message under the clock (``parallel/listener.py``), while it is posted and while it is waited for."""

    def __init__(self, clock: UnitClock, label: Label) -> None:
        self._clock, self._label = clock, label
        clock.count(label)
        self._before = clock.switch(label)

    def posted(self) -> None:
        self._clock.switch(self._before)

    def waits(self, _completed: bool) -> None:
        self._before = self._clock.switch(self._label)

    def done(self) -> None:
        self._clock.switch(self._before)


def _recomputing() -> bool:
    """Whether a forward that runs now is part of a backward."""
    return torch._C._current_graph_task_id() != -1


def _ends(layers: range, stages: Sequence[range]) -> tuple[str, str]:
    """Names of the first and the last unit of the stage that holds ``layers``."""
    first = "embed" if layers == stages[0] else f"block {layers.start}"
    last = "head" if layers == stages[-1] else f"block {layers.stop - 1}"
    return first, last
