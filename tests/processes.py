"""Gloo processes forked for one case: whoever fails first ends them all, and whoever hangs is found by the clock."""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.forked_python import import_what_runs_load


class Broken(Exception):
    """A process failed or hung; the text says which and where."""


def run_forked(ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120.0) -> list[Any]:
    """What ``function(*arguments)`` returns on each of ``ranks`` processes of one world, one thread each."""
    import_what_runs_load()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends, workers = {}, []
        for rank in range(ranks):
            mine, theirs = context.Pipe(duplex=False)
            arguments_of_child = (rank, ranks, Path(folder) / "store", theirs, function, arguments)
            worker = context.Process(target=_child, args=arguments_of_child, daemon=True)
            worker.start()
            theirs.close()
            ends[mine] = rank
            workers.append(worker)
        try:
            answers = _gather(ends, seconds)
        finally:
            for worker in workers:
                worker.join(timeout=5 if "answers" in locals() else 0)
                worker.kill()
                worker.join()
    return [answers[rank] for rank in range(ranks)]


def _gather(ends: dict[Any, int], seconds: float) -> dict[int, Any]:
    answers: dict[int, Any] = {}
    limit = time.monotonic() + seconds
    while len(answers) < len(ends):
        open_ends = [end for end, rank in ends.items() if rank not in answers]
        ready = wait(open_ends, timeout=max(0.0, limit - time.monotonic()))
        if not ready:
            raise Broken(f"ranks {[ends[end] for end in open_ends]} still run after {seconds:.0f} s")
        for end in ready:
            assert isinstance(end, Connection)
            try:
                failure, answer = pickle.loads(end.recv_bytes())
            except EOFError:
                raise Broken(f"rank {ends[end]} died") from None
            if failure:
                raise Broken(f"rank {ends[end]}:\n{failure}")
            answers[ends[end]] = answer
    return answers


def _child(
    rank: int, ranks: int, store: Path, end: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), ranks),
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=60),
        )
        answer = function(*arguments)
        dist.barrier()
        end.send_bytes(pickle.dumps(("", answer)))
        dist.destroy_process_group()
    except BaseException:
        end.send_bytes(pickle.dumps((traceback.format_exc(), None)))
