"""A rank that hangs is found and named, with everybody's stacks; a rank that lags is named."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fivefold.trainer import loop
from fivefold.trainer.faults import watchdog
from fivefold.trainer.faults.signals import EXIT_RETRY
from fivefold.trainer.faults.watchdog import RankStatus, _describe_missing_ranks
from fivefold.trainer.parallel import pipeline
from tests.endure.ranks import Ranks
from tests.trainer.test_faults import (
    events,
    lines,
    read_last_step,
    saved_step,
    set_run,
    wait_for,
    workspace,
)

__all__ = ["workspace"]
TWO: dict[str, Any] = {"layout": "dp2 zero2 mbs2", "checkpoints": {"every_steps": 5}}
SECONDS = 5  # longer than a first step takes while other tests run


@pytest.mark.long  # so is one in test_a_run_of_two_processes_survives_every_failure
def test_a_stopped_rank_is_reported_and_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the run continues from there: ``test_a_run_of_two_processes_survives_every_failure``."""
    set_run(**TWO, job={"steps": 30}, faults={"watchdog_seconds": SECONDS})
    with monkeypatch.context() as slowly:  # so that it is not done before it is ended
        step = loop.Loop._step
        slowly.setattr(loop.Loop, "_step", lambda *own: (time.sleep(0.03), step(*own))[1])
        ranks = Ranks(2)
    wait_for(lambda: read_last_step() > 10)
    ranks.signal(1, signal.SIGSTOP)
    begin = time.monotonic()
    assert ranks.wait(seconds=60) == {0: EXIT_RETRY, 1: EXIT_RETRY}
    assert time.monotonic() - begin < SECONDS + watchdog.ALARM_SECONDS
    said = [line for line in ranks.read_output().splitlines() if line.startswith("fivefold: ")]
    who = f"rank 1 did not come for {SECONDS} s: no answer, stopped or cut off"
    assert said == [f"fivefold: {who}; every rank's stack is in run/stacks-rank*.txt"]
    (event,) = events()
    assert event["event"] == said[0].removeprefix("fivefold: ")
    assert event["step"] == max(line["step"] for line in lines() if "loss" in line), "no step follows the verdict"
    assert lines()[-1] == event
    for rank in range(2):
        stacks = Path(f"run/stacks-rank{rank}.txt").read_text()
        assert "loop.py" in stacks, f"rank {rank}: {stacks}"
        assert "in train" in stacks, stacks
    assert 10 <= saved_step() <= 30  # woken to tell its stack, a rank goes on for a moment


def test_a_rank_that_waits_for_something_other_than_a_message_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads answer, and its main thread is nowhere near a collective."""
    step = loop.Loop._step

    def hang(self: loop.Loop, number: int, meter: Any) -> Any:
        while number == 25 and self.built.ranks.rank == 0:
            time.sleep(0.1)
        return step(self, number, meter)

    monkeypatch.setattr(loop.Loop, "_step", hang)
    set_run(**TWO, job={"steps": 200}, faults={"watchdog_seconds": SECONDS})
    ranks = Ranks(2)
    assert ranks.wait(seconds=90) == {0: EXIT_RETRY, 1: EXIT_RETRY}
    said = [line for line in ranks.read_output().splitlines() if line.startswith("fivefold: ")]
    assert len(said) == 1
    assert re.match(rf"fivefold: rank 0 did not come for {SECONDS} s: a step after step 25, ", said[0])
    assert "in hang" in Path("run/stacks-rank0.txt").read_text()


def test_a_long_step_of_many_micro_batches_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    act = pipeline.Pipeline._run_action

    def act_slowly(self: pipeline.Pipeline, action: Any, **first: int) -> None:
        time.sleep(0.3)
        act(self, action, **first)

    monkeypatch.setattr(pipeline.Pipeline, "_run_action", act_slowly)
    set_run(layout="dp1 mbs1", job={"steps": 1, "global_batch": 8}, faults={"watchdog_seconds": 2})
    ranks = Ranks(1)
    assert ranks.wait(seconds=120) == {0: 0}, ranks.read_output()
    assert events() == []
    (seconds,) = [line["seconds"] for line in lines() if "loss" in line]
    assert seconds > 2


def test_a_lagging_rank_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    step = loop.Loop._step

    def step_slowly(self: loop.Loop, number: int, meter: Any) -> Any:
        if self.built.ranks.rank == 1:
            time.sleep(0.8)  # many times a step of its own, even while other tests run
        return step(self, number, meter)

    monkeypatch.setattr(loop.Loop, "_step", step_slowly)
    monkeypatch.setattr(watchdog, "WINDOW_SECONDS", 1.0)
    set_run(**TWO, job={"steps": 10})
    ranks = Ranks(2)
    assert ranks.wait(seconds=120) == {0: 0, 1: 0}, ranks.read_output()
    (event,) = events()
    assert re.fullmatch(
        r"rank 1 lags: [\d.]+ s of its own per step, where the other ranks take 0(\.\d+)?", event["event"]
    )
    assert len([line for line in lines() if "loss" in line]) == 10


def make_status(step: int, *, waits: bool) -> RankStatus:
    return RankStatus(step, "a step", "wait (collectives.py:47)", waits)


@pytest.mark.parametrize(
    ("places", "silent", "named"),
    [
        ({0: make_status(7, waits=True)}, [1, 2], "ranks 1, 2 did not come"),
        (
            {0: make_status(7, waits=True), 1: make_status(6, waits=True)},
            [],
            "rank 1 did not come for 9 s: a step after step 6",
        ),
        (
            {0: make_status(7, waits=True), 1: make_status(7, waits=False), 2: make_status(7, waits=True)},
            [],
            "rank 1 did not come",
        ),
        ({0: make_status(7, waits=True), 1: make_status(7, waits=True)}, [], "no rank went on for 9 s"),
    ],
)
def test_ranks_that_do_not_answer_are_reported(places: dict[int, RankStatus], silent: list[int], named: str) -> None:
    assert _describe_missing_ranks(places, silent, 9.0).startswith(named)


def test_stacks_of_a_running_rank_can_be_requested() -> None:
    set_run(job={"steps": 4000}, layout="dp1 zero0 mbs4")
    ranks = Ranks(1)
    wait_for(lambda: read_last_step() > 10)
    ranks.signal(0, signal.SIGUSR2)
    wait_for(lambda: os.path.getsize("run/stacks-rank0.txt") > 0, seconds=10)
    ranks.signal(0, signal.SIGUSR1)  # what Slurm sends before the time is up
    assert ranks.wait(seconds=30) == {0: 1}
    assert "stopped by SIGUSR1 after step" in ranks.read_output()
    assert saved_step() >= 10
