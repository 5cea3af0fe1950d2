"""Worker process of ``calibrate --for``: run the real training step of one rank.

    python -m fivefold.calibration.unit_worker '{"rank": 0, ...}'

Modules, optimizer, schedule and tensors are those of ``train``. Where the workers of this computer are all ranks of the
layout, they send their messages; otherwise messages return at once (``null_process_group.py``). The workers of a
computer begin every step together. The first worker prints the ``RankProfile`` of each.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch._C._distributed_c10d import FileStore

from fivefold.calibration.messages import MessageOrder, Timed, gloo_world, heard, make_work, time_messages
from fivefold.calibration.null_process_group import NullProcessGroup, silent_world
from fivefold.calibration.processes import carry_out
from fivefold.calibration.unit_clock import UnitClock, UnitSeconds
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import CollectivePoint
from fivefold.model.spec import Model
from fivefold.record import Record
from fivefold.trainer.build import Built, build
from fivefold.trainer.engine import Engine

WARM = 2  # warm-up steps that are not counted: optimizer states and buffers exist after them


class ProfileOrder(Record):
    """The order to one worker: number ``place`` of ``beside`` workers, which runs ``rank`` of the layout's world."""

    place: NonNegativeInt
    beside: PositiveInt
    rank: NonNegativeInt
    model: Model
    layout: str
    job: Job
    threads: PositiveInt
    meeting: str  # path of a file that does not exist yet
    seconds: PositiveFloat  # least time of the measured steps, of which there are at least ``steps``
    steps: PositiveInt
    silence_seconds: PositiveFloat
    messages: tuple[MessageOrder, ...] = ()  # to time among the workers, after the steps
    work_seconds: PositiveFloat = 5e-3  # between two messages


class RankProfile(Record):
    """The timed occurrences of one rank.

    ``timed``: by ``direction unit`` such as ``F block 3``, by ``update``, and by message in the step, such as ``message
    all_reduce 2 4096``. ``messages``: those that were timed by themselves.
    """

    place: NonNegativeInt
    rank: NonNegativeInt
    torch: str
    device: str
    timed: dict[str, Timed]
    messages: tuple[CollectivePoint, ...] = ()


class Barrier:
    """A barrier and a table between the workers, which share a file because their process groups send nothing."""

    def __init__(self, order: ProfileOrder) -> None:
        self._store = FileStore(order.meeting, order.beside)
        self._store.set_timeout(timedelta(seconds=order.silence_seconds))
        self._order, self._round = order, 0

    def wait(self) -> None:
        """Wait until all workers have called it."""
        self._round += 1
        name = f"round/{self._round}"
        if self._store.add(name, 1) == self._order.beside:
            self._store.set(f"{name}/go", "1")
        self._store.wait([f"{name}/go"])

    def max_over_workers(self, seconds: float) -> float:
        """Return the largest value of all workers."""
        self._store.set(f"value/{self._round}/{self._order.place}", repr(seconds))
        return max(float(self._store.get(f"value/{self._round}/{worker}")) for worker in range(self._order.beside))

    def report(self, profile: RankProfile) -> list[RankProfile]:
        """Publish the profile of this worker; return the profiles of all."""
        self._store.set(f"profile/{self._order.place}", profile.model_dump_json())
        return [
            RankProfile.model_validate_json(self._store.get(f"profile/{worker}"))
            for worker in range(self._order.beside)
        ]


def profile(order: ProfileOrder, meeting: Barrier, *, device: torch.device) -> RankProfile:
    """Build the rank's share of the model and time its steps."""
    layout = Layout.parse(order.layout)
    with _world(order, layout):
        built = build(model=order.model, layout=layout, job=order.job, device=device, streams=False)
        end = 0 if order.job.documents == "separate" else None  # any token may end a document
        engine = Engine(built, model=order.model, layout=layout, job=order.job, end=end)
        step = _step_of(engine, built, order)
        for _ in range(WARM):
            step()
        steps: list[UnitSeconds] = []
        begin = time.perf_counter()
        while True:
            meeting.wait()
            if len(steps) >= order.steps and meeting.max_over_workers(time.perf_counter() - begin) > order.seconds:
                break
            steps.append(step())
    return RankProfile(
        place=order.place, rank=order.rank, torch=torch.__version__, device=str(device), timed=_medians(steps)
    )


