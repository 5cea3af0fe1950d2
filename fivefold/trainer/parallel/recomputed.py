"""Operations that run again in the backward, and the references that stand for their tensors until then.

    SavedHandle    n-th saved tensor of an operation; unpacking it runs the operation again
    OutputView     a view of an operation's output, which is recomputed from that operation's inputs
    KeptTensor     a tensor that stays in memory

Only autograd holds handles, so a recomputed tensor is freed after the last backward that reads it. An operation must be
a function of its inputs and of weights only: no state (dropout's random key is an input).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fivefold.trainer.model.linear import mark_recomputation
from fivefold.trainer.model.operation import exclude_from_graphs

Function = Callable[..., Any]


class KeptTensor(NamedTuple):
    """A tensor kept in memory. It checks its version itself, because autograd does not see it and cannot check."""

    tensor: Tensor
    version: int

    @classmethod
    def keep(cls, tensor: Tensor) -> KeptTensor:
        """Keep ``tensor`` detached from its graph; a weight is kept as it is, because its storage may be resized."""
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def open(self) -> Tensor:
        """Return the tensor; RuntimeError if it was changed in place."""
        if self.tensor._version != self.version:
            raise RuntimeError(f"a tensor {list(self.tensor.shape)} kept for the backward was changed in place")
        return self.tensor


class RecomputedOutput:
    """An output of a recomputed operation: freed, kept because another operation saved it, or recomputed."""

    def __init__(self, operation: RecomputedOperation, *, cheap: bool) -> None:
        self.operation: RecomputedOperation | None = operation
        self.cheap = cheap
        self.tensor: Tensor | None = None

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor in memory instead of the operation and its inputs."""
        self.tensor, self.operation = tensor.detach(), None

    def open(self) -> Tensor:
        """Return the tensor; run the operation again if it was freed."""
        if self.tensor is None:
            assert self.operation is not None
            self.operation.recompute()
        assert self.tensor is not None
        return self.tensor


class OutputView(NamedTuple):
    """A view of an operation's output: size, stride and offset in its storage."""

    output: RecomputedOutput
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def open(self) -> Tensor:
        """Return the same view of the kept or recomputed output."""
        return self.output.open().as_strided(self.size, self.stride, self.offset)


class OperationInput(NamedTuple):
    """A tensor argument of an operation."""

    held: KeptTensor | OutputView
    requires_grad: bool

    def open(self) -> Tensor:
        """Return the tensor as a leaf of a new graph."""
        return self.held.open().detach().requires_grad_(self.requires_grad)


class SavedHandle:
    """The object that autograd saves for an operation's tensor.

    ``source``: a reference to the tensor, or the operation that recomputes it. A reference does not keep the operation,
    whose inputs are freed if nothing else needs it to run again.
    """

    def __init__(self, source: RecomputedOperation | KeptTensor | OutputView) -> None:
        self.source: RecomputedOperation | KeptTensor | OutputView | None = source
        self.tensor: Tensor | None = None

    def open(self) -> Tensor:
        """Return the saved tensor: from its reference if there is one, else by running the operation again."""
        if isinstance(self.source, KeptTensor | OutputView):
            return self.source.open()
        if self.source is not None:
            self.source.recompute()
        assert self.tensor is not None
        return self.tensor


def restore(packed: KeptTensor | OutputView | SavedHandle) -> Tensor:
    """Return the tensor of a handle: the unpack hook for autograd."""
    with torch.no_grad():
        return packed.open()


class OutputsByStorage(dict[StorageWeakRef, RecomputedOutput]):
    """Outputs of recomputed operations by storage; the weak reference keeps the storage's address from being reused."""

    def refer_to(self, tensor: Tensor) -> KeptTensor | OutputView:
        """Return a reference to ``tensor``: a view if its storage is a recomputed output, else the tensor itself."""
        output = self.get(StorageWeakRef(tensor.untyped_storage()))
        if output is None:
            return KeptTensor.keep(tensor)
        return OutputView(output, tensor.size(), tensor.stride(), cast(int, tensor.storage_offset()))

    @exclude_from_graphs
    def pack(self, tensor: Tensor) -> KeptTensor | OutputView:
        """Keep the outputs that an operation saves, except cheap ones.

        It is the pack hook of operations that are not recomputed.
        """
        held = self.refer_to(tensor)
        if isinstance(held, OutputView) and not held.output.cheap:
            held.output.keep(tensor)
        return held


