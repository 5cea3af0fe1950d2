"""Processes of one thread each that hold every contender of a race and step them by name, all together.

Forked from a server that has imported torch and run nothing with it; gloo; ended with the ``with`` block.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist
from contenders import Step, build_fivefold_step
from native import build_native_step
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model

PRELOADED = [
    "fivefold.trainer.engine",
    "transformers",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]


class Taken(NamedTuple):
    """A step: its seconds, those of CPU, and the loss. Of ranks: the slowest, the sum, the sum."""

    wall: float
    cpu: float
    loss: float


class Race(NamedTuple):
    """The contenders that each rank builds: our engine under ``layout``, and PyTorch's native equivalent."""

    model: Model
    job: Job
    layout: Layout


def time_step(step: Step, tokens: Tensor) -> Taken:
    """Take a step."""
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step(tokens)
    return Taken(time.perf_counter() - wall, time.process_time() - cpu, loss)


@contextmanager
def crew(race: Race, *, against: bool = True) -> Iterator[Mapping[str, partial[Taken]]]:
    """Name → what steps that contender on all ranks; without ``against`` ours alone, optimizer and all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pipes = [context.Pipe() for _ in range(race.layout.world)]
    with TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_rank, args=(rank, race, against, str(Path(folder, "store")), there), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for worker, (_, there) in zip(workers, pipes, strict=True):
            worker.start()
            there.close()

        def step(name: str, tokens: Tensor) -> Taken:
            for here, _ in pipes:
                here.send((name, tokens.numpy()))
            wall, cpu, loss = zip(*(here.recv() for here, _ in pipes), strict=True)
            return Taken(max(wall), sum(cpu), sum(loss))

        yield {name: partial(step, name) for name in (("ours", "native") if against else ("ours",))}
        for here, _ in pipes:
            here.send(None)
        for worker in workers:
            worker.join(timeout=60)


def _rank(rank: int, race: Race, against: bool, store: str, orders: Connection) -> None:
    """Run steps of one rank, ours or PyTorch's own, as orders arrive."""
    torch.set_num_threads(1)
    world = race.layout.world
    dist.init_process_group("gloo", store=FileStore(store, world), rank=rank, world_size=world)
    steps = {"ours": build_fivefold_step(race.model, race.job, layout=race.layout, update=not against)}
    if against:
        steps["native"] = build_native_step(race.model, race.job, layout=race.layout)
    while (order := orders.recv()) is not None:
        name, tokens = order
        dist.barrier()  # none begins before the others are there
        orders.send(tuple(time_step(steps[name], torch.from_numpy(tokens))))
    dist.destroy_process_group()
