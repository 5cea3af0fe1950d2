"""Operations that run a second time in the backward, and how what they save and make is found until then.

    SavedHandle    n-th saved tensor of an operation     autograd holds it; when it is read, the operation runs again
    OutputView     a piece of what an operation made     its inputs, kept or made again before, are the only tensors
    held KeptTensor     a tensor that stays

Nobody but autograd holds a handle: what it brought back dies when the last backward that reads it has run. An operation
is a function of its inputs and of weights: no dropout, no state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fivefold.train.model.linear import recomputing

Function = Callable[..., Any]


class KeptTensor(NamedTuple):
    """A tensor that stays. Autograd's check that it was not changed meanwhile is ours, since it does not hold it."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> KeptTensor:
        """Without its graph; a weight as it is, for its storage may be replaced."""
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def open(self) -> Tensor:
        """The tensor."""
        if self.tensor._version != self.version:
            raise RuntimeError(f"a tensor {list(self.tensor.shape)} kept for the backward was changed in place")
        return self.tensor


class RecomputedOutput:
    """What a chosen operation made: let go, kept because others keep it, or made again."""

    def __init__(self, operation: Operation, *, cheap: bool) -> None:
        self.operation, self.cheap = operation, cheap
        self.tensor: Tensor | None = None

    def open(self) -> Tensor:
        """The tensor, made again if need be."""
        if self.tensor is None:
            self.operation.recompute()
        assert self.tensor is not None
        return self.tensor


class OutputView(NamedTuple):
    """How a tensor lies in the storage of an output."""

    output: RecomputedOutput
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def open(self) -> Tensor:
        """The same view of what was kept or made again."""
        return self.output.open().as_strided(self.size, self.stride, self.offset)


class OperationInput(NamedTuple):
    """A tensor that an operation reads."""

    held: KeptTensor | OutputView
    requires_grad: bool

    def open(self) -> Tensor:
        """The tensor, as one with which a graph begins."""
        return self.held.open().detach().requires_grad_(self.requires_grad)


class SavedHandle:
    """What autograd holds for the n-th tensor that an operation saved; ``instead``: where it is if none ran again."""

    def __init__(self, operation: Operation, instead: KeptTensor | OutputView | None) -> None:
        self.operation, self.instead = operation, instead
        self.tensor: Tensor | None = None

    def open(self) -> Tensor:
        """The tensor; whoever needs what this operation made has asked for it already."""
        if self.tensor is None and self.instead is not None:
            return self.instead.open()
        if self.tensor is None:
            self.operation.recompute()
        assert self.tensor is not None
        return self.tensor


def restore(packed: KeptTensor | OutputView | SavedHandle) -> Tensor:
    """The tensor that autograd wants back."""
    with torch.no_grad():
        return packed.open()


class OutputsByStorage(dict[StorageWeakRef, RecomputedOutput]):
    """Outputs of chosen operations by their storage, whose address a weak reference keeps from being used again."""

    def held(self, tensor: Tensor) -> KeptTensor | OutputView:
        """Where ``tensor`` will be found."""
        output = self.get(StorageWeakRef(tensor.untyped_storage()))
        if output is None:
            return KeptTensor.of(tensor)
        return OutputView(output, tensor.size(), tensor.stride(), cast(int, tensor.storage_offset()))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack(self, tensor: Tensor) -> KeptTensor | OutputView:
        """Of an operation that was not chosen: what it keeps stays, unless it is cheap to make."""
        held = self.held(tensor)
        if isinstance(held, OutputView) and not held.output.cheap:
            held.output.tensor = tensor.detach()
        return held


class Operation:
    """A function that ran and may run again. Who no longer waits for what it saves or makes has let go of it."""

    def __init__(self, function: Function, inputs: Sequence[Any], found: OutputsByStorage) -> None:
        self.function, self.found = function, found
        self.inputs = [OperationInput(found.held(x), x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
        self.storages = {StorageWeakRef(x.untyped_storage()) for x in inputs if isinstance(x, Tensor)}
        self.handles: list[weakref.ref[SavedHandle]] = []
        self.outputs: list[weakref.ref[RecomputedOutput]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack(self, tensor: Tensor) -> SavedHandle:
        """What it saves is made again, unless it was there before: an input or a weight."""
        storage = StorageWeakRef(tensor.untyped_storage())
        there = storage in self.found or storage in self.storages or isinstance(tensor, nn.Parameter)
        handle = SavedHandle(self, self.found.held(tensor) if there else None)
        self.handles.append(weakref.ref(handle))
        return handle

    def done(self, made: Any, *, cheap: bool) -> None:
        """It has run. A view of an input is that input."""
        for tensor in _tensors(made):
            output = RecomputedOutput(self, cheap=cheap)
            self.outputs.append(weakref.ref(output))
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage not in self.storages:
                self.found.setdefault(storage, output)
        del self.found, self.storages

    def recompute(self) -> None:
        """Run, and give what comes out to those who wait for it."""
        saved: list[Tensor] = []
        inputs = [x.open() if isinstance(x, OperationInput) else x for x in self.inputs]
        with torch.enable_grad(), recomputing(), saved_tensors_hooks(_into(saved), _unread):
            made = self.rerun(inputs, saved)
        for handle, tensor in zip(self.handles, saved, strict=True):
            if (reader := handle()) is not None:
                reader.tensor, reader.instead = tensor, None
        for output, tensor in zip(self.outputs, _tensors(made), strict=True):
            if (result := output()) is not None:
                result.tensor = tensor.detach()
        self.inputs = []

    def rerun(self, inputs: list[Any], saved: list[Tensor]) -> Any:
        """What the function makes; what it saves goes into ``saved``."""
        return self.function(*inputs)


def _tensors(made: Any) -> list[Tensor]:
    return [each for each in (made if isinstance(made, tuple) else (made,)) if isinstance(each, Tensor)]


def _into(saved: list[Tensor]) -> Callable[[Tensor], None]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack(tensor: Tensor) -> None:
        saved.append(tensor.detach())

    return cast(Callable[[Tensor], None], pack)


def _unread(_packed: None) -> Tensor:
    raise RuntimeError("the graph of what ran again is not run backward")
