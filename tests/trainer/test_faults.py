"""What a bad input, a full disk, a dead process or a signal leaves: one line, a code, the last good state.

Runs of one process, and who starts two, are forked from the test, which has imported torch already; of the runs of two
the undisturbed one is the real command.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fivefold.profiling.closed_loop  # torch once, before any fork
from fivefold import cli
from fivefold.cli import command_line
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.csv_file import write_table
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Chip, Link, Machine
from fivefold.machine.toml import emit, write
from fivefold.model.catalog import resolve
from fivefold.planner.predict import predict
from fivefold.results import run_folder
from fivefold.trainer.checkpoint.checkpoint_folder import find_latest, read
from fivefold.trainer.loop import Loop
from fivefold.trainer.run import Run
from tests.forked_python import import_what_runs_load, true_interpreters
from tests.selection import mark_share

MACHINE = Machine(
    name="here", ranks=2, ranks_per_node=2, backend="gloo",
    chip=Chip(name="core", peak_flops={"fp32": 1e11}, memory_bytes=2**32, memory_bandwidth=1e10, source="test"),
    links=(Link(name="loopback", span=2, bandwidth=1e9, latency_seconds=1e-4, source="test"),),
)  # fmt: skip
RUN = {
    "model": "nano", "layout": "dp1 zero0 mbs4", "folder": "run", "evaluate_every": 1000, "evaluate_sequences": 4,
    "sample": "", "job": {"sequence": 32, "global_batch": 4, "precision": "fp32", "steps": 12},
    "data": {"corpus": "corpus", "heldout": 0.2}, "checkpoints": {"every_steps": 4},
}  # fmt: skip
TWO = {
    "layout": "dp2 zero2 mbs2",
    "job": {"steps": 56},
    "checkpoints": {"every_steps": 8},
    "faults": {"max_restarts": 0},
}
NOT_HALF = "nothing is half-done, and the same command takes it up again"


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a corpus and a calibrated machine."""
    write(MACHINE, tmp_path / "cache" / "fivefold" / "local.toml")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for number in range(20):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"document {number} says: " + "all work and no play. " * 20)
    set_run()
    return tmp_path


def set_run(**changes: Any) -> None:
    """Write run.toml: RUN with ``changes``, whose tables change single keys of RUN's."""
    values = RUN | {
        key: RUN.get(key, {}) | value if isinstance(value, dict) else value for key, value in changes.items()
    }
    Path("run.toml").write_text(emit(values))


# Running it


@dataclass(frozen=True)
class Ended:
    code: int
    error: str

    @property
    def line(self) -> str:
        """The only line for the user, which is the last on stderr; all others are progress."""
        lines = self.error.splitlines()
        said = [line for line in lines if line.startswith("fivefold: ")]
        assert said == lines[-1:], self.error
        assert "Traceback" not in self.error
        assert all(re.match(r"step \d|fivefold: ", line) for line in lines), self.error
        return said[0].removeprefix("fivefold: ")


