"""Bad losses: what counts as one, which data is then passed over, and that the run is the one without it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.errors import RunFailure
from fivefold.trainer import engine, loop
from fivefold.trainer.checkpoint.checkpoint_folder import find_latest, read
from fivefold.trainer.faults.spikes import BadLoss, Faults, LossGuard
from tests.endure.ranks import Ranks
from tests.selection import mark_share
from tests.trainer.test_faults import events, losses, saved_bits, saved_step, set_run, train, workspace

__all__ = ["workspace"]


def test_spikes_are_detected() -> None:
    """1 … 9: the median is 5, the median deviation 2, so 4 robust deviations above are 5 + 4 · 1.4826 · 2 = 16.8608."""
    guard = LossGuard(Faults(on_spike="skip", spike_deviations=4, spike_window=9))
    assert guard.judge(1e9, 1.0) is None  # nothing is usual yet
    assert guard.judge(math.nan, 1.0) == BadLoss("stop", "loss nan, gradient norm 1")
    for loss in range(1, 10):
        assert guard.judge(loss, 1.0) is None
    assert guard.judge(16.861, 1.0) == BadLoss("skip", "loss 16.86, where 5 is usual and 16.86 the limit")
    assert len(guard.recent) == 9, "a spike is no measure for later ones"
    assert guard.judge(16.860, 1.0) is None
    assert guard.judge(2.0, math.inf) == BadLoss("stop", "loss 2, gradient norm inf")
    flat = LossGuard(Faults(on_spike="rollback", spike_deviations=8, spike_window=8))
    assert [flat.judge(2.0, 1.0) for _ in range(8)] == [None] * 8
    assert flat.judge(2.015, 1.0) is None
    assert flat.judge(2.017, 1.0) is not None  # 0.1 % · 8 above a loss that never moved


def test_rollbacks_are_limited() -> None:
    guard = LossGuard(Faults(max_rollbacks=2))
    guard.count(BadLoss("skip", "loss nan, gradient norm 1"), step=7)
    guard.count(BadLoss("rollback", "loss 9"), step=8)
    kept = LossGuard(Faults(max_rollbacks=2))
    kept.restore(guard.facts(), going_back=False)
    with pytest.raises(RunFailure, match=r"step 9: loss 9, after 2 rollbacks, and max_rollbacks=2; lower .*"):
        kept.count(BadLoss("skip", "loss 9"), step=9)


# In a run: the data of batch 6 poisons the gradients


def poison(monkeypatch: pytest.MonkeyPatch, *bad: int, loss: float = math.nan, rank: int = 0) -> None:
    """Batches ``bad`` have that loss, and gradients of it on one rank."""
    step, backward, reads = loop.Loop._step, engine.Engine.backward, [0]

    def step_noted(self: loop.Loop, number: int, meter: Any) -> Any:
        reads[0] = self.samples // 4
        return step(self, number, meter)

    def backward_poisoned(self: engine.Engine, tokens: Tensor) -> Tensor:
        total = backward(self, tokens)
        if reads[0] in bad and self.built.ranks.rank == rank:
            for shard in self.built.shards:
                assert shard.weight.grad is not None
                shard.weight.grad.fill_(loss)
            total = torch.full_like(total, loss)
        return total

    monkeypatch.setattr(loop.Loop, "_step", step_noted)
    monkeypatch.setattr(engine.Engine, "backward", backward_poisoned)


def run_without(*batches: int, folder: str, ranks: int = 1, **changes: Any) -> dict[str, str]:
    """The bits of a run that does not read ``batches``."""
    step = loop.Loop._step

    def skip_batches(self: loop.Loop, number: int, meter: Any) -> Any:
        while self.samples // 4 in batches:
            self.samples += 4
        return step(self, number, meter)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop.Loop, "_step", skip_batches)
        set_run(folder=folder, **changes | {"checkpoints": {"every_steps": 100}})
        assert set(Ranks(ranks).wait(seconds=90).values()) == {0}
    return saved_bits(folder)


@pytest.mark.long  # as test_all_ranks_detect_the_same_spikes
@pytest.mark.parametrize(
    ("action", "batches", "said"),
    mark_share(
        2,
        [
            ("rollback", [4, 5, 6], "back to step 4, and samples 16 to 27 passed over (rollback 1)"),
            ("skip", [6], "no update, and samples 24 to 27 passed over (skip 1)"),
        ],
    ),
)
def test_batches_with_a_nan_loss_are_skipped_or_rolled_back(
    monkeypatch: pytest.MonkeyPatch, action: str, batches: list[int], said: str
) -> None:
    steady = {"learning_rate": {"kind": "constant"}}
    wanted = run_without(*batches, folder="straight", job=steady)
    assert wanted != run_without(folder="plain", job=steady)
    poison(monkeypatch, 6)
    set_run(faults={"on_nan": action}, job=steady | {"steps": 9})
    ended = train()
    assert ended.code == 0, ended.error
    line = f"step 7  loss nan, gradient norm nan: {said}"
    assert [line for line in ended.error.splitlines() if "passed over" in line] == [line]
    assert [event["step"] for event in events()] == [7]
    newest = find_latest(Path("run/checkpoints"))
    assert newest
    assert read(newest).progress.facts["rollbacks"] == 1
    assert read(newest).progress.samples == (9 + len(batches)) * 4
    set_run(faults={"on_nan": action}, job=steady)
    assert train().code == 0  # a later resume reads on
    assert (saved_step(), saved_bits()) == (12, wanted)
    assert len(losses()) == 12
    assert all(map(math.isfinite, losses()))


@pytest.mark.parametrize("action", mark_share(2, ["rollback", "skip"]))
def test_all_ranks_detect_the_same_spikes(monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    """Gradients of one rank alone are bad, twice before there is any checkpoint but that of the start."""
    two = {"layout": "dp2 zero2 mbs2"}
    wanted = run_without(*([2, 6] if action == "skip" else range(7)), folder="straight", ranks=2, **two)
    poison(monkeypatch, 2, 6, rank=1)
    set_run(faults={"on_nan": action}, **two)
    ranks = Ranks(2)
    assert ranks.wait(seconds=90) == {0: 0, 1: 0}, ranks.read_output()
    assert len(events()) == 2
    assert saved_bits() == wanted


def test_a_skip_needs_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 0, 1)
    set_run(faults={"on_nan": "skip"}, job={"steps": 3}, checkpoints={"every_steps": 100})
    assert train().code == 0
    assert [(event["step"], "no update" in event["event"]) for event in events()] == [(1, True), (1, True)]
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000003"]


@pytest.mark.long  # in test_the_window_of_usual_losses_is_kept_across_a_resume one comes after a resume
def test_a_batch_with_a_loss_spike_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"steps": 12}
    wanted = run_without(9, folder="straight", job=job)
    poison(monkeypatch, 9, loss=40.0)
    set_run(faults={"on_spike": "skip", "spike_window": 8}, job=job)
    ended = train()
    assert ended.code == 0, ended.error
    (event,) = events()
    assert re.match(r"loss 40, where \d\.\d+ is usual and .* the limit: no update, and samples 36 to ", event["event"])
    assert saved_bits() == wanted


def test_a_checkpoint_that_leads_to_spikes_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches 9 and 11 leap after the checkpoint of step 8: the second goes back to that of step 4, and reads on."""
    changes = {
        "job": {"steps": 16, "learning_rate": {"kind": "constant"}},
        "checkpoints": {"every_steps": 4, "keep": 9},
    }
    wanted = run_without(*range(4, 12), folder="straight", **changes)
    poison(monkeypatch, 9, 11, loss=math.inf)
    set_run(faults={"on_nan": "rollback"}, **changes)
    assert train().code == 0
    assert [event["event"].partition(": ")[2] for event in events()] == [
        "back to step 8, and samples 32 to 39 passed over (rollback 1)",
        "back to step 4, as step-00000008 led here again, and samples 16 to 47 passed over (rollback 2)",
    ]
    assert saved_bits() == wanted
    assert len(losses()) == 16
    names = sorted(path.name for path in Path("run/checkpoints").iterdir())
    assert names[:4] == ["step-00000000", "step-00000004", "step-00000008", "step-00000008.doubted-1"]


