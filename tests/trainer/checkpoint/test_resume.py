"""A run that was left and taken up again: the data it reads, and what it refuses to go on from."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from fivefold.machine.toml import emit
from fivefold.model.catalog import resolve
from fivefold.trainer import engine, loop
from fivefold.trainer.checkpoint.checkpoint_folder import MANIFEST, _compute_digest, find_latest, read
from tests.endure.ranks import Ranks
from tests.trainer.test_faults import (
    assert_line,
    events,
    losses,
    saved_bits,
    set_run,
    train,
    train_well,
    workspace,
)

__all__ = ["workspace"]

STEADY = {"learning_rate": {"kind": "constant", "peak": 3e-3}}  # the same whatever the last step


def rows_read(folder: str) -> np.ndarray:
    """The samples [steps, global batch, sequence + 1] that all ranks together have read, put in order by step."""
    result: dict[int, list[list[int]]] = {}
    for path in sorted(Path(folder).glob("read-*.jsonl")):
        for line in path.read_text().splitlines():
            step, rows = json.loads(line)
            result.setdefault(step, []).extend(rows)
    return np.array([sorted(result[step]) for step in sorted(result)])


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank notes what it trains on."""
    begun, step, numbers = loop.Loop._step, engine.Engine.step, [0]

    def step_numbered(self: loop.Loop, number: int, meter: Any) -> Any:
        numbers[0] = number
        return begun(self, number, meter)

    def step_noted(self: engine.Engine, tokens: Tensor, **options: Any) -> Any:
        folder = tomllib.loads(Path("run.toml").read_text())["folder"]
        with Path(f"{folder}/read-{self.built.ranks.rank}.jsonl").open("a") as file:
            file.write(json.dumps([numbers[0], tokens.reshape(-1, tokens.shape[-1]).tolist()]) + "\n")
        return step(self, tokens, **options)

    monkeypatch.setattr(loop.Loop, "_step", step_numbered)
    monkeypatch.setattr(engine.Engine, "step", step_noted)


@pytest.mark.long  # as tests/agree/loop: test_a_resumed_run_continues…
@pytest.mark.usefixtures("noting")
def test_another_number_of_data_ranks_reads_the_same_samples() -> None:
    """Two processes to step 4, one to step 8, two to step 12: each step's samples and loss are those of one process."""
    set_run(folder="straight", job=STEADY)
    train_well()
    for layout, world, steps in (("dp2 zero3 mbs2", 2, 4), ("dp1 mbs2", 1, 8), ("dp2 zero1 mbs1", 2, 12)):
        set_run(layout=layout, job=STEADY | {"steps": steps})
        ranks = Ranks(world)
        assert set(ranks.wait(seconds=120).values()) == {0}, ranks.read_output()
    straight, moved = rows_read("straight"), rows_read("run")
    assert straight.shape == (12, 4, 33)
    assert np.array_equal(straight, moved)
    wanted = losses("straight")
    assert losses() == pytest.approx(wanted, rel=1e-5)
    assert losses() != wanted, "sums in other orders: the bound above is not idle"


def test_resuming_under_the_same_layout_is_bitwise_equal() -> None:
    """Weights, moments, random states, scale of the loss (which a checkpoint holds) and losses, in fp16."""
    job = STEADY | {"precision": "fp16"}
    set_run(folder="straight", job=job)
    train_well()
    for steps in (5, 12):
        set_run(job=job | {"steps": steps})
        train_well()
    assert saved_bits() == saved_bits("straight")
    assert losses() == losses("straight")


# What it refuses, in one line and before the first step


def check_invalid(**changes: Any) -> str:
    newest, before = find_latest(Path("run/checkpoints")), losses()
    set_run(**changes)
    ended = train()
    assert ended.code == 2, ended.error
    assert (find_latest(Path("run/checkpoints")), losses()) == (newest, before)
    return ended.line


