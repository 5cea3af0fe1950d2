"""The batch ramp as arithmetic, and what no group of weights can mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.update import Optimizer, Ramp


def sizes(job: Job, steps: int) -> list[int]:
    """Return the first ``count`` steps."""
    results: list[int] = []
    for _ in range(steps):
        results.append(job.batch(sum(results)))
    return results


def test_a_batch_ramp_grows_by_steps() -> None:
    ramped = Job(global_batch=8, ramp=Ramp(first=2, step=2, every=3))
    assert sizes(ramped, 11) == [2, 2, 2, 4, 4, 4, 6, 6, 6, 8, 8]
    assert sizes(Job(global_batch=8), 2) == [8, 8]


def test_a_batch_ramp_over_samples_equals_megatrons() -> None:
    """--rampup-batch-size 16 16 5859375: 95 growths to 1536, one for each 61 677.6 sequences."""
    ramp = Ramp(first=16, step=16, samples=5_859_375)
    taken = (0, 61_677, 61_678, 123_355, 123_356, 5_859_374, 5_859_375)
    assert [ramp.size(item, full_batch=1536) for item in taken] == [16, 16, 32, 32, 48, 1520, 1536]


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3000), st.booleans())
def test_a_batch_ramp_grows_to_the_full_batch(first: int, step: int, growths: int, long: int, by_steps: bool) -> None:
    full_batch = first + growths * step
    ramp = Ramp(first=first, step=step, **{"every" if by_steps else "samples": long})
    results = [ramp.size(taken, full_batch=full_batch) for taken in (*range(2 * long), 10**9)]
    assert results == sorted(results)
    assert (results[0], results[-1]) == (first, full_batch)
    assert {(size - first) % step for size in results} == {0}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"ramp": {"first": 2, "step": 2}}, r"run: ramp: give either every .* or samples"),
        ({"ramp": {"first": 2, "step": 2, "every": 1, "samples": 9}}, "give either every"),
        (
            {"optimizer": {"groups": [{"of": "head"}, {"of": "head", "rate": 2}]}},
            "2 groups are of head; put their settings into one",
        ),
        ({"optimizer": {"groups": [{"of": "heads"}]}}, r"optimizer.groups\[0\].of must be 'embeddings', 'head'"),
        ({"optimizer": {"undecayed": ["head"]}}, r"unknown key 'optimizer.undecayed'"),
    ],
)
def test_invalid_values_of_ramps_and_groups_are_errors(values: dict[str, object], line: str) -> None:
    with pytest.raises(UserError, match=line):
        Job.read(values, origin="run")


def test_parameter_groups_state_their_rate_and_weight_decay() -> None:
    usual = Optimizer(weight_decay=0.2)
    assert [usual.rates(part) for part in ("vectors", "head", None)] == [(1, 0), (1, 0.2), (1, 0.2)]
    job = Job.read(
        {"optimizer": {"groups": [{"of": "vectors", "rate": 0.5}, {"of": "head", "weight_decay": 0}]}}, origin="run"
    )
    assert [job.optimizer.rates(part) for part in ("vectors", "head", "router")] == [(0.5, 0), (1, 0), (1, 0.1)]
