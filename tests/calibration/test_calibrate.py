import math
import subprocess
import sys
from itertools import product

import pytest
import torch

from fivefold.calibration import calibrate, fit_line, fit_machine, worker
from fivefold.calibration.kernels import KERNELS
from fivefold.calibration.points import AttentionPointShape, Facts, Points, choose_default_points, list_matmul_shapes
from fivefold.calibration.worker import PROBE, Curves, WorkerContext
from fivefold.errors import RunFailure, UserError
from fivefold.machine import toml
from fivefold.machine.catalog import resolve
from fivefold.machine.spec import Calibration, KernelPoint, MatmulPoint
from fivefold.rendering import table
from fivefold.units import KIB, MIB

pytestmark = pytest.mark.processes

TINY = Points(
    dtypes=("fp32", "bf16"),
    matmuls=((64, 64, 64), (256, 256, 256)),
    attentions=(AttentionPointShape(sequences=2, tokens=64, heads=2, head_dim=32),),
    kernel_bytes=(64 * KIB,),
    collective_bytes=(KIB, 4 * MIB),
    rounds=2,
    budget_seconds=1,
    step_seconds=1.0,
    seconds_per_point=0.005,
)


@pytest.fixture(scope="module")
def measured():
    heard = []
    machine = calibrate(
        ranks=(2, 1), quick=True, points=TINY, in_steps=False, progress=lambda *progress: heard.append(progress)
    )
    return machine, heard


def test_every_point_is_measured_once_for_each_number_of_ranks(measured):
    calibration = measured[0].calibration
    assert len(calibration.matmuls) == 2 * 2 * 2
    assert len(calibration.attentions) == 2 * 2
    assert len(calibration.kernels) == 2 * 2 * len(KERNELS)
    assert len(calibration.collectives) == 5 * 2
    assert {point.ranks for point in calibration.matmuls} == {1, 2}
    assert {point.ranks for point in calibration.collectives} == {2}
    assert {point.bytes for point in calibration.collectives} == {KIB, 4 * MIB}


def test_larger_messages_and_matmuls_are_measured_to_take_longer(measured):
    calibration = measured[0].calibration
    for small, large in zip(calibration.collectives[::2], calibration.collectives[1::2], strict=True):
        assert small.collective == large.collective
        assert large.seconds > small.seconds  # 32 MiB against 1 KiB: the noise is not that large
    # Of one thread each: two threads on a busy computer wait for one another longer than a small product takes.
    alone = [point for point in calibration.matmuls if point.ranks == 2]
    for small, large in zip(alone[::2], alone[1::2], strict=True):
        assert large.seconds > small.seconds


def test_the_calibrated_machine_has_the_measured_peaks(measured):
    machine = measured[0]
    assert (machine.name, machine.ranks, machine.ranks_per_node, machine.backend) == ("local", 2, 2, "gloo")
    assert {"fp32", "bf16"} == set(machine.chip.peak_flops)
    best = max(
        2 * point.m * point.n * point.k / point.seconds
        for point in machine.calibration.matmuls
        if point.ranks == 2 and point.dtype == "fp32"
    )
    assert machine.chip.peak("fp32") == best
    assert machine.chip.memory_bandwidth > 1e8
    assert machine.link(2).bandwidth > 1e7


def test_written_calibration_reads_back_as_local(measured, tmp_path):
    path = tmp_path / "local.toml"
    toml.write(measured[0], path)
    assert resolve("local", local=path) == measured[0]
    assert resolve("local:1", local=path).chip.memory_bytes == 2 * measured[0].chip.memory_bytes


def test_progress_grows_to_its_total(measured):
    heard = measured[1]
    done = [step for _, step, _ in heard]
    assert done == sorted(done)
    assert {total for *_, total in heard} == {100}
    assert done[-1] >= 75  # all of the first round at least, also on two ranks
    assert heard[0][0] == "matmuls on 1 rank, per cent"


def test_an_error_in_a_calibration_worker_is_a_one_line_error():
    broken = TINY.replace(kernel_bytes=(2**60,), attentions=(), matmuls=())
    with pytest.raises(RunFailure, match=r"worker 0 of 1 ended with code 1: .*Error") as fault:
        calibrate(ranks=(1,), quick=True, points=broken)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("ranks", [(), (0, 1), (-1,)])
def test_invalid_numbers_of_ranks_are_errors(ranks):
    with pytest.raises(UserError, match="1 to 1024"):
        calibrate(ranks=ranks, quick=True)


@pytest.mark.parametrize(("probe_seconds", "kept"), [(1e-4, 3), (0.05, 2), (10.0, 1)])
def test_matmuls_that_would_take_long_are_not_measured(monkeypatch, probe_seconds, kept):
    """A CPU without instructions for bf16 multiplies a hundred times slower; PROBE itself is always measured."""

    def multiply(_context, shape, dtype):
        m, n, k = shape
        return MatmulPoint(dtype=dtype, ranks=1, m=m, n=n, k=k, seconds=probe_seconds * m * n * k / math.prod(PROBE))

    monkeypatch.setattr(worker, "time_matmul", multiply)
    context = WorkerContext(0, 1, torch.device("cpu"), 0.01)
    points = TINY.replace(dtypes=("bf16",), matmuls=(PROBE, (256, 256, 512), (1024, 1024, 1024)), attentions=())

    def list_jobs(context):
        return list(worker.list_kernel_jobs(context, points, worker.probe_products(context, points.dtypes)))

    products = [point for job in list_jobs(context)[: -len(KERNELS)] if (point := job())]
    assert len(products) == kept
    assert len(list_jobs(context._replace(device=torch.device("meta")))) == 3 + len(KERNELS)


