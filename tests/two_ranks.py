"""Two gloo processes for what may not run in the test's own: its memory is metered, or its world is left open."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_two_ranks(folder: Path, body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``body`` returns on rank 0 of two processes."""
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                store = dist.FileStore(str(folder / "store"), 2)
                dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
                result = body()
                if rank == 0:
                    (folder / "found.json").write_text(json.dumps(result))
                dist.barrier()
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    result = json.loads((folder / "found.json").read_text())
    assert isinstance(result, dict)
    return result