class Child:
    """``fivefold train run.toml`` in a forked process on one core; ``leads``: in a process group of its own."""

    def __init__(self, *, file_bytes: int = resource.RLIM_INFINITY, leads: bool = False) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._status: int | None = None
        import_what_runs_load()
        self.pid = os.fork()
        if self.pid == 0:
            if leads:
                os.setsid()
            self._run(file_bytes)

    def _run(self, file_bytes: int) -> None:
        code: object = 99
        gc.freeze()  # what the parent has not collected is not ours: its threads are not here to answer
        try:
            for stream, path in ((1, os.devnull), (2, "stderr.txt")):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
            os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
            sys.argv = ["fivefold", "train", "run.toml", "--json"]
            command_line.main()
        except SystemExit as done:
            code = done.code
        finally:
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 0)

    def has_ended(self) -> bool:
        if self._status is None and (status := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._status = status[1]
        return self._status is not None

    def wait(self) -> Ended:
        if self._status is None:
            _, self._status = os.waitpid(self.pid, 0)
        return Ended(os.waitstatus_to_exitcode(self._status), Path("stderr.txt").read_text())


def train(**limits: int) -> Ended:
    return Child(**limits).wait()


def train_well(**limits: int) -> None:
    ended = train(**limits)
    assert (ended.code, "fivefold: " in ended.error) == (0, False), ended.error


def wait_for(condition: Callable[[], object], *, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)  # it runs on the core of those that it waits for


def read_last_step() -> int:
    """The last step in the log."""
    try:
        return int(json.loads(Path("run/log.jsonl").read_text().splitlines()[-1])["step"])
    except (FileNotFoundError, IndexError, ValueError):
        return -1


def saved_step(folder: str = "run") -> int:
    path = find_latest(Path(folder, "checkpoints"))
    return read(path).progress.step if path else -1


def saved_bits(folder: str = "run") -> dict[str, str]:
    """The sha256 of every file of tensors of the newest checkpoint: weights, moments, random states."""
    path = find_latest(Path(folder, "checkpoints"))
    assert path
    return {file.name: file.sha256 for file in read(path).files if file.name != ".metadata"}


def lines(folder: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]


def losses(folder: str = "run") -> list[float]:
    return [line["loss"] for line in lines(folder) if "loss" in line]


def events() -> list[dict[str, Any]]:
    return [line for line in lines() if "event" in line]


# Mistakes, refused before anything starts


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """The line with which ``fivefold WORDS`` refuses, in this process."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*words: str, code: int = 2) -> str:
        monkeypatch.setattr(sys, "argv", ["fivefold", *words])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        assert ended.value.code == code
        return Ended(code, capfd.readouterr().err).line

    monkeypatch.setattr("fivefold.trainer.process.launch", lambda *_, **__: pytest.fail("processes were started"))
    yield run
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"model": "nanno"}, r"unknown model 'nanno'; did you mean nano\? .fivefold models. lists all; .*"),
        ({"machine": "h10"}, r"unknown machine 'h10'; did you mean h100.*"),
        ({"layout": "dp2 zero2 mb2"}, r"unknown layout token 'mb2'; did you mean mbs2\?"),
        ({"layout": "dp2 mbs3"}, r"layout '.*': global batch 4 is not divisible by dp·mbs=2·3=6; try gbs 6 or mbs2"),
        ({"layout": "dp4 mbs1"}, r"layout '.*': needs 4 ranks, but here has 2; .*"),
        ({"layout": "tp2x2"}, r"layout '.*': needs 4 ranks, but here has 2; .*"),
        ({"job": {"dispatcher": "fused"}}, r"job: the trainer supports dispatcher=all_to_all, not fused; .*"),
        ({"job": {"loss": "plain"}}, r"job: the trainer supports loss=fused or chunked, not plain; .*"),
        ({"job": {"offload": ["activations"]}}, r"offload=activations: the trainer keeps only the optimizer in .*"),
        ({"layout": "tp2 mbs1 ep2"}, r"layout '.*': ep=2 needs a model with experts, and nano has none; use ep1"),
        ({"layout": "pp2 zb1p mbs4"}, r"layout '.*': zb1p needs 2 micro-batches or more, but the batch gives 1; .*"),
        ({"stepz": 3}, r"run.toml: unknown key 'stepz'.*"),
        ({"job": {"global_bach": 3}}, r"run.toml: unknown key 'job.global_bach'; did you mean 'global_batch'\?"),
        ({"job": {"steps": 0}}, r"run.toml: job.steps must be 1 or more, not 0"),
        ({"folder": "corpus/0.txt"}, r".*corpus/0.txt cannot be written: (Not a directory|File exists); make .*"),
        (
            {"machine": "h100:64", "layout": "dp64", "job": {"global_batch": 64}},
            r"machine 'h100:64': layout 'dp64 .*' has 64 ranks, each on a GPU of its own, but this host has no GPU .*; "
            r"start `torchrun --nnodes 8 --nproc-per-node 8 .* -m fivefold train run.toml` on each of 8 hosts, or .*",
        ),
    ],
)  # fmt: skip
def test_an_invalid_run_file_is_an_error(refused: Callable[..., str], changes: dict[str, Any], pattern: str) -> None:
    set_run(**changes)
    assert_line(refused("train", "run.toml"), pattern)
    assert not Path("run").exists()


def test_a_folder_of_another_model_is_rejected(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    run, model = Run.load(Path("run.toml")), resolve("tiny")
    machine = MACHINE.replace(ranks=1)
    step = predict(model=model, machine=machine, layout=Layout.parse("dp1 mbs1"), job=run.job)
    Path("run").mkdir()
    fivefold.profiling.closed_loop.write_steps(Path("run") / run_folder.PREDICTED, step)
    assert_line(
        refused("train", "run.toml"),
        r"run holds a run of tiny, and run.toml trains nano; give run.toml another folder, such as folder = "
        r'"run-nano", or remove run',
    )
    assert [path.name for path in Path("run").iterdir()] == [run_folder.PREDICTED]
    step = step.replace(model="nano")  # of the same model
    fivefold.profiling.closed_loop.write_steps(Path("run") / run_folder.PREDICTED, step)
    started: list[str] = []
    monkeypatch.setattr("fivefold.trainer.process.launch", lambda words, **_: started.extend(words))
    set_run(**TWO)
    monkeypatch.setattr(sys, "argv", ["fivefold", "train", "run.toml", "--force"])
    with pytest.raises(SystemExit):
        command_line.main()
    assert started[:2] == ["train", "run.toml"]


def test_a_step_that_does_not_fit_is_not_started_unless_forced(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = MACHINE.replace(chip=MACHINE.chip.replace(memory_bytes=2**20))
    write(small, Path("cache/fivefold/local.toml"))
    line = refused("train", "run.toml")
    assert_line(
        line, r"layout 'dp1 .*' would need .* MiB on stage 0 \(.*\), but here has 1.00 MiB a rank; .* or --force"
    )
    assert not Path("run").exists()
    started: list[str] = []
    monkeypatch.setattr("fivefold.trainer.process.launch", lambda words, **_: started.extend(words))
    set_run(**TWO)
    monkeypatch.setattr(sys, "argv", ["fivefold", "train", "run.toml", "--force"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert not ended.value.code
    assert started[:2] == ["train", "run.toml"]


def test_a_schedule_file_for_another_layout_is_an_error(refused: Callable[..., str]) -> None:
    write_table(schedule("zb2p", pp=2, v=1, micro_batches=4), Path("mine.csv"))
    set_run(layout="pp2 mbs2", schedule="mine.csv")
    line = refused("train", "run.toml")
    assert_line(line, r"mine.csv has 2 ranks, 2 stages and 4 micro-batches, but .* and 2 micro-batches; change either")
    assert not Path("run").exists()


def assert_line(text: str, pattern: str) -> None:
    assert re.fullmatch(pattern, text), f"{text!r} is not {pattern!r}"


@pytest.mark.parametrize("command", ["train", "data"])
def test_an_unreadable_run_file_is_an_error(refused: Callable[..., str], command: str) -> None:
    assert refused(command, "nowhere.toml") == "nowhere.toml: no such file"
    Path("run.toml").write_text("model = nano")
    assert_line(refused(command, "run.toml"), r"run.toml: not valid TOML: .*\(at line 1, column \d+\)")
    Path("run.toml").write_bytes(b"model = '\xff'")
    assert_line(
        refused(command, "run.toml"), r"run.toml cannot be read as UTF-8 text: not UTF-8 at byte 9; save it as UTF-8"
    )


def test_training_on_an_uncalibrated_machine_is_an_error(refused: Callable[..., str], workspace: Path) -> None:
    shutil.rmtree(workspace / "cache")
    line = refused("train", "run.toml", "--no-calibrate")
    assert_line(line, r"this computer is not calibrated yet \(\S+ is missing\); run `fivefold calibrate`")


def empty(corpus: Path) -> None:
    shutil.rmtree(corpus)
    corpus.mkdir()


def link_to_nowhere(corpus: Path) -> None:
    (corpus / "x.txt").symlink_to("nowhere.txt")


def write_short_texts(corpus: Path) -> None:
    empty(corpus)
    for number in range(4):
        (corpus / f"{number}.txt").write_text(f"{number}: some forty bytes of text are too few.")


CORPORA: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (shutil.rmtree, r"corpus: no such file or folder; the corpus is 'stdlib' or a path"),
    "no files": (empty, r"corpus: no file ends in .txt .*; it holds no files"),
    "of 0 bytes": (
        lambda corpus: (empty(corpus), (corpus / "a.txt").touch()),
        r"corpus: the corpus is empty: 1 files of 0 bytes; add text",
    ),
    "dangling link": (link_to_nowhere, r"corpus/x.txt cannot be read: No such file or directory"),
    "not UTF-8": (
        lambda corpus: (corpus / "7.txt").write_bytes(b"good text, and then \xff"),
        r"corpus/7.txt: not UTF-8: byte 0xff at offset 20; convert the file or leave it out",
    ),
    "too short": (
        write_short_texts,
        r"\S*run/data: train holds \d+ tokens, but 4 sequences of 32 need 129; "
        r"add text or lower the sequence or the global batch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", ["train", "data"])
@pytest.mark.parametrize("name", CORPORA)
def test_an_unusable_corpus_is_an_error(refused: Callable[..., str], name: str, command: str) -> None:
    set_run(layout="dp2 mbs2")
    spoil, pattern = CORPORA[name]
    spoil(Path("corpus"))
    assert_line(refused(command, "run.toml"), pattern)
    left = {path.name for path in Path("run").glob("*")}
    assert left == ({"data"} if name == "too short" else set())


@pytest.mark.parametrize("command", ["train", "data"])
def test_held_out_text_and_tokenizer_must_suffice(refused: Callable[..., str], command: str) -> None:
    set_run(layout="dp2 mbs2", job={"sequence": 500}, data={"heldout": 0.001})
    assert_line(
        refused(command, "run.toml"), r"\S*run/data: heldout holds \d+ tokens, but 1 sequences of 500 need 501; .*"
    )
    set_run(layout="dp2 mbs2", data={"tokenizer": "bpe:300"})
    assert_line(
        refused(command, "run.toml"),
        r"tokenizer 'bpe:300' has 300 tokens, but nano only vocab=256; use a smaller tokenizer or .*",
    )


# How it ends


def test_finished_ranks_exit_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Not by the interpreter's end, in which a thread of gloo that holds a tensor still aborts; and with all said.

    The second start has nothing left to do, and shows what the first has measured.
    """
    train_well()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        gc.freeze()
        os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
        try:
            sys.stdout = os.fdopen(1, "w")  # as behind a pipe: it is not written before it is flushed
            sys.argv = ["fivefold", "train", "run.toml", "--json"]
            cli.entry()
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    out, error = capfd.readouterr()
    assert set(json.loads(out)) == {"predicted", "measured"}
    finished = "finished already: run is at step 12 of 12, so nothing was trained; to train on, raise steps"
    assert finished in error
    assert "finished 12 steps" not in error
    set_run(layout="dp1 zero0 mbs2")  # nothing is trained in another layout either
    ended = train()
    assert ended.code == 0
    assert finished in ended.error
    assert ended.error.splitlines()[-1] == "its measured step is of layout dp1 zero0 mbs4 on here"
    set_run(job={"steps": 14})  # another job: what was measured before is not of it
    ended = train()
    assert (ended.code, ended.error.splitlines()[-1].partition(";")[0]) == (0, "too few steps to measure one")


def test_a_run_without_checkpoints_writes_none() -> None:
    set_run(checkpoints={"every_steps": 0})
    ended = train()
    assert (ended.code, ended.error.splitlines()[-1]) == (0, "finished 12 steps; saved nothing")
    assert find_latest(Path("run/checkpoints")) is None


# Checkpoints that cannot be resumed


def test_a_damaged_checkpoint_is_passed_over() -> None:
    """Truncated, one bit changed, or without its index: the run continues from the previous one, to the same bits."""
    train_well()
    bits, newest = saved_bits(), Path("run/checkpoints/step-00000012")
    shutil.copytree("run", "kept")

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 4
        path.write_bytes(content)

    for damage, what in (
        (lambda: os.truncate(newest / "__0_0.distcp", 1000), r"__0_0.distcp holds 1000 bytes, but \d+ .* written"),
        (
            lambda: flip(newest / "__0_0.distcp"),
            r"__0_0.distcp: its \d+ bytes have another SHA-256 than when written",
        ),
        (lambda: (newest / ".metadata").unlink(), r".metadata is missing, but \d+ bytes were written"),
        (
            lambda: flip(newest / "checkpoint.json"),
            r"checkpoint.json: (does not hold what was written|.*read.*|.*JSON.*)",
        ),
    ):
        shutil.rmtree("run")
        shutil.copytree("kept", "run")
        damage()
        ended = train()
        assert ended.code == 0, ended.error
        told = [line for line in ended.error.splitlines() if "set aside" in line]
        assert len(told) == 1, ended.error
        assert_line(told[0], rf"step 8  {newest}/{what}; set aside")
        assert [event["event"] for event in events()] == [told[0].removeprefix("step 8  ")]
        assert saved_bits() == bits
        assert newest.with_name("step-00000012.damaged-1").is_dir()


def test_resuming_from_an_unusable_checkpoint_is_an_error() -> None:
    train_well()
    newest = Path("run/checkpoints/step-00000012")
    shutil.copytree("run", "kept")

    def run_damaged(damage: Callable[[], object]) -> str:
        shutil.rmtree("run")
        shutil.copytree("kept", "run")
        damage()
        set_run(model="other.toml" if Path("other.toml").exists() else "nano", job={"steps": 16})
        ended = train()
        assert ended.code == 2
        assert find_latest(Path("run/checkpoints")) == newest
        return ended.line

    def cut_the_only_one() -> None:
        shutil.rmtree(newest.with_name("step-00000008"))
        os.truncate(newest / "__0_0.distcp", 1000)

    mend = "there is none before it to resume from"
    cut = run_damaged(cut_the_only_one)
    assert_line(cut, rf"{newest}/__0_0.distcp holds 1000 bytes, but \d+ bytes were written; {mend}")
    manifest = newest / "checkpoint.json"
    newer = run_damaged(lambda: manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 7})))
    assert newer == f"{newest}: written by a newer version 7; this one reads up to 1; upgrade fivefold"
    other = resolve("nano").replace(name="other", ffn=160)
    foreign = run_damaged(lambda: Path("other.toml").write_text(emit(other.model_dump(exclude_none=True))))
    assert_line(foreign, rf"{newest} holds another model, with ffn=176 instead of 160; give that model or start .*")
    shutil.rmtree(newest)  # the fix
    Path("other.toml").unlink()
    set_run(job={"steps": 16})
    train_well()
    assert saved_step() == 16


