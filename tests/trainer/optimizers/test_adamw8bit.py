"""AdamW with moments of 8 bits: its codes against the published table, its runs against fp32, its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint.checkpoint import find_latest, load
from fivefold.trainer.engine import Engine
from fivefold.trainer.optimizers import fp32_update
from fivefold.trainer.optimizers.adamw8bit import Codebook
from fivefold.update import LearningRate, Optimizer
from tests.trainer.optimizers.test_optimizers import combine_ranks, job, run_steps

Fork = Callable[..., list[Any]]
CPU = torch.device("cpu")
# matrices above and below 4096 elements; rows of one block, of several, and of a short one
MODEL = Model(name="wide", layers=2, width=264, heads=4, kv_heads=2, head_dim=128, ffn=512, vocab=83, qkv_bias=True)
EXPERTS = MODEL.replace(name="experts", moe=MoE(experts=2, topk=1, ffn=512, dense_layers=1))


def table(*, signed: bool) -> list[float]:
    """The published one: bits after the sign are zeros, a one, and a fraction, of which the middles are taken; 0, 1."""
    values = [1.0, 0.0]
    for fraction_bits in range(7):
        bounds = np.linspace(0.1, 1, 2 ** (fraction_bits + (not signed)) + 1)
        middles = 10.0 ** (fraction_bits - 6) * (bounds[:-1] + bounds[1:]) / 2
        values += [*middles, *(-middles if signed else ())]
    return sorted(values)


def quantize(rows: Tensor, *, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and what they say, element by element."""
    values = torch.tensor(table(signed=signed)[0 if signed else 1 :])  # v has no 0
    blocks = -(-rows.shape[1] // 256)
    codes, scales, said = torch.zeros_like(rows), torch.zeros(len(rows), blocks), torch.zeros_like(rows)
    for row, cells in enumerate(rows):
        for block, part in enumerate(cells.split(256)):
            scales[row, block] = part.abs().max()
            for place, cell in enumerate(part / scales[row, block].clamp(min=1e-37), start=256 * block):
                codes[row, place] = (values - cell).abs().argmin()
                said[row, place] = values[int(codes[row, place])] * scales[row, block]
    return codes, scales, said


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("columns", [100, 256, 600])
def test_codes_are_those_of_the_published_table(signed: bool, columns: int) -> None:
    rows = torch.randn(4, columns, generator=torch.Generator().manual_seed(columns)) ** 5
    rows[1] *= 1e-12
    rows[2] = 0.0
    rows = rows if signed else rows.abs()
    expected_codes, expected_scales, expected = quantize(rows, signed=signed)
    result = Codebook.build(signed=signed, device=CPU)
    codes, scales = torch.zeros(4, columns, dtype=torch.uint8), torch.zeros(4, -(-columns // 256))
    result.write(rows.clone(), codes, scales)
    assert torch.equal(scales, expected_scales)
    assert (codes - expected_codes).abs().max() <= 1  # of two neighbours as near
    torch.testing.assert_close(result.read(codes, scales), expected, rtol=0.2, atol=1e-6 * float(rows.abs().max()))
    assert (codes != expected_codes).sum() <= 2
    assert len(result.values) == (256 if signed else 255)
    assert torch.equal(result.read(codes, scales)[2], torch.zeros(columns))
    again, rescaled = torch.zeros_like(codes), torch.zeros_like(scales)
    result.write(result.read(codes, scales), again, rescaled)
    if not signed:  # the largest of a block is kept as it is; of -max the code says 0.993 max
        assert torch.equal(again, codes)
        assert torch.equal(rescaled, scales)


def losses(kind: Any, precision: str, steps: int) -> tuple[list[float], int]:
    """A run on the same few sentences, and bytes of moments."""
    task = Job(
        sequence=16,
        global_batch=8,
        precision=get_recipe(precision),
        steps=steps,
        optimizer=Optimizer(kind=kind),
        learning_rate=LearningRate(kind="constant", peak=3e-3),
    )
    layout = Layout.parse("mbs8")
    built = build(model=MODEL, layout=layout, job=task, device=CPU)
    engine, results = Engine(built, model=MODEL, layout=layout, job=task), []
    for step in range(steps):
        chance = torch.Generator().manual_seed(step % 8)
        tokens = torch.randint(0, 83, (8, 1), generator=chance) + torch.arange(17) * torch.tensor([[1 + step % 3]])
        results.append(engine.step((tokens % 83)[None]).loss)
        engine.zero_grad()
    return results, sum(tensor.nbytes for tensor in built.moments())


@pytest.mark.long
def test_8_bit_moments_train_as_fp32_moments(forked: Fork) -> None:
    """Means of the last losses 1.837 and 1.857; in fp32 1.789 and 1.802."""
    ((narrow, small),) = forked(1, losses, "adamw8bit", "bf16-pure", 40)
    ((plain, large),) = forked(1, losses, "adamw", "bf16-pure", 40)
    assert plain[-1] < plain[0] / 2
    assert sum(narrow[-8:]) == pytest.approx(sum(plain[-8:]), rel=0.05)
    assert narrow[:2] == pytest.approx(plain[:2], rel=1e-3)
    assert small / large == pytest.approx(1 / 4 + 1 / 256, rel=0.05)


def test_updates_of_8_bit_moments_do_not_depend_on_the_block_size(
    monkeypatch: pytest.MonkeyPatch, forked: Fork
) -> None:
    model = MODEL.replace(layers=1)
    ((_, whole),) = forked(1, run_steps, model, Layout.parse("mbs1"), job("adamw8bit"), 0, None, 2)
    monkeypatch.setattr(fp32_update, "CONVERTED_ELEMENTS", 5000)
    ((_, pieces),) = forked(1, run_steps, model, Layout.parse("mbs1"), job("adamw8bit"), 0, None, 2)
    for (name, *_, a), (_, *_, b) in zip(whole, pieces, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.long  # test_low_precision_moments.py has the same in fp8
def test_codes_go_from_layout_to_layout_to_the_bit(forked: Fork, tmp_path: Path) -> None:
    """Rows of 264 elements are never split by tp, those of 512 into full blocks; ranks go on as one would."""
    left: dict[str, Tensor] | None = None
    for number, text in enumerate(["dp3 zero3 mbs1", "dp2 tp2 etp2 ep2 zero1 mbs1"]):
        layout, task = Layout.parse(text), job("adamw8bit")
        ranks = forked(layout.world, run_steps, EXPERTS, layout, task, number, tmp_path / "changing", 1)
        (alone,) = forked(1, run_steps, EXPERTS, Layout.parse("mbs4"), task, number, tmp_path / "alone", 1)
        result = combine_ranks([before for before, _ in ranks])
        if left is not None:
            assert result.keys() == left.keys()
            assert [name for name in result if not torch.equal(result[name], left[name])] == []
        left = combine_ranks([after for _, after in ranks])
        expected, before = combine_ranks([alone[1]]), combine_ranks([alone[0]])
        assert left["blocks.1.moe.experts.down/exp_avg_scale"].shape == (2, 264, 2)
        assert "blocks.1.moe.router.weight/exp_avg_scale" not in left  # 528 elements
        for name in (name for name in expected if name.endswith("/weight")):
            change = (expected[name] - before[name]).norm()
            assert (left[name] - expected[name]).norm() <= 1e-3 * change, name
        codes = [name for name in expected if name.endswith(("exp_avg", "exp_avg_sq"))]
        apart = sum(float((left[name] != expected[name]).sum()) for name in codes)
        assert apart <= 1e-3 * sum(expected[name].numel() for name in codes)


def resume(folder: Path) -> str:
    narrow, layout = MODEL.replace(ffn=384), Layout.parse("tp2 mbs1")
    built = build(model=narrow, layout=layout, job=job("adamw8bit"), device=CPU)
    try:
        path = find_latest(folder)
        assert path is not None
        load(path, built=built, model=narrow, job=job("adamw8bit"))
    except UserError as error:
        return str(error)
    return ""


def test_split_quantization_blocks_are_rejected(forked: Fork, tmp_path: Path) -> None:
    forked(1, run_steps, MODEL.replace(ffn=384), Layout.parse("mbs1"), job("adamw8bit"), 0, tmp_path)
    assert (
        forked(2, resume, tmp_path)
        == [
            "adamw8bit: under tp1 rows of blocks.0.mlp.down.weight had 384 elements, here 192, and blocks of 256 do "
            "not fit both; resume with tp1 or start a new run"
        ]
        * 2
    )