@pytest.mark.parametrize(("slower", "shapes"), [(5.0, {(64, 256, 64), (128, 128, 128)}), (10.0, {(64, 256, 64)})])
def test_a_dtype_without_instructions_is_measured_at_few_shapes(monkeypatch, slower, shapes):
    def multiply(_context, shape, dtype):
        return MatmulPoint(
            dtype=dtype, ranks=1, m=shape[0], n=shape[1], k=shape[2], seconds=1e-4 * (slower if dtype == "bf16" else 1)
        )

    monkeypatch.setattr(worker, "time_matmul", multiply)
    context = WorkerContext(0, 1, torch.device("cpu"), 0.01)
    points = TINY.replace(matmuls=((64, 256, 64), (128, 128, 128)), attentions=(), kernel_bytes=())
    rates = worker.probe_products(context, points.dtypes)
    products = [job() for job in worker.list_kernel_jobs(context, points, rates)]
    assert {(p.m, p.n, p.k) for p in products if p.dtype == "fp32"} == {(64, 256, 64), (128, 128, 128)}
    assert {(p.m, p.n, p.k) for p in products if p.dtype == "bf16"} == shapes


def test_latency_and_bandwidth_are_fitted_to_message_times():
    sizes = [2**power for power in range(10, 26, 3)]
    latency, bandwidth = fit_line(sizes, [2e-5 + size / 3e9 for size in sizes])
    assert latency == pytest.approx(2e-5)
    assert bandwidth == pytest.approx(3e9)
    assert fit_line([1000, 2000], [1e-3, 3e-3]) == (0.0, pytest.approx(2000 / 3e-3))


@pytest.mark.parametrize(("backend", "each"), [("gloo", 8), ("nccl", 16)])
def test_ranks_share_the_memory_of_a_cpu_and_each_have_that_of_a_gpu(backend, each):
    calibration = Calibration.model_validate(
        {
            "date": "2026-01-01",
            "torch": "2.13.0",
            "cores": 2,
            "matmuls": [{"dtype": "fp32", "ranks": 2, "m": 10, "n": 10, "k": 5, "seconds": 1e-6}],
            "kernels": [{"kernel": "copy", "dtype": "fp32", "ranks": 2, "moved_bytes": 4000, "seconds": 2e-6}],
            "collectives": [
                {"collective": "p2p", "ranks": 2, "bytes": size, "seconds": 1e-5 + size / 1e9} for size in (10, 10**6)
            ],
        }
    )
    facts = Facts(device="here", backend=backend, memory_bytes=16, torch="2.13.0")
    machine = fit_machine(calibration, facts=facts, ranks=2)
    assert machine.chip.memory_bytes == each
    assert machine.chip.peak("fp32") == pytest.approx(1e9)
    assert machine.chip.memory_bandwidth == pytest.approx(2e9)
    assert machine.link(2).latency_seconds == pytest.approx(1e-5)
    assert machine.backend == backend


def test_the_measured_grids_have_the_expected_matmul_shapes():
    assert list_matmul_shapes((1, 2), most_flops=8) == (
        (1, 1, 1),
        (1, 1, 2),
        (1, 2, 1),
        (1, 2, 2),
        (2, 1, 1),
        (2, 1, 2),
        (2, 2, 1),
    )
    for backend, quick in product(("gloo", "nccl"), (True, False)):
        points = choose_default_points(backend, quick=quick)
        assert set(points.dtypes) == {"fp32", "bf16"}
        assert min(points.collective_bytes) == KIB
        assert max(points.collective_bytes) >= 32 * MIB


def test_the_parent_process_of_a_calibration_does_not_import_torch():
    code = "import sys, fivefold.calibration; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_measured_time_is_the_median_of_its_rounds():
    """The spread is that of the two fastest rounds; a point that takes long is measured once."""
    values = [iter((1e-3, 9e-3, 1.05e-3)), iter((2e-3, 1e-3, 1.1e-3)), iter((0.5,))]

    def measure(place):
        return lambda: KernelPoint(kernel="copy", dtype="fp32", ranks=1, moved_bytes=8, seconds=next(values[place]))

    curves, kinds = Curves([measure(place) for place in range(3)]), []
    for _ in range(3):
        curves.measure_round(kinds.append)
    medians = [(point.seconds, spread and round(spread, 3)) for point, spread in curves.list_medians()]
    assert medians == [(1.05e-3, 0.05), (1.1e-3, 0.1), (0.5, None)]
    assert kinds == ["kernels"] * 9


def test_a_calibration_states_the_spread_between_its_rounds(measured):
    machine = measured[0].replace(calibration=measured[0].calibration.replace(spread=0.12))
    assert table.describe_machine(machine).endswith("; nine tenths of the measured times repeat within 12%")


LATE_IMPORTS = """
import sys, torch
from fivefold.calibration.worker import import_lazy_modules
import_lazy_modules()
before = set(sys.modules)
x = torch.nn.Parameter(torch.ones(4))
x.grad, = torch.autograd.grad(x * 2, x, torch.ones(4))
torch.optim.AdamW([x], fused=True).step()
print(len(set(sys.modules) - before))
"""


@pytest.mark.long  # depends on the release of torch alone
def test_a_worker_imports_all_of_torch_before_its_rounds() -> None:
    """What a first gradient or optimizer would import takes a second, in which the other workers wait."""
    printed = subprocess.run([sys.executable, "-c", LATE_IMPORTS], capture_output=True, text=True, check=True).stdout
    assert int(printed) < 5
