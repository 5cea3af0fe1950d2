"""The global batch of a question that names none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fivefold as ff
from fivefold.job import Job
from fivefold.layout.batch import choose_gpu_counts, fill_batch
from fivefold.layout.spec import Layout
from fivefold.update import Ramp
from fivefold.web.folder import ServedFolder
from fivefold.web.question import AskQuestion, CompareQuestion, SearchQuestion
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


def test_all_interfaces_compare_machines_with_the_batch_of_the_largest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a run on a range of GPUs with that of the last number."""
    folder, local = ServedFolder(Path()), Path("none")
    quick: dict[str, Any] = {"where": "tp=1 pp=1 cp=1 ac=none order=default", "tokens": 1e9, "seq": 64}
    words = ["--where", quick["where"], "--tokens", "1e9", "--seq", "64", "--json"]
    for machines, counts, batch in ((["h100:6", "a100:8"], None, 8), (["h100:16"], "8-32", 32)):
        asked = ff.compare_machines("nano", machines, gpu_counts=counts, **quick)
        assert run(monkeypatch, "search", "nano", *machines, *(["--gpu-counts", counts] if counts else []), *words) == 0
        printed = json.loads(capsys.readouterr().out)
        assert [(offer.layout, offer.mfu) for offer in asked.offers] == [
            (offer["layout"], offer["mfu"]) for offer in printed["offers"]
        ]
        question = SearchQuestion(
            model="nano", machine=machines[0], machines=tuple(machines[1:]), gpu_counts=counts, **quick
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
        model="nano", machine=machines[0], machines=tuple(machines[1:]), gpu_counts=counts, deadline=deadline
    )
    assert question.tried_gpu_counts == tried
    batch = question.resolve(folder=ServedFolder(Path()), local=Path("none")).job.global_batch
    assert batch == {"1-16384": 4096, "64-512": 512}.get(tried or "", 64 if "a100:64" in machines else 8)


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
