"""The machine of a run against the computer it is started on; of the latter every kind is drawn here."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.machine.launch import divide_over_hosts, start_commands
from fivefold.machine.spec import Machine
from fivefold.machine.toml import write
from fivefold.requests.playbook import _start_lines
from fivefold.trainer.host import Host, check_host, check_memory
from fivefold.units import GIB
from tests.trainer.test_faults import MACHINE

LAPTOP = Host(cores=2, memory_bytes=24 * GIB)
EIGHT = Host(cores=64, memory_bytes=2048 * GIB, gpus=8, gpu="NVIDIA H100 80GB HBM3", gpu_memory_bytes=79 * GIB)
RUN = Path("run.toml")


def machine(named: str, tmp_path: Path) -> Machine:
    write(MACHINE, tmp_path / "local.toml")
    return resolve(named, local=tmp_path / "local.toml")


def check(host: Host, named: str, layout: str, tmp_path: Path, *, started: int = 0) -> str:
    return check_host(
        host, machine=machine(named, tmp_path), named=named, layout=Layout.parse(layout), file=RUN, started=started
    )


@pytest.mark.parametrize(
    ("host", "named", "layout", "started"),
    [
        (LAPTOP, "local", "dp1", 0),
        (LAPTOP, "local:8", "dp8", 0),  # processes share the cores
        (EIGHT, "h100:8", "dp8", 0),
        (EIGHT, "h100:64", "dp4", 0),  # of a larger machine only this is used
        (EIGHT, "h100:64", "dp8 tp8", 8),  # under torchrun
    ],
)
def test_a_host_with_enough_gpus_and_memory_is_accepted(
    host: Host, named: str, layout: str, started: int, tmp_path: Path
) -> None:
    assert check(host, named, layout, tmp_path, started=started) == ""


TORCHRUN = (
    "torchrun --nnodes {} --nproc-per-node {} --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
    "-m fivefold train run.toml"
)


@pytest.mark.parametrize(
    ("host", "named", "layout", "started", "line"),
    [
        (
            LAPTOP, "h100:64", "dp8 tp8", 0,
            "machine 'h100:64': layout 'dp8 tp8 zero0 mbs1' has 64 ranks, each on a GPU of its own, but this host has "
            f"no GPU (2 cores, 24.00 GiB); start `{TORCHRUN.format(8, 8)}` on each of 8 hosts, or this with --slurm on "
            "a cluster, or try it here: --machine local:2 --layout auto",
        ),
        (
            LAPTOP, "h100:1", "dp1", 0,
            "machine 'h100:1': layout 'dp1 zero0 mbs1' has 1 rank, on a GPU, but this host has no GPU "
            "(2 cores, 24.00 GiB); start it on a host of 1 GPU, or try it here: --machine local:1 --layout auto",
        ),
        (EIGHT, "h100:64", "dp16", 0, "has 16 ranks, each on a GPU of its own, but this host has 8 GPUs (NVIDIA H100"),
        (EIGHT, "h100:64", "dp12", 0, TORCHRUN.format(2, 6)),
        (LAPTOP, "h100:64", "dp64", 8, "has 64 ranks, of which 8 were started here, but this host has no GPU"),
        (EIGHT, "local:16", "dp16", 0, "has 16 ranks, each on a GPU of its own, but this host has 8 GPUs"),
        (EIGHT, "h200:8", "dp8", 0, "h200 has 139.80 GiB, but this host has 8 GPUs (NVIDIA H100 80GB HBM3, 79.00 GiB)"),
    ],
)  # fmt: skip
def test_a_host_with_too_little_memory_is_rejected(
    host: Host, named: str, layout: str, started: int, line: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        check(host, named, layout, tmp_path, started=started)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_hosts_of_a_calibrated_machine_are_checked(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text("")
    hosts = MACHINE.replace(ranks=4)
    told = {"machine": hosts, "named": "hosts.toml", "file": RUN}
    with pytest.raises(
        UserError, match=r"has 4 ranks on 2 hosts, and this would start all of them here; start `torchr"
    ):
        check_host(LAPTOP, layout=Layout.parse("dp4"), **told)
    assert check_host(LAPTOP, layout=Layout.parse("dp4"), started=2, **told) == ""
    assert check_host(LAPTOP, layout=Layout.parse("dp2"), **told) == ""


def test_a_host_with_another_chip_gets_a_remark(tmp_path: Path) -> None:
    line = "this host has 8 GPUs (NVIDIA H100 80GB HBM3, 79.00 GiB), not a100: what is predicted is of the latter"
    assert check(EIGHT, "a100:8", "dp8", tmp_path) == line


def test_memory_of_all_processes_of_a_host_is_checked() -> None:
    check_memory(LAPTOP, peak_bytes=3 * GIB, ranks=8, named="local:8")
    line = r"machine 'local:9': 9 ranks of up to 3.00 GiB need 27.00 GiB, but this host has 24.00 GiB; shard more"
    with pytest.raises(UserError, match=line):
        check_memory(LAPTOP, peak_bytes=3 * GIB, ranks=9, named="local:9")
    check_memory(EIGHT, peak_bytes=70 * GIB, ranks=2**10, named="h100:1024")  # GPUs have a memory of their own


def test_a_plan_ends_with_the_commands_that_start_it(tmp_path: Path) -> None:
    big, one = machine("h100:64", tmp_path), machine("h100:8", tmp_path)
    assert start_commands(RUN, world=64, machine=big) == (TORCHRUN.format(8, 8), "fivefold train run.toml --slurm")
    assert start_commands(RUN, world=8, machine=one) == ("fivefold train run.toml",)
    assert _start_lines(RUN, big, world=64) == (
        f"{TORCHRUN.format(8, 8)}   # on each of 8 hosts of 8 h100",
        "fivefold train run.toml --slurm   # or as a Slurm job",
    )
    assert _start_lines(RUN, machine("local:2", tmp_path), world=2) == ("fivefold train run.toml",)
    assert [divide_over_hosts(world, 8) for world in (4, 8, 12, 64, 7)] == [(1, 4), (1, 8), (2, 6), (8, 8), (1, 7)]
