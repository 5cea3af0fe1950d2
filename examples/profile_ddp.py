"""Record PyTorch profiler traces of a small DDP loop on two CPU processes: `python examples/profile_ddp.py traces`.

Rank 1 gets sequences twice as long as those of rank 0, so rank 0 waits for it in every step. `fivefold trace traces`
shows that. `examples/traces` holds what one such run has recorded.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

RANKS, STEPS, WIDTH, LAYERS = 2, 2, 256, 2


def train(rank: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = 256 * (1 + rank)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=STEPS),
        record_shapes=True,
        on_trace_ready=lambda done: done.export_chrome_trace(f"{folder}/rank{rank}.json.gz"),
    ) as profiler:
        for _ in range(2 + STEPS):
            loss = model(torch.randn(4, tokens, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.makedirs(sys.argv[1], exist_ok=True)
    mp.spawn(train, args=(sys.argv[1],), nprocs=RANKS)
