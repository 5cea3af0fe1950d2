"""Worker process that runs the real training steps of one rank of a run (``calibrate --for``).

    python -m fivefold.calibration.unit_worker ORDER.json

Where the workers of this computer are all ranks of the layout, they send their messages; otherwise messages return at
once (``null_process_group.py``). The workers of a computer begin every step together. At the end the first worker
prints the ``RankProfile`` of each worker.
"""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

from fivefold.calibration.message_orders import MessageOrder, list_measured_seconds
from fivefold.calibration.messages import init_process_group, make_work, time_messages
from fivefold.calibration.null_process_group import init_null_process_group
from fivefold.calibration.orders import ProfileOrder, RankProfile
from fivefold.calibration.processes import carry_out
from fivefold.calibration.step_clock import WARMUP_STEPS, build_step, summarize_steps
from fivefold.calibration.unit_clock import MeasuredUnitSeconds
from fivefold.layout.spec import Layout
from fivefold.machine.spec import CollectivePoint


class Barrier:
    """A barrier and a table between the workers, which share a file because their process groups send nothing."""

    def __init__(self, order: ProfileOrder) -> None:
        self._store = FileStore(order.rendezvous_file, order.workers)
        self._store.set_timeout(timedelta(seconds=order.silence_seconds))
        self._order, self._round = order, 0

    def wait(self) -> None:
        """Wait until all workers have called it."""
        self._round += 1
        name = f"round/{self._round}"
        if self._store.add(name, 1) == self._order.workers:
            self._store.set(f"{name}/go", "1")
        self._store.wait([f"{name}/go"])

    def max_over_workers(self, seconds: float) -> float:
        """Return the largest value of all workers."""
        self._store.set(f"value/{self._round}/{self._order.place}", repr(seconds))
        return max(float(self._store.get(f"value/{self._round}/{worker}")) for worker in range(self._order.workers))

    def report(self, profile: RankProfile) -> list[RankProfile]:
        """Publish the profile of this worker; return the profiles of all."""
        self._store.set(f"profile/{self._order.place}", profile.model_dump_json())
        return [
            RankProfile.model_validate_json(self._store.get(f"profile/{worker}"))
            for worker in range(self._order.workers)
        ]


def profile_rank(order: ProfileOrder, barrier: Barrier, *, device: torch.device) -> RankProfile:
    """Build the rank's share of the model of the run and time its steps."""
    run, steps = order.run, list[MeasuredUnitSeconds]()
    with _enter_world(order):
        step = build_step(
            run.model, Layout.parse(run.layout), run.job, rank=run.rank, device=device, sends=_has_messages(order)
        )
        for _ in range(WARMUP_STEPS):
            step()
        begin = time.perf_counter()
        while True:
            barrier.wait()
            if len(steps) >= run.steps and barrier.max_over_workers(time.perf_counter() - begin) > run.seconds:
                break
            steps.append(step())
    return RankProfile(
        workers=order.workers,
        place=order.place,
        rank=run.rank,
        torch=torch.__version__,
        device=str(device),
        timed=summarize_steps(steps),
    )


def _has_messages(order: ProfileOrder) -> bool:
    """Return whether the workers exchange messages.

    Messages of gloo take different times in a step than by themselves; those of NCCL run on streams of their own.
    """
    return order.workers == Layout.parse(order.run.layout).world > 1 and not torch.cuda.is_available()


def _enter_world(order: ProfileOrder) -> AbstractContextManager[None]:
    """Return the context of the process group in which the steps are profiled."""
    rank, world = order.run.rank, Layout.parse(order.run.layout).world
    if not _has_messages(order):
        return init_null_process_group(rank=rank, world=world)
    silence = timedelta(seconds=order.silence_seconds)
    return init_process_group(Path(f"{order.rendezvous_file}.step"), rank=rank, world=world, silence=silence)


def _time_messages(
    order: ProfileOrder, messages: tuple[MessageOrder, ...], *, device: torch.device
) -> tuple[CollectivePoint, ...]:
    """Time ``messages`` among the workers, with compute as in the run between two of them."""
    silence = timedelta(seconds=order.silence_seconds)
    rendezvous_file = Path(f"{order.rendezvous_file}.gloo")
    with init_process_group(rendezvous_file, rank=order.place, world=order.workers, silence=silence):
        work = make_work(order.run.work_seconds)
        return tuple(time_messages(messages, rank=order.place, local_ranks=order.workers, work=work, device=device))


def run_worker(order: ProfileOrder) -> None:
    """Profile the run of ``order``; the first worker prints the profiles of all workers."""
    torch.set_num_threads(order.threads)
    device = torch.device("cuda", order.place) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    barrier = Barrier(order)
    barrier.wait()
    own_profile = profile_rank(order, barrier, device=device)
    if untimed := tuple(
        message for message in order.run.messages if not list_measured_seconds(message, own_profile.timed)
    ):
        own_profile = own_profile.replace(messages=_time_messages(order, untimed, device=device))
    profiles = barrier.report(own_profile)
    if order.place == 0:
        for item in profiles:
            print(item.model_dump_json(), flush=True)
    barrier.wait()  # the file must outlive the last reader


if __name__ == "__main__":
    carry_out(lambda: run_worker(ProfileOrder.model_validate_json(Path(sys.argv[1]).read_text())))