def test_resuming_with_another_optimizer_is_an_error() -> None:
    set_run(job={"optimizer": {"kind": "sgd", "momentum": 0.0}})
    train_well()
    line = check_invalid(job={"optimizer": {"kind": "sgd", "momentum": 0.9}, "steps": 16})
    assert_line(
        line,
        r"run/checkpoints/step-00000012 is missing \d+ tensors that the optimizer needs, such as moments/\S+; "
        r"give the optimizer that it was trained with or start a new run",
    )
    line = check_invalid(job={"optimizer": {"kind": "adamw"}, "steps": 16})
    assert re.search(r"step-00000012 holds moments of optimizer.kind=sgd, which adamw cannot continue with", line)


@pytest.mark.long  # as test_resuming_with_another_text…
def test_resuming_with_another_tokenizer_is_an_error() -> None:
    """The corpus is prepared anew for it, and the weights know nothing of its tokens."""
    Path("wide.toml").write_text(emit(resolve("nano").replace(name="wide", vocab=300).model_dump(exclude_none=True)))
    wide = {"model": "wide.toml"}
    set_run(data={"tokenizer": "bpe:300"}, **wide)
    train_well()
    line = check_invalid(data={"tokenizer": "bytes"}, job={"steps": 16}, **wide)
    assert_line(
        line,
        r"run/checkpoints/step-00000012: was trained on tokens of another tokenizer \([0-9a-f]{12}, and these are of "
        r"[0-9a-f]{12}\); prepare the corpus with that one or start a new run",
    )
    set_run(data={"tokenizer": "bpe:300"}, job={"steps": 16}, **wide)
    train_well()


def rewrite(change: Callable[[str], str]) -> None:
    """Every document of the corpus as ``change`` makes it, so that it is prepared anew."""
    for path in Path("corpus").iterdir():
        path.write_text(change(path.read_text()))
        os.utime(path, (0, 0))


def test_resuming_with_another_text_is_an_error() -> None:
    """It would be read silently, and in another order; the same text in other files is the same."""
    set_run(job=STEADY)
    train_well()
    shutil.copytree("corpus", "kept")
    changes: tuple[tuple[Callable[[], object], float], ...] = (
        (lambda: rewrite(lambda text: text.replace("document 7 ", "document T ")), 0.2),  # one letter
        (lambda: Path("corpus/0.txt").rename("corpus/z.txt"), 0.2),  # another order
        (lambda: None, 0.4),
    )
    for change, heldout in changes:
        shutil.rmtree("corpus")
        shutil.copytree("kept", "corpus")
        change()
        line = check_invalid(data={"heldout": heldout}, job=STEADY | {"steps": 16})
        assert_line(
            line,
            r"run/checkpoints/step-00000012: was trained on another text \([0-9a-f]{12}, and the corpus is now "
            r"[0-9a-f]{12}\), or with another share of it held out; restore the text, its order and data.heldout, "
            r"or start a new run",
        )
    rewrite(lambda text: text)
    Path("corpus/blank.txt").write_text(" ")
    set_run(job=STEADY | {"steps": 16})
    train_well()
    assert not events()


@pytest.mark.long  # of checkpoints of an older version
def test_a_checkpoint_without_a_fingerprint_of_its_text_resumes_with_a_remark() -> None:
    """As one is that an older version wrote."""
    train_well()
    newest = find_latest(Path("run/checkpoints"))
    assert newest
    old = read(newest)
    values = old.replace(progress=old.progress.replace(facts={})).model_dump(mode="json")
    (newest / MANIFEST).write_text(json.dumps({**values, "digest": _compute_digest(values)}))
    set_run(job={"steps": 16})
    train_well()
    said = f"{newest}: does not say on what text it was trained; taken to be this one"
    assert [(line["step"], line["event"]) for line in events()] == [(12, said)]
    assert "text" in read(Path("run/checkpoints/step-00000016")).progress.facts