# Full disks: a limit on the size of files is met in mid-file, as the end of a disk is


def test_a_full_disk_during_a_checkpoint_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    set_run(job={"steps": 4})
    train_well()
    bits = saved_bits()
    set_run(job={"steps": 8})

    def free_of_quota(folder: Path) -> SimpleNamespace:
        """A disk of 16 MiB, with what lies in the checkpoints' folder."""
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return SimpleNamespace(free=2**24 - sum(path.stat().st_size for path in files))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", free_of_quota)
        ended = train(file_bytes=500_000)
    assert ended.code == 1
    assert_line(
        ended.line,
        r"run/checkpoints/step-00000008 cannot be written: rank 0: .*(disk is full|File too large).*"
        r"\(at least 1\.\d+ MiB to write, .* free\); the last good checkpoint is run/checkpoints/step-00000004",
    )
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000004"]
    then = float(re.search(r"([\d.]+) MiB free", ended.line)[1])  # type: ignore[index]
    now = free_of_quota(Path("run/checkpoints")).free / 2**20
    assert now - then > 0.4, "the half of a file that was written is not free when it fails"
    assert saved_bits() == bits
    train_well()
    assert saved_step() == 8


def test_a_full_disk_for_the_logs_ends_the_run() -> None:
    set_run(job={"steps": 4})
    train_well()
    set_run(job={"steps": 4000}, checkpoints={"every_steps": 4000})
    ended = train(file_bytes=12_000)
    assert ended.code == 1
    goes_on = "the same command continues from run/checkpoints/step-00000004"
    assert ended.line == f"run: the logs cannot be written: File too large; make room, and {goes_on}"
    set_run(job={"steps": 8})
    train_well()
    assert len(losses()) == 8


