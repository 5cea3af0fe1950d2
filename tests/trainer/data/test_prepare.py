"""From files to shards and back: the same bytes however it is done, and never half a folder."""

import errno
import fcntl
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from fivefold.errors import RunFailure, UserError
from fivefold.trainer.data import encode, shards
from fivefold.trainer.data.corpus import list_files, read_documents
from fivefold.trainer.data.encode import TEXT_HASHES, hash_text
from fivefold.trainer.data.prepare import prepare, show_progress
from fivefold.trainer.data.shards import SPLITS, Shards, Split, SplitWriter
from fivefold.trainer.data.tokenizer import train_bpe

JSON_SOURCE = Path(json.__file__).parent  # a small folder of the standard library


def documents(opened: Shards, split: Split) -> list[str]:
    """The documents as the index and the ends say, each checked to stop at one end token."""
    tokens = opened.read(split, start=0, count=opened.index.part(split).tokens)
    result = np.split(tokens, opened.read_ends(split)) if len(tokens) else [tokens]
    assert len(result.pop()) == 0  # the last end is the end
    for document in result:
        assert (document == opened.tokenizer.end).nonzero()[0].tolist() == [len(document) - 1]
    return [opened.tokenizer.decode(document[:-1]) for document in result]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_ends_of_documents_count_from_the_start_of_the_split(tmp_path: Path) -> None:
    """Documents of 3, 1 and 5 tokens, added in two units of work over shards of 4 tokens."""
    writer = SplitWriter(tmp_path, "train", shard_tokens=4)
    writer.add(np.arange(4, dtype=np.uint16), lengths=np.array([3, 1]), text_bytes=2)
    writer.add(np.arange(4, 9, dtype=np.uint16), lengths=np.array([5]), text_bytes=4)
    part = writer.finish()
    assert np.fromfile(tmp_path / part.ends, np.int64).tolist() == [3, 4, 9]
    assert (part.tokens, part.documents, part.text_bytes) == (9, 3, 6)
    assert [shard.tokens for shard in part.shards] == [4, 4, 1]
    tokens = [np.fromfile(tmp_path / shard.name, np.uint16) for shard in part.shards]
    assert np.concatenate(tokens).tolist() == list(range(9))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(f"document {number} é\n" * (number + 1))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_prepared_tokens_decode_to_the_text(tokenizer: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("plain é\n")
    (source / "b.md").write_text("# mark\0\n")
    (source / "c.py").write_text("x = 1\n" * 30_000)  # two documents
    (source / "d.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(100)))
    parquet.write_table(pyarrow.table({"text": [f"row {i}" for i in range(100)]}), source / "e.parquet")
    index = prepare(str(source), tokenizer=tokenizer, directory=tmp_path / "out", holdout=0.2)
    opened = Shards.open(tmp_path / "out", fingerprint=index.tokenizer)
    assert opened.index == index
    expected = list(read_documents(list_files(str(source))))
    assert len(expected) == 2 + 3 + 100 + 100
    for split in SPLITS:
        wanted = [text for text in expected if (hash_text(text) < 0.2 * TEXT_HASHES) == (split == "heldout")]
        assert documents(opened, split) == wanted
        assert index.part(split).documents == len(wanted) > 20
        assert index.part(split).text_bytes == len("".join(wanted).encode())
    assert (index.nul_bytes, index.dtype) == (1, "uint16")
    if tokenizer == "bpe:300":  # has seen the training text alone
        assert opened.tokenizer.text == train_bpe(documents(opened, "train"), vocab=300).text


def test_files_of_the_standard_library_are_prepared(tmp_path: Path) -> None:
    prepare(str(JSON_SOURCE), directory=tmp_path / "out")
    opened = Shards.open(tmp_path / "out")
    together = documents(opened, "train") + documents(opened, "heldout")
    assert sorted(together) == sorted(read_documents(list_files(str(JSON_SOURCE))))
    assert len(documents(opened, "heldout")) == 1  # of six documents none fell below 1 %: the nearest was taken


@pytest.mark.parametrize("shard_tokens", [1, 100, 1234, 10**6])
def test_shards_join_without_a_seam(
    shard_tokens: int, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "WORK_BYTES", 50)
    for path in sorted(texts.iterdir())[6:]:
        path.unlink()
    prepare(str(texts), directory=tmp_path / "out", shard_tokens=shard_tokens, holdout=0)
    opened = Shards.open(tmp_path / "out")
    whole = b"\0".join(path.read_bytes() for path in sorted(texts.iterdir())) + b"\0"
    part = opened.index.train
    assert part.tokens == sum(shard.tokens for shard in part.shards) == len(whole)
    assert len(part.shards) == -(-len(whole) // shard_tokens)
    for start, count in ((0, len(whole)), (95, 10), (100, 100), (len(whole), 0)):
        assert bytes(opened.read("train", start=start, count=count).tolist()) == whole[start : start + count]
    with pytest.raises(IndexError):
        opened.read("train", start=len(whole) - 1, count=2)
    assert documents(opened, "heldout") == []


@pytest.mark.slow
def test_processes_write_the_same_bytes(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "WORK_BYTES", 2000)
    for workers in (1, 2):
        prepare(str(texts), tokenizer="bpe:270", directory=tmp_path / str(workers), workers=workers, shard_tokens=999)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


@pytest.mark.slow
def test_the_fingerprint_of_a_corpus_follows_its_text(texts: Path, tmp_path: Path) -> None:
    """Of random corpora, two have one exactly if both splits hold the same tokens; how they are cut says nothing."""
    draw, known = random.Random(12), {}
    for number in range(60):
        shutil.rmtree(texts)
        texts.mkdir()
        for place_in_order in range(draw.randint(2, 3)):
            (texts / f"{place_in_order}{draw.choice('ab')}.txt").write_text(draw.choice(("one", "two", "three")))
        options = {"holdout": draw.choice((0.0, 0.01, 0.5)), "shard_tokens": draw.choice((1, 5, 999))}
        try:
            index = prepare(str(texts), directory=tmp_path / str(number), **options)
        except UserError:  # all was held out
            continue
        opened = Shards.open(tmp_path / str(number))
        tokens = tuple(opened.read(split, start=0, count=index.part(split).tokens).tobytes() for split in SPLITS)
        assert known.setdefault(tokens, index.text) == index.text
    assert len(known) == len(set(known.values())) > 20


def test_duplicate_documents_are_not_split_between_training_and_held_out(texts: Path, tmp_path: Path) -> None:
    for path in sorted(texts.iterdir()):
        path.with_suffix(".md").write_bytes(path.read_bytes())
    prepare(str(texts), directory=tmp_path / "out", holdout=0.3)
    opened = Shards.open(tmp_path / "out")
    assert set(documents(opened, "train")).isdisjoint(documents(opened, "heldout"))
    assert opened.index.heldout.documents >= 20


@pytest.mark.slow
def test_prepared_shards_are_reused_until_something_changes(texts: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []

    def run(**options: Any) -> bool:
        """Whether anything was done."""
        calls.clear()
        prepare(str(texts), directory=tmp_path / "out", progress=lambda *call: calls.append(call), **options)
        return bool(calls)

    assert run()
    assert calls[-1][1] == calls[-1][2] == sum(path.stat().st_size for path in texts.iterdir())
    assert not run()
    assert run(holdout=0.5)
    assert run(tokenizer="bpe:300")
    assert not run(tokenizer="bpe:300")
    copy = tmp_path / "copy.json"
    copy.write_bytes((tmp_path / "out/tokenizer.json").read_bytes())
    assert run(tokenizer=str(copy))
    assert not run(tokenizer=str(copy))
    (texts / "00.txt").write_text("changed")
    assert run(tokenizer=str(copy))
    (tmp_path / "out/train-00000.bin").write_bytes(b"")
    assert run(tokenizer=str(copy))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.json", "out", "texts"]


@pytest.mark.parametrize("stranger", ["notes.txt", "pytorch_model.bin", "train-00000.bin"])
def test_a_folder_with_other_files_is_not_changed(stranger: str, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / stranger).touch()
    with pytest.raises(UserError, match=f"out holds '{stranger}', which is not a shard; choose another folder"):
        prepare(str(texts), directory=tmp_path / "out")
    with pytest.raises(UserError, match="is a file; choose another folder"):
        prepare(str(texts), directory=tmp_path / "out" / stranger)
    assert list(contents(tmp_path / "out")) == [stranger]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_preparation_does_not_delete_a_checkpoint_next_to_the_shards(texts: Path, tmp_path: Path) -> None:
    prepare(str(texts), directory=tmp_path / "out")
    (tmp_path / "out/checkpoint").mkdir()
    prepare(str(texts), directory=tmp_path / "out")  # nothing to do
    with pytest.raises(UserError, match="out holds 'checkpoint', which is not a shard"):
        prepare(str(texts), directory=tmp_path / "out", holdout=0.5)


def test_two_preparations_of_one_folder_take_turns(texts: Path, tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    second = Thread(target=lambda: prepare(str(texts), directory=tmp_path / "out"))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    assert not (tmp_path / ".out.partial").exists()
    os.close(folder)
    second.join(10)
    assert (tmp_path / "out/index.json").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_during_preparation_leaves_no_files(workers: int, texts: Path, tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(str(texts), directory=tmp_path / "out", workers=workers, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_failed_preparation_keeps_the_old_shards(texts: Path, tmp_path: Path) -> None:
    prepare(str(texts), directory=tmp_path / "out")
    before = contents(tmp_path / "out")
    (texts / "59.txt").write_bytes(b"\xff")
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"59.txt: not UTF-8: byte 0xff at offset 0"):
            prepare(str(texts), directory=tmp_path / "out", workers=workers)
    assert contents(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


@pytest.mark.parametrize("failing", ["train-00000.bin", "heldout-ends.bin", "tokenizer.json", "index.json"])
def test_a_full_disk_during_preparation_is_an_error(
    failing: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shards.append

    def write_full(path: Path, data: bytes) -> None:
        if path.name == failing:
            real(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(shards, "append", write_full)
    monkeypatch.setattr("fivefold.trainer.data.prepare.append", write_full)
    written: list[int] = []
    usage = shutil.disk_usage

    def note_usage(folder: Path) -> Any:
        written.append(sum(path.stat().st_size for path in (tmp_path / ".out.partial").rglob("*")))
        return usage(folder)

    monkeypatch.setattr(shutil, "disk_usage", note_usage)
    with pytest.raises(
        RunFailure, match=r"out: the disk is full: .* are free, the corpus has .*; free some space"
    ) as error:
        prepare(str(texts), directory=tmp_path / "out")
    assert "\n" not in str(error.value)
    assert len(written) == 1
    assert written[0] > 0, "what is free is asked before the half-written files are removed"
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_preparing_into_an_unwritable_folder_is_an_error(texts: Path) -> None:
    with pytest.raises(UserError, match=r"out cannot be written: (Not a directory|File exists)"):
        prepare(str(texts), directory=texts / "00.txt" / "out")


SLOW = """
import sys, time
from pathlib import Path
from fivefold.trainer.data import encode
from fivefold.trainer.data.prepare import prepare

def progress(what, done, total):
    print(what, flush=True)
    time.sleep(0.05)

if __name__ == "__main__":
    encode.WORK_BYTES = 500
    prepare(sys.argv[1], directory=Path(sys.argv[2]), workers=int(sys.argv[3]), progress=progress)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_preparation_is_started_again(workers: int, texts: Path, tmp_path: Path) -> None:
    script, out = tmp_path / "slow.py", tmp_path / "out"
    script.write_text(SLOW)
    command = [sys.executable, str(script), str(texts), str(out), str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline() == "tokenizing\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
    assert len(children) >= workers - 1
    assert not out.exists()
    assert (tmp_path / ".out.partial").exists()
    with pytest.raises(UserError, match="holds no prepared corpus; run `fivefold data` first"):
        Shards.open(out)
    prepare(str(texts), directory=out)
    assert Shards.open(out).index.train.documents + Shards.open(out).index.heldout.documents == 60
    assert not (tmp_path / ".out.partial").exists()
    deadline = time.monotonic() + 10
    while any(map(is_alive, children)):  # workers die with their parent
        assert time.monotonic() < deadline, children
        time.sleep(0.02)


def is_alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_dead_preparation_worker_is_an_error(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_exit_with_parent", partial(os._exit, 9))
    with pytest.raises(RunFailure, match="a tokenizing process was killed"):
        prepare(str(texts), directory=tmp_path / "out", workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_no_progress_bar_is_drawn_without_a_terminal(
    texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with show_progress() as progress:
        prepare(str(texts), directory=tmp_path / "out", progress=progress)
    assert capfd.readouterr() == ("", "")


def test_workers_start_without_torch() -> None:
    program = (
        "import sys, fivefold.trainer.data.prepare, fivefold.trainer.data.loader; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (" \n\0", {}, "the corpus is empty: its 1 files hold no text"),
        (
            "one",
            {},
            "a corpus of one document cannot be split into training and held-out text; add a document",
        ),
        ("one", {"holdout": 1.0}, "holdout=1.0 is not a fraction of the documents"),
        ("one", {"holdout": -0.1}, "holdout=-0.1 is not a fraction of the documents"),
        ("one", {"tokenizer": "bits"}, "unknown tokenizer 'bits'"),
    ],
)
def test_unpreparable_corpus_is_an_error(text: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        prepare(str(tmp_path), directory=tmp_path / "out", **options)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def _edit(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**values, **changes}))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda folder: _cut(folder / "train-00000.bin"),
        r"train-00000\.bin: cut short by 3 bytes, should be \d+; prepare the corpus again",
    ),
    "too long": (
        lambda folder: (folder / "heldout-ends.bin").write_bytes(b" " * 999),
        r"heldout-ends\.bin: longer by \d+ bytes",
    ),
    "gone": (
        lambda folder: (folder / "train-ends.bin").unlink(),
        r"train-ends\.bin cannot be read: No such file or directory; prepare the corpus again",
    ),
    "newer": (
        lambda folder: _edit(folder, version=3, novelty=1),
        r"index\.json: written by a newer fivefold \(version 3, this one reads 2\)",
    ),
    "unknown key": (lambda folder: _edit(folder, novelty=1), "unknown key 'novelty'"),
    "no JSON": (lambda folder: _cut(folder / "index.json"), r"index\.json: not valid JSON"),
    "other tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_bytes((folder / "../other/tokenizer.json").read_bytes()),
        r"tokenizer\.json is not the tokenizer of these shards",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_shards_are_not_opened(case: str, texts: Path, tmp_path: Path) -> None:
    prepare(str(texts), directory=tmp_path / "out")
    prepare(str(texts), directory=tmp_path / "other", tokenizer="bpe:270")
    breaks, message = BROKEN[case]
    breaks(tmp_path / "out")
    with pytest.raises(UserError, match=message) as error:
        Shards.open(tmp_path / "out")
    assert "\n" not in str(error.value)


def test_shards_made_with_another_tokenizer_are_an_error(texts: Path, tmp_path: Path) -> None:
    prepare(str(texts), directory=tmp_path / "out")
    with pytest.raises(UserError, match=r"made with another tokenizer \(\w{12}, expected abcabcabcabc\)"):
        Shards.open(tmp_path / "out", fingerprint="abc" * 20)
