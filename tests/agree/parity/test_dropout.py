"""Dropout draws the same masks under every layout, also where blocks run again; in evaluation it draws none."""

from __future__ import annotations

from typing import Literal, NamedTuple

import pytest
import torch

from fivefold.adapter import Adapter
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from tests.agree.parity.cases import DENSE, batch, job_for
from tests.agree.parity.compare import judge
from tests.agree.parity.rank import train_rank
from tests.processes import run_forked
from tests.selection import mark_share

MODEL = DENSE.replace(name="dropped", layers=4, dropout=0.2, norm="layernorm", mlp="plain", qkv_bias=True)


class Compared(NamedTuple):
    model: Model
    layout: Layout
    job: Job


@pytest.mark.parametrize(
    ("layout", "attention"),
    mark_share(
        7,
        [
            ("dp2 zero3 mbs2 ac=selective", "flash"),
            ("dp2 tp2 zero3 mbs2 ac=selective", "flash"),
            ("tp2 cp2 mbs1 cp=ulysses nosp ac=norm+act", "flash"),
            ("tp2 pp2 zb1p mbs2 ac=full", "unfused"),
            ("dp2 pp2 dualpipe", "unfused"),
            ("tp2 cp2 mbs2 ac=selective", "flash"),
            ("cp4 zero3 mbs1", "flash"),
        ],
    ),
)
def test_dropout_is_equal_under_every_layout(layout: str, attention: str) -> None:
    check_equal_dropout(MODEL, layout, attention=attention)


@pytest.mark.parametrize(
    ("rates", "layout", "attention"),
    mark_share(
        3,
        [
            ({"attention_dropout": 0.3, "embedding_dropout": 0.1}, "tp2 mbs1", "flash"),
            ({"dropout": 0.0, "attention_dropout": 0.3, "embedding_dropout": 0.1}, "tp2 cp2 mbs1", "flash"),
            ({"attention_dropout": 0.0, "embedding_dropout": 0.0}, "tp2 pp2 zbv v2 mbs2 ac=full", "unfused"),
        ],
    ),
)
def test_dropout_rates_differ_by_position_in_the_model(rates: dict[str, float], layout: str, attention: str) -> None:
    check_equal_dropout(MODEL.replace(**rates), layout, attention=attention)


@pytest.mark.long  # as test_adapters_of_latents_drop_the_same_inputs…
@pytest.mark.parametrize(
    ("layout", "base"),
    mark_share(
        6,
        [
            ("cp2 mbs2 ac=full", None),
            ("tp2 cp2 mbs2 ac=full", None),
            ("dp2 tp2 zero3 mbs1 ac=norm+act", None),
            ("tp2 cp2 mbs2 cp=ulysses nosp", None),
            ("cp2 pp2 zero1 mbs1", "nf4"),
            ("dp2 pp2 zero3 mbs2 ac=full", "nf4"),
        ],
    ),
)
def test_dropout_of_adapter_inputs_does_not_depend_on_the_layout(layout: str, base: Literal["nf4"] | None) -> None:
    adapter = Adapter(rank=3, dropout=0.2, base=base)
    check_equal_dropout(DENSE.replace(layers=2, width=64, ffn=64), layout, attention="flash", adapter=adapter)


def check_equal_dropout(model: Model, layout: str, *, attention: str, adapter: Adapter | None = None) -> None:
    """Whether ``layout`` equals one process."""
    result = Layout.parse(layout)
    job = job_for(result).replace(attention=attention, adapter=adapter)
    case = Compared(model, result, job)
    verdict = judge(case, run_forked(result.world, train_rank, *case, seconds=240.0))
    assert verdict.is_equal, verdict
    assert verdict.said == (), verdict.said
    assert verdict.flops[0] == verdict.flops[1]


def evaluate(model: Model) -> list[float]:
    """Losses of an evaluation, and of two steps on the same tokens."""
    job = job_for(Layout())
    engine = Engine(
        build(model=model, layout=Layout(), job=job, device=torch.device("cpu")), model=model, layout=Layout(), job=job
    )
    tokens = batch(job, step=0)[:, None]
    plain = float(engine.evaluate(tokens)) / tokens[..., 1:].numel()
    losses = [plain, float(engine.backward(tokens))]
    engine.zero_grad()
    engine.step_number += 1
    return [*losses, float(engine.backward(tokens))]


def test_evaluation_applies_no_dropout() -> None:
    ((dropped, first, second),) = run_forked(1, evaluate, MODEL, seconds=240.0)
    ((plain, *_),) = run_forked(1, evaluate, MODEL.replace(dropout=0.0), seconds=240.0)
    assert dropped == pytest.approx(plain, rel=1e-6)
    assert len({round(loss, 6) for loss in (dropped, first, second)}) == 3  # another mask at each step
