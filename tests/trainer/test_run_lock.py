"""One training at a time in a run's folder: by processes of this host, and by what another host would have written."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fivefold.errors import RunFailure, UserError
from fivefold.trainer import loop, run_lock
from fivefold.trainer.checkpoint import checkpoint
from fivefold.trainer.run_lock import LOCK_FILE, Holder, check_held, hold
from tests.trainer.test_faults import Child, assert_line, read_last_step, saved_step, set_run, wait_for, workspace

__all__ = ["workspace"]


@contextmanager
def holder(folder: Path) -> Iterator[int]:
    """Another process that holds the lock, by its id."""
    pid = os.fork()
    if pid == 0:
        with hold(folder):
            time.sleep(60)
        os._exit(0)
    wait_for(lambda: (folder / LOCK_FILE).exists() and (folder / LOCK_FILE).stat().st_size)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def lock_elsewhere(folder: Path, beat: int = 0) -> None:
    """The lock as a process of another host writes it."""
    there = Holder(host="node7", process=4711, kernel="another", started="1", since=1.0, beat=beat)
    folder.mkdir(exist_ok=True)
    (folder / LOCK_FILE).write_text(there.model_dump_json())


def test_a_second_run_is_rejected_and_the_lock_of_a_dead_one_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with holder(folder) as pid:
        line = rf"process {pid} on host \S+ has been using this folder since \d\d:\d\d:\d\d; wait for it, stop it, or"
        with pytest.raises(UserError, match=rf"^{folder}: {line} give this run another folder$"), hold(folder):
            pytest.fail("two hold it")
        with pytest.raises(RunFailure, match=rf"process {pid} on host .* has taken this run over"):
            check_held(folder)
        os.kill(pid, signal.SIGKILL)  # and it has not been waited for yet
        wait_for(lambda: Holder.from_pid(pid).started == "", seconds=5)
        said: list[str] = []
        with hold(folder, report=said.append):
            assert Holder.model_validate_json((folder / LOCK_FILE).read_text()).process == os.getpid()
            check_held(folder)
        assert said == []  # at once: that it is dead can be seen from here
        assert not (folder / LOCK_FILE).exists()


def test_only_one_of_many_processes_takes_a_stale_lock(tmp_path: Path) -> None:
    there = Holder.from_pid(os.getpid()).replace(started="another process of this id")
    (tmp_path / LOCK_FILE).write_text(there.model_dump_json())
    begin = time.time() + 0.3
    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            time.sleep(max(0.0, begin - time.time()))
            try:
                with hold(tmp_path):
                    time.sleep(1.5)
                os._exit(0)
            except UserError:
                os._exit(2)
            finally:
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(codes) == [0, 2, 2, 2, 2, 2]


def test_a_run_on_another_host_is_watched_until_its_state_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes cannot be seen from here; its clock is not asked."""
    monkeypatch.setattr(run_lock, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(run_lock, "POLL_SECONDS", 0.05)
    said: list[str] = []
    lock_elsewhere(tmp_path)
    with hold(tmp_path, report=said.append):
        pass
    assert said == [f"{tmp_path}: waiting up to 0.5 s to see whether process 4711 on host node7 still trains here"]
    lock_elsewhere(tmp_path)
    threading.Timer(0.2, lock_elsewhere, (tmp_path, 1)).start()
    with pytest.raises(UserError, match="process 4711 on host node7 has been using"), hold(tmp_path):
        pytest.fail("two hold it")


def test_the_holder_of_a_lock_writes_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.05)
    with hold(tmp_path):
        wait_for(lambda: Holder.model_validate_json((tmp_path / LOCK_FILE).read_text()).beat >= 2, seconds=10)
        lock_elsewhere(tmp_path)  # takes it over while this one stands still
        time.sleep(0.2)
        with pytest.raises(RunFailure, match="process 4711 on host node7 has taken this run over"):
            check_held(tmp_path)
    assert "node7" in (tmp_path / LOCK_FILE).read_text(), "what is not ours was removed"


def test_a_damaged_lock_does_not_block_a_run(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("{")
    with hold(tmp_path):
        pass
    with pytest.raises(UserError, match="cannot be written: Not a directory"), hold(Path("/dev/null/run")):
        pytest.fail("held")


def test_checkpoints_of_a_run_that_took_over_are_kept(tmp_path: Path) -> None:
    lock_elsewhere(tmp_path)
    theirs = tmp_path / "checkpoints" / "step-00000008.tmp-1234"
    theirs.mkdir(parents=True)
    with pytest.raises(RunFailure, match="taken this run over"):
        checkpoint._begin(tmp_path / "checkpoints" / "step-00000004")
    assert theirs.is_dir()


@pytest.mark.usefixtures("workspace")
def test_a_second_train_on_one_folder_is_a_one_line_error_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = loop.Loop._step
    with monkeypatch.context() as slowly:
        slowly.setattr(loop.Loop, "_step", lambda *own: (time.sleep(0.1), step(*own))[1])
        set_run(job={"steps": 20}, checkpoints={"every_steps": 2})
        first = Child()
        wait_for(lambda: read_last_step() >= 3)
        error = Path("stderr.txt").rename("first.txt")
        ended = Child().wait()
    assert ended.code == 2
    assert_line(ended.line, rf"run: process {first.pid} on host \S+ has been using this folder since .*")
    assert first.wait().code == 0, error.read_text()
    assert saved_step() == 20
    assert not Path("run", LOCK_FILE).exists()
