"""States of recipes with weights, masters, sums and moments of one and two bytes: a real run against the planner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.model.float8.cast import cast_per_matrix
from tests.processes import run_forked
from tests.selection import mark_share

DENSE = Model(name="wide", layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn=160, vocab=96, qkv_bias=True)
SPARSE = build_model("qwen3-30b-a3b").replace(
    name="sparse", layers=2, width=64, heads=4, kv_heads=2, head_dim=16, vocab=96
)


def states(model: Model, layout: Layout, job: Job) -> tuple[tuple[int, int, int, int], bool]:
    """Bytes of weights, gradients and moments after a step, and of a matrix; whether it is its master's cast."""
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    engine = Engine(built, model=model, layout=layout, job=job)
    tokens = torch.arange(layout.mbs * (job.sequence + 1)).view(1, layout.mbs, -1) % model.vocab
    micro_batches = layout.micro_batches(job)
    engine.step(tokens.expand(micro_batches, -1, -1))
    kept = [unit.gradients for unit in built.units]
    gradients = sum((item._sums if item.keeps_full_gradients else item.reduced).nbytes for item in kept)  # type: ignore[union-attr]
    matrix = built.module.get_parameter("blocks.0.attention.out.weight")
    result = (
        sum(tensor.untyped_storage().nbytes() for tensor in built.weights()),
        gradients,
        sum(tensor.nbytes for tensor in built.moments()),
        matrix.element_size(),
    )
    engine.zero_grad()  # weights have changed
    unit = next(item for item in built.units if any("blocks.0.attention.out.weight" in s.name for s in item.shards))
    unit.gather()
    if layout.shards > 1 or matrix.itemsize > 1:
        return result, True
    (shard,) = (item for item in unit.shards if item.name == "blocks.0.attention.out.weight")
    cast = cast_per_matrix(shard.weight.detach().bfloat16())
    same = torch.equal(cast.data.view(torch.uint8), matrix.detach().view(torch.uint8))
    return result, same and torch.equal(cast.scale, matrix.scale)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "model", "text"),
    mark_share(
        5,
        [
            ("fp8-nanotron", DENSE, "mbs1"),
            ("fp8-nanotron", SPARSE, "dp2 zero2 mbs1"),
            ("fp8-lm", DENSE, "dp2 tp2 zero1 mbs1"),
            ("fp8-lm", DENSE, "dp2 zero3 mbs1"),
            ("fp8-deepseek", SPARSE, "dp2 ep2 zero1 mbs1"),
        ],
    ),
)
def test_an_fp8_run_holds_the_planned_bytes(name: str, model: Model, text: str) -> None:
    layout = Layout.parse(text)
    job = Job(sequence=16, global_batch=4, precision=get_recipe(name), emulate=True)
    ranks = run_forked(layout.world, states, model, layout, job)
    machine = resolve(f"h100:{layout.world}", local=Path("/nowhere"))
    (plan,) = Planner(model=model, machine=machine, job=job).step(layout).memory.stages
    for (parameters, gradients, optimizer, width), same in ranks:
        assert (parameters, optimizer) == (plan.parameters_bytes, plan.optimizer_bytes)
        assert gradients == plan.gradients_bytes
        assert width == get_recipe(name).weights_bytes == 1
        assert same
