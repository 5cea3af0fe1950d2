"""Known answers of the numerics report: nothing lost in fp32, planted underflow and overflow found, rounding's size."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.diagnosis.numerics import COMPARED_ELEMENTS, ErrorStats, examine
from fivefold.job import Job, get_recipe
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights
from fivefold.rendering.numerics import describe_numerics, draw_error_map, render_page
from fivefold.results.numerics import Compared, Numerics
from fivefold.trainer.build import draw_initial_weight

SIZES = {"width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "vocab": 64}
DENSE = Model(name="dense", layers=2, **SIZES)
EXPERTS = Model(
    name="experts",
    layers=2,
    mla=MLA(q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8),
    moe=MoE(experts=4, topk=2, ffn=16, shared_experts=1, dense_layers=1),
    **SIZES | {"kv_heads": 4, "head_dim": 12},
)


@dataclass(frozen=True)
class Planted:
    """Drawn weights, some of them multiplied."""

    model: Model
    factors: dict[str, float]
    path: Path = Path("planted")

    def weights(self, *, dtype: torch.dtype) -> dict[str, Tensor]:
        drawn = {w.name: draw_initial_weight(w, model=self.model, seed=1).to(dtype) for w in list_weights(self.model)}
        assert not self.factors.keys() - drawn.keys()
        layers = [layer for layer in range(self.model.layers) if self.model.is_moe(layer)]
        result = {name: weight * self.factors.get(name, 1.0) for name, weight in drawn.items()}
        return result | {
            f"blocks.{layer}.moe.bias": torch.zeros(self.model.moe.experts) for layer in layers if self.model.moe
        }


def compare(model: Model, name: str, factors: dict[str, float] | None = None) -> Numerics:
    job = Job(sequence=32, global_batch=8, precision=get_recipe(name), emulate=True)
    tokens = np.random.default_rng(0).integers(0, model.vocab, (2, 33))
    source: Any = None if factors is None else Planted(model, factors)
    return examine(
        model=model,
        job=job,
        source=source,
        tokens=tokens,
        end=0,
        device=torch.device("cpu"),
        report=lambda what, done, of: None,
    )


def rows(found: Numerics, kind: str, name: str) -> dict[int | None, Compared]:
    return {row.layer: row for row in found.rows if (row.kind, row.name) == (kind, name)}


Fork = Callable[..., list[Any]]


def test_an_fp32_run_compared_with_fp32_has_no_errors(forked: Fork) -> None:
    (result,) = forked(1, compare, DENSE, "fp32")
    names = {(row.kind, row.name) for row in result.rows}
    assert {
        ("activation", "attention.core"),
        ("gradient", "mlp.act"),
        ("weight", "attention.q"),
        ("gradient", "head.out"),
        ("weight", "head.norm"),
        ("activation", "stream"),
    } <= names
    assert {row.error for row in result.rows} == {row.underflow for row in result.rows} == {0.0}
    assert min(row.cosine for row in result.rows) == pytest.approx(1, abs=1e-12)
    assert result.loss == result.reference_loss
    assert result.reference_loss == pytest.approx(4.16, abs=0.05)  # log 64
    assert all(row.largest > 0 for row in result.rows)
    assert len(rows(result, "weight", "attention.q")) == DENSE.layers
    assert sum(row.elements for row in result.rows if row.kind == "weight") == DENSE.parameters


def test_bf16_errors_are_those_of_eight_bits(forked: Fork) -> None:
    (result,) = forked(1, compare, DENSE, "bf16")
    first = rows(result, "activation", "embed")[None]
    # uniform over a step of 2^-7 of the power of two below: a relative rms of 2^-9 · sqrt(1/3) to twice that
    assert 2**-10 * 3**-0.5 < first.error < 2**-8 * 3**-0.5
    assert max(row.overflow for row in result.rows) == 0
    assert max(row.underflow for row in result.rows) < 0.01  # differences that are 0 by chance
    assert 1e-4 < max(row.error for row in result.rows if row.kind == "weight") < 0.05


def test_a_planted_difference_is_located(forked: Fork) -> None:
    small = {"blocks.1.attention.v.weight": 1e-9, "blocks.0.mlp.up.weight": 1.0}
    (result,) = forked(1, compare, DENSE, "fp16", small)
    core = rows(result, "activation", "attention.core")
    assert (core[0].underflow, core[1].underflow) == (0, 1)
    assert core[1].error == 1
    assert result.loss_scale == 2**16
    (result,) = forked(1, compare, DENSE, "fp16", {"blocks.0.mlp.up.weight": 1e7})
    assert rows(result, "activation", "mlp.gate_up")[0].overflow > 0
    assert "fp16 overflows in" in describe_numerics(result)
    assert "first in mlp.gate_up of layer 0" in describe_numerics(result)


def test_tokens_go_to_the_experts_that_fp32_chose(forked: Fork) -> None:
    assert EXPERTS.moe is not None
    many = EXPERTS.replace(moe=EXPERTS.moe.replace(experts=64, topk=8))
    (result,) = forked(1, compare, many, "fp8-tiles")
    assert result.rerouted is not None
    assert 0 < result.rerouted < 0.2  # of rows that are a few percent off
    assert 0 < rows(result, "activation", "moe.experts.down")[1].error < 0.2  # were they others, it would be above 1


@pytest.mark.parametrize("name", ["fp8", "fp8-rowwise", "fp8-tiles"])
def test_errors_of_fp8_operands_are_listed(forked: Fork, name: str) -> None:
    (result,) = forked(1, compare, EXPERTS, name)
    operands = [row for row in result.rows if row.kind == "operand"]
    assert {"attention.out x", "attention.out weight", "attention.out gradient", "moe.experts x"} <= {
        row.name for row in operands
    }
    for row in operands:  # e4m3 has three bits, e5m2 two: half a step is 2^-4 or 2^-3 of the power of two
        assert row.overflow == 0
        assert 2**-8 < row.error < (2**-3 if name == "fp8" else 2**-4), row


def test_error_statistics_equal_figures_by_hand() -> None:
    tally = ErrorStats()
    tally.add(torch.tensor([0.0, 2.0, 0.0, 8.0, torch.inf]), torch.tensor([0.5, 1.0, 0.0, 3.0, 9.0]), top=8, scale=2)
    row = tally.to_row(("gradient", 3, "mlp.act"))
    assert (row.elements, row.underflow, row.overflow, row.largest) == (5, 0.2, 0.4, 1.0)
    assert row.error == pytest.approx((0.25 / 1.25) ** 0.5)  # of 0, 1, 0 against 0.5, 1, 0
    assert row.cosine == pytest.approx(1 / 1.25**0.5)


class LargestDouble(TorchDispatchMode):
    """Records the elements of the largest fp64 tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float64:
                self.elements = max(self.elements, tensor.numel())
        return result