@pytest.mark.long  # logs and checkpoints meet full disks too
def test_a_full_disk_for_the_measured_step_ends_the_run() -> None:
    Path("run/step.json").mkdir(parents=True)
    ended = train()
    assert (ended.code, saved_step()) == (1, 12)
    assert_line(ended.line, r"run/step.json: the comparison cannot be written: Is a directory; the run itself is saved")
    assert not Path("run/step.partial").exists()


# Signals


def signal_before(monkeypatch: pytest.MonkeyPatch, place: str, number: int) -> None:
    """Every process forked from now on signals itself where it first comes to ``place``."""
    owner, _, name = place.rpartition(".")
    holder: Any = Loop if owner.endswith("Loop") else sys.modules[owner]
    function, calls = getattr(holder, name), iter(range(1000))

    def signal_first(*arguments: Any, **options: Any) -> Any:
        if next(calls) == (1 if holder is Loop and name == "evaluate" else 0):  # the first is before the first step
            os.kill(os.getpid(), number)
        return function(*arguments, **options)

    monkeypatch.setattr(holder, name, signal_first)


@pytest.mark.parametrize(
    "place", mark_share(2, ["fivefold.profiling.closed_loop.build", "fivefold.trainer.data.prepare._write"])
)
def test_a_signal_before_the_first_step_ends_the_run(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    import fivefold.trainer.data.prepare  # noqa: F401

    with monkeypatch.context() as patched:
        signal_before(patched, place, signal.SIGTERM)
        ended = train()
    assert (ended.code, ended.line) == (1, f"stopped by SIGTERM; {NOT_HALF}")
    assert [path.name for path in Path("run").iterdir()] == ([] if "prepare" in place else ["data"])
    train_well()


@pytest.mark.long  # as test_a_run_of_two_processes_survives_every_failure
@pytest.mark.parametrize(
    ("place", "step"),
    mark_share(
        3,
        [
            ("fivefold.trainer.loop.Loop._save", 4),
            ("fivefold.trainer.loop.Loop._step", 1),
            ("fivefold.trainer.loop.Loop.evaluate", 6),
        ],
    ),
)
def test_a_signal_during_training_saves_and_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, place: str, step: int
) -> None:
    set_run(folder="straight", evaluate_every=6 if "evaluate" in place else 1000)
    train_well()
    set_run(evaluate_every=6 if "evaluate" in place else 1000)
    with monkeypatch.context() as patched:
        signal_before(patched, place, signal.SIGINT)
        ended = train()
    saved = f"run/checkpoints/step-{step:08d}"
    expected = f"stopped by SIGINT after step {step} of 12; saved {saved}; the same command continues from there"
    assert (ended.code, ended.line) == (1, expected)
    assert saved_step() == step
    train_well()
    assert (saved_step(), saved_bits()) == (12, saved_bits("straight"))
    assert len(losses()) == 12


