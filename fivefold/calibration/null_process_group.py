"""A process group of any size whose messages return at once, with made-up contents.

It serves to time the compute of one rank on real tensors. A gather fills every position with this rank's own shard; a
receive writes small random numbers: with uninitialized buffers, activations would become NaN and all tokens would be
routed to the same experts. Making up the contents is not part of the step, so ``untimed`` is entered
around it, which stops the clock. Another thread writes the contents, as gloo's threads do, so that caches are as cold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore

BACKEND = "silent"
RECEIVED_STD = 0.02  # standard deviation of received values: about that of initial weights and activations


Group: Any = dist.ProcessGroup  # untyped: the methods of a group differ between torch 2.11 and 2.13


class NullProcessGroup(Group):  # type: ignore[misc]
    """A process group of which only this process exists; ``untimed`` is shared by all groups."""

    untimed: ClassVar[list[Callable[[], AbstractContextManager[None]]]] = [nullcontext]

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._named = ""
        self._carrier = ThreadPoolExecutor(1)

    @property
    def group_name(self) -> str:
        """Return the name that torch gave the group."""
        return self._named

    def _set_group_name(self, name: str) -> None:
        self._named = name

    def _write(self, target: Tensor, write: Callable[[], object]) -> FakeWork:
        """Run ``write``, which changes only ``target``."""

        def write_without_grad() -> None:
            with torch.no_grad():
                write()

        with self.untimed[0]():
            if target.is_cuda:
                write_without_grad()
            else:
                self._carrier.submit(write_without_grad).result()
        return FakeWork()

    def _send_nothing(self, *_arguments: Any) -> FakeWork:
        return FakeWork()

    def _gather(self, out: Tensor, part: Tensor, *_options: Any) -> FakeWork:
        return self._write(out, lambda: out.view(self.size(), -1).copy_(part.reshape(1, -1)))

    def _reduce_scatter(self, out: Tensor, full: Tensor, *_options: Any) -> FakeWork:
        return self._write(out, lambda: out.view(-1).copy_(full.view(self.size(), -1)[self.rank()]))

    def _exchange(self, out: Tensor, full: Tensor, *_options: Any) -> FakeWork:
        if out.shape == full.shape:
            return self._write(out, lambda: out.copy_(full))
        return self._receive([out])

    def _receive(self, tensors: list[Tensor], *_options: Any) -> FakeWork:
        for tensor in tensors:
            if tensor.is_floating_point():
                self._write(tensor, partial(tensor.normal_, 0, RECEIVED_STD))
        return FakeWork()

    # torch 2.13 renamed the single-tensor collectives; 2.11 calls them by their older names.
    all_gather_single = _allgather_base = _gather
    reduce_scatter_single = _reduce_scatter_base = _reduce_scatter
    all_to_all_single = alltoall_base = _exchange
    recv = _receive
    allreduce = broadcast = barrier = send = _send_nothing


@contextmanager
def init_null_process_group(*, rank: int, world: int) -> Iterator[None]:
    """Make this process ``rank`` of a world of ``world`` ranks that send nothing."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            BACKEND, lambda _store, rank, size, _timeout: NullProcessGroup(rank, size), devices=["cpu", "cuda"]
        )
    hook = sys.excepthook  # init_process_group wraps it, and destroy_process_group does not restore it
    dist.init_process_group(BACKEND, store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        NullProcessGroup.untimed[0] = nullcontext
        dist.destroy_process_group()
        sys.excepthook = hook