def test_a_large_tensor_is_compared_in_pieces() -> None:
    """The statistics are those of all elements at once, and no fp64 copy is larger than a piece."""
    draw = torch.Generator().manual_seed(0)
    wanted = torch.randn(3, COMPARED_ELEMENTS // 2 + 7, generator=draw)
    result = (wanted + 0.01 * torch.randn(wanted.shape, generator=draw)).to(torch.bfloat16)
    result[0, 0], result[1, 1], result[2, -1] = 0, torch.inf, 0
    tally = ErrorStats()
    with LargestDouble() as largest:
        tally.add(result, wanted, top=1e30)
    assert 0 < largest.elements <= COMPARED_ELEMENTS
    row = tally.to_row(("activation", None, "x"))
    a, b = result.double(), wanted.double()
    a[1, 1] = b[1, 1] = 0
    assert (row.elements, row.underflow * row.elements, row.overflow * row.elements) == (a.numel(), 2, 1)
    assert row.largest == float(a.abs().max())
    assert row.error == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-9)
    assert row.cosine == pytest.approx(float((a * b).sum() / a.norm() / b.norm()), rel=1e-9)


def test_result_reads_back_and_renders(forked: Fork) -> None:
    (result,) = forked(1, compare, DENSE, "bf16")
    console = Console(width=100, record=True, file=StringIO())
    console.print(render_page(result))
    text = console.export_text()
    assert "bf16: gradients of weights are within" in text
    assert "Gradients of those results" in text
    assert "attention.core" in text
    assert Numerics.model_validate(json.loads(result.model_dump_json())) == result
    pytest.importorskip("altair")
    spec = draw_error_map(result).to_dict()
    assert len(spec["vconcat"]) == 3
