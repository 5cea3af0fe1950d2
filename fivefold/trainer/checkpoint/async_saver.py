"""Asynchronous checkpoints: copies the state to host memory, and a thread writes the copy while training goes on.

    training   … step 400 │ copy │ step 401   step 402   step 403 …
    thread                       └ write, checksum, publish ┘

At most one save runs at a time: the next save, the end of the run and a rollback wait for it. The thread's collectives
use their own gloo group, as two threads on one group could issue them in different orders on different ranks.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.trainer.build import Built
from fivefold.trainer.checkpoint.checkpoint import Checkpoint, State, collect_state_dict, write
from fivefold.trainer.checkpoint.reshard import BoxTensor
from fivefold.trainer.process import TIMEOUT


class Saver:
    """A saver of one rank's part of a run; a context manager around training. All ranks make the same calls in order.

    ``newest``: the last checkpoint known to be complete. ``asynchronous=False``: ``save`` writes before it returns and
    makes no copy.
    """

    def __init__(self, directory: Path, *, built: Built, keep: int, asynchronous: bool) -> None:
        self.directory, self.built, self.keep, self.asynchronous = directory, built, keep, asynchronous
        self.newest: Path | None = None
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if asynchronous else None
        self._copy: State = {}  # reused by every save: pinned memory is slow to allocate
        self._thread = ThreadPoolExecutor(1, "saver", initializer=self._take_device)
        self._pending_save: Future[Path] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        """Finish a running save even if the run fails, since the other ranks take part in it."""
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)

    @property
    def has_failed(self) -> bool:
        """Return whether the last save has failed, as far as this rank knows; ``wait`` raises the error."""
        pending = self._pending_save
        return pending is not None and pending.done() and pending.exception() is not None

    def save(self, checkpoint: Checkpoint) -> None:
        """Save the current state with ``checkpoint`` as its manifest; waits for the previous save first."""
        self.wait()
        state = collect_state_dict(self.built)
        if not self.asynchronous:
            self.newest = self._write(state, checkpoint)
            return
        self._copy = {name: _copy_to_host(tensor, self._copy.get(name)) for name, tensor in state.items()}
        copy_done = torch.cuda.current_stream().record_event() if self._is_on_gpu else None
        self._pending_save = self._thread.submit(self._write, self._copy, checkpoint, copy_done)

    def wait(self) -> Path | None:
        """Wait for a running save; return the newest checkpoint. Raises ``RunFailure`` on all ranks if it failed."""
        if self._pending_save is not None:
            pending, self._pending_save = self._pending_save, None
            self.newest = pending.result()
        return self.newest

    def _write(self, state: State, checkpoint: Checkpoint, copied: torch.cuda.Event | None = None) -> Path:
        """Write the checkpoint; wait first until a copy from the GPU has ended."""
        if copied is not None:
            copied.synchronize()
        ranks, keep = self.built.ranks, self.keep
        return write(self.directory, state, checkpoint=checkpoint, ranks=ranks, keep=keep, group=self._group)

    @property
    def _is_on_gpu(self) -> bool:
        return self.built.ranks.device.type == "cuda"

    def _take_device(self) -> None:
        if self._is_on_gpu:
            torch.cuda.set_device(self.built.ranks.device)


def _copy_to_host(tensor: Tensor | BoxTensor, previous: Tensor | BoxTensor | None) -> Tensor | BoxTensor:
    """Copy ``tensor`` to host memory, into ``previous`` if given; from a GPU asynchronously, pinned, on its stream."""
    if isinstance(tensor, BoxTensor):
        rows = _copy_to_host(tensor.rows, previous.rows if isinstance(previous, BoxTensor) else None)
        return BoxTensor(tensor.size(), tensor.boxes, rows)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda) if previous is None else previous
    return host.copy_(tensor.detach(), non_blocking=True)
