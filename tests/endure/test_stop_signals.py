"""A judge that is stopped prints what it has done."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fivefold.trainer.faults.signals import STOP_SIGNALS
from tests.endure.commands import answer, isolate
from tests.endure.stop_signals import end_at_stop_signal

JUDGES = [path for path in Path(__file__).parent.glob("*.py") if "ArgumentParser(" in path.read_text(encoding="utf-8")]
JUDGES += [Path(__file__).parents[1] / "agree" / kind / "drawn.py" for kind in ("dry_run", "parity")]
# One test of minutes; and judges that take up stored cases where they ended.
OTHERS = ("hosts", "slurm", "package", "kills", "runs")


@pytest.fixture(autouse=True)
def _keep_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_block_ends_and_what_follows_is_done(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    done = 0
    with end_at_stop_signal():
        for case in range(10):
            done += 1
            if case == 3:
                os.kill(os.getpid(), number)
    assert done == 4
    os.kill(os.getpid(), number)  # as ``timeout`` does
    assert capsys.readouterr().out == f"stopped by {signal.Signals(number).name}; until then:\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_command_takes_stops_the_judge(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = []
    with end_at_stop_signal(), isolate():
        answered.append(answer(["predict", "llama3-8b", "h100:8", "dp8"], limit=10)[0])
        monkeypatch.setattr("fivefold.planner.predict.predict", lambda *_, **__: os.kill(os.getpid(), number))
        answered.append(answer(["predict", "llama3-8b", "h100:8", "dp8"], limit=10)[0])
    assert answered == [0]


def test_a_block_that_is_not_stopped_restores_the_handlers() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with end_at_stop_signal():
        pass
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.mark.parametrize("path", JUDGES, ids=lambda path: path.stem)
def test_every_judge_prints_its_counts_when_it_is_stopped(path: Path) -> None:
    assert path.stem in OTHERS or "end_at_stop_signal()" in path.read_text(encoding="utf-8")
