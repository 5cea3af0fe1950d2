"""Watches operations below autograd and writes them to a tape: storages, kernels, messages, with where in the code.

    operation of torch → storages that are born and freed · a kernel · a message and who waits for it

Elementwise operations that one call of a function runs in a row count as one kernel, as it is on GPUs where they are
fused: it reads what was there before and writes what is left. In the backward the module is the one whose forward made
the node that runs.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.check.dryrun.tape import ALLOC, FREE, KERNEL, SCOPE, START, WAIT, Kernel, Message, Scope, Site, Tape
from fivefold.train.metrics import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    COLLECTIVES,
    MATMULS,
    is_group,
    operation_flops,
    tensors,
)

aten, c10d = torch.ops.aten, torch.ops.c10d
GROUPED = (aten._grouped_mm.default,)
SCALAR, RESIZE = aten._local_scalar_dense.default, torch.ops.inductor.resize_storage_bytes_.default
NO_WORK = (
    "empty",
    "new_empty",
    "lift_fresh",
    "_unsafe_view",
    "empty_like",
    "_local_scalar_dense",
    "set_",
    "detach_",
)  # nor do views
LEAF = 2**62  # nodes of leaves, which no module made, count from further up: they belong to the node before
HIDDEN = -1  # id of a storage of which nothing is written
NOWHERE = Site("", "", "")
TORCH = str(Path(torch.__file__).parent)
OWN = str(Path(__file__).parent)
ROOT = str(Path(__file__).parents[3]) + "/"


class Group(NamedTuple):
    """What is to be known of a process group: the mesh axis whose traffic it is, and its ranks of the world."""

    axis: str
    members: tuple[int, ...]


class Handle(Work):
    """A message on its way; to wait for it is an event."""

    def __init__(self, waited: Callable[[], None]) -> None:
        super().__init__()
        self._waited: Callable[[], None] | None = waited

    def wait(self, timeout: object = None) -> bool:
        """At once: nothing is sent."""
        if self._waited is not None:
            self._waited()
            self._waited = None
        return True


class Recorder(TorchDispatchMode):
    """Writes ``tape`` while it is entered, on top of a ``FakeTensorMode`` or of real tensors without process groups.

    ``groups``: what is known of a process group, by its name. ``categories`` of what is born in a function, by its
    qualified name. ``through``: files of which not they are the site but who calls them. Messages are not sent: each
    returns at once, and numbers asked of tensors are 0.
    """

    def __init__(
        self, *, rank: int, groups: Callable[[str], Group] | None = None, categories: Mapping[str, str] = {},
        through: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.rank, self.groups, self._categories = rank, groups, categories
        self._skipped = (TORCH, OWN, *through)
        self.tape = Tape(rank)
        self._module = self._back_in = ""
        self._since: tuple[list[int], list[str]] = ([0], [""])  # from which autograd node on which module ran
        self._ids: dict[int, int] = {}  # storages that live, by address
        self._born: dict[int, tuple[int, Site]] = {}  # bytes and site, by id
        self._next = 0
        self._handles = 0
        self._kept: list[object] = []  # works, which C++ holds without their Python half
        self._lines: dict[tuple[CodeType, int], str] = {}
        self._fused: _Fused | None = None
        self.live_bytes = 0
        self._hides = False
        self.silent = False

    # The tape

    def cut(self) -> Tape:
        """The tape so far; a new one begins with what lives."""
        self._flush()
        done, self.tape = self.tape, Tape(self.rank)
        self._kept.clear()
        self.tape.add(SCOPE, self.tape.scope(Scope("start")))
        for storage, (size, site) in self._born.items():
            self.tape.add(ALLOC, storage, size, self.tape.site(site))
        return done

    def name(self, living: Iterable[Tensor], category: str) -> None:
        """What ``living`` are, from the next tape on; what is not known yet is born."""
        for tensor in living:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._ids:
                if storage.nbytes():
                    self._birth(storage, Site("", "", "", category))
                continue
            key = self._ids[storage._cdata]
            size, site = self._born[key]
            self._born[key] = size, site._replace(category=category)

    def enter_scope(self, scope: Scope) -> None:
        """From here on."""
        self._flush()
        self.tape.add(SCOPE, self.tape.scope(scope))

    @property
    def phase(self) -> str:
        """What the engine says that it does; forward and backward are known from the schedule."""
        return ""

    @phase.setter
    def phase(self, phase: str) -> None:
        if phase == "optimizer":
            self.enter_scope(Scope("update"))

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Follow which module of ``module`` runs."""
        hooks = []
        for path, part in module.named_modules():
            if path:
                stack: list[str] = []
                hooks.append(part.register_forward_pre_hook(self._enters(path, stack), prepend=True))
                hooks.append(part.register_forward_hook(self._leaves(stack), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enters(self, path: str, stack: list[str]) -> Callable[..., None]:
        def enter(_module: object, _inputs: object) -> None:
            stack.append(self._module)
            self._is_in(path)

        return enter

    def _leaves(self, stack: list[str]) -> Callable[..., None]:
        def leave(_module: object, _inputs: object, _output: object) -> None:
            self._is_in(stack.pop())

        return leave

    def _is_in(self, path: str) -> None:
        self._module = path
        numbers, paths = self._since
        number = torch._C._autograd._get_sequence_nr()
        if numbers[-1] == number:
            paths[-1] = path
        else:
            numbers.append(number)
            paths.append(path)

    # For those who write to the tape what they have seen before

    @contextmanager
    def aside(self) -> Iterator[Tape]:
        """What happens within is written to another tape."""
        self._flush()
        (outer, live), self.tape = (self.tape, self.live_bytes), Tape(self.rank)
        try:
            yield self.tape
        finally:
            self._flush()
            self.tape, self.live_bytes = outer, live
            self._is_in(self._module)

    def place(self) -> int:
        """How many events there are."""
        self._flush()
        return len(self.tape)

    def id_of(self, tensor: Tensor) -> int:
        """Of its storage."""
        return self._ids[tensor.untyped_storage()._cdata]

    def site_here(self) -> Site:
        """Of the module that runs."""
        return Site(self._where(), "", "")

    def reserve_ids(self, count: int) -> int:
        """The first of so many ids of storages."""
        first, self._next = self._next, self._next + count
        return first

    def reserve_handles(self, count: int) -> int:
        """The first of so many handles of messages."""
        first, self._handles = self._handles, self._handles + count
        return first

    def play(self, events: NDArray[np.int64], *, live_bytes: int) -> None:
        """Write ``events`` [n, 4], of which so many more bytes live."""
        self._flush()
        self.tape.events.frombytes(events.tobytes())
        self.live_bytes += live_bytes

    @contextmanager
    def inside(self, module: str) -> Iterator[None]:
        """As if ``module`` ran."""
        former, self._module = self._module, module
        try:
            yield
        finally:
            self._module = former

    @contextmanager
    def hiding(self) -> Iterator[None]:
        """What is born within is not written, nor when it dies."""
        self._hides, former = True, self._hides
        try:
            yield
        finally:
            self._hides = former

    def make(self, tensor: Callable[[], Tensor], *, site: int) -> Tensor:
        """A tensor that is born at a site of the tape."""
        self._flush()
        with self.hiding():
            made = tensor()
        storage = made.untyped_storage()
        self._ids[storage._cdata] = key = self.reserve_ids(1)
        self._register(key, storage.nbytes(), self.tape.sites[site])
        return made

    def free_early(self, tensor: Tensor) -> None:
        """Now, though somebody still holds it."""
        address = tensor.untyped_storage()._cdata
        self._flush()
        self._death(address)
        self._ids[address] = HIDDEN

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run or stand in for the operation, and write down what it does."""
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            return self._message(func, args)
        if func is SCALAR:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
        if func is RESIZE:
            self._resize(args[0], args[1])
            return None
        fake = func in GROUPED and isinstance(args[0], FakeTensor)
        out = _by_group(*args) if fake else func(*args, **(kwargs or {}))
        if self._hides:
            for tensor in tensors(out):
                if tensor.untyped_storage()._cdata not in self._ids:
                    self._birth(tensor.untyped_storage(), NOWHERE)
            return out
        if self.silent:
            return out
        frame = self._frame()
        if self._fused is not None and not self._fused.goes_on(frame):
            self._flush()
        made = list(tensors(out))
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._ids and storage.nbytes():
                self._birth(storage, self._site(func, frame))
        if not func.is_view and func._opname not in NO_WORK:
            self._kernel(func, args, out, made, frame)
        return out

    def _kernel(self, func: Any, args: Any, out: Any, made: list[Tensor], frame: FrameType) -> None:
        kind, shape = _kind(func, args, out)
        if kind == "moving":
            if self._fused is None:
                self._fused = _Fused(frame.f_code, self._site(func, frame), str(made[0].dtype)[6:] if made else "")
            self._fused.last = frame.f_lasti
            self._fused.add(tensors(args), made, ids=self._ids)
            return
        self._flush()
        moved = sum(tensor.nbytes for tensor in tensors(args)) + sum(tensor.nbytes for tensor in made)
        site = self.tape.site(self._site(func, frame))
        flops = operation_flops(func, args, out)
        kernel = Kernel(kind, shape, str(made[0].dtype)[6:], flops, moved, 1, site)
        self.tape.add(KERNEL, self.tape.kernel(kernel))

    def _flush(self) -> None:
        """The elementwise operations so far were one kernel."""
        fused, self._fused = self._fused, None
        if fused is not None and not self.silent:
            moved = fused.moved(self._born)
            kernel = Kernel("moving", (), fused.dtype, 0, moved, fused.operations, self.tape.site(fused.site))
            self.tape.add(KERNEL, self.tape.kernel(kernel))

    def _message(self, func: Any, args: Any) -> Any:
        self._flush()
        frame = self._frame()
        group = next(ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and is_group(a))
        assert self.groups is not None
        known = self.groups(group.group_name)
        received = func is c10d.recv_.default
        collective, full = COLLECTIVES[c10d.send.default if received else func]
        whole = list(tensors(args[full]))
        peer = known.members[args[2]] if collective == "p2p" else -1
        message = Message(
            known.axis, group.group_name, known.members, collective, str(whole[0].dtype)[6:],
            sum(tensor.numel() for tensor in whole), sum(tensor.nbytes for tensor in whole), peer, received,
            self.tape.site(self._site(func, frame)), collective == "p2p" and _joins(whole[0]),
        )  # fmt: skip
        handle = self._handles
        self._handles += 1
        carried = self._ids.get(whole[0].untyped_storage()._cdata, -1)
        self.tape.add(START, handle, self.tape.message(message), carried)
        return _returned(func, args, self._work(handle))

    def _work(self, handle: int) -> torch.ScriptObject:
        work = Handle(lambda: self._waited(handle))
        boxed: torch.ScriptObject = work.boxed()
        self._kept.append((work, boxed))
        return boxed

    def _waited(self, handle: int) -> None:
        self._flush()
        self.tape.add(WAIT, handle)

    # Storages

    def _birth(self, storage: torch.UntypedStorage, site: Site) -> None:
        weakref.finalize(storage, self._death, storage._cdata)
        if self._hides:
            self._ids[storage._cdata] = HIDDEN
            return
        self._ids[storage._cdata] = key = self.reserve_ids(1)
        self._register(key, storage.nbytes(), site)

    def _register(self, key: int, size: int, site: Site) -> None:
        self._born[key] = size, site
        self.live_bytes += size
        if not self.silent:
            self.tape.add(ALLOC, key, size, self.tape.site(site))

    def _death(self, address: int) -> None:
        key = self._ids.pop(address, None)
        if key is not None and key != HIDDEN:
            self.live_bytes -= self._born.pop(key)[0]
            if not self.silent:
                self.tape.add(FREE, key)

    def _resize(self, tensor: Tensor, size: int) -> None:
        """To nothing is death, from nothing is birth; the finalizer of the first birth stays."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._ids:
            self._death(address)
            known = True
        else:
            known = storage.nbytes() == 0
        storage.resize_(size)
        if size and known:
            self._ids[address] = key = self.reserve_ids(1)
            self._register(key, size, self._site(RESIZE, self._frame()))

    # Places

    def _frame(self) -> FrameType:
        """The innermost that is not torch's or ours."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(self._skipped):
            frame = frame.f_back
        return frame

    def _site(self, func: Any, frame: FrameType) -> Site:
        key = frame.f_code, frame.f_lineno
        line = self._lines.get(key)
        if line is None:
            file = frame.f_code.co_filename.removeprefix(ROOT)
            line = self._lines[key] = f"{file}:{frame.f_lineno} {frame.f_code.co_qualname}"
        return Site(self._where(), line, func.name(), self._categories.get(frame.f_code.co_qualname, ""))

    def _where(self) -> str:
        node = torch._C._current_autograd_node()
        if node is None or self._module:  # what is recomputed runs through modules again
            return self._module
        number: int = node._sequence_nr()
        if number < LEAF:
            numbers, paths = self._since
            self._back_in = paths[bisect_right(numbers, number) - 1]
        return self._back_in


class _Fused:
    """Elementwise operations of one call of a function, or of one round of its loop.

    The frame is not held: it would keep alive what it holds.
    """

    def __init__(self, code: CodeType, site: Site, dtype: str) -> None:
        self.code, self.last = code, -1
        self.site, self.dtype, self.operations = site, dtype, 0
        self._before: dict[int, int] = {}  # bytes that were there, by storage
        self._made: dict[int, int] = {}

    def goes_on(self, frame: FrameType) -> bool:
        """Whether it may be the same call: a new one begins further up."""
        return frame.f_code is self.code and frame.f_lasti > self.last

    def add(self, read: Iterable[Tensor], made: list[Tensor], *, ids: dict[int, int]) -> None:
        """One of them."""
        self.operations += 1
        for tensor in read:
            key = ids.get(tensor.untyped_storage()._cdata, -1)
            if key not in self._made:
                self._before[key] = max(self._before.get(key, 0), tensor.nbytes)
        for tensor in made:
            key = ids.get(tensor.untyped_storage()._cdata, -1)
            self._made[key] = max(self._made.get(key, 0), tensor.nbytes)

    def moved(self, living: dict[int, tuple[int, Site]]) -> int:
        """Bytes read that were there, and bytes written that are left."""
        return sum(self._before.values()) + sum(size for key, size in self._made.items() if key in living)


def _kind(func: Any, args: Any, out: Any) -> tuple[str, tuple[int, ...]]:
    """What a price wants to know of an operation."""
    if func in MATMULS:
        inner = int(args[MATMULS[func]].shape[-1])
        *batch, rows, columns = out.shape
        return "matmul", (rows, columns, inner, batch[0] if batch else 1)
    if func in GROUPED:
        left, right = args[0], args[1]
        if right.dim() == 3:  # rows by the matrix of their group
            return "matmul", (-(-left.shape[0] // right.shape[0]), right.shape[2], left.shape[1], right.shape[0])
        groups = out.shape[0]
        return "matmul", (left.shape[0], right.shape[1], -(-left.shape[1] // groups), groups)
    if func in ATTENTION_FORWARD:
        q, k = args[0], args[1]
        return "attention", (q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3])
    if func in ATTENTION_BACKWARD:
        q, k = args[1], args[2]
        return "attention_backward", (q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3])
    return "moving", ()


def _by_group(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """What a grouped matmul makes, in any dtype: torch knows it of fake tensors in bf16 alone."""
    groups = () if right.dim() == 3 else (ends.shape[0],)
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


def _joins(tensor: Tensor) -> bool:
    """Whether it is sent or received in one go with another, by a batch that does not begin with it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, OWN)):
        if frame.f_code.co_name == "batch_isend_irecv":
            return frame.f_locals["p2p_op_list"][0].tensor is not tensor
        frame = frame.f_back
    return False


def _returned(func: Any, args: Any, work: torch.ScriptObject) -> Any:
    """What torch expects of a collective."""
    if func in (c10d.allreduce_.default, c10d.broadcast_.default, c10d._allgather_base_.default,
                c10d._reduce_scatter_base_.default):  # fmt: skip
        return args[0], work
    return work
