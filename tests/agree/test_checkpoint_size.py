"""The size of a checkpoint as it is planned and as the trainer makes it: equal to the byte, for every optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.planner.run_estimate import count_checkpoint_bytes
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint.checkpoint import collect_state_dict
from fivefold.update import Optimizer

MODEL = Model(name="odd", layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=640)
EXPERTS = MODEL.replace(name="experts", moe=MoE(experts=8, topk=2, ffn=48, shared_experts=1, dense_layers=1))
OPTIMIZERS = [
    *(Optimizer(kind=kind) for kind in ("adamw", "adamw8bit", "muon", "adafactor", "sgd")),
    Optimizer(kind="sgd", momentum=0),
]
JOBS = [
    Job(sequence=16, global_batch=4, precision=get_recipe(name), optimizer=optimizer)
    for optimizer in OPTIMIZERS
    for name in ("bf16", "bf16-pure")
]


def saved_bytes(model: Model) -> list[int]:
    """Return the bytes of the weights and optimizer states that a checkpoint of each job holds."""
    sizes = []
    for job in JOBS:
        built = build(model=model, layout=Layout(), job=job, device=torch.device("cpu"))
        state = {
            name: value
            for name, value in collect_state_dict(built).items()
            if name.startswith(("weights/", "moments/"))
        }
        tensors = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
        sizes.append(sum(tensor.nbytes for tensor in tensors))
    return sizes


@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_a_checkpoint_has_the_size_that_is_planned(forked: Callable[..., list[Any]], model: Model) -> None:
    (sizes,) = forked(1, saved_bytes, model)
    planned = [count_checkpoint_bytes(model, job) for job in JOBS]
    assert sizes == planned
    assert len(set(sizes)) > len(OPTIMIZERS)


@pytest.mark.parametrize("job", JOBS[:1])
def test_a_checkpoint_takes_about_twelve_bytes_per_parameter(job: Job) -> None:
    assert count_checkpoint_bytes(MODEL, job) == pytest.approx(12 * MODEL.parameters, rel=1e-3)
