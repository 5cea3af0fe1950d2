"""``hanging_rank.py FOLDER``: of two ranks the second leaves out an all-reduce; both write their recorders."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

os.environ["TORCH_FR_BUFFER_SIZE"] = "100"

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d


def rank_of_a_hang(rank: int, folder: str) -> None:
    """Rank 1 leaves out an all-reduce, and both write what their recorders hold."""
    torch.set_num_threads(1)
    file = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=file, timeout=timedelta(seconds=1))
    x = torch.ones(4, 3)
    dist.all_reduce(x)
    try:
        if rank == 0:
            dist.all_reduce(x)
    except RuntimeError:
        pass
    Path(f"{folder}/trace_{rank}").write_bytes(c10d._dump_fr_trace())
    Path(f"{folder}/dump_rank{rank}.json").write_bytes(c10d._dump_fr_trace_json())
    file.set(f"done{rank}", "1")
    file.wait([f"done{1 - rank}"])
    os._exit(0)


if __name__ == "__main__":
    rank_of_a_hang(int(os.fork() == 0), sys.argv[1])
