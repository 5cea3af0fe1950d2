"""Worker process that runs the real training steps of one rank, of one run (``calibrate --for``) or of several.

    python -m fivefold.calibration.unit_worker ORDER.json

Modules, optimizer, schedule and tensors are those of ``train``. Where the workers of this computer are all ranks of the
layout, they send their messages; otherwise messages return at once (``null_process_group.py``). The workers of a
computer begin every step together. After each run the first worker prints the ``RankProfile`` of each worker.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from math import inf
from pathlib import Path

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch._C._distributed_c10d import FileStore

from fivefold.calibration.messages import MessageOrder, Timed, gloo_world, heard, make_work, time_messages
from fivefold.calibration.null_process_group import NullProcessGroup, silent_world
from fivefold.calibration.processes import carry_out
from fivefold.calibration.unit_clock import MeasuredUnitSeconds, UnitClock
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import CollectivePoint
from fivefold.model.spec import Model
from fivefold.record import Record
from fivefold.trainer.build import Built, build
from fivefold.trainer.engine import Engine
from fivefold.units import Dtype

MIN_RUNS = 3  # a run that would take more than the budget over this number is left out
WARM = 2  # warm-up steps that are not counted: optimizer states and buffers exist after them


class RunOrder(Record):
    """A run to profile: the worker runs ``rank`` of the layout's world. ``step_seconds``: as predicted, or 0."""

    rank: NonNegativeInt
    step_seconds: NonNegativeFloat = 0.0
    model: Model
    layout: str
    job: Job
    seconds: PositiveFloat  # least time of the measured steps, of which there are at least ``steps``
    steps: PositiveInt
    messages: tuple[MessageOrder, ...] = ()  # to time among the workers, after the steps
    work_seconds: PositiveFloat = 5e-3  # between two messages


class ProfileOrder(Record):
    """The order to one worker: number ``place`` of ``workers`` workers.

    ``budget_seconds``: no run begins that would probably end later; None: all are run.
    """

    place: NonNegativeInt
    workers: PositiveInt
    threads: PositiveInt
    meeting: str  # path of a file that does not exist yet
    silence_seconds: PositiveFloat
    runs: tuple[RunOrder, ...]
    budget_seconds: PositiveFloat | None = None


class RankProfile(Record):
    """The timed occurrences of one rank in run number ``run`` of its order.

    ``timed``: by ``direction unit`` such as ``F block 3``, by ``update``, and by message in the step, such as ``message
    all_reduce 2 4096``. ``messages``: those that were timed by themselves.
    """

    run: NonNegativeInt = 0
    place: NonNegativeInt
    rank: NonNegativeInt
    torch: str
    device: str
    timed: dict[str, Timed]
    messages: tuple[CollectivePoint, ...] = ()


class Barrier:
    """A barrier and a table between the workers, which share a file because their process groups send nothing."""

    def __init__(self, order: ProfileOrder) -> None:
        self._store = FileStore(order.meeting, order.workers)
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
        self._store.set(f"profile/{profile.run}/{self._order.place}", profile.model_dump_json())
        return [
            RankProfile.model_validate_json(self._store.get(f"profile/{profile.run}/{worker}"))
            for worker in range(self._order.workers)
        ]


class Budget:
    """The time that is left for runs; steps are expected to take as much longer than predicted as those before them."""

    def __init__(self, seconds: float) -> None:
        self._end, self._longest = time.perf_counter() + seconds, seconds / MIN_RUNS
        self._slowdown: dict[Dtype, float] = {}

    def overrun(self, run: RunOrder) -> float:
        """Return by how many seconds a run would probably be too long, or end too late.

        The first run of each dtype is made if any time is left, as its prediction may be far too long.
        """
        overdue, slowdown = time.perf_counter() - self._end, self._slowdown.get(run.job.precision.compute)
        if slowdown is None:
            return overdue
        expected_seconds = (WARM + run.steps) * slowdown * run.step_seconds
        return max(expected_seconds - self._longest, overdue + expected_seconds)

    def note(self, run: RunOrder, step_seconds: float) -> None:
        """Record the seconds of a step."""
        if run.step_seconds:
            self._slowdown[run.job.precision.compute] = step_seconds / run.step_seconds


