"""Seconds of a step besides work and messages: their share of the step, and the waits of ranks that drift apart."""

import random
from math import sqrt
from statistics import fmean

import numpy as np
import pytest

from fivefold.job import Job
from fivefold.layout.remarks import list_remarks
from fivefold.layout.spec import Layout
from fivefold.machine.spec import StepOverhead
from fivefold.model.catalog import resolve as model_of
from fivefold.planner.counts.traffic import list_messages
from fivefold.planner.counts.update import list_stages
from fivefold.planner.predict import get_planner
from fivefold.planner.time.compute import expect_largest_deviate
from fivefold.planner.time.step_overhead import find_overhead, sum_deviations
from tests.agree.time import cases
from tests.calibration.test_step_factors import drawn_factors, with_curves

OVERHEAD = StepOverhead(
    ranks=2,
    host_share=0.08,
    forward_gap_seconds=2e-5,
    backward_gap_seconds=3e-5,
    start_seconds=4e-3,
    drift_seconds=0.02,
)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_is_longer_by_the_clock_of_its_work_and_by_the_waits(seed):
    """Of drawn runs: all parts add up, messages are as without, and a rank alone waits for no other.

    The host between operations is a part of the work, and not added to it.
    """
    factors = drawn_factors(random.Random(seed), 2)
    plain, slower = with_curves(steps=factors), with_curves(steps=factors, overheads=(OVERHEAD,))
    for case in cases(seed=seed, groups=4, each=4, world=2):
        before, after = (get_planner(case.model, known, case.job).estimate(case.layout).step_time
                         for known in (plain, slower))  # fmt: skip
        assert after.exposed == before.exposed
        ratio = 1 + OVERHEAD.host_share
        assert after.compute + after.host == pytest.approx(ratio * before.compute)
        assert after.optimizer == pytest.approx(ratio * before.optimizer)
        assert after.bubble == pytest.approx(ratio * before.bubble + after.waits)
        assert 0 < after.host < after.compute
        assert (after.waits > 0) == (case.layout.world > 1)
        parts = [after.compute, *after.exposed.values(), after.bubble, after.optimizer, after.host]
        assert after.seconds == pytest.approx(sum(parts))
        assert sum(after.split.values()) == pytest.approx(after.seconds)
        step = get_planner(case.model, slower, case.job).step(case.layout)
        assert sum(step.time.parts.values()) == pytest.approx(step.time.step_seconds)
        hosts = [seconds for name, seconds in step.time.parts.items() if name.startswith("host in ")]
        assert len(hosts) == 2
        assert step.time.host_seconds == after.host == pytest.approx(sum(hosts))
        assert before.host == 0
        assert 0 < step.time.parts["gradients.sum"] < step.time.compute_seconds


@pytest.mark.parametrize("layout", ["dp2 zero1 mbs1", "dp4 zero3 mbs1", "tp2 dp2 zero1 mbs1", "dp8 zero0 mbs1"])
def test_waits_are_those_of_ranks_that_drift_apart_as_in_a_random_walk(layout):
    """Ranks that work between messages at random speed, played message by message, wait as long as the formula says."""
    shards, job = Layout.parse(layout), Job(sequence=128, global_batch=16, precision="fp32")
    counts = get_planner(model_of("tiny"), with_curves(), job).counts
    messages = [message for message in list_messages(counts, shards) if message.ranks > 1]
    groups = [message.ranks for message in messages for _ in range(message.times)]
    work, drift = 2.0, 0.01
    chance, waited = np.random.default_rng(0), list[float]()
    for _ in range(400):
        behind = [chance.normal(0.0, drift * sqrt(work / len(groups)), size=ranks) for ranks in groups]
        waited.append(sum(float(arrivals.max() - arrivals.mean()) for arrivals in behind))
    deviations = sum_deviations(counts, shards, (0,), work_seconds=work)
    assert drift * deviations.drift == pytest.approx(fmean(waited), rel=0.05)
    assert deviations.start == expect_largest_deviate(shards.world)


def test_the_rank_of_every_stage_waits_for_its_own_messages():
    layout, job = Layout.parse("pp2 mbs1"), Job(sequence=128, global_batch=8, precision="fp32")
    counts = get_planner(model_of("tiny"), with_curves(), job).counts
    for chunks in list_stages(layout):
        number = sum(message.times for message in list_messages(counts, layout, chunks=chunks) if message.ranks > 1)
        expected = number * expect_largest_deviate(2) * sqrt(1.0 / number)
        assert sum_deviations(counts, layout, chunks, work_seconds=1.0).drift == pytest.approx(expected)


def test_the_overhead_is_that_of_as_many_processes_or_of_the_nearest_number():
    one, two = (OVERHEAD.replace(ranks=ranks) for ranks in (1, 2))
    calibration = with_curves(overheads=(two, one)).calibration
    assert [find_overhead(calibration, ranks=ranks) for ranks in (1, 2, 64)] == [one, two, two]
    assert find_overhead(with_curves().calibration, ranks=2) is None
    assert find_overhead(None, ranks=2) is None


def test_a_calibration_without_overheads_is_named_in_its_predictions():
    """A machine file of an older version is read, and says what is missing; a GPU has no such part."""
    known = with_curves(steps=drawn_factors(random.Random(0), 2))
    layout, model = Layout.parse("dp2 zero1 mbs1"), model_of("tiny")

    def count_lines(machine):
        return sum("by an older Fivefold" in line for line in list_remarks(model, machine, Job(), layout))

    assert count_lines(known) == 1
    assert count_lines(known.replace(backend="nccl")) == 0
    assert count_lines(known.replace(calibration=known.calibration.replace(overheads=(OVERHEAD,)))) == 0
    assert get_planner(model, known, Job()).estimate(layout).step_time.host == 0
