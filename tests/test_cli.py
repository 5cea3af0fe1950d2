"""Every mistake on the command line is one line and exit code 2; of training: ``tests/trainer/test_faults.py``."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fivefold import cli
from fivefold.cli import command_line
from fivefold.errors import UserError
from tests.forked_python import true_interpreters

LOCAL = ("predict", "nano", "local", "dp8")
PREDICT = ("predict", "nano", "h100:8", "dp8")
ASK = ("ask", "run", "nano", "h100:8", "dp8", "--tokens")


@pytest.fixture(autouse=True)
def signals() -> object:
    """Give back the handlers that ``main`` replaces."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (("predct",), r"No such command 'predct'.*"),
        (("watch", "trace.json"), r"No such command 'watch'; ff.watch is a function of Python, .*"),
        (("write", "nano", "h100:8", "dp8"), r"'h100:8 dp8': one argument too many; write takes a layout .*"),
        (("train", "run.toml", "--adapter", "qlora:16"), r'No .*; train reads a run file, which has adapter = "q.*'),
        (("sweep", "nano", "h100:8"), r"'h100:8': one argument too many; sweep takes a sweep file, which lists .*"),
        (("train", "nano", "h100:8"), r"'h100:8': one argument too many; train takes a run file, which names model.*"),
        (("train", "nano"), r'nano: no such file; a run file names the model, such as model = "nano" in run.toml'),
        (("write", "dp8", "--model", "nano"), r"name a format, such as --to torchtitan, or set your software: .*"),
        ((*PREDICT, "--gsb", "8"), r"No such option: --gsb.*"),
        ((*PREDICT, "--gbs", "2M"), r"Invalid value for '--gbs': must be a whole number; it counts sequences.*"),
        ((*PREDICT, "--micro-batch", "2"), r"No such option: --micro-batch; degrees, ZeRO stage and micro-batch .*"),
        ((*PREDICT, "--gpu-counts", "8-64"), r"No such option: --gpu-counts .*; `fivefold search` has it"),
        (("ask", "gpus", "nano", "h100", "--deadline", "30d"),
         r"--deadline: `ask gpus` does not use it, only tokens; drop it; for the fewest GPUs .* fivefold search .*"),
        (("compare", "nano", "h100:8", "dp8", "--machines", "b200:8"), r".*; machines are arguments .*"),
        ((*PREDICT, "--tp", "2"), r"No such option: --tp; degrees, ZeRO stage and .* in the layout, .*"),
        ((*PREDICT, "--batch", "64"), r"No such option: --batch; the global batch is --gbs, in sequences"),
        ((*PREDICT, "--ga", "4"), r"No such option: --ga; gradients are accumulated over gbs / .*: set --gbs, .*"),
        ((*PREDICT, "--dtype", "bf16"), r"No such option: --dtype; the numbers of a step are --precision, .*"),
        ((*PREDICT, "--set", "gradient_accumulation=4"), r"--set .*: no such field: gradients are .*: set --gbs, .*"),
        ((*PREDICT, "--optimizer", "lion"), r"--optimizer must be 'adafactor', 'adamw', .*, not 'lion'.*"),
        ((*PREDICT, "--optimizer", "sgd", "--set", "optimizer.kind=muon"), r"--optimizer and --set .* both set .*"),
        ((*PREDICT, "--set", "lr=1e-4"), r"--set lr: no such field; did you mean 'learning_rate.peak'\?"),
        ((*PREDICT, "--set", "gbs=64"), r"--set gbs: no such field; did you mean 'global_batch'\?"),
        ((*PREDICT, "--set", "gradient_checkpointing=true"), r"--set .*: no such field: recomputation is ac in .*"),
        ((*PREDICT, "--set", "warmup_step=9"), r"--set warmup_step: .* did you mean 'learning_rate.warmup_steps'\?"),
        (("predict", "nano", "h100-8", "dp8"), r"unknown machine 'h100-8'; for 8 GPUs write h100:8. .*"),
        (("plan", "nano", "h100:8", "--tokens", "15", "trillion"), r"'trillion': one argument too many; quote .*"),
        (("explain", "x", "--against", "nano", "h100:8"), r"--against needs MODEL MACHINE LAYOUT, such as .*"),
        (("search", "nano", "h100:8", "--top", "0"), r"Invalid value for '--top': must be 1 or more"),
        (("search", "nano", "h100:8", "--front", "9" * 19), r"Invalid value for '--front': .*10000.*"),
        ((*PREDICT, "--set", "precision.name={a=1}"), r"job: .*--set precision.name must be text, not .*"),
        ((*ASK, "many"), r"Invalid value for '--tokens': must be a number, such as 2e12 or 2T"),
        ((*PREDICT, "--attention", "fast"), r"Invalid value for '--attention': 'fast' is not one of .*"),
        (("predict", "nano"), r"Missing argument 'machine'.*"),
        (("plan", "h100:8"), r"'h100:8' is a machine; write the model before it, .*"),
        (("predict", "h100:8", "nano", "dp8"), r"'h100:8' is a machine; write the model before it, .*"),
        (("compare", "h100:8", "dp8", "dp4 tp2"), r"'h100:8' is a machine; write the model before it, .*"),
        (("plan", "nano", "h100:8", "--tokens", "5"), r"tokens=5: a run has 1,000 to .*"),
        (("ask", "gpus", "h100"), r"'h100' is a machine; write the model before it, .*"),
        (("predict", "nano", "h100:8"), r"Missing argument 'layout'; add it, such as 'dp8 zero3 mbs1', or let .*"),
        (("predict", "nanno", "h100:8", "dp8"), r"unknown model 'nanno'; did you mean nano\? .fivefold models.*"),
        (("predict", "nowhere/config.json", "h100:8", "dp8"), r"nowhere/config.json: no such file"),
        (("predict", "nano", "h100:8", ""), r"layout '' is empty; write for example .*"),
        (("ask", "changes", "nano", "h100:8", ""), r"layout '' is empty; write for example .*"),
        (("predict", "a" * 300, "h100:8", "dp8"), r"unknown model 'a+…a+'; .fivefold models. lists all; or .*"),
        (("read", "a" * 300), r"a+…a+: too long for a file name; .*"),
        (("show", "a" * 300), r"a+…a+: too long for a file name; .*"),
        (("train", "a" * 300), r"a+…a+: too long for a file name; .*"),
        (("plan", "gpt3-175b", "h200:64", "--seq", "4096"), r"sequence 4096 is longer than the 2048 learned .*"),
        (("predict", "nano", "h10:8", "dp8"), r"unknown machine 'h10'; did you mean h100.*lists all"),
        (("predict", "nano", "cpu", "dp1"), r"unknown machine 'cpu'; .*lists all; `local` is this computer, and a .*"),
        (("predict", "https://hf.co/a/b", "h100", "dp8"), r"unknown model 'a/b': not a repository of the catalog, .*"),
        (("predict", "nano", "h100:0", "dp8"), r"machine 'h100:0': '0' is not a number of ranks; .* as in h100:8"),
        (("predict", "nano", "here.toml:2", "dp8"), r"here.toml: no such file"),
        ((*LOCAL, "--no-calibrate"), r"this computer is not calibrated yet \(.* is missing\); run .*"),
        (("predict", "nano", "h100:8", "pd8"), r"unknown layout token 'pd8'; known: dpN, .*"),
        (("predict", "nano", "h100:8", "dp8 dp4"), r"layout 'dp8 dp4': 'dp4' sets dp a second time; keep one"),
        ((*PREDICT, "--gbs", "12"), r"layout 'dp8 .*': global batch 12 is not divisible by .*; try gbs 8 or gbs 16"),
        (("predict", "nano", "h100:8", "dp16"), r"layout 'dp16 .*': needs 16 ranks, but h100 has 8; .*"),
        ((*PREDICT, "--precision", "fp7"), r"job: unknown precision 'fp7'; did you mean fp8, fp32 or fp16\?"),
        ((*PREDICT, "--set", "loss"), r"--set 'loss' is not FIELD=VALUE; write loss=chunked or optimizer.kind=muon"),
        ((*PREDICT, "--set", "loss.a=1"), r"job: loss must be 'plain', .*, not \{'a': '1'\}"),
        ((*PREDICT, "--attention", "flash", "--set", "attention.a=1"), r".*: attention is one value and .*"),
        ((*PREDICT, "--set", "loss=[x"), r"--set 'loss=\[x': not a TOML value: .*"),
        ((*PREDICT, "--set", "optimizer.groups.0.rate=2"), r"job: .*must be a list.*"),
        ((*PREDICT, "--precision", "bf16", "--set", "precision=fp16"), r"--precision and .* both set .*"),
        ((*PREDICT, "--set", "steps=9", "--set", "steps=8"), r"--set 'steps=9' and .* both set steps; .*"),
        ((*PREDICT, "--set", "precision.compute=fp9"), r"--set precision.compute must be 'fp64', .*"),
        ((*PREDICT, "--set", "steps=true"), r"--set steps must be a whole number, not 'true'"),
        ((*PREDICT, "--seq", "1" + "0" * 20), r"--seq must be 1073741824 or less, not 10+"),
        (("predict", "gpt2", "h100:8", "dp8", "--seq", "2048"),
         r"layout '.*': sequence 2048 is longer than the 1024 learned positions of gpt2; try seq 1024"),
        (("search", "gpt2", "h100:8", "--seq", "2048"), r"sequence 2048 is longer than the 1024 learned .*"),
        (("search", "nano", "h100:8", "--seq", "1" + "0" * 20), r"--seq must be .* or less, not 10+"),
        (("predict", "nano", "h100:8", "dp1 pp2 gpipe", "--gbs", "1000000"), r".*: 1000000 micro-.* too many .*"),
        (("predict", "nano", "h100:8", "dp99999 tp99999"), r".*: .*=9999800001 ranks are more than 9,.*"),
        *(((*ASK, word), rf"tokens={word}: a run has 1,000 to 1e\+18; .*") for word in ("inf", "nan", "0", "-1")),
        (("ask", "batch", "nano", "h100:8", "dp8", "--tokens", "0"), r"tokens=0: a run has .*"),
        ((*PREDICT, "--set", "los=chunked"), r"--set los: no such field; did you mean 'loss'\?"),
        (("predict", "nano", "h100:8", "dp8 ac=nrom"), r"layout 'dp8 ac=nrom': unknown recomputation .*ac=norm.*"),
        ((*PREDICT, "--seq", "0"), r"--seq must be 1 or more, not 0"),
        ((*PREDICT, "--job", "nowhere.toml"), r"nowhere.toml: no such file"),
        ((*PREDICT, "--job", "bad.toml"), r"bad.toml: not valid TOML: .*line 2.*"),
        ((*PREDICT, "--job", "unknown.toml"), r"unknown.toml: unknown key 'learning_rate.peek'; did you mean 'peak'\?"),
        (("compare", "nano", "h100:8"), r"compare needs a layout; .* 'dp4 tp2 zero1'"),
        (
            ("compare", "nano", "h100:8", "b200:8"),
            r"compare needs a layout; .*; for the best layout of each machine: fivefold search nano h100:8 b200:8",
        ),
        (("compare", "nano", "dp8", "dp4"), r"compare needs a machine; .*"),
        (("compare", "nano", "h10:8", "dp8", "dp4 tp2"), r"unknown machine 'h10'; did you mean h100.*"),
        (("compare", "nano", "h100:8", "dp8", "--stacks", "fivefold,torchtitn"),
         r"unknown stack 'torchtitn'; did you mean torchtitan.*"),
        (("compare", "nano", "h100:8", "dp8", "--precisions", "fp8,,bf16"), r"--precisions 'fp8,,bf16' is not a .*"),
        (("compare", "bad.toml", "unknown.toml"), r"bad.toml: not valid TOML: .*line 2.*"),
        (("compare", "bad.toml", "unknown.toml", "--gbs", "16"), r"a run file has its own job; drop .*"),
        (("search", "nano", "h100:8", "--memory", "much"), r"--memory 'much' is not a size; .*"),
        (("search", "nano", "h100:8", "--memory", "100GiB"), r"--memory 100GiB: a rank of h100 has 79.19 GiB; .*"),
        (("search", "nano", "h100:8", "--keep", "pd8"), r"unknown layout token 'pd8'; known: .*"),
        (("search", "nano", "h100:8", "--keep", "dp16"), r"layout 'dp16 .*': needs 16 ranks, but h100 has 8; .*"),
        (("search", "nano", "h100:8", "h200:8", "--by", "cost"), r"--by cost: h100, h200 have no price; .*"),
        (("search", "nano", "h100:8", "h21:8"), r"unknown machine 'h21'; did you mean .*"),
        (("search", "nano", "h100:8", "--tokens", "1e9", "--price", "h200=2/h"), r".*: no machine is called 'h200'.*"),
        (("search", "nano", "h100:8", "--price", "dear"), r"--price 'dear' is not a price; write h100=2.2/h, .*"),
        (("search", "nano", "h100:8", "--deadline", "soon"), r"--deadline 'soon' is not a number and a unit; .*"),
        (("search", "nano", "h100:8", "--gpu-counts", "8"), r"--gpu-counts '8' is not a range of .* 64-512"),
        (("search", "nano", "h100:8", "h200:8", "--by", "memory"), r"--by memory ranks layouts of one machine; .*"),
        (("search", "nano", "h100:8", "h200:8", "--assume", "moon=1"), r"unknown assumption 'moon'; .*"),
        (("search", "nano", "h100:8", "h200:8", "--keep", "dp8"), r"--keep: valid for a search of one .*; drop it, .*"),
        (("search", "nano", "h100:8", "--deadline", "1d", "--2d", "--front", "2"), r"--front, --2d: .*; drop them, .*"),
        (("ask", "run", "nano", "h100:8", "dp8", "--assume", "grid=mars"), r"--assume grid=mars is not a known .*"),
        (("ask", "gpus", "nano", "h100:8", "--tokens", "15T"),
         r"--tokens: `ask gpus` does not use it, only batch and run; .*--deadline 30d"),
        (("ask", "sequence", "nano", "h100:8", "--assume", "failures=1"), r"--assume: `ask sequence` does not .*"),
        (("ask", "gpus", "nano", "h100:8", "--chart", "x.svg"), r"--chart x.svg: 'gpus'.*"),
        (("plan", "nano", "h100:8", "--tokens", "0"), r"tokens=0: a run has 1,000 to 1e\+18; .*"),
        (("plan", "nano", "h100:8", "--tokens", "1M", "--seq", "64", "--write", "none/run.toml"),
         r"--write none/run.toml: there is no folder none"),
        (("plan", "llama3-405b", "h100:8"), r"none of the 11 layouts that plan tries fits .*: the nearest, .*"),
        (("ask", "batch", "nano", "h100:8", "dp8", "--noise", "loud"), "--noise 'loud' is neither a run folder .*"),
        (("search", "nanno", "h100:8"), r"unknown model 'nanno'; .*"),
        (("show", "nowhere"), r"nowhere: no such run folder; .*"),
        (("predict", "nano", "h100:8", "pp2 stages=²-1"), r"layout token 'stages=²-1': '²' is not a number of .*"),
        (("dryrun", "nano", "h100:2", "dp2", "--ranks", "²"), r"--ranks '²' is not a list of ranks; write 0,3"),
        (("calibrate", "--processes", "²"), r"--processes '²' is not a list of process counts; write 1,2"),
        (("calibrate", "--processes", "99999"), r"ranks=\[99999\]: each number of processes must be 1 to 1024; .*"),
        (("doctor", "x.py", "--budget", "9" * 400 + "GiB"), r"--budget '9+…?9*GiB' is not a size; .*"),
        (("doctor", "x.py", "--budget", "0.1B"), r"--budget '0.1B' is not a size; .*"),
        (("calibrate", "--processes", "1,two"), r"--processes '1,two' is not a list of process counts; write 1,2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_a_user_error_is_a_one_line_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    pattern: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["fivefold", *words])
    Path("bad.toml").write_text("steps = 3\nsteps = 4\n")
    Path("unknown.toml").write_text("[learning_rate]\npeek = 1e-3\n")
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    out, line = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert re.fullmatch(rf"fivefold: ({pattern})\n", line), line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.toml", "unknown.toml"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["fivefold", *PREDICT])
    monkeypatch.setattr("fivefold.model.catalog.resolve", lambda _: signal.raise_signal(number))
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 1
    name = signal.Signals(number).name
    assert capfd.readouterr().err == (
        f"fivefold: stopped by {name}; nothing is half-done, and the same command takes it up again\n"
    )


def test_an_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """As under nohup, or in the background of a script."""

    def go_on(_model: str) -> None:
        signal.raise_signal(signal.SIGINT)
        raise UserError("it went on")

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr(sys, "argv", ["fivefold", *PREDICT])
    monkeypatch.setattr("fivefold.model.catalog.resolve", go_on)
    with pytest.raises(SystemExit):
        command_line.main()
    assert capfd.readouterr().err == "fivefold: it went on\n"


def test_tests_receive_ctrl_c_even_if_started_in_the_background() -> None:
    """A background process of a script starts with SIGINT ignored; a test that sends one would see no effect."""
    born = 'trap "" INT; exec "$0" -c "import signal, tests.conftest; print(signal.getsignal(signal.SIGINT))"'
    started = subprocess.run(["sh", "-c", born, sys.executable], capture_output=True, text=True, check=True)
    assert "default_int_handler" in started.stdout


@true_interpreters()
def test_a_closed_output_pipe_is_no_error() -> None:
    """As in ``fivefold predict … | head -1``."""
    command = subprocess.Popen(
        [sys.executable, "-m", "fivefold", *PREDICT, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert command.stdout
    assert command.stderr
    command.stdout.close()
    with command.stderr:
        assert (command.stderr.read(), command.wait()) == (b"", 1)


def test_a_full_disk_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fivefold", *PREDICT])
    monkeypatch.setattr("fivefold.model.catalog.resolve", lambda _: Path(tmp_path / "a" / "b").mkdir())
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert (ended.value.code, capfd.readouterr().err) == (1, f"fivefold: {tmp_path}/a/b: No such file or directory\n")


@pytest.mark.parametrize(
    ("words", "job"),
    [
        ("--set loss=chunked --set optimizer.kind=muon", {"loss": "chunked", "optimizer.kind": "muon"}),
        ("--optimizer muon", {"optimizer.kind": "muon", "optimizer.clip": 1.0}),
        ("--optimizer muon --set optimizer.clip=0.5", {"optimizer.kind": "muon", "optimizer.clip": 0.5}),
        ("--set optimizer=sgd --set optimizer.clip=0.5", {"optimizer.kind": "sgd", "optimizer.clip": 0.5}),
        ("--job named.toml --optimizer adamw8bit", {"optimizer.kind": "adamw8bit", "optimizer.clip": 0.25}),
        ("--set overlap=dp,pp --set flat_copies=gradients", {"overlap": ["dp", "pp"], "flat_copies": ["gradients"]}),
        (
            "--set overlap= --set flat_copies=weights,gradients",
            {"overlap": [], "flat_copies": ["weights", "gradients"]},
        ),
        ("--set optimizer.betas=0.8,0.9", {"optimizer.betas": [0.8, 0.9]}),
        ("--set precision.moments_bytes=2,2", {"precision.moments_bytes": [2, 2], "precision.name": "bf16"}),
        ("--precision bf16 --set precision.compute=fp16", {"precision.compute": "fp16", "precision.master_bytes": 4}),
        ("--precision fp8 --set precision.scaling=tiles", {"precision.scaling": "tiles", "precision.compute": "fp8"}),
        ("--job named.toml --set precision.scaling=tiles", {"precision.scaling": "tiles", "precision.name": "fp8"}),
        ("--job named.toml --precision fp16", {"precision.name": "fp16"}),
        ("--set ramp.first=2 --set ramp.step=2 --set ramp.every=9 --gbs 8", {"ramp.first": 2}),
        (
            "--set 'optimizer.groups=[{of=\"embeddings\", rate=0.1}, {of=\"head\", weight_decay=0}]'",
            {"optimizer.groups": [{"of": "embeddings", "rate": 0.1, "weight_decay": None},
                                  {"of": "head", "rate": 1.0, "weight_decay": 0.0}]},
        ),
    ],
)  # fmt: skip
def test_any_job_field_can_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, job: dict[str, Any]
) -> None:
    """Each by its path, over the file and the options that name the rest of it."""
    monkeypatch.chdir(tmp_path)
    Path("named.toml").write_text('precision = "fp8"\n[optimizer]\nclip = 0.25\n')
    result = json.loads(answer("predict", "nano", "h100:2", "dp2", "--json", *shlex.split(words)))["job"]
    for path, value in job.items():
        place: Any = result
        for key in path.split("."):
            place = place[key] if key in place else place["stack"][key]
        assert place == value, path


def answer(*words: str) -> str:
    """What a command prints, which must end well."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cli.app(list(words), standalone_mode=False)
    return printed.getvalue()