def _has_messages(order: ProfileOrder) -> bool:
    """Return whether the workers exchange messages.

    Messages of gloo take different times in a step than alone; those of NCCL run on streams of their own.
    """
    world = Layout.parse(order.layout).world
    return order.beside == world > 1 and not torch.cuda.is_available()


def _world(order: ProfileOrder, layout: Layout) -> AbstractContextManager[None]:
    """Return the context of the process group in which the steps are profiled."""
    if not _has_messages(order):
        return silent_world(rank=order.rank, world=layout.world)
    silence = timedelta(seconds=order.silence_seconds)
    return gloo_world(Path(f"{order.meeting}.step"), rank=order.rank, world=layout.world, silence=silence)


def _step_of(engine: Engine, built: Built, order: ProfileOrder) -> Callable[[], UnitSeconds]:
    """Return a function that runs one step on random tokens under the clock."""
    layout, job, clock = engine.layout, order.job, UnitClock(engine)
    NullProcessGroup.aside[0] = clock.exclude
    if _has_messages(order):
        clock.follow(engine)
    draw = torch.Generator().manual_seed(order.rank)
    shape = layout.micro_batches(job), layout.mbs, job.row_tokens(order.model.mtp_depth)
    tokens = torch.randint(0, order.model.vocab, shape, generator=draw)

    def step() -> UnitSeconds:
        clock.start()
        engine.step(tokens)
        engine.zero_grad()
        return clock.stop()

    return step


def _medians(steps: list[UnitSeconds]) -> dict[str, Timed]:
    """Return the seconds of one occurrence of each unit and direction, over the least disturbed half of the steps."""
    quickest = sorted(steps, key=lambda step: step.seconds.total())[: (len(steps) + 1) // 2]
    timed = {}
    for label in sorted({label for step in steps for label in step.seconds}):
        seconds = [step.seconds[label] / max(1, step.times[label]) for step in quickest]
        median_seconds = statistics.median(seconds)
        spread = (max(seconds) - min(seconds)) / median_seconds if median_seconds else 0.0
        timed[" ".join(label).strip()] = Timed(seconds=median_seconds, spread=spread)
    return timed


def _message_times(order: ProfileOrder, *, device: torch.device) -> list[CollectivePoint]:
    """Time the messages of ``order`` among the workers, with compute as in the run between two of them."""
    silence = timedelta(seconds=order.silence_seconds)
    with gloo_world(Path(f"{order.meeting}.gloo"), rank=order.place, world=order.beside, silence=silence):
        work = make_work(order.work_seconds)
        return time_messages(order.messages, rank=order.place, beside=order.beside, work=work, device=device)


def main(order: ProfileOrder) -> None:
    """Profile the rank of ``order``; the first worker prints all profiles."""
    torch.set_num_threads(order.threads)
    device = torch.device("cuda", order.place) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = Barrier(order)
    own_profile = profile(order, meeting, device=device)
    if untimed := tuple(item for item in order.messages if not heard(item, own_profile.timed)):
        own_profile = own_profile.replace(
            messages=tuple(_message_times(order.replace(messages=untimed), device=device))
        )
    profiles = meeting.report(own_profile)
    if order.place == 0:
        for item in profiles:
            print(item.model_dump_json(), flush=True)
    meeting.wait()  # the file must outlive the last reader


if __name__ == "__main__":
    carry_out(lambda: main(ProfileOrder.model_validate_json(sys.argv[1])))
