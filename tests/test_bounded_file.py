"""What is read of a path that leads anywhere: regular files and pipes, with limits on bytes and seconds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fivefold import bounded_file
from fivefold.bounded_file import MIB, drop_torn_line, read_bytes, read_end
from fivefold.diagnosis.explain import explain
from fivefold.errors import UserError
from fivefold.layout.schedule.csv_file import read_table
from fivefold.profiling.traces import read as read_trace
from fivefold.results import run_folder, trace_file
from fivefold.text_files import read_file, read_lines, read_text
from fivefold.trainer.data.corpus import list_files
from fivefold.trainer.data.tokenizer import load


@contextmanager
def feed_pipe(path: Path, *texts: bytes, pause: float = 0.0) -> Iterator[None]:
    """A writer at the other end of a named pipe, who writes ``texts``, or one for ever."""

    def feed() -> None:
        try:
            with path.open("wb", buffering=0) as pipe:
                for text in texts:
                    pipe.write(text)
                    time.sleep(pause)
                while len(texts) == 1:
                    pipe.write(texts[0])
        except BrokenPipeError:
            pass

    os.mkfifo(path)
    writer = threading.Thread(target=feed, daemon=True)
    writer.start()
    yield
    writer.join(10)
    assert not writer.is_alive()


def test_a_file_within_the_limit_is_read_in_full(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"a = 1\r\nb = '\xc3\xa9'\n")
    assert read_text(path, kind="text") == "a = 1\nb = 'é'\n"
    assert read_file(path) == {"a": 1, "b": "é"}
    path.write_bytes(b"x" * (4 * MIB))
    assert len(read_bytes(path)) == 4 * MIB
    assert read_end(path, most_bytes=3) == b"xxx"


@pytest.mark.parametrize("name", ["run.toml", "step.json", "log.jsonl", "trace.json", "dump.pickle"])
def test_a_link_to_an_endless_device_is_rejected_at_once(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.symlink_to("/dev/zero")
    readers = {
        "run.toml": [read_file],
        "step.json": [read_file, lambda path: run_folder.read(path.parent)],
        "log.jsonl": [read_lines],
        "trace.json": [lambda path: read_trace([path]), lambda path: explain([path])],
        "dump.pickle": [lambda path: explain([path])],
    }
    for reader in readers[name]:
        begin = time.process_time()
        with pytest.raises(UserError, match=r"is a device or a socket; name a file or a pipe|not a regular file"):
            reader(path)
        assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("name", "limit"), [("run.toml", 4), ("x.yaml", 1), ("step.json", 64), ("x.csv", 64), ("log.jsonl", 512)]
)
def test_sizes_are_bounded_by_kind(tmp_path: Path, name: str, limit: int) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(limit * MIB + 1)  # of holes: no disk is used
    with pytest.raises(UserError, match=rf"{name} .*holds more than {limit} MiB, the (most|limit)"):
        read_lines(path) if name.endswith("l") and "log" in name else read_text(path, kind="text")


def test_a_step_file_of_gigabytes_is_rejected(tmp_path: Path) -> None:
    with (tmp_path / "step.json").open("wb") as file:
        file.truncate(3 * 2**29)
    with pytest.raises(UserError, match=r"step\.json cannot be read as UTF-8 text: holds more than 64 MiB"):
        run_folder.read(tmp_path)


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    with feed_pipe(tmp_path / "run.toml", b"steps = 3", b"0\n", pause=0.05):
        assert read_file(tmp_path / "run.toml") == {"steps": 30}
    ours, theirs = os.pipe()  # as the shell's <(…), whose writer may be gone already
    os.write(theirs, b"steps = 4")
    os.close(theirs)
    assert read_file(Path(f"/dev/fd/{ours}")) == {"steps": 4}
    os.close(ours)


def test_a_silent_pipe_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_file, "PIPE_SECONDS", 0.2)
    os.mkfifo(tmp_path / "nobody.toml")
    for reader in (read_file, read_table, load, lambda path: explain([path]), lambda path: read_trace([path])):
        with pytest.raises(UserError, match=r"the pipe did not end in 0.2 s; write it to a file first"):
            reader(tmp_path / "nobody.toml")
    os.mkfifo(tmp_path / "corpus.txt")
    with pytest.raises(UserError, match="not a regular file"):
        list_files(str(tmp_path))
    (tmp_path / "trace").mkdir()
    os.mkfifo(tmp_path / "trace" / "rank0.json")
    with pytest.raises(UserError, match="did not end"):
        trace_file.read(tmp_path)


def test_reading_an_endless_pipe_ends_at_the_limit(tmp_path: Path) -> None:
    with (
        feed_pipe(tmp_path / "run.toml", b"x" * 65_536),
        pytest.raises(UserError, match="holds more than 4 MiB, the most that is read of such a file"),
    ):
        read_file(tmp_path / "run.toml")


def test_partial_line_of_a_killed_writer_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for text, kept in (("", ""), ("{", ""), ("{}\n", "{}\n"), ("{}\n{}\n" + "x" * 200_000, "{}\n{}\n")):
        path.write_text(text)
        with path.open("r+b") as file:
            drop_torn_line(file.fileno())
        assert path.read_text() == kept
