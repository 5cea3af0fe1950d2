"""Predicted rows against ``fivefold.predict`` and ``search``, by names as on the command line."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import fivefold
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.machine.catalog import resolve as find_machine
from fivefold.model.catalog import build_model
from fivefold.planner.search import search
from fivefold.results.sweep_row import SweepRow
from fivefold.step import Step
from fivefold.sweeps.journal import open_journal
from fivefold.sweeps.predict import Predictor, hash_setting
from fivefold.sweeps.spec import Sweep, SweepSetting
from fivefold.sweeps.sweep import SweepPlan, run

WIDE = Sweep.read(
    {
        "models": ["nano", "llama3-8b", "qwen3-30b-a3b"], "machines": ["h100", "mi300x"], "ranks": [4, 8, 16],
        "layouts": ["dp* tp{1,2} pp{1,2,2 zbv} zero{0,1,3} mbs{1,3}", "dp* ep{2,4} zero2"],
        "sequences": [512, 8192], "batches": [16, 64], "precisions": ["bf16", "fp8"],
        "recomputations": ["none", "full"], "stacks": ["fivefold", "megatron-core"],
    }, origin="test",
)  # fmt: skip


def plan_of(**values: Any) -> list[tuple[SweepSetting, list[str]]]:
    least = {"models": ["nano"], "machines": ["h100"], "layouts": ["dp*"]}
    return SweepPlan.from_sweep(Sweep.read(least | values, origin="test"), local=Path("nowhere")).parts


def predict_by_names(row: SweepRow) -> Step:
    return fivefold.predict(
        row.model,
        f"{row.machine}:{row.ranks}",
        row.layout,
        seq=row.sequence,
        gbs=row.batch,
        precision=row.precision,
        stack=row.stack,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* defers weight gradients:fivefold.errors.UsageWarning")
def test_rows_of_a_sweep_equal_predict() -> None:
    draw, predictor = random.Random(1), Predictor()
    pairs = [
        (setting, text) for setting, texts in SweepPlan.from_sweep(WIDE, local=Path("nowhere")).parts for text in texts
    ]
    counted = {"fits": 0, "memory": 0, "invalid": 0}
    for setting, text in draw.sample(pairs, 80):
        (row,) = predictor.rows(setting, text)
        counted[row.status] += 1
        if row.status == "invalid":
            with pytest.raises(UserError) as refused:
                predict_by_names(row.replace(layout=text))
            assert row.why == str(refused.value)
            assert row.step_seconds is None
            continue
        step = predict_by_names(row)
        assert (row.step_seconds, row.tokens_per_second_per_gpu) == (
            step.time.step_seconds,
            step.tokens_per_second_per_gpu,
        )
        assert (row.peak_bytes, row.status) == (step.memory.peak_bytes, "fits" if step.memory.fits else "memory")
        assert (row.mfu_causal, row.mfu_non_causal, row.hfu) == (step.mfu.causal, step.mfu.non_causal, step.hfu)
        assert row.layout == step.layout
        parts = (row.compute_seconds, row.bubble_seconds, row.exposed_seconds, row.optimizer_seconds)
        assert sum(part for part in parts if part) == pytest.approx(row.step_seconds, rel=1e-9)
        assert (row.why == "") == (row.status == "fits")
    assert min(counted.values()) >= 5, counted


@pytest.mark.slow
def test_the_best_k_are_those_of_search() -> None:
    ((setting, texts),) = plan_of(machines=["h100:2"], layouts=["best 3"], batches=[4], sequences=[128])
    rows = Predictor().rows(setting, texts[0])
    result = search(
        model=build_model("nano"),
        machine=find_machine("h100:2", local=Path("x")),
        job=Job(sequence=128, global_batch=4),
        top=3,
    )
    assert [(row.layout, row.step_seconds) for row in rows] == [
        (item.step.layout, item.step.time.step_seconds) for item in result.best
    ]
    ((setting, texts),) = plan_of(
        machines=["h100:2"], layouts=["best 1"], batches=[4], sequences=[128], recomputations=["full"]
    )
    assert [row.recomputation for row in Predictor().rows(setting, texts[0])] == ["full"]


@pytest.mark.slow
def test_setting_without_a_layout_is_a_row() -> None:
    ((setting, texts),) = plan_of(models=["tiny"], machines=["h100:2 memory=1MiB"], layouts=["best 2"], sequences=[128])
    (row,) = Predictor().rows(setting, texts[0])
    assert (row.status, row.layout) == ("memory", "best 2")
    assert row.why.startswith("no layout fits; the nearest, ")


def test_invalid_layouts_of_a_sweep_are_rows_with_their_error() -> None:
    rows = [
        row
        for setting, texts in plan_of(ranks=[8, 12], layouts=["dp* pp{1,2} zb1p"], sequences=[96], batch_tokens=[1024])
        for text in texts
        for row in Predictor().rows(setting, text)
    ]
    assert {row.status for row in rows} == {"invalid"}
    assert [row.layout for row in rows] == [
        "dp8 pp1 zb1p",
        "dp4 pp2 zero0 zb1p mbs1",
        "dp12 pp1 zb1p",
        "dp6 pp2 zero0 zb1p mbs1",
    ]
    assert all("1024 tokens" in row.why for row in rows)
    ((setting, texts),) = plan_of(layouts=["dp* pp1 zb1p"])
    (row,) = Predictor().rows(setting, texts[0])
    assert "zb1p v1 needs a pipeline" in row.why
    ((setting, texts),) = plan_of(layouts=["dp4 tp2x1", "dp* tp2x2 nosp"][1:])
    (row,) = Predictor().rows(setting, texts[0])
    assert "2D tensor parallelism is not supported" in row.why


def test_key_of_a_row_has_all_it_depends_on() -> None:
    ((setting, _),) = plan_of()
    chip = setting.machine.chip.replace(memory_bytes=2**33)
    other = setting._replace(machine=setting.machine.replace(chip=chip))
    assert hash_setting(setting) != hash_setting(other)
    assert hash_setting(setting, calibrated=False) == hash_setting(other, calibrated=False)
    ((longer, _),) = plan_of(sequences=[128])
    assert len({hash_setting(item, calibrated=False) for item in (setting, longer, setting)}) == 2


def test_a_row_fits_up_to_the_requested_risk(tmp_path: Path) -> None:
    """A row that a journal has kept answers for no other risk; a measurement does not depend on it."""
    tight = {"models": ["llama3-8b"], "machines": ["h100:8 memory=45GiB"], "layouts": ["dp8 zero3 mbs1"]}
    plan = SweepPlan.from_sweep(
        Sweep.read(tight | {"sequences": [4096], "batches": [64]}, origin="test"), local=Path("nowhere")
    )
    ((setting, _),) = plan.parts
    results = []
    with open_journal(tmp_path / "journal") as journal:
        for risk in (0.05, 0.5, 0.05):
            (row,) = run(plan, journal, trials=None, report=lambda *_: None, risk=risk)
            results.append((row.status, row.why))
    assert [status for status, _ in results] == ["memory", "fits", "memory"]
    assert "13 % risk of running out" in results[0][1]
    assert len({hash_setting(setting), hash_setting(setting, risk=0.05), hash_setting(setting, risk=0.5)}) == 3