# kill -9


@pytest.mark.long  # two ranks are killed in test_a_run_of_two_processes_survives_every_failure
def test_kill_9_at_random_moments_loses_nothing() -> None:
    changes = {"job": {"steps": 96}, "checkpoints": {"every_steps": 2}}
    set_run(folder="straight", **changes)
    begin = time.monotonic()
    train_well()
    save_seconds = (time.monotonic() - begin) / 48
    set_run(**changes)
    draw, newest, unfinished = random.Random(5), -1, 0
    for kill in range(8):  # 200 of them: tests/endure/kills.py
        child = Child()
        if kill % 4:  # of four kills, one falls somewhere into the start, three into training and saving
            wait_for(lambda now=newest: saved_step() > now)
            time.sleep(draw.uniform(0, 3 * save_seconds))
        else:
            time.sleep(draw.uniform(0, 0.5))
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait().code == -signal.SIGKILL
        assert saved_step() >= newest
        newest = saved_step()
        unfinished += any(".tmp-" in path.name for path in Path("run").glob("checkpoints/*"))
    assert 0 < newest < 96
    assert unfinished, "no kill hit a save"
    train_well()
    assert (saved_step(), saved_bits()) == (96, saved_bits("straight"))
    assert len(losses()) == 96


# Two processes


