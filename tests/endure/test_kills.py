"""Five of the kills of ``make endure``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.endure.kills import endure, standing_in


def test_kills_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # so that it is put back
    with standing_in(tmp_path):
        told = endure("dp2 zero2 mbs2", kills=5, seed=3, steps=60)
    assert told.equal, told
    assert told.kills == 5
