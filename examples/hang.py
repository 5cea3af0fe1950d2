"""Make two processes hang, and write what their flight recorders hold: `python examples/hang.py hang`.

Rank 1 leaves out an all-reduce, as a rank does that takes another branch than the others. `fivefold explain hang/*`
says so. `examples/hang` holds the dumps of one such run. A job on GPUs writes the same dumps by itself with
TORCH_NCCL_DUMP_ON_TIMEOUT=1.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def average_loss(loss: torch.Tensor) -> None:
    dist.all_reduce(loss, op=dist.ReduceOp.SUM)


def train(rank: int, folder: str) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store, timeout=timedelta(seconds=2))
    gradients = torch.ones(1024)
    try:
        for step in range(3):
            dist.all_reduce(gradients)
            if rank == 0 or step < 2:  # the fault: at step 2 only rank 0 averages its loss
                average_loss(torch.ones(1))
    except RuntimeError:
        print(f"rank {rank}: timed out")
    from torch._C import _distributed_c10d as c10d

    Path(f"{folder}/flight_recorder_{rank}").write_bytes(c10d._dump_fr_trace())
    store.set(f"done{rank}", "1")
    store.wait([f"done{1 - rank}"])
    os._exit(0)


if __name__ == "__main__":
    os.makedirs(sys.argv[1], exist_ok=True)
    mp.spawn(train, args=(sys.argv[1],), nprocs=RANKS)
    Path(f"{sys.argv[1]}/store").unlink(missing_ok=True)
