"""Makes one rank's training code report its regions to a ``SpanRecorder`` while a step is traced.

    action ⊃ operation (forward · backward · weight · recomputed) ⊃ post and wait of a message    data · reduce · update

The calls that the trainer makes through attributes (``module.run``, GEMMs, ZeRO units, pipeline, optimizer) are
replaced when the step begins and restored when it ends, so that an untraced step costs nothing. The backward of an
operation is traced by hooks on its first and last autograd node: nodes run in the reverse order of their creation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.layout.schedule.action import Action
from fivefold.model.weights import strip_block
from fivefold.results.spans import SpanKind
from fivefold.trainer.data.prefetch import Prefetcher
from fivefold.trainer.engine import Engine
from fivefold.trainer.measure.recorder import SpanRecorder
from fivefold.trainer.model.experts import GroupedLinear
from fivefold.trainer.model.linear import Linear, Work, fused_linears, is_recomputing
from fivefold.trainer.model.moe import Moe
from fivefold.trainer.model.operation import Run
from fivefold.trainer.parallel.zero import ZeroUnit

GROUPED = ("down", "gate", "up", "out", "q")  # weights of experts of an MLP or of attention, in the order of their dW
LEAF = 2**63  # autograd's nodes of leaves have numbers above all others
MISSING = object()
WAYS = ("forward", "recomputed", "backward", "weight")  # labels of the GEMMs of a weight
FORWARD, RECOMPUTED, BACKWARD, WEIGHT = range(4)


class Regions:
    """The replaced calls of one rank. A compiled block is one operation, except GEMMs that are not in its graph."""

    def __init__(self, recorder: SpanRecorder, *, engine: Engine, data: Prefetcher | None) -> None:
        self.recorder, self.pipeline = recorder, engine.pipeline
        self._swaps: list[tuple[dict[str, Any], str, Any]] = []
        built, label = engine.built, recorder.label
        self._wrap(engine.pipeline, "_run_action", _wrap_action(recorder, engine.pipeline._run_action))
        for name, region in (
            ("sum_norm", label("update", "gradient norm")),
            ("update", label("update", "update")),
            ("zero_grad", label("host", "zero_grad")),
            ("_balance", label("op", "moe.balance")),
        ):
            self._wrap(engine, name, recorder.wrap(region, getattr(engine, name)))
        for unit in built.units:
            self._add_unit(unit)
        if data is not None:
            self._wrap(data, "take", recorder.wrap(label("data", "data"), data.take))
        self._wrap(built.ranks.listener, "post", recorder.post)
        self._add_operations(engine, compiled=engine.job.stack.is_compiled)

    @contextmanager
    def report(self) -> Iterator[None]:
        """Report regions within the context."""
        former_values = [(attributes, name, attributes.get(name, MISSING)) for attributes, name, _ in self._swaps]
        try:
            for attributes, name, new in self._swaps:
                attributes[name] = new
            yield
        finally:
            for attributes, name, old in former_values:
                if old is MISSING:
                    del attributes[name]
                else:
                    attributes[name] = old

    def _wrap(self, owner: object, name: str, function: Any) -> None:
        self._swaps.append((vars(owner), name, function))

    def _add_unit(self, unit: ZeroUnit) -> None:
        label, wrap = self.recorder.label, self.recorder.wrap
        self._wrap(unit, "gather", wrap(label("op", "weights.gather"), unit.gather))
        gradients = unit.gradients
        self._wrap(gradients, "accumulate", wrap(label("op", "gradients.sum"), gradients.accumulate))
        self._wrap(gradients, "_reduce", wrap(label("call", "reduce"), gradients._reduce))
        self._wrap(gradients, "finish", wrap(label("reduce", "reduce gradients"), gradients.finish))

    def _add_operations(self, engine: Engine, *, compiled: bool) -> None:
        """Wrap the operations of all modules, so that each records a span with the operation's name."""
        built, names = engine.built, dict[int, str]()
        linears = [(strip_block(path), part) for path, part in built.module.named_modules() if isinstance(part, Linear)]
        for name, linear in linears:
            names[id(linear.matrix)] = name
        for name, linear in linears:
            self._wrap(linear, "gemms", Gemms(self.recorder, linear.gemms, names))
            if linear.quantized is not None:
                self._wrap(linear, "dense_matrix", Dequantization(self.recorder, linear.dense_matrix, name, names))
        for path, part in built.module.named_modules():
            if isinstance(part, GroupedLinear):
                weight_names = {id(part.get_parameter(name)): f"{strip_block(path)}.{name}" for name in part.names}
                self._wrap(part, "gemms", GroupedGemmRegions(self.recorder, part.gemms, weight_names))
                if part.quantized:
                    self._wrap(part, "dense_weights", ExpertDequantization(self.recorder, part, weight_names))
            if compiled and path.startswith("blocks."):  # a replaced attribute inside would recompile it
                if path.count(".") == 1:
                    self._wrap(
                        part, "forward", _Timed(self.recorder, _make_labels(self.recorder, "op", "block"), part.forward)
                    )
                continue
            if isinstance(part, Moe):
                plan = self.recorder.wrap(self.recorder.label("op", "moe.plan"), part._plan_dispatch)
                self._wrap(part, "_plan_dispatch", plan)
            if "run" in vars(part):
                self._wrap(part, "run", _wrap_run(self.recorder, vars(part)["run"]))
        self._wrap(built.wgrad_store, "run_or_defer", _wrap_deferral(self.recorder, built.wgrad_store))


