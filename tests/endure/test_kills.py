"""Five of the kills of ``make endure``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.endure.kills import Told, endure, enter_folder


@pytest.mark.long  # killed ranks end with the same bits: tests/trainer/test_faults.py
def test_killed_and_resumed_runs_are_bitwise_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after three kills, it goes on with the fourth."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # so that it is put back
    noted: list[Told] = []

    def stop_after_three(told: Told) -> None:
        noted.append(told)
        if told.kills == 3:
            raise KeyboardInterrupt

    with enter_folder(tmp_path):
        with pytest.raises(KeyboardInterrupt):
            endure(Told("dp2 zero2 mbs2"), kills=5, seed=3, tell=stop_after_three)
        told = endure(noted[-1], kills=5, seed=3)
    assert told.equal, told
    assert (told.kills, len(noted)) == (5, 3)