def profile(order: ProfileOrder, number: int, meeting: Barrier, budget: Budget, *, device: torch.device) -> RankProfile:
    """Build the rank's share of the model of a run and time its steps."""
    run = order.runs[number]
    layout = Layout.parse(run.layout)
    with _world(order, number, layout):
        built = build(model=run.model, layout=layout, job=run.job, device=device, streams=False)
        end = 0 if run.job.documents == "separate" else None  # any token may end a document
        engine = Engine(built, model=run.model, layout=layout, job=run.job, end=end)
        step = _step_of(engine, built, run, sends=_has_messages(order, layout))
        for _ in range(WARM):
            begin = time.perf_counter()
            step()
        budget.note(run, time.perf_counter() - begin)
        steps: list[MeasuredUnitSeconds] = []
        begin = time.perf_counter()
        while True:
            meeting.wait()
            if len(steps) >= run.steps and meeting.max_over_workers(time.perf_counter() - begin) > run.seconds:
                break
            steps.append(step())
    return RankProfile(
        run=number,
        place=order.place,
        rank=run.rank,
        torch=torch.__version__,
        device=str(device),
        timed=_medians(steps),
    )


def _has_messages(order: ProfileOrder, layout: Layout) -> bool:
    """Return whether the workers exchange messages.

    Messages of gloo take different times in a step than alone; those of NCCL run on streams of their own.
    """
    return order.workers == layout.world > 1 and not torch.cuda.is_available()


def _world(order: ProfileOrder, number: int, layout: Layout) -> AbstractContextManager[None]:
    """Return the context of the process group in which the steps of a run are profiled."""
    rank = order.runs[number].rank
    if not _has_messages(order, layout):
        return silent_world(rank=rank, world=layout.world)
    silence = timedelta(seconds=order.silence_seconds)
    return gloo_world(Path(f"{order.meeting}.{number}.step"), rank=rank, world=layout.world, silence=silence)


def _step_of(engine: Engine, built: Built, run: RunOrder, *, sends: bool) -> Callable[[], MeasuredUnitSeconds]:
    """Return a function that runs one step on random tokens under the clock."""
    layout, job, clock = engine.layout, run.job, UnitClock(engine)
    NullProcessGroup.aside[0] = clock.exclude
    if sends:
        clock.follow(engine)
    draw = torch.Generator().manual_seed(run.rank)
    shape = layout.micro_batches(job), layout.mbs, job.row_tokens(run.model.mtp_depth)
    tokens = torch.randint(0, run.model.vocab, shape, generator=draw)

    def step() -> MeasuredUnitSeconds:
        clock.start()
        engine.step(tokens)
        engine.zero_grad()
        return clock.stop()

    return step


def _medians(steps: list[MeasuredUnitSeconds]) -> dict[str, Timed]:
    """Return the seconds of one occurrence of each unit and direction, over the least disturbed half of the steps."""
    quickest = sorted(steps, key=lambda step: step.seconds.total())[: (len(steps) + 1) // 2]
    timed = {}
    for label in sorted({label for step in steps for label in step.seconds}):
        seconds = [step.seconds[label] / max(1, step.times[label]) for step in quickest]
        median_seconds = statistics.median(seconds)
        spread = (max(seconds) - min(seconds)) / median_seconds if median_seconds else 0.0
        timed[" ".join(label).strip()] = Timed(seconds=median_seconds, spread=spread)
    return timed


def _message_times(
    order: ProfileOrder, number: int, messages: tuple[MessageOrder, ...], *, device: torch.device
) -> tuple[CollectivePoint, ...]:
    """Time ``messages`` among the workers, with compute as in the run between two of them."""
    silence, meeting = timedelta(seconds=order.silence_seconds), Path(f"{order.meeting}.{number}.gloo")
    with gloo_world(meeting, rank=order.place, world=order.workers, silence=silence):
        work = make_work(order.runs[number].work_seconds)
        return tuple(time_messages(messages, rank=order.place, local_ranks=order.workers, work=work, device=device))


def main(order: ProfileOrder) -> None:
    """Profile the runs of ``order``; the first worker prints the profiles of all workers."""
    torch.set_num_threads(order.threads)
    device = torch.device("cuda", order.place) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting, budget = Barrier(order), Budget(order.budget_seconds or inf)
    for number, run in enumerate(order.runs):
        meeting.wait()
        if meeting.max_over_workers(budget.overrun(run)) > 0:
            continue
        own_profile = profile(order, number, meeting, budget, device=device)
        if untimed := tuple(message for message in run.messages if not heard(message, own_profile.timed)):
            own_profile = own_profile.replace(messages=_message_times(order, number, untimed, device=device))
        profiles = meeting.report(own_profile)
        if order.place == 0:
            for item in profiles:
                print(item.model_dump_json(), flush=True)
    meeting.wait()  # the file must outlive the last reader


if __name__ == "__main__":
    carry_out(lambda: main(ProfileOrder.model_validate_json(Path(sys.argv[1]).read_text())))
