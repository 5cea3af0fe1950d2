"""Steps over links between hosts without GPUs: time on the wire overlaps with compute, time on a core does not."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from fivefold.job import Job
from fivefold.layout.schedule.order import Task
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.machine.spec import Calibration, CollectivePoint, KernelPoint, Machine, MatmulPoint
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.planner.time.action_time import estimate_action_costs
from fivefold.planner.time.stage_time import estimate_stage_seconds

MODEL = Model(name="small", layers=4, width=256, heads=8, kv_heads=4, head_dim=32, ffn=768, vocab=1024)
JOB = Job(sequence=256, global_batch=8)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")


def hosts(rate: float, *, busy: float = 1e-12, nodes: int = 2) -> Machine:
    """Two ranks on ``hosts`` hosts: a message takes its bytes over ``rate``, and a core ``busy`` seconds per byte."""
    points = tuple(
        CollectivePoint.model_validate(
            {
                "collective": name,
                "ranks": 2,
                "nodes": nodes,
                "bytes": size,
                "seconds": size / rate,
                "busy_seconds": busy * size,
            }
        )
        for name in COLLECTIVES
        for size in (2**10, 2**24)
    )
    calibration = Calibration(
        date="2026-01-01",
        torch="2",
        cores=1,
        collectives=points,
        matmuls=(MatmulPoint(dtype="bf16", ranks=1, m=64, n=64, k=64, seconds=5e-6),),
        kernels=(KernelPoint(kernel="copy", dtype="fp32", ranks=1, moved_bytes=2**20, seconds=1e-4),),
    )
    known = resolve("h100:2", local=Path("none"))
    wire = known.links[0].replace(span=2, bandwidth=rate)
    links = (wire.replace(span=1), wire) if nodes == 2 else (wire,)
    return known.replace(backend="gloo", ranks=2, ranks_per_node=2 // nodes, links=links, calibration=calibration)


def seconds(layout: str, machine: Machine, job: Job = JOB) -> float:
    return Planner(model=MODEL, machine=machine, job=job).estimate(Layout.parse(layout)).step_time.seconds


@pytest.mark.parametrize("layout", ["pp2 mbs1", "pp2 gpipe mbs1"])
def test_a_send_between_stages_overlaps_within_a_host_too(layout: str) -> None:
    """gloo's isend returns when the socket has the message: the sender waits for what keeps its core busy alone."""
    free = seconds(layout, hosts(1e15))
    apart, within = (seconds(layout, hosts(1e9, nodes=nodes)) - free for nodes in (2, 1))
    assert within == pytest.approx(apart, rel=1e-6)
    for nodes in (1, 2):
        assert within < 0.7 * (seconds(layout, hosts(1e9, busy=1e-9, nodes=nodes)) - free)


@pytest.mark.parametrize("layout", ["dp2 mbs4", "dp2 zero2 mbs4", "dp2 zero3 mbs4", "cp2 mbs8"])
def test_messages_overlap_between_hosts_and_not_within_one(layout: str) -> None:
    free = seconds(layout, hosts(1e15))
    (travels,), (works,) = ([seconds(layout, hosts(1e9, nodes=nodes)) - free] for nodes in (2, 1))
    assert 0 < travels < 0.7 * works
    # what keeps the core busy all the time overlaps with nothing
    assert seconds(layout, hosts(1e9, busy=1e-9)) - free == pytest.approx(works, rel=0.2)


def test_without_overlap_data_parallelism_waits_for_every_message() -> None:
    free, job = seconds("dp2 zero3 mbs4", hosts(1e15)), JOB.replace(overlap=())
    waits, within = (seconds("dp2 zero3 mbs4", hosts(1e9, nodes=n), job) - free for n in (2, 1))
    assert waits == pytest.approx(within, rel=1e-6)


def test_one_reduction_is_in_flight_at_a_time() -> None:
    """Each is hidden by the backward of the unit before it alone: worked out from the units' own seconds."""
    planner = Planner(model=MODEL, machine=hosts(3e8), job=JOB)
    layout = Layout.parse("dp2 mbs4")
    runs = [run for run, times in planner.counts.stage_work(layout)[0] for _ in range(times)]
    reduces = [planner.units.gather_reduce(layout, run.name).reduce for run in runs]
    backwards = [unit.backward + unit.weight for unit in (planner.units.unit(layout, run) for run in runs)]
    shown = reduces[0] + sum(max(0.0, late - room) for room, late in zip(backwards, reduces[1:], strict=False))
    assert planner.estimate(layout).step_time.exposed["dp"] == pytest.approx(shown, rel=1e-3)


@pytest.mark.parametrize(
    "layout", ["dp2 zero0 mbs4", "dp2 zero3 mbs4", "tp2 mbs8", "cp2 mbs8", "pp2 mbs1", "pp2 v2 interleaved mbs1"]
)
def test_a_slower_link_is_never_quicker(layout: str) -> None:
    taken = [seconds(layout, hosts(rate)) for rate in (1e10, 1e9, 3e8, 1e8, 1e7)]
    assert all(quick <= slow for quick, slow in pairwise(taken))
    # a link slow enough is all there is
    slow, slower = (seconds(layout, hosts(rate)) for rate in (1e5, 5e4))
    assert slower == pytest.approx(2 * slow, rel=0.02)


def test_a_pair_runs_one_after_the_other_on_a_cpu() -> None:
    """An FB of DualPipeV, whose halves no stream runs side by side, however much its messages could hide."""
    planner = Planner(model=MODEL, machine=hosts(1e9), job=JOB)
    tasks = Task("F", 1, -1), Task("BW", 2, -1), Task("FB", 1, 2)
    costs = estimate_action_costs(estimate_stage_seconds(planner.units, Layout.parse("pp2 v2 dualpipev mbs1")), tasks)
    forward, backward, both = (costs[task].seconds for task in tasks)
    apart = forward + backward
    assert both == pytest.approx(apart, rel=1e-9)
