"""Host memory: where the job's ``offload`` keeps what the optimizer updates, and the copies to and from the device.

    device   weights that are computed with, reduced gradients ── copy_to_host ──> gradients   host: fp32 rows, moments
             this rank's rows, rounded                         <── copy_to_device ── the update

On a GPU the two memories differ in a tensor's device. On CPU, and in a dry run, they are one device: whatever
counts bytes asks ``is_host_memory`` when a tensor is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

HOST = torch.device("cpu")
_IS_HOST_MEMORY = ContextVar("is_host_memory", default=False)


@contextmanager
def use_host_memory() -> Iterator[None]:
    """Declare that what is allocated within is in host memory."""
    token = _IS_HOST_MEMORY.set(True)
    try:
        yield
    finally:
        _IS_HOST_MEMORY.reset(token)


def is_host_memory() -> bool:
    """Return whether what is allocated now is in host memory."""
    return _IS_HOST_MEMORY.get()


def allocate_on_host(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialized tensor in host memory, pinned if it is for copies to or from a GPU ``device``."""
    with use_host_memory():
        return torch.empty(shape, dtype=dtype, device=HOST, pin_memory=device.type == "cuda")


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy ``tensors`` of one device to host memory, and wait for the copies."""
    copies = [
        allocate_on_host(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor, non_blocking=True)
        for tensor in tensors
    ]
    if tensors and tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def copy_to_device(target: Tensor, source: Tensor) -> None:
    """Copy ``source``, which is in host memory, to ``target``; its dtype is converted before it is sent."""
    if source.dtype != target.dtype:
        source = allocate_on_host(source.shape, dtype=target.dtype, device=target.device).copy_(source)
    target.copy_(source, non_blocking=True)
