from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.planner.time.units import Units
from fivefold.planner.time.update_time import estimate_elementwise_seconds, launch_seconds, update_seconds
from fivefold.stack.catalog import build_stack

MODEL, MACHINE = build_model("llama3-8b"), resolve("h100:8", local=Path("none"))
LAUNCH = MACHINE.chip.launch_seconds


def units_of(layout: Layout, stack: str = "fsdp2", **facts) -> Units:
    job = Job(stack=build_stack(stack).replace(**facts), global_batch=layout.dp * layout.mbs * layout.pp)
    return Units(Counts(MODEL, job), MACHINE)


@pytest.mark.parametrize("text", ["dp8 zero3", "dp4 pp2 zero0 1f1b"])
def test_the_host_launches_its_kernels_for_each_weight_of_the_rank(text):
    layout = Layout.parse(text)
    units, last = units_of(layout, update_kernels=10), layout.pp - 1
    # q, k, v, output, gate, up, down and two norms of each of 32 blocks; table; norm and head
    weights = 9 * 32 // layout.pp + 2 + (layout.pp == 1)
    assert launch_seconds(units, layout, (last,)) == pytest.approx(weights * 10 * LAUNCH)
    assert launch_seconds(units_of(layout), layout, (last,)) == 0


def test_a_rank_holds_parts_of_few_weights_of_a_flat_tensor():
    layout = Layout.parse("dp8 zero3")
    weights = 32 * (1 + 8 / 8) + 1 + (1 + 1 / 8)
    assert launch_seconds(units_of(layout, update_kernels=12, flat_shards=True), layout, (0,)) == pytest.approx(
        weights * 12 * LAUNCH
    )
    replicas = Layout.parse("dp8 zero0")
    each, flat = (
        launch_seconds(units_of(replicas, update_kernels=12, flat_shards=is_flat), replicas, (0,))
        for is_flat in (False, True)
    )
    assert each == flat


def test_launches_and_kernels_of_an_update_run_at_the_same_time():
    layout = Layout.parse("dp8 zero3")
    for kernels in (1, 4, 40):
        units = units_of(layout, update_kernels=kernels)
        (rank,) = count_rank_memory(units.counts, layout)
        device, host = estimate_elementwise_seconds(units, layout, rank, (0,)), launch_seconds(units, layout, (0,))
        assert max(device, host) < update_seconds(units, layout, rank, (0,)) < device + host
