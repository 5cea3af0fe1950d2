"""Every optimizer that a job can name has a record of its costs, and the record agrees with itself."""

from __future__ import annotations

from typing import get_args

import pytest

from fivefold.job import Job
from fivefold.model.catalog import named
from fivefold.model.weights import weights
from fivefold.planner.counts.optimizers import OPTIMIZERS
from fivefold.update import Optimizer

KINDS = get_args(Optimizer.model_fields["kind"].annotation)


def test_every_kind_of_the_job_has_costs() -> None:
    assert set(OPTIMIZERS) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_moves_the_states_of_a_large_matrix(kind: str) -> None:
    """A hidden matrix that no rank shards: what an update reads and writes are its states, but for scales and means."""
    matrix = next(weight for weight in weights(named("llama3-8b")) if weight.is_hidden)
    job = Job(optimizer=Optimizer(kind=kind))  # type: ignore[arg-type]
    cost = OPTIMIZERS[kind]
    states = cost.state_bytes([matrix], shards=1, quantised=frozenset({matrix.name}), job=job) / matrix.numel
    assert states == pytest.approx(cost.moved_bytes(job), abs=0.04)


def test_sgd_without_momentum_has_no_state_anywhere() -> None:
    job = Job(optimizer=Optimizer(kind="sgd", momentum=0.0))
    matrix = next(weight for weight in weights(named("llama3-8b")) if weight.is_hidden)
    cost = OPTIMIZERS["sgd"]
    assert cost.state_bytes([matrix], shards=1, quantised=frozenset(), job=job) == 0
    assert cost.moved_bytes(job) == 0
