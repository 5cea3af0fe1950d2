"""The journal through kills: a torn last line is dropped, nothing is done twice, the rows are a quiet sweep's."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from fivefold.errors import RunFailure, UserError
from fivefold.results.sweep_row import SweepRow
from fivefold.sweeps.journal import Journal, open_journal
from fivefold.sweeps.spec import Sweep
from fivefold.sweeps.sweep import SweepPlan, run

SWEEP = Sweep.read(
    {
        "models": ["nano"], "machines": ["h100"], "ranks": [2, 8], "batches": [16],
        "layouts": ["dp* tp{1,2} pp{1,2} zero{0,3} mbs{1,2}"], "sequences": [64],
    }, origin="test",
)  # fmt: skip


def put_three(path: Path) -> bytes:
    with open_journal(path) as journal:
        for number in range(3):
            journal.put("predicted", f"key {number}", [{"text": "zwölf" * number, "number": number}])
    return path.read_bytes()


def test_a_journal_truncated_at_any_byte_is_readable(tmp_path: Path) -> None:
    whole = put_three(tmp_path / "whole")
    for size in range(len(whole) + 1):
        (tmp_path / "cut").write_bytes(whole[:size])
        with open_journal(tmp_path / "cut") as journal:
            known = [journal.get("predicted", f"key {number}") for number in range(3)]
            lines = whole[:size].count(b"\n")
            assert [value is not None for value in known] == [number < lines for number in range(3)]
            journal.put("measured", "more", 1)
        texts = (tmp_path / "cut").read_text().splitlines()
        assert [json.loads(text)["key"] for text in texts] == [*(f"key {number}" for number in range(lines)), "more"]


def test_a_long_torn_line_is_dropped(tmp_path: Path) -> None:
    whole = put_three(tmp_path / "journal")
    with (tmp_path / "journal").open("ab") as file:
        file.write(b"x" * 200_000)
    with open_journal(tmp_path / "journal"):
        pass
    assert (tmp_path / "journal").read_bytes() == whole


def test_a_journal_is_written_by_one_sweep_at_a_time(tmp_path: Path) -> None:
    with (
        open_journal(tmp_path / "journal"),
        pytest.raises(UserError, match="another sweep writes to it"),
        open_journal(tmp_path / "journal"),
    ):
        pytest.fail("two at once")
    with (
        pytest.raises(UserError, match=r"cannot be written: (File exists|Not a directory)"),
        open_journal(tmp_path / "journal" / "within"),
    ):
        pytest.fail("a file as a folder")


def test_a_full_disk_is_a_one_line_error_and_keeps_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = put_three(tmp_path / "journal")
    write = os.write
    with open_journal(tmp_path / "journal") as journal:
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
        with pytest.raises(RunFailure, match="cannot be written: No space left on device; the same command continues"):
            journal.put("predicted", "key", "value")
    monkeypatch.undo()
    assert (tmp_path / "journal").read_bytes() == whole


def test_dropped_rows_are_removed(tmp_path: Path) -> None:
    with open_journal(tmp_path / "journal") as journal:
        journal.put("predicted", "a", 1)
        journal.put("measured", "b", 2)
        journal.drop("predicted")
    with open_journal(tmp_path / "journal") as journal:
        assert (journal.get("predicted", "a"), journal.get("measured", "b")) == (None, 2)
        journal.drop("measured")
    assert not (tmp_path / "journal").exists()


def run_all(journal: Journal) -> list[SweepRow]:
    return run(
        SweepPlan.from_sweep(SWEEP, local=Path("nowhere")), journal, trials=None, report=lambda what, done, total: None
    )


def test_kill_9_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    with open_journal(tmp_path / "quiet") as journal:
        expected = run_all(journal)
    path, draw, kills = tmp_path / "journal", random.Random(0), 0
    keys_before = 0
    while True:
        child = os.fork()
        if child == 0:
            try:
                with open_journal(path) as journal:
                    run_all(journal)
            finally:
                os._exit(0)
        time.sleep(draw.uniform(0.01, 0.03 * 1.5**kills))  # longer and longer: a busy machine does nothing in 0.03 s
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            break
        kills += 1
        keys = path.read_bytes().count(b"\n") if path.exists() else 0
        assert keys >= keys_before
        keys_before = keys
        if draw.random() < 0.5 and path.exists() and path.stat().st_size:  # as if the write itself had been cut
            os.truncate(path, path.stat().st_size - draw.randint(1, 20))
            keys_before = 0
    assert kills >= 3
    texts = path.read_text().splitlines()
    keys_once = [json.loads(text)["key"] for text in texts]
    assert len(set(keys_once)) == len(keys_once) == len(expected)
    with open_journal(path) as journal:
        assert run_all(journal) == expected
