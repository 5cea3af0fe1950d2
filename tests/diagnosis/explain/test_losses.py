"""Logs of losses: every format gives the same points; drawn faults are found where they are, and none elsewhere."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from fivefold.diagnosis.explain import explain as explain_files
from fivefold.diagnosis.explain.losses import LossPoint, explain, read
from fivefold.results.explanation import LossEvent

POINTS = [LossPoint(10 * n, round(9 - 0.5 * n, 3), round(1 + 0.1 * n, 3)) for n in range(1, 12)]
TEXTS = {
    "json lines": "\n".join(json.dumps({"step": s, "loss": x, "gradient_norm": g}) for s, x, g in POINTS),
    "trainer state": json.dumps({"best_metric": None, "log_history": [
        *({"step": s, "loss": x, "grad_norm": g} for s, x, g in POINTS), {"eval_loss": 3.0, "step": 99}]}),
    "csv": "step,time,train_loss,grad_norm\n" + "\n".join(f"{s},0.1,{x},{g}" for s, x, g in POINTS),
    "megatron": "\n".join(
        f" [2026-01-01] iteration {s:8d}/     500 | learning rate: 1.0E-04 | "
        f"lm loss: {x:.6E} | loss scale: 1.0 | grad norm: {g:.3f} | nan iterations: 0 |" for s, x, g in POINTS),
    "torchtitan": "\n".join(
        f"[titan] 2026-01-01 - root - INFO - \x1b[31mstep: {s:2}  \x1b[32mloss: {x:7.4f}  \x1b[38mgrad_norm: {g:.4f}  "
        f"\x1b[34mmemory: 47.65GiB(50.12%)" for s, x, g in POINTS),
    "nanogpt": "\n".join(f"iter {s}: loss {x:.4f}, time 120.12ms, grad_norm {g:.4f}" for s, x, g in POINTS),
    "nanotron": "\n".join(f"INFO iteration: {s} / 500 | consumed_tokens: 9.2K | lm_loss: {x} | grad_norm: {g} |"
                          for s, x, g in POINTS),
    "deepspeed": "\n".join(f"step={s}, skipped=0, loss={x}, grad_norm={g}" for s, x, g in POINTS),
}  # fmt: skip


@pytest.mark.parametrize("form", TEXTS)
def test_every_format_gives_the_same_points(form: str) -> None:
    assert read(TEXTS[form]) == POINTS


def test_hugging_face_log_lines_have_no_step() -> None:
    lines = "\n".join(f"{{'loss': {x}, 'grad_norm': {g}, 'learning_rate': 5e-05, 'epoch': 0.1}}" for _, x, g in POINTS)
    assert read(lines) == [point._replace(step=n) for n, point in enumerate(POINTS, start=1)]


def test_other_numbers_are_not_read_as_losses() -> None:
    assert read("loss scale: 65536\nwrote loss.png at step 3\nlossless codec 7\n") == []


def draw_losses(seed: int, count: int = 400) -> list[LossPoint]:
    """A run that falls as runs do."""
    draw = random.Random(seed)
    floor, rate, noise = draw.uniform(1, 3), draw.uniform(0.1, 0.4), draw.uniform(0.005, 0.03)
    return [
        LossPoint(n, floor + 8 * n**-rate + draw.gauss(0, noise), 1 + draw.gauss(0, 0.05)) for n in range(1, count + 1)
    ]


def events(points: list[LossPoint]) -> list[LossEvent]:
    result = explain(points, files=("x",))
    assert result is not None
    return list(result.losses)


@pytest.mark.parametrize("seed", range(20))
def test_a_falling_loss_has_no_finding(seed: int) -> None:
    assert [event for event in events(draw_losses(seed)) if event.kind != "plateau"] == []


@pytest.mark.parametrize("seed", range(20))
def test_random_loss_spikes_are_located(seed: int) -> None:
    points, draw = draw_losses(seed), random.Random(seed)
    at, length = draw.randint(150, 350), draw.randint(1, 6)
    for n in range(at, at + length):
        points[n] = points[n]._replace(loss=points[n].loss + draw.uniform(1, 5))
    points[at] = points[at]._replace(norm=40.0)
    (spike,) = [event for event in events(points) if event.kind != "plateau"]
    assert (spike.kind, spike.step, spike.last) == ("spike", points[at].step, points[at + length - 1].step)
    assert "gradient norm 40" in spike.line


@pytest.mark.parametrize("seed", range(10))
def test_a_loss_that_becomes_nan_is_located(seed: int) -> None:
    points = draw_losses(seed)
    at = random.Random(seed).randint(70, 390)
    broken = points[:at] + [point._replace(loss=math.nan) for point in points[at:]]
    (event,) = events(broken)
    assert (event.kind, event.step, event.last) == ("not a number", points[at].step, 400)
    assert ", to the end of the log" in event.line


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("slow", [False, True], ids=["at once", "slowly"])
def test_a_divergence_begins_at_the_lowest_loss(seed: int, slow: bool) -> None:
    points = draw_losses(seed)
    at = 250
    rise = 0.004 if slow else 0.5
    broken = points[:at] + [p._replace(loss=points[at].loss + rise * n) for n, p in enumerate(points[at:], start=1)]
    results = [event for event in events(broken) if event.kind == "divergence"]
    assert len(results) == 1
    assert abs(results[0].step - at) <= (100 if slow else 8)
    assert results[0].last == 400


@pytest.mark.parametrize("seed", range(10))
def test_a_plateau_begins_where_the_loss_stops_falling(seed: int) -> None:
    draw = random.Random(seed)
    points = [LossPoint(n, 2 + max(0, 200 - n) * 0.02 + draw.gauss(0, 0.01), 0) for n in range(1, 601)]
    (event,) = events(points)
    assert event.kind == "plateau"
    assert abs(event.step - 200) <= 64


def test_a_log_of_fivefold_with_evaluations_and_a_resume_is_read(tmp_path: Path) -> None:
    """Evaluations and events stand between the steps; it was resumed."""
    path = tmp_path / "log.jsonl"
    lines = [{"step": s, "loss": x, "gradient_norm": g} for s, x, g in draw_losses(1, 40)]
    lines[20:20] = [{"step": 20, "heldout_loss": 3.0}, {"step": 20, "event": "resumed"}]
    lines += [{"step": 30, "loss": 3.1, "gradient_norm": 1.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (result,) = explain_files([path])
    assert any("goes back 1 times, first from step 40 to 30" in line for line in result.findings)


def test_a_gradient_norm_that_ends_as_nan_is_located() -> None:
    """A short log of Hugging Face's whose loss is 0 then; one that was so once, as fp16's scale finds itself, falls."""
    line = "{{'loss': {}, 'grad_norm': {}, 'learning_rate': 2e-05, 'epoch': 0.01}}\n"
    short = "".join(line.format(*item) for item in ((2.1, 1.2), (2.0, 1.1), (1.9, 1.0), (0.0, "nan")))
    result = explain(read(short), files=("log",))
    assert result is not None
    assert result.verdict == "the gradient norm is not a number at step 4, 1 of 4 in all"
    long = line.format(9.0, "inf") + "".join(line.format(8.5 - 0.1 * n, 1.0) for n in range(30))
    result = explain(read(long), files=("log",))
    assert result is not None
    assert result.verdict.startswith("31 losses fall")
    assert any("1 of 31" in finding for finding in result.findings)