class Launched(Child):
    """Who starts two processes, as the command does, and waits for them."""

    def __init__(self) -> None:
        super().__init__(leads=True)

    def workers(self) -> dict[int, int]:
        """Process ids by rank."""
        result = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, facts = status.read_text().rpartition(")")
            except OSError:
                continue
            state, parent = facts.split()[:2]
            if int(parent) == self.pid and state != "Z" and (rank := re.search(r"\(fivefold rank (\d+)$", name)):
                result[int(rank[1])] = int(status.parent.name)
        return result

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: read_last_step() >= step or self.has_ended())

    def wait(self) -> Ended:
        workers = self.workers()
        wait_for(self.has_ended)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers.values()), seconds=5)
        return super().wait()


@pytest.mark.parametrize("is_thorough", mark_share(2, [False, True]))
def test_a_run_of_two_processes_survives_every_failure(is_thorough: bool) -> None:
    """Each failure strikes the run that the one before has left; in the end it is the undisturbed one to the bit.

    ``is_thorough``: in new interpreters, and also with Ctrl-C at the start and in training, and SIGKILL for all.
    """
    set_run(folder="straight", **TWO | {"checkpoints": {"every_steps": 56}})
    with true_interpreters() if is_thorough else nullcontext():
        done = subprocess.run(
            [sys.executable, "-m", "fivefold", "train", "run.toml", "--json"],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    assert done.stderr.splitlines()[-1].startswith("finished 56 steps")
    assert sorted(path.name for path in Path("straight").iterdir()) == [
        "checkpoints",
        "data",
        "log.jsonl",
        "predicted.json",
        "report.html",
        "step.json",
        "tensorboard",
    ]
    whole = run_folder.read(Path("straight"))
    assert run_folder.read_prediction(Path("straight")) == whole.predicted.replace(operations=())
    (peak,) = (line["peak_bytes"] for line in lines("straight") if "peak_bytes" in line)
    assert peak == whole.measured.memory.peak_bytes  # which both ranks have
    set_run(**TWO)

    if is_thorough:
        run = Launched()
        wait_for(lambda: len(run.workers()) == 2)  # somewhere in their start
        os.killpg(run.pid, signal.SIGINT)  # Ctrl-C in a terminal
        ended = run.wait()
        goes_on = r"after step \d+ of 56; saved \S+; the same command continues from there"
        assert ended.code == 1  # on a busy machine a few steps may have passed
        assert re.fullmatch(rf"stopped by SIGINT(; {NOT_HALF}| {goes_on})", ended.line), ended.line

    run = Launched()
    run.wait_for_step(12)
    os.kill(run.workers()[1], signal.SIGKILL)
    ended = run.wait()
    assert ended.code == 1
    goes_on = f"the same command continues from run/checkpoints/step-{saved_step():08d}"
    assert ended.line == f"rank 1 was ended by SIGKILL, perhaps for want of memory; {goes_on}"
    assert saved_step() >= 8

    for begin, name in [(12, "SIGINT"), (16, "SIGTERM")] if is_thorough else [(16, "SIGTERM")]:
        run = Launched()
        run.wait_for_step(begin)
        (os.killpg if name == "SIGINT" else os.kill)(run.pid, signal.Signals[name])
        ended = run.wait()
        saved = f"run/checkpoints/step-{saved_step():08d}"
        assert ended.line == (
            f"stopped by {name} after step {saved_step()} of 56; saved {saved}; the same command continues from there"
        )
        assert (ended.code, saved_step() >= begin) == (1, True)

    if is_thorough:
        run = Launched()
        run.wait_for_step(20)
        os.killpg(run.pid, signal.SIGKILL)
        assert run.wait().code == -signal.SIGKILL  # and the processes went with it
        assert saved_step() >= 16

    # From here on it heals itself: of a checkpoint without a file, of a rank that is killed, of one that is stopped.
    (cut := Path("run/checkpoints") / f"step-{saved_step():08d}" / "__1_0.distcp").unlink()
    set_run(**TWO | {"faults": {"max_restarts": 1, "watchdog_seconds": 9}})
    run = Launched()
    run.wait_for_step(24)
    os.kill(killed := run.workers()[0], signal.SIGKILL)
    wait_for(lambda: run.workers().get(0, killed) != killed or run.has_ended())
    newest = saved_step()
    wait_for(lambda: saved_step() > newest or run.has_ended())  # the new one is well underway
    os.kill(run.workers()[0], signal.SIGSTOP)  # who writes the log
    ended = run.wait()
    said = [line for line in ended.error.splitlines() if line.startswith("fivefold: ") or "set aside" in line]
    patterns = (
        rf"step \d+  {cut} is missing, but \d+ bytes were written; set aside",
        r"fivefold: rank 0 was ended by SIGKILL, perhaps for want of memory; the same command continues from \S+",
        r"fivefold: started again from run/checkpoints/step-\d+",
        r"fivefold: rank 0 did not come for 9 s: no answer, stopped or cut off; every rank's stack is in .*",
        r"fivefold: started again from run/checkpoints/step-\d+",
    )
    assert len(said) == len(patterns), ended.error
    for line, pattern in zip(said, patterns, strict=True):
        assert_line(line, pattern)
    logged_events = [event["event"] for event in events()[-4:]]
    assert len(logged_events) == 4
    assert_line(logged_events[0], rf"{cut} is missing, but .*; set aside")
    assert_line(logged_events[1], r"rank 0 was ended by SIGKILL, .*; started again")
    assert logged_events[2] == said[3].removeprefix("fivefold: ")
    assert_line(logged_events[3], r"started again from run/checkpoints/step-\d+")
    assert ended.code == 0
    assert (saved_step(), saved_bits()) == (56, saved_bits("straight"))
    assert len(losses()) == 56
    assert not list(Path("run").glob("stacks-*"))
