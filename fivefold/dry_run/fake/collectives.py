"""Fake c10d collectives: they send nothing and return at once, with a handle that reports when it is waited for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import ProcessGroup

from fivefold.dry_run.record.tape import TapeMessage
from fivefold.trainer.measure.meter import COLLECTIVES, is_group, list_tensors

c10d = torch.ops.c10d


class TapeGroup(NamedTuple):
    """A process group as the tape records it: its mesh axis, and its members as ranks of the world."""

    axis: str
    members: tuple[int, ...]


class Handle(Work):
    """A handle of a fake message; the first ``wait`` calls ``on_wait``, which records a WAIT event."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self._on_wait: Callable[[], None] | None = on_wait

    def wait(self, timeout: object = None) -> bool:
        """Report the wait and return at once: nothing is sent."""
        if self._on_wait is not None:
            self._on_wait()
            self._on_wait = None
        return True


def describe_message(
    func: Any, args: Any, groups: Callable[[str], TapeGroup], *, site: int
) -> tuple[TapeMessage, Tensor]:
    """Describe a c10d call as a ``TapeMessage``; also return its full tensor (for a list, the first tensor)."""
    group = next(ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and is_group(a))
    tape_group = groups(group.group_name)
    receives = func is c10d.recv_.default
    collective, tensor_argument = COLLECTIVES[c10d.send.default if receives else func]
    full_tensors = list(list_tensors(args[tensor_argument]))
    message = TapeMessage(
        tape_group.axis,
        group.group_name,
        tape_group.members,
        collective,
        str(full_tensors[0].dtype)[6:],
        sum(tensor.numel() for tensor in full_tensors),
        sum(tensor.nbytes for tensor in full_tensors),
        tape_group.members[args[2]] if collective == "p2p" else -1,
        receives,
        site,
        collective == "p2p" and _continues_batch(full_tensors[0]),
    )
    return message, full_tensors[0]


def _continues_batch(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is in a running ``batch_isend_irecv``, but not its first (read from the frames)."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "batch_isend_irecv":
            return frame.f_locals["p2p_op_list"][0].tensor is not tensor
        frame = frame.f_back
    return False


def make_result(func: Any, args: Any, work: torch.ScriptObject) -> Any:
    """Return the value that the schema of the c10d operation requires: the work handle, or (tensors, work)."""
    if func in (
        c10d.allreduce_.default,
        c10d.broadcast_.default,
        c10d._allgather_base_.default,
        c10d._reduce_scatter_base_.default,
    ):
        return args[0], work
    return work
