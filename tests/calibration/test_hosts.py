"""Two hosts that are two processes here, each told that it is alone on its own."""

from __future__ import annotations

import json
import os
from multiprocessing import get_context
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from fivefold.calibration.hosts import calibrate_hosts, fit_host_link
from fivefold.calibration.points import AttentionPointShape, Points
from fivefold.layout.mesh import RankGroup
from fivefold.machine.catalog import resolve
from fivefold.machine.spec import CollectivePoint, Machine
from fivefold.machine.toml import write
from fivefold.planner.time.network import Network
from fivefold.trainer.process import Process
from fivefold.units import KIB, MIB

SMALL = Points(
    dtypes=("fp32",),
    matmuls=((64, 64, 64),),
    attentions=(AttentionPointShape(sequences=1, tokens=64, heads=2, head_dim=32),),
    kernel_bytes=(64 * KIB,),
    collective_bytes=(KIB, MIB),
    rounds=1,
    budget_seconds=1,
    step_seconds=1.0,
    seconds_per_point=0.005,
)


def calibrate_here(rank: int, folder: Path, known: dict[str, str]) -> None:
    """Calibrate as host ``rank``; the first one writes what was measured."""
    os.chdir(folder)
    os.environ.update(known | {"RANK": str(rank)})
    machine = calibrate_hosts(Process.from_environment(os.environ), points=SMALL)
    assert (machine is None) == (rank != 0)
    if machine is not None:
        write(machine, Path("hosts.toml"))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("hosts")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    known = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [get_context("fork").Process(target=calibrate_here, args=(rank, folder, known)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=100)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return resolve(str(folder / "hosts.toml"), local=Path("none"))


def test_calibrating_two_hosts_gives_links_within_and_between_hosts(hosts: Machine) -> None:
    assert (hosts.ranks, hosts.ranks_per_node, hosts.nodes, hosts.can_overlap) == (2, 1, 2, True)
    assert [(link.name, link.span) for link in hosts.links] == [("none", 1), ("between hosts", 2)]
    assert hosts.calibration is not None
    points = hosts.calibration.collectives
    assert sorted(json.dumps((point.collective, point.bytes)) for point in points) == sorted(
        json.dumps((name, size))
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
        for size in (KIB, MIB)
    )
    assert {(point.ranks, point.nodes) for point in points} == {(2, 2)}
    assert all(point.busy_seconds is not None and 0 < point.busy_seconds <= point.seconds for point in points)


def test_groups_between_hosts_have_their_own_curve(hosts: Machine) -> None:
    assert hosts.calibration is not None
    network = Network(hosts)
    for point in hosts.calibration.collectives:
        assert network.seconds(point.collective, point.bytes, RankGroup(2, 1)) == pytest.approx(point.seconds)
        assert network.busy_seconds(point.collective, point.bytes, RankGroup(2, 1)) == pytest.approx(point.busy_seconds)


def test_more_hosts_have_the_same_chips_and_link(hosts: Machine, tmp_path: Path) -> None:
    write(hosts, tmp_path / "hosts.toml")
    sixteen = resolve(f"{tmp_path}/hosts.toml:16", local=Path("none"))
    assert (sixteen.nodes, sixteen.chip, sixteen.links[1].span) == (16, hosts.chip, 16)
    assert sixteen.links[1].bandwidth == hosts.links[1].bandwidth


def test_the_link_between_hosts_is_fitted_to_its_message_times() -> None:
    points = [
        CollectivePoint(collective="p2p", ranks=2, nodes=2, bytes=size, seconds=1e-4 + size / 12.5e6, busy_seconds=1e-5)
        for size in (2**10, 2**14, 2**18, 2**22)
    ]
    link = fit_host_link(points, span=2, date="2026-01-01")
    assert (link.latency_seconds, link.bandwidth) == (pytest.approx(1e-4), pytest.approx(12.5e6))
