"""The global batch of a question that names none."""

from __future__ import annotations

import json
import re
from math import ceil
from pathlib import Path
from typing import Any

import pytest

import fivefold as ff
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.batch import choose_gpu_counts, fill_batch
from fivefold.layout.spec import Layout
from fivefold.model.catalog import resolve
from fivefold.planner.playbook import plan_batch_stage
from fivefold.requests.batch import choose_batch
from fivefold.update import Ramp
from fivefold.web import worker
from fivefold.web.folder import ServedFolder
from fivefold.web.question import AskQuestion, ChosenQuestion, CompareQuestion, SearchQuestion
from tests.cli.commands import run


@pytest.mark.parametrize(
    ("ranks", "sequence", "layouts", "batch"),
    [
        (8, 4096, (), 8),
        (1, 4096, (), 8),
        (6, 4096, (), 12),  # at least 8, and a multiple of the ranks
        (64, 4096, (), 64),
        (384, 4096, (), 384),
        (16384, 8192, (), 2048),  # 16.8 M tokens
        (6144, 4096, (), 3072),  # the largest divisor of the ranks with at most 16.8 M tokens
        (512, 131072, (), 128),
        (64, 4096, ("dp64 mbs4",), 256),
        (64, 4096, ("dp64 mbs1", "dp16 tp4 mbs3"), 192),
        (16, 2**27, (), 8),
    ],
)
def test_the_default_batch_gives_each_gpu_a_sequence(
    ranks: int, sequence: int, layouts: tuple[str, ...], batch: int
) -> None:
    parsed = [Layout.parse(text) for text in layouts]
    job = Job(sequence=sequence)
    assert fill_batch(job, ranks=ranks, stated=(), layouts=parsed).global_batch == batch
    assert fill_batch(job, ranks=ranks, stated={"global_batch"}, layouts=parsed) is job


def test_pairs_of_preferences_stay_together() -> None:
    job = Job(objective="dpo")
    assert fill_batch(job, ranks=64, stated=()).global_batch == 128


def test_a_ramp_has_a_batch_of_its_own() -> None:
    job = Job(ramp=Ramp(first=4, step=4, samples=100), global_batch=8)
    assert fill_batch(job, ranks=64, stated=()) is job


def test_python_fills_the_batch_as_the_command_line_does() -> None:
    assert ff.predict("nano", "h100:16", "dp16", seq=64).job["global_batch"] == 16
    assert ff.predict("nano", "h100:16", "dp4 tp2 pp2", seq=64, gbs=8).job["global_batch"] == 8
    assert ff.predict("nano", "h100:16", "dp4 tp2 pp2", seq=64, job={"global_batch": 4}).job["global_batch"] == 4
    assert ff.predict("nano", "h100:16", "dp4 tp2 pp2", job=Job(sequence=64)).job["global_batch"] == 8
    comparison = ff.compare("nano", "h100:16", "dp16 mbs2", "dp8 tp2 mbs1", seq=64)
    assert [variant.step.job["global_batch"] for variant in comparison.variants if variant.step] == [32, 32]


@pytest.mark.parametrize(
    ("ranks", "tokens", "layouts", "stated", "batch", "reason"),
    [
        (8, 100e9, (), (), 512, "advised for 100 B tokens"),
        (8, 2e12, (), (), 2048, "advised for 2 T tokens"),
        (6, 100e9, (), (), 516, "advised for 100 B tokens"),  # so that each GPU has as many
        (8, 100e9, ("dp8 mbs3",), (), 504, "advised for 100 B tokens"),
        (1024, 100e9, (), (), 1024, ""),  # one per GPU is more
        (500, 100e9, (), (), 500, ""),  # nearer to the advised 512 than 1000
        (8, 100e9, (), ("global_batch",), 8, ""),
        (8, None, (), (), 8, ""),
    ],
)
def test_a_complete_run_has_the_batch_that_plan_advises(
    ranks: int, tokens: float | None, layouts: tuple[str, ...], stated: tuple[str, ...], batch: int, reason: str
) -> None:
    model, parsed = resolve("llama3-8b"), [Layout.parse(text) for text in layouts]
    job, why = choose_batch(model, Job(), run_tokens=tokens, ranks=ranks, stated=stated, layouts=parsed)
    assert (job.global_batch, why) == (batch, reason)
    if tokens and reason:
        _, planned = plan_batch_stage(model, Job(), tokens=tokens, is_given=False)
        assert abs(planned.global_batch - batch) <= 3 * ranks / 2