def _wrap_action(recorder: SpanRecorder, act: Callable[..., None]) -> Callable[..., None]:
    def run_timed(action: Action, *, first: int) -> None:
        recorder.begin(recorder.label(action.kind, str(action), "", action))
        act(action, first=first)
        recorder.end()

    return run_timed


def _wrap_deferral(recorder: SpanRecorder, store: Any) -> Callable[[Work], None]:
    """Wrap ``WgradStore.run_or_defer``: deferred works are regions named after the operation that deferred them."""
    inner = store.run_or_defer

    def run_or_defer(work: Work) -> None:
        inner(recorder.wrap(recorder.deferred_label(), work) if store.deferring else work)

    return run_or_defer


def _wrap_run(recorder: SpanRecorder, inner: Run) -> Run:
    """Wrap ``module.run`` so that each function it calls is timed, also when ``inner`` recomputes it."""
    labels_of_name: dict[str, Labels] = {}

    def run(name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        labels = labels_of_name.get(name)
        if labels is None:
            is_outer = function is fused_linears or isinstance(function, Linear) or name in GROUPED_CALLS
            labels = labels_of_name[name] = _make_labels(recorder, "call" if is_outer else "op", name)
        return inner(name, _Timed(recorder, labels, function), *inputs)

    return run


def _make_labels(recorder: SpanRecorder, kind: SpanKind, name: str) -> Labels:
    """Return the labels of an operation.

    Hooks on autograd's nodes are most of the cost of a trace, so linear layers, whose GEMMs are traced separately, and
    sums, which only pass their gradient on, have none.
    """
    forward, recomputed, backward = (recorder.label(kind, name, way) for way in ("forward", "recomputed", "backward"))
    return Labels(forward, recomputed, None if kind == "call" or name.endswith(".add") else backward)


class Labels(NamedTuple):
    """The codes of an operation's regions; ``backward`` is None if it is not traced."""

    forward: int
    recomputed: int
    backward: int | None


GROUPED_CALLS = ("moe.experts.gate_up", "moe.experts.down", "attention.experts.q", "attention.experts.out")


def is_in_backward() -> bool:
    """Return whether autograd is running a node in this thread: a forward then is a recomputation."""
    return torch._C._current_autograd_node() is not None


class _Timed:
    """A call of an operation as a region, and its backward as another."""

    __slots__ = ("function", "labels", "recorder")

    def __init__(self, recorder: SpanRecorder, labels: Labels, function: Callable[..., Any]) -> None:
        self.recorder, self.function, self.labels = recorder, function, labels

    def __call__(self, *inputs: Any) -> Any:
        recorder = self.recorder
        labels = self.labels
        is_recomputation = is_in_backward()
        first = torch._C._autograd._get_sequence_nr()
        recorder.begin(labels.recomputed if is_recomputation else labels.forward)
        try:
            output = self.function(*inputs)
        finally:
            recorder.end()
        if labels.backward is not None and not is_recomputation and torch.is_grad_enabled():
            self._watch(output, first, labels.backward)
        return output

    def _watch(self, output: Any, first: int, label: int) -> None:
        """Report the backward of the nodes created since number ``first``, from newest to oldest, as ``label``."""
        nodes: dict[int, Any] = {}
        waiting = [
            out.grad_fn for out in (output if isinstance(output, tuple) else (output,)) if isinstance(out, Tensor)
        ]
        while waiting:
            node: Any = waiting.pop()
            number = -1 if node is None else node._sequence_nr()
            if first <= number < LEAF and number not in nodes:
                nodes[number] = node
                waiting += [earlier for earlier, _ in node.next_functions]
        if not nodes:
            return
        recorder = self.recorder
        begun_flags: list[bool] = []

        def start_region(_gradients: object) -> None:
            begun_flags.append(True)
            recorder.begin(label)

        def end_region(_made: object, _gradients: object) -> None:
            if begun_flags:
                recorder.end()

        nodes[max(nodes)].register_prehook(start_region)
        nodes[min(nodes)].register_hook(end_region)


class Gemms:
    """The GEMMs of a linear layer and of those fused with it, as regions named after the weights."""

    def __init__(self, recorder: SpanRecorder, inner: Any, names: dict[int, str]) -> None:
        self.recorder, self.inner, self.names = recorder, inner, names
        self.travels, self.adds = (getattr(inner, name, False) for name in ("travels", "adds"))  # of experts: none
        self.labels = {name: tuple(recorder.label("op", name, way) for way in WAYS) for name in names.values()}
        self.fused: list[str] = []  # names of the layers on the last input
        self.turn = 0

    def operand(self, *inputs: Any) -> Any:
        """Call the inner ``operand`` on a new input."""
        self.fused = []
        return self.inner.operand(*inputs)

    def shared_operand(self, x: Tensor, **exchanges: Any) -> Any:
        """Call the inner ``shared_operand`` on a new input."""
        self.fused = []
        return self.inner.shared_operand(x, **exchanges)

    def fprop(self, operand: Any, weight: Tensor, *rest: Any) -> Tensor:
        """Call and record the inner ``fprop``."""
        name = self.names[id(weight)]
        self.fused.append(name)
        return self._time_gemm(
            name, RECOMPUTED if is_in_backward() else FORWARD, self.inner.fprop, operand, weight, *rest
        )

    def dgrad(self, gradient: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        """Call and record the inner ``dgrad``; without a sum to add to, it is the first of the fused ones."""
        name = self.names[id(weight)]
        self.fused = [name] if rest[-1] is None else [*self.fused, name]
        return self._time_gemm(name, BACKWARD, self.inner.dgrad, gradient, weight, *rest)

    def columns(self, *inputs: Any) -> Any:
        """Call the inner ``columns``; dW of the fused layers follow in order."""
        self.turn = 0
        return self.inner.columns(*inputs)

    def wgrad(self, *inputs: Any) -> Tensor:
        """Call and record the inner ``wgrad``."""
        self.turn += 1
        return self._time_gemm(self.fused[self.turn - 1], WEIGHT, self.inner.wgrad, *inputs)

    def add_wgrad(self, *inputs: Any) -> None:
        """Call and record the inner ``add_wgrad``."""
        self.turn += 1
        self._time_gemm(self.fused[self.turn - 1], WEIGHT, self.inner.add_wgrad, *inputs)

    def _time_gemm(self, name: str, way: int, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Call ``function`` as the region of the weight ``name``; ``way``: an index of ``WAYS``."""
        self.recorder.begin(self.labels[name][way])
        output = function(*inputs)
        self.recorder.end()
        return output


class Dequantization:
    """The dequantization of a linear layer's weight, in the region of the GEMM that reads the result."""

    def __init__(self, recorder: SpanRecorder, inner: Callable[[], Tensor], name: str, names: dict[int, str]) -> None:
        self.recorder, self.inner, self.name, self.names = recorder, inner, name, names
        self.labels = tuple(recorder.label("op", name, way) for way in WAYS[:WEIGHT])

    def __call__(self) -> Tensor:
        """Return the weight; ``names`` gives the GEMM its name."""
        way = FORWARD if not is_in_backward() else RECOMPUTED if is_recomputing() else BACKWARD
        self.recorder.begin(self.labels[way])
        weight = self.inner()
        self.recorder.end()
        self.names[id(weight)] = self.name
        return weight


class ExpertDequantization:
    """The dequantization of the weights of experts, each in the region of the GEMM that reads the result."""

    def __init__(self, recorder: SpanRecorder, experts: GroupedLinear, names: dict[int, str]) -> None:
        self.inner = experts.dense_weights
        paths = {path.rpartition(".")[2]: path for path in names.values()}
        self.weights = {
            name: Dequantization(recorder, partial(self.inner, name), paths[name], names) for name in experts.quantized
        }

    def __call__(self, name: str) -> Tensor:
        """Return the weights ``name``."""
        weight = self.weights.get(name)
        return self.inner(name) if weight is None else weight()


class GroupedGemmRegions(Gemms):
    """The GEMMs of experts as regions; their dW come in the order of ``GROUPED``, each with separate columns."""

    def __init__(self, recorder: SpanRecorder, inner: Any, names: dict[int, str]) -> None:
        super().__init__(recorder, inner, names)
        self.order = cycle([path for name in GROUPED for path in names.values() if path.endswith(f".{name}")])

    def wgrad(self, *inputs: Any) -> Tensor:
        """Call and record the inner ``wgrad``."""
        return self._time_gemm(next(self.order), 3, self.inner.wgrad, *inputs)
