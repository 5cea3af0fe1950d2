"""Bad losses: what counts as one, which batches are then passed over, and that the run is the one without them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.record import Fault
from fivefold.train import loop
from fivefold.train.checkpoint_folder import latest, read
from fivefold.train.spikes import Faults, Guard, Passed, Trouble
from tests.endure.ranks import Ranks
from tests.train.test_faults import events, here, losses, saved_bits, saved_step, set_run, train

__all__ = ["here"]


@given(st.lists(st.sets(st.integers(0, 40), min_size=1, max_size=5), max_size=6), st.integers(1, 30))
def test_a_step_reads_the_next_batch_that_is_not_passed_over(taken: list[set[int]], steps: int) -> None:
    passed = Passed()
    for batches in taken:
        passed.add(sorted(batches))
    left = [batch for batch in range(200) if not any(batch in batches for batches in taken)]
    assert [passed.batch(step) for step in range(steps)] == left[:steps]
    assert all(last + 1 < first for (_, last), (first, _) in zip(passed.ranges, passed.ranges[1:], strict=False))


def test_what_is_a_spike() -> None:
    """1 … 9: the median is 5, the median deviation 2, so 4 robust deviations above are 5 + 4 · 1.4826 · 2 = 16.8608."""
    guard = Guard(Faults(on_spike="skip", spike_deviations=4, spike_window=9))
    assert guard.judge(1e9, 1.0) is None  # nothing is usual yet
    assert guard.judge(math.nan, 1.0) == Trouble("stop", "loss nan, gradient norm 1")
    for loss in range(1, 10):
        assert guard.judge(loss, 1.0) is None
    assert guard.judge(16.861, 1.0) == Trouble("skip", "loss 16.86, where 5 is usual and 16.86 the limit")
    assert len(guard.recent) == 9, "a spike is no measure for later ones"
    assert guard.judge(16.860, 1.0) is None
    assert guard.judge(2.0, math.inf) == Trouble("stop", "loss 2, gradient norm inf")
    flat = Guard(Faults(on_spike="rollback", spike_deviations=8, spike_window=8))
    assert [flat.judge(2.0, 1.0) for _ in range(8)] == [None] * 8
    assert flat.judge(2.015, 1.0) is None
    assert flat.judge(2.017, 1.0) is not None  # 0.1 % · 8 above a loss that never moved


def test_what_is_passed_over() -> None:
    guard = Guard(Faults(max_rollbacks=2))
    said = guard.pass_over(Trouble("skip", "loss nan, gradient norm 1"), step=7, good=4)
    assert said == "loss nan, gradient norm 1: back to step 4, and batch 6 passed over (skip 1)"
    said = guard.pass_over(Trouble("rollback", "loss 9"), step=8, good=4)  # steps 5 to 8 read batches 4, 5, 7, 8
    assert said == "loss 9: back to step 4, and batches 4 to 8 passed over (rollback 2)"
    assert guard.passed.ranges == [[4, 8]]
    kept = Guard(Faults())
    kept.restore(guard.facts(), going_back=False)
    assert (kept.passed.ranges, kept.rollbacks) == ([[4, 8]], 2)
    with pytest.raises(Fault, match=r"step 9: loss 9, after 2 rollbacks, and max_rollbacks=2; lower .*"):
        guard.pass_over(Trouble("skip", "loss 9"), step=9, good=4)


# In a run: the data of batch 6 poisons the weights


def poison(monkeypatch: pytest.MonkeyPatch, *bad: int, loss: float = math.nan) -> None:
    step = loop.Loop._step

    def poisoned(self: loop.Loop, number: int, meter: Any) -> Any:
        done = step(self, number, meter)
        if self.guard.passed.batch(number) not in bad:
            return done
        for shard in self.built.shards:
            shard.weight.fill_(math.nan)
        return done._replace(loss=loss)

    monkeypatch.setattr(loop.Loop, "_step", poisoned)


def without(*batches: int, folder: str, **changes: Any) -> dict[str, str]:
    """The bits of a run that passes over ``batches`` from its start."""
    started = Guard.__init__

    def start(self: Guard, faults: Faults) -> None:
        started(self, faults)
        self.passed.add(list(batches))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Guard, "__init__", start)
        set_run(folder=folder, **changes)
        assert train().code == 0
    return saved_bits(folder)


@pytest.mark.parametrize(
    ("action", "batches", "said"),
    [
        ("skip", [6], "batch 6 passed over (skip 1)"),
        ("rollback", [4, 5, 6], "batches 4 to 6 passed over (rollback 1)"),
    ],
)
def test_a_loss_that_is_no_number(monkeypatch: pytest.MonkeyPatch, action: str, batches: list[int], said: str) -> None:
    steady = {"learning_rate": {"kind": "constant"}}
    wanted = without(*batches, folder="straight", job=steady)
    assert wanted != without(folder="plain", job=steady)
    poison(monkeypatch, 6)
    set_run(faults={"on_nan": action}, job=steady | {"steps": 9})
    ended = train()
    line = f"loss nan, gradient norm \\d\\.\\d+: back to step 4, and {re.escape(said)}"
    assert ended.code == 0, ended.error
    assert len(re.findall(f"^step 7  {line}$", ended.error, flags=re.MULTILINE)) == 1
    assert [event["step"] for event in events()] == [7]
    newest = latest(Path("run/checkpoints"))
    assert newest
    assert read(newest).progress.facts == {"passed": [[batches[0], batches[-1]]], "rollbacks": 1}
    assert read(newest).progress.samples == (9 + len(batches)) * 4
    set_run(faults={"on_nan": action}, job=steady)
    assert train().code == 0  # a later resume knows what was passed over
    assert (saved_step(), saved_bits()) == (12, wanted)
    assert len(losses()) == 12
    assert all(map(math.isfinite, losses()))


def test_two_ranks_go_back_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    two = {"layout": "dp2 zero2 mbs2"}
    started = Guard.__init__
    with monkeypatch.context() as patched:
        patched.setattr(
            Guard, "__init__", lambda self, faults: (started(self, faults), self.passed.add([2, 6]), None)[2]
        )
        set_run(folder="straight", **two)
        assert Ranks(2).wait(seconds=90) == {0: 0, 1: 0}
    poison(monkeypatch, 2, 6)  # batch 2: before there is a checkpoint but that of the start
    set_run(faults={"on_nan": "skip"}, **two)
    ranks = Ranks(2)
    assert ranks.wait(seconds=90) == {0: 0, 1: 0}, ranks.said()
    assert len(events()) == 2
    assert saved_bits() == saved_bits("straight")


def test_a_spike(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"steps": 20}
    wanted = without(14, folder="straight", job=job)
    poison(monkeypatch, 14, loss=40.0)
    set_run(faults={"on_spike": "skip", "spike_window": 8}, job=job)
    ended = train()
    assert ended.code == 0, ended.error
    (event,) = events()
    assert re.match(r"loss 40, where \d\.\d+ is usual and .* the limit: back to step 12, and batch 14 ", event["event"])
    assert saved_bits() == wanted


def test_a_bad_loss_ends_the_run_unless_it_is_told_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        poison(patched, 6)
        ended = train()
    assert ended.code == 1
    assert re.fullmatch(
        r"step 7: loss nan, gradient norm \d\.\d+; the last good checkpoint is run/checkpoints/step-00000004; "
        r'lower the learning rate, or set on_nan = "skip" in \[faults\]',
        ended.line,
    )
    assert len(losses()) == 6
    poison(monkeypatch, *range(5, 100))
    set_run(faults={"on_nan": "skip", "max_rollbacks": 3})
    ended = train()
    assert ended.code == 1
    assert re.search(r"fivefold: step 6: loss nan, .*, after 3 rollbacks, and max_rollbacks=3; lower ", ended.error)
    assert saved_step() == 4


def test_the_usual_losses_outlive_a_resume(set_steps: Callable[[int], None]) -> None:
    set_steps(10)
    assert train().code == 0
    set_steps(20)
    assert train().code == 0
    newest = latest(Path("run/checkpoints"))
    assert newest
    assert read(newest).progress.facts["losses"] == losses()[-8:]


@pytest.fixture
def set_steps() -> Callable[[int], None]:
    faults = {"on_spike": "rollback", "spike_window": 8, "spike_deviations": 1000.0}
    return lambda steps: set_run(faults=faults, job={"steps": steps})
