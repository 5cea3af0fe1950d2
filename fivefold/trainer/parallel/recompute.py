"""Activation recomputation by saved-tensor hooks: chosen operations run again when the backward first needs them.

    forward    a chosen operation saves handles (operation, n-th saved tensor) instead of tensors
    backward   autograd unpacks a handle → the operation runs again, on inputs that were kept or are recomputed first

Nothing is sharded. Collectives inside an operation run again with it; an operation whose tensors are not read does not
run. ``planner/counts/operations/recompute.py`` says which tensors are kept. Sources: arXiv:1604.06174,
arXiv:2205.05198 §5.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fivefold.layout.recomputation import CHEAP, list_groups
from fivefold.trainer.model import linear_op
from fivefold.trainer.model.linear import Linear, fused_linears, mark_recomputation
from fivefold.trainer.model.operation import exclude_from_graphs, skip_wrappers
from fivefold.trainer.parallel.recomputed import Function, OutputsByStorage, RecomputedOperation, SavedHandle, restore

Compile = Callable[[Function], Function]
END_OF_FEED_FORWARD = ("mlp.", "moe.", "hyper2.mix")  # how the names of operations near a block's end begin
END_OF_MIXER = ("attention.out", "mixer.out", "hyper1.mix")  # of a block without a feed-forward


def attach(
    blocks: Iterable[tuple[nn.Module, bool]], *, groups: frozenset[str], compiled: Compile | None = None
) -> None:
    """Make ``blocks`` recompute ``groups``, as in ``Layout.recomputed_operations``; ``compiled``: torch.compile.

    Saved-tensor hooks run outside compiled code, so compiling is done here too: a block is compiled as one graph if all
    or nothing of it is recomputed, else operation by operation. Its linear layers are in its graph unless it is
    recomputed (the layers that gather depend on when they run), or does not begin with a norm, whose gradient, made by
    autograd, ends the backward and lets ZeRO free the weights. Call the block as a module: the recomputation calls the
    inner forward, so hooks on the module fire once.
    """
    if compiled is not None:
        skip_wrappers()  # compiled within their callers only
    for block, recomputes in blocks:
        block_groups = groups if recomputes else frozenset()
        if compiled is not None and block_groups <= {"layer"}:
            if not block_groups and next(name for name, _ in block.named_parameters()).startswith("norm"):
                linear_op.attach(block.modules())
            block.forward = compiled(block.forward)
            torch._dynamo.eval_frame.skip_code(_FullRecompute.run.__code__)  # compiled within its callers only
        if not block_groups:
            continue
        ends: tuple[str, ...] = END_OF_MIXER if block.feed_forward is None else END_OF_FEED_FORWARD
        if compiled is None:  # a frozen feed-forward may save nothing: a watched operation would cut a compiled graph
            ends = (*END_OF_MIXER, *END_OF_FEED_FORWARD)
        recorder = (
            _FullRecompute(block.forward, ends=ends)
            if "layer" in block_groups
            else _SelectiveRecompute(block.forward, block_groups, compiled)
        )
        block.forward = recorder.forward
        for module in block.modules():
            if hasattr(module, "run"):
                module.run = cast(Any, recorder.run)


class _ThreadState(threading.local):
    """Recording state of this thread; the backward may run in a thread other than the forward's."""

    outputs: OutputsByStorage | None = None
    layer: RecomputedLayer | None = None


class _SelectiveRecompute:
    """Recomputes some operations of a block; every operation of the block is called through ``run``."""

    def __init__(self, forward: Function, wanted: frozenset[str], compiled: Compile | None) -> None:
        self.inner, self.wanted, self.compiled = forward, wanted, compiled
        self.thread_state = _ThreadState()
        self._ready: dict[str, tuple[Function, Function]] = {}  # by name: the function and its compiled form

    def forward(self, *inputs: Any) -> Any:
        """Run the block's forward; in training, record its operations for recomputation."""
        if not torch.is_grad_enabled():
            return self.inner(*inputs)
        self.thread_state.outputs = outputs = OutputsByStorage()
        try:
            return self.inner(*inputs)
        finally:
            self.thread_state.outputs = None
            outputs.clear()  # the autograd graph keeps the hooks, and they keep these outputs

    def run(self, name: str, function: Function, *inputs: Any) -> Any:
        """Run one operation, recorded if it is chosen; operations nested in it are part of it."""
        if self.compiled is not None:
            function = self._compile(name, function)
        outputs = self.thread_state.outputs
        chosen_groups = list_groups(name) & self.wanted
        if outputs is None or not (chosen_groups or outputs):
            return function(*inputs)
        self.thread_state.outputs = None
        if chosen_groups:
            operation = RecomputedOperation(function, inputs, outputs)
            with mark_recomputation(), saved_tensors_hooks(operation.make_pack_hook(), restore):
                result = function(*inputs)
            operation.record_outputs(result, cheap=bool(chosen_groups & CHEAP))
        else:
            with saved_tensors_hooks(outputs.pack, restore):
                result = function(*inputs)
        self.thread_state.outputs = outputs
        return result

    def _compile(self, name: str, function: Function) -> Function:
        assert self.compiled is not None
        if function is fused_linears or isinstance(function, Linear):  # never compiled
            return function
        if name not in self._ready or self._ready[name][0] != function:
            self._ready[name] = function, self.compiled(function)
        return self._ready[name][1]


