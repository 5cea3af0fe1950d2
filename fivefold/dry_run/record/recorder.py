"""Records a step below autograd, as a ``TorchDispatchMode`` that writes events to a tape (``tape.py``).

torch operation → ALLOC and FREE of storages · KERNEL · START and WAIT of a message, each with its site in the code
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.dry_run.fake.collectives import Handle, TapeGroup, describe_message, make_result
from fivefold.dry_run.record.call_sites import CallSites
from fivefold.dry_run.record.kernels import (
    OPERATIONS_WITHOUT_KERNEL,
    FusedKernel,
    allocate_grouped,
    classify_kernel,
    find_matmul_alignment,
)
from fivefold.dry_run.record.tape import ALLOC, FREE, KERNEL, SCOPE, START, WAIT, CodeSite, Kernel, Scope, Tape
from fivefold.trainer.measure.meter import GROUPED_MATMULS, count_operation_flops, list_tensors
from fivefold.trainer.parallel.host_memory import is_host_memory

DEVICE = torch.ops.prim.device.default  # torch asks for it of each tensor of a subclass
READ_SCALAR = torch.ops.aten._local_scalar_dense.default
RESIZE_STORAGE = torch.ops.inductor.resize_storage_bytes_.default
HIDDEN_ID = -1  # id of a storage whose ALLOC and FREE are not recorded
NO_SITE = CodeSite("", "", "")


class TapeRecorder(TorchDispatchMode):
    """A recorder that writes ``tape`` while it is entered.

    It runs on top of a ``FakeTensorMode``, or on real tensors without process groups. ``groups``: ``TapeGroup`` of a
    process group, by its name. ``categories``, ``skipped_files``: as for ``CallSites``. Messages are not sent: each
    collective returns at once. A number read from a tensor (``.item()``) is 0. While ``silent``, storages are tracked
    but no event is written.
    """

    def __init__(
        self,
        *,
        rank: int,
        groups: Callable[[str], TapeGroup] | None = None,
        categories: Mapping[str, str] = {},
        skipped_files: tuple[str, ...] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rank, self.groups = rank, groups
        self.call_sites = CallSites(categories=categories, skipped_files=skipped_files)
        self.tape = Tape(rank)
        self._ids: dict[int, int] = {}  # id of each live storage, by address
        self._live: dict[int, tuple[int, CodeSite]] = {}  # bytes and site of each live storage, by id
        self._host_sizes: dict[int, int] = {}  # bytes of each live storage in host memory, by address
        self._next = 0
        self._handles = 0
        self._work_handles: list[object] = []  # work handles: C++ holds them without their Python object
        self._fused_kernel: FusedKernel | None = None
        self.live_bytes = 0
        self._is_hiding = False
        self.silent = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that no dispatch needs protection from the compiler, which a dry run does not use."""
        return False

    # The tape

    def finish_tape(self) -> Tape:
        """Return the tape so far and begin a new one, with an ALLOC of every live storage."""
        self._flush()
        finished, self.tape = self.tape, Tape(self.rank)
        self.tape.host_bytes = sum(self._host_sizes.values())
        self._work_handles.clear()
        self.tape.add(SCOPE, self.tape.scope(Scope("start")))
        for storage, (size, site) in self._live.items():
            self.tape.add(ALLOC, storage, size, self.tape.site(site))
        return finished

    def set_category(self, named_tensors: Iterable[Tensor], category: str) -> None:
        """Set the category of storages from the next tape on; record unknown ones as allocated."""
        for tensor in named_tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._ids:
                if storage.nbytes():
                    self._record_storage(storage, CodeSite("", "", "", category))
                continue
            key = self._ids[storage._cdata]
            if key == HIDDEN_ID:
                continue
            size, site = self._live[key]
            self._live[key] = size, site._replace(category=category)

    def enter_scope(self, scope: Scope) -> None:
        """Write a SCOPE event: later events belong to ``scope``."""
        self._flush()
        self.tape.add(SCOPE, self.tape.scope(scope))

    @property
    def phase(self) -> str:
        """Return an empty phase: the trainer sets it, but only "optimizer" has an effect, as actions set the others."""
        return ""

    @phase.setter
    def phase(self, phase: str) -> None:
        if phase == "optimizer":
            self.enter_scope(Scope("update"))

    # For replay.py, which writes recorded events to the tape

    @contextmanager
    def use_separate_tape(self) -> Iterator[Tape]:
        """Write the events within to a separate tape, which is yielded."""
        self._flush()
        (outer, live), self.tape = (self.tape, self.live_bytes), Tape(self.rank)
        try:
            yield self.tape
        finally:
            self._flush()
            self.tape, self.live_bytes = outer, live
            self.call_sites.reenter()

    def count_events(self) -> int:
        """Return the number of events on the tape."""
        self._flush()
        return len(self.tape)

    def storage_id(self, tensor: Tensor) -> int:
        """Return the id of a tensor's storage."""
        return self._ids[tensor.untyped_storage()._cdata]

    def module_site(self) -> CodeSite:
        """Return a site that names the running module only."""
        return CodeSite(self.call_sites.find_running_module(), "", "")

    def reserve_ids(self, count: int) -> int:
        """Reserve ``count`` consecutive storage ids; return the first."""
        first, self._next = self._next, self._next + count
        return first

    def reserve_handles(self, count: int) -> int:
        """Reserve ``count`` consecutive message handles; return the first."""
        first, self._handles = self._handles, self._handles + count
        return first

    def append_events(self, events: NDArray[np.int64], *, live_bytes: int) -> None:
        """Append ``events`` [n, 4] to the tape; ``live_bytes``: bytes that they allocate less those that they free."""
        self._flush()
        self.tape.events.frombytes(events.tobytes())
        self.live_bytes += live_bytes

    @contextmanager
    def hide_storages(self) -> Iterator[None]:
        """Hide storages created within: neither their ALLOC nor their FREE is recorded."""
        self._is_hiding, was_hiding = True, self._is_hiding
        try:
            yield
        finally:
            self._is_hiding = was_hiding

    def create_tensor(self, tensor: Callable[[], Tensor], *, site: int) -> Tensor:
        """Create a tensor and record its storage at site number ``site`` of the tape."""
        self._flush()
        with self.hide_storages():
            created = tensor()
        storage = created.untyped_storage()
        self._ids[storage._cdata] = key = self.reserve_ids(1)
        self._register_storage(key, storage.nbytes(), self.tape.sites[site])
        return created

    def free_early(self, tensor: Tensor) -> None:
        """Record a FREE of the tensor's storage now, though Python still holds it."""
        address = tensor.untyped_storage()._cdata
        self._flush()
        self._record_free(address)
        self._ids[address] = HIDDEN_ID

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, or fake it (collectives, scalars, resizes), and record its storages, kernel or message."""
        if func is DEVICE:
            return args[0].device
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            return self._record_message(func, args)
        if func is READ_SCALAR:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
        if func is RESIZE_STORAGE:
            self._resize(args[0], args[1])
            return None
        fake = func in GROUPED_MATMULS and isinstance(args[0], FakeTensor)
        out = allocate_grouped(*args) if fake else func(*args, **(kwargs or {}))
        if self._is_hiding:
            for tensor in list_tensors(out):
                if tensor.untyped_storage()._cdata not in self._ids:
                    self._record_storage(tensor.untyped_storage(), NO_SITE)
            return out
        if self.silent:
            return out
        frame = self.call_sites.find_frame()
        if self._fused_kernel is not None and not func.is_view and not self._fused_kernel.can_continue(frame):
            self._flush()
        outputs = list(list_tensors(out))
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._ids and storage.nbytes():
                self._record_storage(storage, self.call_sites.site(func, frame))
        if not func.is_view and func._opname not in OPERATIONS_WITHOUT_KERNEL:
            self._record_kernel(func, args, out, outputs, frame)
        return out

    def _record_kernel(self, func: Any, args: Any, out: Any, outputs: list[Tensor], frame: FrameType) -> None:
        """Record one kernel; consecutive ones that only move bytes are recorded as one fused kernel.

        What runs in host memory, and a copy from or to it, is a kernel of its own.
        """
        kind, shape = classify_kernel(func, args, out)
        if self._host_sizes and kind == "moving" and (host_kind := self._classify_host_kernel(args, outputs)):
            self._flush()
            operation = FusedKernel(frame.f_code, self.call_sites.site(func, frame), "")
            operation.add(func, args, outputs, ids=self._ids)
            tensors = [*list_tensors(args), *outputs]
            moved_bytes = tensors[0].nbytes if host_kind == "host_link" else operation.unfused_bytes
            dtype, site = str(tensors[0].dtype)[6:], self.tape.site(operation.site)
            self.tape.add(KERNEL, self.tape.kernel(Kernel(host_kind, (), dtype, 0, moved_bytes, 1, site)))
            return
        if kind == "moving":
            if self._fused_kernel is None:
                self._fused_kernel = FusedKernel(
                    frame.f_code, self.call_sites.site(func, frame), str(outputs[0].dtype)[6:] if outputs else ""
                )
            self._fused_kernel.last_instruction = frame.f_lasti
            self._fused_kernel.add(func, args, outputs, ids=self._ids)
            return
        self._flush()
        moved_bytes = sum(tensor.nbytes for tensor in list_tensors(args)) + sum(tensor.nbytes for tensor in outputs)
        site = self.tape.site(self.call_sites.site(func, frame))
        flops = count_operation_flops(func, args, out)
        kernel = Kernel(
            kind,
            shape,
            str(next(list_tensors(args)).dtype)[6:],
            flops,
            moved_bytes,
            1,
            site,
            aligned=find_matmul_alignment(func, args, outputs),
        )
        self.tape.add(KERNEL, self.tape.kernel(kernel))

    def _classify_host_kernel(self, args: Any, outputs: list[Tensor]) -> str:
        """Return "host" for an operation in host memory, "host_link" for a copy from or to it, else ""."""
        on_host = [tensor.untyped_storage()._cdata in self._host_sizes for tensor in (*list_tensors(args), *outputs)]
        if on_host and (is_host_memory() or all(on_host)):
            return "host"
        return "host_link" if any(on_host) else ""

    def _flush(self) -> None:
        """End the current fused kernel and write its KERNEL event."""
        fused_kernel, self._fused_kernel = self._fused_kernel, None
        if fused_kernel is not None and not self.silent:
            moved_bytes = fused_kernel.count_moved_bytes(self._live)
            site = self.tape.site(fused_kernel.site)
            kernel = Kernel(
                "moving",
                (),
                fused_kernel.dtype,
                0,
                moved_bytes,
                fused_kernel.operations,
                site,
                fused_kernel.unfused_bytes,
            )
            self.tape.add(KERNEL, self.tape.kernel(kernel))

    def _record_message(self, func: Any, args: Any) -> Any:
        """Record the start of a message, and return what its collective returns: a handle whose wait is recorded."""
        self._flush()
        assert self.groups is not None
        site = self.tape.site(self.call_sites.site(func, self.call_sites.find_frame()))
        message, tensor = describe_message(func, args, self.groups, site=site)
        handle = self.reserve_handles(1)
        storage = self._ids.get(tensor.untyped_storage()._cdata, -1)
        self.tape.add(START, handle, self.tape.message(message), storage)
        work = Handle(lambda: self._record_wait(handle))
        boxed: torch.ScriptObject = work.boxed()
        self._work_handles.append((work, boxed))
        return make_result(func, args, boxed)

    def _record_wait(self, handle: int) -> None:
        self._flush()
        self.tape.add(WAIT, handle)

    # Storages

    def _record_storage(self, storage: torch.UntypedStorage, site: CodeSite) -> None:
        """Record a new storage until it is freed; one in host memory is counted there, without an event."""
        weakref.finalize(storage, self._record_free, storage._cdata)
        if is_host_memory():
            self._ids[storage._cdata] = HIDDEN_ID  # to the device
            self._host_sizes[storage._cdata] = storage.nbytes()
            self.tape.host_bytes = max(self.tape.host_bytes, sum(self._host_sizes.values()))
            return
        if self._is_hiding:
            self._ids[storage._cdata] = HIDDEN_ID
            return
        self._ids[storage._cdata] = key = self.reserve_ids(1)
        self._register_storage(key, storage.nbytes(), site)

    def _register_storage(self, key: int, size: int, site: CodeSite) -> None:
        self._live[key] = size, site
        self.live_bytes += size
        if not self.silent:
            self.tape.add(ALLOC, key, size, self.tape.site(site))

    def _record_free(self, address: int) -> None:
        key = self._ids.pop(address, None)
        self._host_sizes.pop(address, None)
        if key is not None and key != HIDDEN_ID:
            self.live_bytes -= self._live.pop(key)[0]
            if not self.silent:
                self.tape.add(FREE, key)

    def _resize(self, tensor: Tensor, size: int) -> None:
        """Record a resize: to 0 as FREE, from 0 as ALLOC; the finalizer of the storage stays the first one."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._ids:
            self._record_free(address)
            is_tracked = True
        else:
            is_tracked = storage.nbytes() == 0
        storage.resize_(size)
        if size and is_tracked:
            self._ids[address] = key = self.reserve_ids(1)
            self._register_storage(key, size, self.call_sites.site(RESIZE_STORAGE, self.call_sites.find_frame()))
