"""The command generate, from a checkpoint of two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Chip, Link, Machine
from fivefold.machine.toml import write
from fivefold.model.spec import Model
from fivefold.text_files import read_lines
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint import checkpoint
from fivefold.trainer.data.tokenizer import ByteTokenizer

MODEL = Model(name="small", layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=256)


def save(folder: Path) -> None:
    """A checkpoint as drawn, and the tokenizer of its corpus."""
    layout, job = Layout.parse("tp2 zero1 mbs1"), Job(sequence=16, global_batch=4, precision=get_recipe("fp32"))
    built = build(model=MODEL, layout=layout, job=job, device=torch.device("cpu"))
    progress = checkpoint.RunProgress(step=0, samples=0, tokens=0)
    checkpoint.save(folder / "checkpoints", built=built, progress=progress, model=MODEL, layout=layout, job=job)


@pytest.fixture
def run(tmp_path: Path, forked: Callable[..., Any]) -> Path:
    forked(2, save, tmp_path / "run")
    (tmp_path / "run" / "data").mkdir()
    (tmp_path / "run" / "data" / "tokenizer.json").write_text(ByteTokenizer().text)
    (tmp_path / "run.toml").write_text(f'folder = "{tmp_path}/run"\n')
    return tmp_path / "run"


def generate(*words: str) -> Any:
    return CliRunner().invoke(app, ["generate", *words], catch_exceptions=False)


def test_generated_text_is_equal_from_every_kind_of_source(run: Path) -> None:
    one = ("--prompt", "def ", "--tokens", "12", "--seed", "3")
    from_run = generate(str(run), *one)
    assert from_run.stdout.startswith("def ")
    assert "12 tokens in" in from_run.stderr
    for source in (run.with_suffix(".toml"), run / "checkpoints" / "step-00000000"):
        assert generate(str(source), *one).stdout == from_run.stdout
    answer = json.loads(generate(str(run), *one, "--prompt", "class", "--json").stdout)
    first, second = answer["samples"]
    assert first["prompt"] + first["text"] + "\n" == from_run.stdout
    assert (second["prompt"], first["tokens"]) == ("class", 12)
    assert answer["tokens_per_second"] == pytest.approx((12 + second["tokens"]) / answer["seconds"])
    both = generate(str(run), *one, "--prompt", "class").stdout
    assert both == "def " + first["text"] + "\n\nclass" + second["text"] + "\n"


def test_invalid_input_is_a_one_line_error(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"top_p must be 1 or less"):
        generate(str(run), "--top-p", "2")
    with pytest.raises(UserError, match=r"nowhere: no such folder"):
        generate(str(tmp_path / "nowhere"))
    (run / "data" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"name one with --tokenizer"):
        generate(str(run))
    assert generate(str(run), "--tokenizer", "bytes", "--tokens", "1").exit_code == 0


def test_samples_in_the_log_of_a_run_equal_what_generate_prints(tmp_path: Path) -> None:
    chip = Chip(name="core", peak_flops={"fp32": 1e11}, memory_bytes=2**32, memory_bandwidth=1e10, source="test")
    link = Link(name="loopback", span=1, bandwidth=1e9, latency_seconds=1e-4, source="test")
    machine = Machine(name="here", ranks=1, ranks_per_node=1, backend="gloo", chip=chip, links=(link,))
    write(machine, tmp_path / "here.toml")
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number}: " + "all work and no play. " * 20)
    (tmp_path / "run.toml").write_text(
        'model = "nano"\nmachine = "here.toml"\nlayout = "dp1 mbs4"\nfolder = "run"\nevaluate_every = 2\n'
        'evaluate_sequences = 4\nsample = "all"\nsample_tokens = 9\nsample_at = "evaluations"\n'
        '[job]\nsequence = 32\nglobal_batch = 4\nprecision = "fp32"\nsteps = 4\nseed = 7\n'
        '[data]\ncorpus = "text"\nheldout = 0.2\n'
    )
    words = [sys.executable, "-m", "fivefold"]
    trained = subprocess.run([*words, "train", "run.toml"], cwd=tmp_path, capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    events = [line for line in read_lines(tmp_path / "run" / "log.jsonl") if "event" in line]
    assert [line["step"] for line in events if line["event"].startswith("sample 'all")] == [0, 2, 4]
    drawn = subprocess.run(
        [*words, "generate", "run.toml", "--prompt", "all", "--tokens", "9", "--seed", "7"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert drawn.returncode == 0, drawn.stderr
    assert f"sample after 'all':\n{drawn.stdout}" in trained.stderr
