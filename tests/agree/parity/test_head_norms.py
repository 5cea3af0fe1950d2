"""Norms over all heads, by a weight of each head, of values and before last matrices, cut by tensor parallelism."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.attention import Sliding
from fivefold.model.spec import Model
from tests.agree.parity.cases import DENSE, job_for
from tests.agree.parity.compare import judge
from tests.agree.parity.rank import train_rank
from tests.processes import run_forked
from tests.selection import mark_share

CENTRED = DENSE.replace(name="centred", qk_norm="full", norm="layernorm", qkv_bias=True)
PLUS = DENSE.replace(name="plus", qk_norm="heads", norm="layernorm", norm_bias=False, block="parallel_shared")

SUB = DENSE.replace(name="sub-norms", sub_norm=True, activation="relu2")
TIED = DENSE.replace(
    name="tied values", qk_norm="head", value_norm=True, tied_values=True, window=7, window_pattern=(True, False),
    rope_theta_sliding=50.0, sliding=Sliding(head_dim=6, tied_values=False),
)  # fmt: skip


class Compared(NamedTuple):
    model: Model
    layout: Layout
    job: Job


@pytest.mark.parametrize(
    ("model", "layout"),
    mark_share(
        9,
        [
            (CENTRED.replace(kv_heads=1, norm_plus_one=True), "tp2 mbs1 nosp"),  # both ranks hold the key head
            (CENTRED.replace(kv_heads=2, norm_plus_one=True), "tp4 mbs1 nosp"),
            (CENTRED, "tp2 cp2 zero1 mbs2 ac=norm+act"),
            (PLUS, "tp2 pp2 zb1p mbs1 ac=full"),
            (PLUS.replace(kv_heads=2, norm="rmsnorm"), "tp4 zero0 mbs1"),
            (SUB, "tp2 cp2 zero1 mbs1 ac=mlp"),
            (SUB.replace(norm="layernorm", mlp="plain"), "tp4 mbs2 nosp"),
            (TIED, "tp2 dp2 zero3 mbs1 ac=norm"),
            (TIED, "tp2 pp2 zb1p mbs1"),
        ],
    ),
    ids=str,
)
def test_sharded_norms_equal_those_of_one_process(model: Model, layout: str) -> None:
    result = Layout.parse(layout)
    case = Compared(model, result, job_for(result))
    verdict = judge(case, run_forked(result.world, train_rank, *case, seconds=240.0))
    assert verdict.is_equal, verdict
    assert verdict.said == (), verdict.said
    assert verdict.flops[0] == verdict.flops[1]
