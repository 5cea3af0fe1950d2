"""Moments of one and two bytes: every element from a list of all values, updates against torch's, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.trainer.optimizers.low_precision_moments import ScaledFormat
from fivefold.trainer.supported import check_supported
from fivefold.update import LearningRate, Optimizer
from tests.selection import mark_share
from tests.trainer.optimizers.test_adamw8bit import MODEL
from tests.trainer.optimizers.test_optimizers import RATE, STEPS, combine_ranks, run_steps

Fork = Callable[..., list[Any]]
RECIPES = ("fp8-nanotron", "fp8-lm", "fp8-deepseek")
NORMS = ("norm", "bias")


def task(name: str) -> Job:
    rate = LearningRate(kind="constant", peak=RATE)
    return Job(sequence=8, global_batch=12, precision=get_recipe(name), learning_rate=rate, steps=STEPS, emulate=True)


def values(dtype: torch.dtype) -> Tensor:
    """All that are finite, ascending."""
    bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int64)
    view = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype).double()
    return view[view.isfinite()].unique()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16], ids=str)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("columns", mark_share(3, [300, 100, 256]))
def test_an_element_becomes_the_nearest_value_of_its_block(dtype: torch.dtype, signed: bool, columns: int) -> None:
    rows = torch.randn(4, columns, generator=torch.Generator().manual_seed(columns)) ** 5
    rows[1] *= 1e-12
    rows[2] = 0.0
    rows = rows if signed else rows.abs()
    form = ScaledFormat(dtype, signed)
    codes, scales = torch.zeros(4, columns, dtype=form.dtype), torch.zeros(4, -(-columns // 256))
    form.write(rows.clone(), codes, scales)
    every = values(dtype)
    every = every if signed else every[every > 0]
    for row, cells in enumerate(rows):
        for block, part in enumerate(cells.split(256)):
            top = part.abs().max()
            assert scales[row, block] == top / torch.finfo(dtype).max
            if not top:
                continue
            view = codes[row, 256 * block : 256 * block + len(part)].view(dtype).double()
            ratio = (part / scales[row, block]).double()
            best = (every - ratio[:, None]).abs().amin(1)
            torch.testing.assert_close((view - ratio).abs(), best, rtol=0, atol=1e-6 * float(every.max()))
            assert signed or bool((view > 0).all())
    read = form.read(codes, scales)
    assert torch.equal(read[2], torch.zeros(columns))
    torch.testing.assert_close(read, rows, rtol=0.13, atol=float(scales.max()) * float(every[every > 0].min()))


@pytest.mark.parametrize(
    ("name", "bound"), mark_share(3, [("fp8-lm", 0.04), ("fp8-nanotron", 0.12), ("fp8-deepseek", 0.01)])
)
def test_updates_are_adamws_but_for_what_moments_and_masters_lose(forked: Fork, name: str, bound: float) -> None:
    """Four steps with given gradients, against the same in fp32; norms and small matrices have fp32 moments."""
    ((before, after),) = forked(1, run_steps, MODEL, Layout.parse("mbs1"), task(name))
    ((_, exact),) = forked(1, run_steps, MODEL, Layout.parse("mbs1"), task("fp32").replace(emulate=False))
    ours, wide, start = combine_ranks([after]), combine_ranks([exact]), combine_ranks([before])
    names = [item for item in wide if item.endswith(".weight/weight") and "norm" not in item]
    errors = [float((ours[n].float() - wide[n]).norm() / (wide[n] - start[n].float()).norm()) for n in names]
    assert 1e-4 < max(errors) < bound
    scales = {
        item.rpartition("/")[2] for item in ours if item.startswith("blocks.0.mlp.up.weight/") and "scale" in item
    }
    moments = ("exp_avg_scale", "exp_avg_sq_scale")
    assert scales == {moment for moment, scaled in zip(moments, get_recipe(name).scaled_moments, strict=True) if scaled}
    assert "blocks.0.norm1.weight/exp_avg_scale" not in ours


@pytest.mark.parametrize("name", mark_share(3, RECIPES))
def test_moments_go_from_layout_to_layout_to_the_bit(forked: Fork, tmp_path: Path, name: str) -> None:
    left: dict[str, Tensor] | None = None
    for number, text in enumerate(["dp3 zero3 mbs1", "tp2 mbs1"]):
        layout = Layout.parse(text)
        ranks = forked(layout.world, run_steps, MODEL, layout, task(name), number, tmp_path, 1)
        result = combine_ranks([before for before, _ in ranks])
        if left is not None:
            assert [item for item in result if not torch.equal(result[item], left[item])] == []
        left = combine_ranks([after for _, after in ranks])


@pytest.mark.parametrize("kind", ["muon", "sgd"])
def test_other_optimizers_are_one_line_errors(kind: Any) -> None:
    job = task("fp8-lm").replace(optimizer=Optimizer(kind=kind))
    with pytest.raises(
        UserError, match=rf"'fp8-lm': its moments of 1 \+ 2 bytes are AdamW's, and {kind} keeps fp32; use"
    ):
        check_supported(Layout.parse("mbs1"), job, model=MODEL)