def test_plan_keeps_a_stated_batch_that_is_the_default_of_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 B tokens advise 64 sequences; ``gbs=8`` was taken as not given."""
    quick: dict[str, Any] = {"where": "tp=1 pp=1 cp=1 ac=none order=default", "tokens": 1e11}
    words = ["nano", "h100:8", "--where", quick["where"], "--tokens", "1e11", "--json"]
    question = {"model": "nano", "machine": "h100:8", "where": quick["where"], "tokens": "1e11"}
    for gbs in (None, 8):
        asked = ff.plan("nano", "h100:8", gbs=gbs, **quick)
        assert f"global_batch = {gbs or 64}\n" in asked.run_file
        assert run(monkeypatch, "plan", *words, *(["--gbs", str(gbs)] if gbs else [])) == 0
        assert json.loads(capsys.readouterr().out)["run_file"] == asked.run_file
        payload = {"question": question | ({"gbs": gbs} if gbs else {}), "root": ".", "local": "none"}
        assert worker.plan(payload, lambda *done: None)["run_file"] == asked.run_file
    from_record = ff.plan("nano", "h100:8", job=Job(), **quick)
    assert "global_batch = 64\n" in from_record.run_file


@pytest.mark.parametrize("tokens", [0, -1, float("nan"), 1e30])
def test_tokens_of_no_run_are_an_error(tokens: float) -> None:
    with pytest.raises(UserError, match="a run has 1,000 to"):
        ff.ask("run", "nano", "h100:8", "dp8", tokens=tokens)


def test_all_interfaces_ask_about_a_run_with_the_advised_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And about a step with one sequence per GPU."""
    folder, local = ServedFolder(Path()), Path("none")
    asked = ff.ask("run", "nano", "h100:8", "dp8 mbs1", tokens=1e12)[0]
    assert asked.steps == ceil(1e12 / (256 * 4096))
    assert run(monkeypatch, "ask", "run", "nano", "h100:8", "dp8 mbs1") == 0
    line = " ".join(capsys.readouterr().out.split())
    assert "defaults: seq 4096, global batch 256 (advised for 1 T tokens), bf16" in line
    question = ChosenQuestion(question="run", model="nano", machine="h100:8", layout="dp8 mbs1")
    resolved = question.resolve(folder=folder, local=local)
    assert (resolved.job.global_batch, resolved.batch_reason) == (256, "advised for 1 T tokens")
    of_a_step = question.replace(question="changes").resolve(folder=folder, local=local)
    assert (of_a_step.job.global_batch, of_a_step.batch_reason) == (8, "")


def test_all_interfaces_compare_machines_with_the_batch_of_the_largest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a run on a range of GPUs with that of the last number, unless its tokens advise a larger one."""
    folder, local = ServedFolder(Path()), Path("none")
    quick: dict[str, Any] = {"where": "tp=1 pp=1 cp=1 ac=none order=default", "seq": 64}
    words = ["--where", quick["where"], "--seq", "64", "--json"]
    for machines, counts, tokens, batch in (
        (["h100:6", "a100:8"], None, 1e5, 8),
        (["h100:16"], "8-32", 1e5, 32),
        (["h100:6", "a100:8"], None, 1e6, 32),
    ):
        asked = ff.compare_machines("nano", machines, gpu_counts=counts, tokens=tokens, **quick)
        options = [*(["--gpu-counts", counts] if counts else []), "--tokens", str(tokens)]
        assert run(monkeypatch, "search", "nano", *machines, *options, *words) == 0
        printed = json.loads(capsys.readouterr().out)
        assert [(offer.layout, offer.mfu) for offer in asked.offers] == [
            (offer["layout"], offer["mfu"]) for offer in printed["offers"]
        ]
        question = SearchQuestion(
            model="nano", machine=machines[0], machines=tuple(machines[1:]), gpu_counts=counts, tokens=tokens, **quick
        )
        assert question.resolve(folder=folder, local=local).job.global_batch == batch


@pytest.mark.parametrize(
    ("machines", "deadline", "counts", "tried"),
    [
        (["h100"], "30d", None, "1-16384"),
        (["h100", "p5.48xlarge"], "30d", None, "1-16384"),
        (["h100", "a100:64"], "30d", None, None),
        (["h100"], "30d", "64-512", "64-512"),
        (["h100"], None, None, None),
    ],
)
def test_a_deadline_tries_many_numbers_of_gpus_of_machines_without_one(
    machines: list[str], deadline: str | None, counts: str | None, tried: str | None
) -> None:
    assert choose_gpu_counts(counts, deadline, machines) == tried
    question = SearchQuestion(
        model="nano",
        machine=machines[0],
        machines=tuple(machines[1:]),
        gpu_counts=counts,
        deadline=deadline,
        tokens=1e6 if deadline else None,
    )
    assert question.tried_gpu_counts == tried
    batch = question.resolve(folder=ServedFolder(Path()), local=Path("none")).job.global_batch
    assert batch == {"1-16384": 8, "64-512": 512}.get(tried or "", 64 if "a100:64" in machines else 8)


def test_pages_choose_the_batch_of_their_layouts_and_say_it_in_their_links() -> None:
    folder, local = ServedFolder(Path()), Path("none")
    ask = AskQuestion(model="nano", machine="h100:8", layout="dp8 mbs4")
    assert ask.resolve(folder=folder, local=local).job.global_batch == 32
    assert AskQuestion(model="nano", machine="h100:16").resolve(folder=folder, local=local).job.global_batch == 16
    compared = CompareQuestion(model="nano", machine="h100:6", machines=("h100:8",), layout=("dp6 mbs1", "dp6 mbs2"))
    urls = [*compared.cases(folder=folder, local=local).values()]
    assert [re.findall(r"gbs=(\d+)", url) for url in urls] == [["12"]] * 4
    stated = compared.replace(gbs=96)
    assert all("gbs=96" in url for url in stated.cases(folder=folder, local=local).values())


def test_a_config_keeps_its_batch(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"global_batch": 16, "sequence": 64}))
    assert ff.predict("nano", "h100:64", "dp16 tp2 pp2", job=str(path)).job["global_batch"] == 16