def test_a_nan_or_spike_ends_the_run_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        poison(patched, 6)
        ended = train()
    assert ended.code == 1
    assert re.fullmatch(
        r"step 7: loss nan, gradient norm nan; the last good checkpoint is run/checkpoints/step-00000004; "
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


def test_the_window_of_usual_losses_is_kept_across_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the window is from before the resume: a spike in the first step after it is one."""
    faults = {"on_spike": "skip", "spike_window": 8}
    set_run(faults=faults, job={"steps": 10})
    assert train().code == 0
    poison(monkeypatch, 10, loss=40.0)
    set_run(faults=faults, job={"steps": 13})
    ended = train()
    assert ended.code == 0, ended.error
    assert [(event["step"], event["event"].partition(",")[0]) for event in events()] == [(11, "loss 40")]
    newest = find_latest(Path("run/checkpoints"))
    assert newest
    assert read(newest).progress.facts["losses"] == losses()[-8:]


def test_a_rollback_restores_the_losses_and_still_counts() -> None:
    """Else a run whose loss is bad whatever it reads would go back for ever, and never come to ``max_rollbacks``."""
    guard = LossGuard(Faults(on_nan="rollback", on_spike="rollback", spike_window=8, max_rollbacks=2))
    for loss in (3.0, 2.0):
        assert guard.judge(loss, 1.0) is None
    facts = guard.facts()
    assert facts == {"losses": [3.0, 2.0]}
    for step in (7, 9):
        assert guard.judge(1.0, 1.0) is None  # of data that is passed over
        guard.count(BadLoss("rollback", "loss nan"), step=step)
        guard.restore(facts, going_back=True)
        assert list(guard.recent) == [3.0, 2.0]
    with pytest.raises(RunFailure, match=r"after 2 rollbacks, and max_rollbacks=2"):
        guard.count(BadLoss("rollback", "loss nan"), step=11)
    guard.restore(facts, going_back=False)
    assert guard.rollbacks == 0
