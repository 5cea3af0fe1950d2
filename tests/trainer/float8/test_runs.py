"""Training in eight bits: it learns as bf16 does, and a layout does not change it by more than its casts do."""

from __future__ import annotations

import pytest
import torch

from fivefold.errors import UserError
from fivefold.job import Job, LearningRate, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.trainer.model.precision import check_chip
from tests.agree.parity.cases import MODELS, job_for
from tests.agree.parity.rank import Told, train_rank
from tests.processes import run_forked
from tests.selection import mark_share

NAMES = ("fp8", "fp8-rowwise", "fp8-rowwise-gw", "fp8-tiles", "mxfp8", "fp8-nanotron")
STEPS = 3


def run(model: Model, layout: Layout, job: Job, *, steps: int = STEPS) -> Told:
    told: Told = run_forked(layout.world, train_rank, model, layout, job, None, steps)[0]
    return told


@pytest.mark.parametrize(
    ("model", "text", "name", "bound"),
    mark_share(
        14,
        [
            # What is cast is the same: sums of fp32 in another order.
            ("dense", "dp2 zero3 mbs1", "fp8-rowwise", 2e-6),
            ("dense", "pp2 zb1p mbs1", "fp8", 0.0),
            ("moe", "dp2 zero1 mbs1", "fp8-tiles", 2e-6),
            ("dense", "ac=full mbs1", "fp8-rowwise-gw", 0.0),
            ("dense", "dp2 zero3 mbs1", "mxfp8", 2e-6),
            ("moe", "dp2 tp2 zero1 mbs1", "tf32", 1e-5),
            ("moe", "dp2 zero1 mbs1", "nvfp4", 2e-6),
            ("dense", "dp2 zero3 mbs1", "fp8-nanotron", 2e-6),
            ("dense", "pp2 zb1p mbs1", "fp8-lm", 0.0),
            ("moe", "dp2 zero1 mbs1", "fp8-deepseek", 2e-6),
            # Inputs of row layers are cut, and with them what shares a scale; so are the rows that an expert gets.
            ("dense", "dp2 tp2 zero1 mbs1", "fp8", 2e-3),
            ("mla", "tp2 mbs1 ac=full", "fp8-rowwise-gw", 2e-3),
            ("moe", "dp2 ep2 zero2 mbs1", "fp8-rowwise", 1e-3),
            ("dense", "tp2 mbs1", "mxfp8", 2e-3),
        ],
    ),
)
def test_fp8_training_under_a_layout_differs_only_by_its_casts(model: str, text: str, name: str, bound: float) -> None:
    """Losses of three steps against one process; from those of bf16 they differ by up to 1e-3."""
    layout = Layout.parse(text)
    job = job_for(layout).replace(precision=get_recipe(name), emulate=True)
    few = MODELS[model].replace(layers=3)
    ours, alone = run(few, layout, job), run(few, Layout(), job)
    assert max(abs(a - b) for a, b in zip(ours.losses, alone.losses, strict=True)) <= bound


@pytest.mark.long  # products are compared with those of torch, and runs with one process
@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("dense", NAMES[::6]),
        pytest.param("moe", ("fp8-tiles",), marks=pytest.mark.long),
        pytest.param("dense", NAMES, marks=pytest.mark.long),
    ],
)
def test_fp8_losses_fall_as_in_bf16(model: str, names: tuple[str, ...]) -> None:
    """In 16 steps by 1.7 nats; every recipe ends within 0.05 of bf16."""
    steps, layout = 16, Layout(mbs=8)
    rate = LearningRate(kind="constant", peak=3e-3)
    job = Job(sequence=24, global_batch=8, precision=get_recipe("bf16"), steps=steps, learning_rate=rate)
    few = MODELS[model].replace(layers=3)
    wide = run(few, layout, job, steps=steps).losses
    assert wide[0] - wide[-1] > 1.7
    for name in names:
        narrow = run(few, layout, job.replace(precision=get_recipe(name), emulate=True), steps=steps).losses
        assert narrow != wide
        assert sum(narrow[-4:]) / 4 == pytest.approx(sum(wide[-4:]) / 4, abs=0.05)


@pytest.mark.parametrize(
    ("name", "model", "capability", "pattern"),
    [
        ("fp8", "nano", None, r"'fp8': a CPU has no fp8 units; set job.emulate = true"),
        ("fp8-rowwise", "nano", (8, 0), r"A100 has no fp8 units \(compute capability 8.0, not 8.9\); set job.emulate"),
        (
            "fp8-tiles",
            "nano",
            (9, 0),
            r"'fp8-tiles': torch multiplies tiles from CUDA 12.9 on, .*; set job.emulate",
        ),
        ("nvfp4", "nano", (10, 0), r"'nvfp4': the trainer has no kernel for blocks; set job.emulate = true"),
        (
            "fp8",
            "qwen3-30b-a3b",
            (9, 0),
            r"'fp8': .* no kernel for experts but that of fp8-rowwise-gw; set job",
        ),
        ("fp8-rowwise", "nano", (9, 0), ""),
    ],
)
def test_fp8_on_a_chip_without_fp8_units_is_an_error_before_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, model: str, capability: tuple[int, int] | None, pattern: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    job = Job(precision=get_recipe(name))
    check_chip(job.replace(emulate=True), model=build_model(model))
    if not pattern:
        check_chip(job, model=build_model(model))
        return
    with pytest.raises(UserError, match=pattern) as error:
        check_chip(job, model=build_model(model))
    assert "\n" not in str(error.value)