class _FullRecompute:
    """Recomputes a full block from its input. ``run`` records after which operation the recomputation may stop."""

    def __init__(self, forward: Function, *, ends: tuple[str, ...]) -> None:
        self.inner, self.thread_state, self.ends = forward, _ThreadState(), ends

    def forward(self, *inputs: Any) -> Any:
        """Run the block's forward; in training, keep its input and save handles for everything else."""
        if not torch.is_grad_enabled():
            return self.inner(*inputs)
        self.thread_state.layer = layer = RecomputedLayer(self.inner, inputs, self.thread_state)
        try:
            with mark_recomputation(), saved_tensors_hooks(layer.make_pack_hook(), restore):
                result = self.inner(*inputs)
        finally:
            self.thread_state.layer = None
        layer.record_outputs((), cheap=False)
        return result

    def run(self, name: str, function: Function, *inputs: Any) -> Any:
        """Run one operation; watch those near a block's end, as they may save only inputs. Others stay compiled."""
        if name.startswith(self.ends) and not name.endswith("act"):
            return self._run_watched(function, *inputs)
        return function(*inputs)

    @partial(exclude_from_graphs, recursive=False)
    def _run_watched(self, function: Function, *inputs: Any) -> Any:
        layer = self.thread_state.layer
        if layer is None:
            return function(*inputs)
        layer.enter(inputs)
        result = function(*inputs)
        layer.leave()
        return result


class _StopRecompute(Exception):
    """Ends a recomputation once every saved tensor has been recomputed."""


class StopPoint(NamedTuple):
    """The ``call``-th watched operation, if it saves only its inputs at ``places`` and nothing is saved after it."""

    call: int
    places: list[int]


class RecomputedLayer(RecomputedOperation):
    """A full block as one operation. Its recomputation stops at the ``StopPoint``, before the last collective."""

    def __init__(self, function: Function, inputs: Sequence[Any], thread_state: _ThreadState) -> None:
        super().__init__(function, inputs, OutputsByStorage())
        self.thread_state, self.calls = thread_state, 0
        self.entered: Sequence[Any] = ()
        self.inside: StopPoint | None = None
        self.ending: StopPoint | None = None
        self.saved: list[Tensor] | None = None

    @exclude_from_graphs
    def enter(self, inputs: Sequence[Any]) -> None:
        """Record that a watched operation begins.

        While recomputing, save its inputs and stop if it is the ``StopPoint``.
        """
        self.calls += 1
        if self.saved is None:
            self.entered, self.inside = inputs, StopPoint(self.calls, [])
            if self.ending is None:  # the first after everything that is saved so far; frozen layers save nothing
                self.ending = self.inside
        elif self.ending is not None and self.calls == self.ending.call:
            self.saved += [inputs[place].detach() for place in self.ending.places]
            raise _StopRecompute

    @exclude_from_graphs
    def leave(self) -> None:
        """Record that the watched operation has ended."""
        self.entered, self.inside = (), None

    @exclude_from_graphs
    def pack(self, tensor: Tensor) -> SavedHandle:
        """Save a handle as any operation does, and update the candidate for the ``StopPoint``."""
        place = next((place for place, x in enumerate(self.entered) if x is tensor), None)
        if place is None:
            self.inside = None
        elif self.inside is not None:
            self.inside.places.append(place)
        self.ending = self.inside
        return super().pack(tensor)

    def rerun(self, inputs: list[Any], saved: list[Tensor]) -> Any:
        """Run the block up to the ``StopPoint``, filling ``saved``; its outputs are not needed."""
        self.calls, self.saved, self.thread_state.layer = 0, saved, self
        try:
            with suppress(_StopRecompute):
                self.function(*inputs)
        finally:
            self.saved = self.thread_state.layer = None
        return ()
