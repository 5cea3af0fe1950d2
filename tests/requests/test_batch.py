"""The global batch of a question that names none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.requests.batch import fill_batch
from fivefold.update import Ramp


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


def test_a_config_keeps_its_batch(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"global_batch": 16, "sequence": 64}))
    assert ff.predict("nano", "h100:64", "dp16 tp2 pp2", job=str(path)).job["global_batch"] == 16
