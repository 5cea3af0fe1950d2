"""Every optimizer that a job can name has a record of its costs, and the record agrees with itself."""

from __future__ import annotations

from importlib.util import find_spec
from typing import get_args

import pytest

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity.two_dimensional import explain_unsupported_2d
from fivefold.model.catalog import build_model
from fivefold.model.weights import list_weights
from fivefold.optimizers import KINDS
from fivefold.optimizers.cost import find_cost
from fivefold.planner.counts.memory.states import updates_flat_tensor
from fivefold.update import Optimizer

PLANNED_ONLY = {"adamw4bit"}


def test_every_optimizer_states_its_facts_and_is_trained() -> None:
    assert set(KINDS) == set(get_args(Optimizer.model_fields["kind"].annotation))
    for kind in KINDS:
        cost = find_cost(kind)
        facts = (cost.elementwise, cost.fp32_states, cost.counts_2d_tp, cost.updates_flat_buffer)
        assert all(isinstance(fact, bool) for fact in facts), kind
        assert cost.title
        assert (find_spec(f"fivefold.trainer.optimizers.{kind}") is None) == (kind in PLANNED_ONLY), kind
    assert len({find_cost(kind).title for kind in KINDS}) == len(KINDS)


def test_an_unknown_optimizer_is_an_error() -> None:
    with pytest.raises(UserError, match=r"optimizer.kind must be 'adafactor', 'adamw', .* not 'lion'"):
        Job.read({"optimizer": {"kind": "lion"}}, origin="job")


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_moves_the_states_of_a_large_matrix(kind: str) -> None:
    """A hidden matrix that no rank shards: what an update reads and writes are its states, but for scales and means."""
    matrix = next(weight for weight in list_weights(build_model("llama3-8b")) if weight.is_hidden)
    job = Job(optimizer=Optimizer(kind=kind))
    cost = find_cost(kind)
    states = cost.state_bytes([matrix], shards=1, quantised=frozenset({matrix.name}), job=job) / matrix.numel
    assert states == pytest.approx(cost.moved_bytes(job), abs=0.04)


def test_sgd_without_momentum_has_no_state_anywhere() -> None:
    job = Job(optimizer=Optimizer(kind="sgd", momentum=0.0))
    matrix = next(weight for weight in list_weights(build_model("llama3-8b")) if weight.is_hidden)
    cost = find_cost("sgd")
    assert cost.state_bytes([matrix], shards=1, quantised=frozenset(), job=job) == 0
    assert cost.moved_bytes(job) == 0


def test_2d_tensor_parallelism_and_flat_buffers_follow_the_record_of_the_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two-dimensional tensor parallelism and DeepSpeed's flat buffer follow the record, not names."""
    model, layout = build_model("llama3-8b"), Layout.parse("dp2 tp2x2 zero1 mbs1")
    deepspeed = Job(stack={"name": "deepspeed"}, sequence=2048, global_batch=8)
    assert explain_unsupported_2d(layout, model=model, job=Job()) is None
    assert updates_flat_tensor(layout, deepspeed)
    monkeypatch.setattr(type(find_cost("adamw")), "counts_2d_tp", False)
    monkeypatch.setattr(type(find_cost("adamw")), "updates_flat_buffer", False)
    assert "optimizer adamw" in str(explain_unsupported_2d(layout, model=model, job=Job()))
    assert not updates_flat_tensor(layout, deepspeed)
