"""Meters a step of a third-party loop: counts local tensors of DTensors, FSDP's resized storages, every collective.

The phase follows from torch's state: inside the autograd engine, backward; in ``Optimizer.step``, update; else
forward. The maximum of live bytes beyond the states, when a backward begins, are the bytes that the forward saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from fivefold.step import count_sent_bytes
from fivefold.trainer.measure.meter import COLLECTIVES, Meter, find_group, list_tensors

c10d, functional = torch.ops.c10d, torch.ops._c10d_functional
SCALAR = torch.ops.aten._local_scalar_dense.default
WRAPPER_TENSORS = (DTensor, AsyncCollectiveTensor)  # their operations are dispatched again, on the local tensors
# operation → (collective, index of the argument that is the full tensor)
LISTS = {
    c10d.allgather_.default: ("all_gather", 0), c10d.reduce_scatter_.default: ("reduce_scatter", 1),
    c10d.alltoall_.default: ("all_to_all", 1), c10d.reduce_.default: ("reduce", 0),
    c10d.allreduce_coalesced_.default: ("all_reduce", 0),
    c10d.allgather_into_tensor_coalesced_.default: ("all_gather", 0),
    c10d.reduce_scatter_tensor_coalesced_.default: ("reduce_scatter", 1),
}  # fmt: skip
# operation → (collective, whether its result is the full tensor and not its first argument)
FUNCTIONAL = {
    functional.all_reduce.default: ("all_reduce", False), functional.all_reduce_.default: ("all_reduce", False),
    functional.all_gather_into_tensor.default: ("all_gather", True),
    functional.reduce_scatter_tensor.default: ("reduce_scatter", False),
    functional.all_to_all_single.default: ("all_to_all", False),
    functional.broadcast.default: ("broadcast", False), functional.broadcast_.default: ("broadcast", False),
}  # fmt: skip


class LoopMeter(Meter):
    """A meter of a third-party loop.

    ``living``: tensors allocated before; ``hidden_bytes``: further allocated bytes that no Python tensor refers to.

    ``states``: returns the current bytes of parameters, gradients and moments. ``axis(group name, collective)``:
    returns the axis. ``fake``: count fake tensors; a scalar that is read is then 1 in an update, else 0.
    """

    def __init__(
        self,
        living: Iterable[Tensor],
        *,
        states: Callable[[], int],
        axis: Callable[[str, str], str],
        hidden_bytes: int = 0,
        fake: bool = False,
    ) -> None:
        self._fake = fake
        super().__init__(living, axis=lambda name: name)
        self._states, self._axis_of = states, axis
        self.live_bytes += hidden_bytes
        self.updating, self.kept_bytes = False, 0
        self.begin()

    def begin(self) -> None:
        """Begin a step: reset all counts except live bytes."""
        self.base_bytes = self.peak_bytes = self.live_bytes
        self.flops = self.kept_bytes = 0
        self.phase = self.peak_cause = ""
        self._messages.clear()
        self._sent.clear()

    def __enter__(self) -> Any:
        storages: Any = torch.UntypedStorage
        self._resize_storage = original = storages.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = original(storage, size)
            self._on_resize(storage)
            return out

        storages.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        storages: Any = torch.UntypedStorage
        storages.resize_ = self._resize_storage
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count it. Operations that only infer shapes (fake, meta) are not counted."""
        if any(issubclass(kind, WRAPPER_TENSORS) for kind in types):
            return NotImplemented
        if not self._fake and any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        if self._fake and func is SCALAR:
            return int(self.updating)
        self._update_phase()
        if func in COLLECTIVES:
            out = func(*args, **(kwargs or {}))
            self._count_message(func, args)
            return out
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in LISTS:
            collective, full = LISTS[func]
            self._count(collective, find_group(args), list_tensors(args[full]))
        elif func in FUNCTIONAL:
            collective, gives_full = FUNCTIONAL[func]
            self._count(collective, _resolve_process_group(args[-1]), list_tensors(out if gives_full else args[0]))
        return out

    def _update_phase(self) -> None:
        autograd_phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        phase = "update" if self.updating else autograd_phase
        if phase == "backward" and self.phase != "backward":
            self.kept_bytes = max(self.kept_bytes, self.live_bytes - self._states())
        self.phase = phase

    def _count_message(self, func: Any, args: Any) -> None:
        collective, full = COLLECTIVES[func]
        self._count(collective, find_group(args), list_tensors(args[full]))

    def _count(self, collective: str, group: Any, full: Iterable[Tensor]) -> None:
        key = self._axis_of(group.group_name, collective), collective
        self._messages[key] += 1
        self._sent[key] += count_sent_bytes(
            collective, payload=sum(tensor.nbytes for tensor in full), ranks=group.size()
        )

    def _track_storage(self, tensor: Tensor) -> None:
        skipped = WRAPPER_TENSORS if self._fake else (FakeTensor, *WRAPPER_TENSORS)
        if tensor.device.type != "meta" and not isinstance(tensor, skipped):
            super()._track_storage(tensor)

    def _on_resize(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            self.live_bytes += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
        elif storage.nbytes():
            self._track_result(storage)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_cause = self.live_bytes, f"{self.phase} gather".strip()