class RecomputedOperation:
    """A function that may run again. It refers weakly to its handles and outputs.

    Those already freed are not filled.
    """

    def __init__(self, function: Function, inputs: Sequence[Any], outputs_by_storage: OutputsByStorage) -> None:
        self.function, self.by_storage = function, outputs_by_storage
        self.inputs = [
            OperationInput(outputs_by_storage.refer_to(x), x.requires_grad) if isinstance(x, Tensor) else x
            for x in inputs
        ]
        self.storages = {StorageWeakRef(x.untyped_storage()) for x in inputs if isinstance(x, Tensor)}
        self.handles: list[weakref.ref[SavedHandle]] = []
        self.outputs: list[weakref.ref[RecomputedOutput]] = []

    @exclude_from_graphs
    def pack(self, tensor: Tensor) -> SavedHandle:
        """Return a handle to recompute ``tensor``.

        Inputs and weights are referred to instead. Pack hook for autograd.
        """
        storage = StorageWeakRef(tensor.untyped_storage())
        is_referred = storage in self.by_storage or storage in self.storages or isinstance(tensor, nn.Parameter)
        handle = SavedHandle(self.by_storage.refer_to(tensor) if is_referred else self)
        self.handles.append(weakref.ref(handle))
        return handle

    def make_pack_hook(self) -> Callable[[Tensor], SavedHandle]:
        """Return ``pack`` for autograd, which keeps its hooks as long as the graph: they do not keep the operation."""
        method = weakref.WeakMethod(self.pack)

        @exclude_from_graphs
        def pack(tensor: Tensor) -> SavedHandle:
            operation_pack = method()
            assert operation_pack is not None
            return operation_pack(tensor)

        return cast(Callable[[Tensor], SavedHandle], pack)

    def record_outputs(self, outputs: Any, *, cheap: bool) -> None:
        """Record ``outputs`` of the first run; an output that is a view of an input stays that input."""
        for tensor in _list_tensors(outputs):
            output = RecomputedOutput(self, cheap=cheap)
            self.outputs.append(weakref.ref(output))
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage not in self.storages:
                self.by_storage.setdefault(storage, output)
        del self.by_storage, self.storages

    def recompute(self) -> None:
        """Run again, and hand saved tensors and outputs to the handles and outputs that are still referenced."""
        saved: list[Tensor] = []
        inputs = [x.open() if isinstance(x, OperationInput) else x for x in self.inputs]
        with torch.enable_grad(), mark_recomputation(), saved_tensors_hooks(_make_pack_hook(saved), _make_unread):
            result = self.rerun(inputs, saved)
        for handle, tensor in zip(self.handles, saved, strict=True):
            if (live_handle := handle()) is not None:
                live_handle.tensor, live_handle.source = tensor, None
        for output, tensor in zip(self.outputs, _list_tensors(result), strict=True):
            if (live_output := output()) is not None:
                live_output.tensor = tensor.detach()
        self.inputs = []

    def rerun(self, inputs: list[Any], saved: list[Tensor]) -> Any:
        """Run the function and return its outputs; the hooks around it append what it saves to ``saved``."""
        return self.function(*inputs)


def _list_tensors(outputs: Any) -> list[Tensor]:
    return [output for output in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(output, Tensor)]


def _make_pack_hook(saved: list[Tensor]) -> Callable[[Tensor], None]:
    @exclude_from_graphs
    def pack(tensor: Tensor) -> None:
        saved.append(tensor.detach())

    return cast(Callable[[Tensor], None], pack)


def _make_unread(_packed: None) -> Tensor:
    raise RuntimeError("the graph of a recomputation has no backward")
