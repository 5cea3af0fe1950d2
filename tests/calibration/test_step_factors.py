"""How kernels run within a step: the grid of runs, the fit of its units, and what predictions make of the factors."""

import random
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from fivefold import calibration
from fivefold.calibration import worker
from fivefold.calibration.message_orders import Timed
from fivefold.calibration.null_process_group import init_null_process_group
from fivefold.calibration.orders import CaseOrder, RankProfile
from fivefold.calibration.points import QUICK
from fivefold.calibration.profile import find_unit
from fivefold.calibration.step_clock import build_step, summarize_steps
from fivefold.calibration.step_factors import fit_overhead, fit_step_factors, fit_update, split_step
from fivefold.calibration.step_grid import GridRun, list_grid_runs, select_fitting_runs
from fivefold.calibration.unit_clock import MESSAGE, MeasuredUnitSeconds, UnitClock
from fivefold.calibration.worker import Budget, Measurement, select_quiet_rounds
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.machine.spec import BUSY_CORES, KernelPoint, MatmulPoint, StepFactor, StepOverhead
from fivefold.planner.counts.counts import get_group_degrees
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.predict import get_planner
from fivefold.planner.time.measured_kernels import find_factors
from fivefold.planner.time.step_overhead import estimate_overhead
from fivefold.planner.time.units import Units
from fivefold.planner.time.update_time import estimate_elementwise_seconds
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from tests.agree.time import cases
from tests.calibration.test_calibrate import TINY
from tests.calibration.test_profile import EXPERTS, JOB, NANO, machine
from tests.selection import mark_share

KINDS = {"matmul", "experts", "attention", "embedding", "loss", "memory", "routing"}


def with_curves(**more):
    """A computer with curves of matmuls and memory, and factors if there are ``more``."""
    base = machine()
    curves = base.calibration.replace(
        matmuls=tuple(
            MatmulPoint(dtype=dtype, ranks=ranks, m=m, n=m, k=m, seconds=m**3 / 3e10 + 1e-6)
            for dtype in ("fp32", "bf16")
            for ranks in (1, 2)
            for m in (64, 512)
        ),
        kernels=tuple(
            KernelPoint(kernel="copy", dtype="fp32", ranks=ranks, moved_bytes=2**power, seconds=2**power / 5e9)
            for ranks in (1, 2)
            for power in (16, 24)
        ),
    )
    return base.replace(ranks=2, ranks_per_node=2, calibration=curves.replace(**more))


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_calibration_grid_varies_shapes_precision_and_recomputation(ranks, gpu):
    runs = list_grid_runs(ranks, gpu=gpu, quick=False)
    assert {run.layout.world for run in runs} == {ranks}
    assert len({run.model.width for run in runs}) >= 3
    assert len({run.job.sequence for run in runs}) >= 3
    assert {run.model.moe is None for run in runs} == {True, False}
    if ranks == 1:
        assert {run.layout.ac for run in runs} >= {"none", "full", "selective"}
    else:
        assert {run.layout.zero for run in runs} == {0, 1, 2, 3}
        for axis in ("dp", "tp", "cp", "pp", "ep"):
            assert any(getattr(run.layout, axis) == ranks for run in runs), axis
    if not gpu:
        assert {run.job.precision.compute for run in runs} == {"fp32", "bf16"}
    quick = list_grid_runs(ranks, gpu=gpu, quick=True)
    assert quick == [run for run in runs if run in quick]
    assert {run.model.moe is None for run in quick} == {True, False}


def test_the_grid_and_its_test_cases_differ():
    """Predictions are scored on models that ``calibrate`` has not run."""
    drawn = {case.model.replace(name="", layers=1, vocab=1) for case in cases(seed=0, groups=20, each=4, world=2)}
    for ranks in (1, 2):
        for run in list_grid_runs(ranks, gpu=False, quick=False):
            assert run.model.replace(name="", layers=1, vocab=1) not in drawn


def made_up_profiles(run, truth):
    """The profiles of a run without a pipeline on a machine whose kernels take the seconds of ``truth``."""
    counts = get_planner(run.model, truth, run.job).counts
    units = Units(counts, truth)
    timed = {}
    for name in ("embed", *(f"block {layer}" for layer in range(run.model.layers)), "head"):
        seconds = units.unit(run.layout, find_unit(name, counts, run.layout))
        timed[f"F {name}"] = Timed(seconds=seconds.forward, spread=0.0)
        timed[f"BW {name}"] = Timed(seconds=seconds.backward + seconds.weight, spread=0.0)
    update = estimate_elementwise_seconds(units, run.layout, count_rank_memory(counts, run.layout)[0], (0,))
    timed["update"] = Timed(seconds=update, spread=0.0)
    return [RankProfile(place=rank, rank=rank, torch="", device="cpu", timed=timed) for rank in range(run.layout.world)]


def drawn_factors(chance, ranks):
    return tuple(
        StepFactor(
            kind=kind,
            ranks=ranks,
            dtype=dtype,
            forward=chance.uniform(1.0, 2.0),
            backward=chance.uniform(1.0, 2.0),
            forward_kernel_seconds=1e-4,
            backward_kernel_seconds=5e-5,
        )
        for kind in (*sorted(KINDS), "message", "update")  # the order of a set differs between processes
        for dtype in ("fp32", "bf16")
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", mark_share(3, range(3)))
def test_units_of_the_grid_predict_the_units_of_other_models(ranks, seed):
    """Where kernels follow the model exactly, so do predictions of models, layouts and sequences that did not run."""
    store = with_curves()
    truth = with_curves(steps=drawn_factors(random.Random(seed), ranks))
    runs = [run for run in list_grid_runs(ranks, gpu=False, quick=False) if run.layout.pp == 1]
    factors = fit_step_factors(store, [(run, made_up_profiles(run, truth)) for run in runs], ranks=ranks)
    assert {factor.kind for factor in factors} == {*KINDS, "update", *(["message"] if ranks > 1 else [])}
    fitted = with_curves(steps=tuple(factors))
    for case in cases(seed=seed, groups=6, each=4, world=2):
        if case.layout.world != ranks:
            continue
        right, curves, result = (
            get_planner(case.model, known, case.job).estimate(case.layout).step_time for known in (truth, store, fitted)
        )
        assert result.compute == pytest.approx(right.compute, rel=0.06)
        assert result.optimizer == pytest.approx(right.optimizer, rel=0.02)
        assert abs(curves.compute / right.compute - 1) > 0.1


def test_without_step_factors_predictions_use_only_the_curves():
    layout = Layout.parse("dp2 zero1 mbs2")
    plain, factored = with_curves(), with_curves(steps=drawn_factors(random.Random(1), 1))
    counts = get_planner(EXPERTS, plain, JOB).counts
    prices = Units(counts, factored).prices(layout)
    curve_prices = Units(counts, plain).prices(layout)
    for unit, _ in counts.stage_work(layout)[0]:
        for op in counts.list_ops(get_group_degrees(get_local_degrees(layout), unit), unit.name):
            assert prices.price_repeated(op) == curve_prices.operation(op)


def test_more_processes_than_measured_use_the_factors_of_the_largest_measured_number():
    one, two = (StepFactor(kind="matmul", ranks=ranks, dtype="fp32", forward=2, backward=2) for ranks in (1, 2))
    calibration = with_curves(steps=(one, two)).calibration
    assert find_factors(calibration, ranks=1, dtype="fp32") == {"matmul": one}
    assert find_factors(calibration, ranks=2, dtype="fp32") == {"matmul": two}
    assert find_factors(calibration, ranks=64, dtype="fp32") == {"matmul": two}
    assert find_factors(calibration, ranks=2, dtype="bf16") == {}
    assert find_factors(None, ranks=2, dtype="bf16") == {}


def test_runs_that_do_not_fit_the_budget_are_left_out():
    now = [0.0]
    budget = Budget(24.0, now=lambda: now[0])
    assert budget.overrun("fp32", 100.0) < 0  # the first of its dtype: the curves may be far off
    now[0] = 1.0
    budget.note("fp32", 0.1, measured_seconds=0.5)  # five times as long as predicted, and 1.5 s are still to come
    assert budget.overrun("fp32", 0.1) < 0
    assert budget.overrun("fp32", 0.4) > 0  # 10 s: more than a third of the budget
    now[0] = 20.2
    assert budget.overrun("fp32", 0.1) > 0  # until 22.7 s, and then 1.5 s of the first run
    assert budget.overrun("bf16", 100.0) < 0


@pytest.mark.parametrize(("kernel_seconds", "end_seconds"), [(1.0, 10.6), (2.0, 10.7), (5.0, 14.8)])
def test_a_quick_measurement_ends_with_its_budget(monkeypatch, kernel_seconds, end_seconds):
    """Steps take no more of its 11 s than both rounds of kernels leave, but at least half of their own 8 s."""
    now = [0.0]

    def pass_seconds(seconds):
        now[0] += seconds

    measurement = Measurement.__new__(Measurement)
    measurement.points, measurement.now, measurement.end = QUICK, lambda: now[0], QUICK.budget_seconds
    measurement.context = SimpleNamespace(
        device=torch.device("cpu"), ranks=1, rank=1, max_over_ranks=float, count_cores_of_others=lambda _begin: 0.0
    )
    measurement.messages = SimpleNamespace(measure_round=lambda _note: pass_seconds(1.0))
    measurement.kernels = SimpleNamespace(measure_round=lambda _note: pass_seconds(kernel_seconds))
    measurement.grid, measurement.cases = list_grid_runs(1, gpu=False, quick=True), []
    measurement.list_runs = lambda: [(number, run, 0.19) for number, run in enumerate(measurement.grid)]
    measurement.list_points, measurement.note = list, lambda _kind: None
    step = Mock(side_effect=lambda: pass_seconds(0.19), trace_gaps=lambda: pass_seconds(0.19))
    monkeypatch.setattr(worker, "build_step", lambda *_run, **_place: step)
    monkeypatch.setattr(worker, "profile_run", Mock())
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda *_profiles: None)
    measurement.measure_in_turns()
    assert len(measurement.grid) == 8  # which take 0.95 s each
    assert now[0] == pytest.approx(end_seconds)


def test_a_message_counts_with_its_fastest_time_and_compute_with_its_median():
    steps = [
        MeasuredUnitSeconds(
            Counter({("F", "head"): 2 * value, (MESSAGE, "p2p 2 8"): value}),
            Counter({("F", "head"): 2}),
            4 * value,
            Counter({("F", "head"): 3 * value}),
        )
        for value in (3.0, 1.0, 2.0, 9.0)
    ]
    timed = summarize_steps(steps)
    assert timed["F head"] == Timed(seconds=2.5, spread=3.2, times=2, clock_seconds=3.75)
    assert timed["message p2p 2 8"].seconds == 1.0
    assert timed["step"] == Timed(seconds=10.0, spread=3.2)


def test_compute_is_measured_as_processor_time_and_a_message_as_waiting_time():
    """A pause counts for a message; for a unit only what the thread computes does."""
    layout = Layout.parse("dp1 mbs2")
    with init_null_process_group(rank=0, world=1):
        built = build(model=NANO, layout=layout, job=JOB, device=torch.device("cpu"), streams=False)
        clock = UnitClock(Engine(built, model=NANO, layout=layout, job=JOB))
        clock.start()
        clock.switch(("F", "head"))
        time.sleep(0.1)
        clock.switch((MESSAGE, "p2p 2 8"))
        time.sleep(0.1)
        seconds = clock.stop().seconds
    assert seconds["F", "head"] < 0.02
    assert seconds[MESSAGE, "p2p 2 8"] >= 0.1


def test_the_time_of_an_optimizer_step_is_fitted_by_curve_weights_and_step():
    """The curve's share, each weight and each step are distinguished where models differ in depth."""
    rows = [
        (curve, weights, 0.5 * curve + 4e-5 * weights + 2e-3) for curve, weights in ((1e-3, 20), (4e-3, 20), (2e-3, 40))
    ]
    assert fit_update(rows) == pytest.approx((0.5, 4e-5, 2e-3), rel=0.02)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_clock_of_the_grid_tells_the_overhead_of_a_step(ranks):
    """Clocks, gaps, the start and the drift of ranks are given back, also if other programs used part of the cores."""
    store, others = with_curves(), 0.5
    truth = StepOverhead(
        ranks=ranks,
        host_share=0.07,
        forward_gap_seconds=1e-4,
        backward_gap_seconds=2e-4,
        start_seconds=0.004 * (ranks > 1),
        drift_seconds=0.03 * (ranks > 1),
    )
    assert store.calibration is not None
    disturbed = 1 / (1 - (others - BUSY_CORES) / store.calibration.cores)
    slower = with_curves(overheads=(truth,))
    measured = list[tuple[GridRun, list[RankProfile]]]()
    for run in list_grid_runs(ranks, gpu=False, quick=False):
        profiles = made_up_profiles(run, store) if run.layout.pp == 1 else []
        for profile in profiles:
            profile.timed["message all_reduce 2 8"] = Timed(seconds=2e-3, spread=0.0, times=3)
            work = split_step(profile.replace(timed=profile.timed | {"step": Timed(seconds=0.0, spread=0.0)})).work
            overhead = estimate_overhead(
                Units(get_planner(run.model, slower, run.job).counts, slower), run.layout, (0,), work_seconds=work
            )
            profile.gaps.update(F=overhead.gaps.forward, BW=overhead.gaps.backward)
            step_seconds = disturbed * (overhead.clock_ratio * work + overhead.waits) + 6e-3
            profile.timed["step"] = Timed(seconds=step_seconds, spread=0.0)
        measured.append((run, [profile.replace(cores_of_others=others) for profile in profiles]))
    fitted = fit_overhead(store, measured, ranks=ranks)
    assert fitted is not None
    assert tuple(fitted.model_dump().values()) == pytest.approx(tuple(truth.model_dump().values()), rel=0.02, abs=1e-6)
    pipelines = [(run, profiles) for run, profiles in measured if run.layout.pp > 1]
    assert fit_overhead(store, pipelines, ranks=ranks) is None


@pytest.mark.parametrize(
    ("others", "kept"),
    [([0.0, 0.1, 0.0], [0, 1, 2]), ([0.9, 0.0, 0.1, 0.1], [1, 2, 3]), ([0.9, 0.5, 0.1, 0.6], [1, 2]), ([1.0], [0])],
)
def test_steps_that_other_programs_disturbed_are_left_out(others, kept):
    """All undisturbed rounds count, and two in any case."""
    assert sorted(select_quiet_rounds(others)) == kept


def test_the_host_between_operations_is_the_processor_time_that_no_operation_has():
    """Work of the host before each block counts, and a pause does not: less than the units, more than the work."""
    layout = Layout.parse("dp1 mbs2")

    def delay(*_inputs):
        time.sleep(0.02)
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass

    with init_null_process_group(rank=0, world=1):
        step = build_step(NANO, layout, JOB, rank=0, device=torch.device("cpu"), sends=False)
        step()
        step.trace_gaps()
        gaps = dict(step.gaps)
        for block in step.engine.built.module.blocks:
            block.register_forward_pre_hook(delay)
        step.trace_gaps()
        passes = step().seconds
    planted_seconds = 0.005 * NANO.layers * layout.micro_batches(JOB)
    assert planted_seconds < step.gaps["F"] < 1.5 * planted_seconds + gaps["F"]
    assert step.gaps["F"] < sum(seconds for (way, _), seconds in passes.items() if way == "F")
    assert 0 < step.gaps["BW"] < sum(seconds for (way, _), seconds in passes.items() if way == "BW")


@pytest.mark.long  # test_calibrate.py starts processes, the next test runs the grid
@pytest.mark.processes
def test_steps_of_the_grid_are_measured_in_processes():
    """Kernels, steps and further cases in turns: factors of both dtypes, and the profiles of the cases."""
    experts = CaseOrder(model=EXPERTS, layout="dp2 zero1 ep2 mbs2", job=JOB)
    heard = []
    measurements = calibration.measure(
        ranks=(2,), quick=True, points=TINY, cases={2: (experts,)}, progress=lambda *done: heard.append(done)
    )
    machine = calibration.build_machine(measurements)
    _grid, (profiles,) = measurements.group_profiles(2)
    assert {factor.dtype for factor in machine.calibration.steps} == {"fp32", "bf16"}
    assert {factor.kind for factor in machine.calibration.steps} >= {"matmul", "attention", "memory", "update"}
    assert {factor.ranks for factor in machine.calibration.steps} == {2}
    assert [overhead.ranks for overhead in machine.calibration.overheads] == [2]
    assert [profile.rank for profile in profiles] == [0, 1]
    assert {"F block 0", "BW block 0", "update", "step"} <= set(profiles[0].timed)
    assert profiles[0].timed["step"].seconds > 2 * profiles[0].timed["F block 0"].seconds
    assert calibration.Measurements.model_validate_json(measurements.model_dump_json()) == measurements
    assert any(name.startswith("message all_to_all 2") for name in profiles[0].timed)
    assert any(what == "steps on 2 ranks, per cent" for what, *_ in heard)


def test_a_gpu_measures_its_runs_one_after_another(monkeypatch, capsys):
    """The path of a GPU on a CPU: alone in a world that sends nothing, each run with its own steps."""
    small = GridRun(NANO, Layout.parse("dp1 mbs2"), JOB)
    experts = GridRun(EXPERTS, Layout.parse("dp1 mbs2"), JOB)
    measurement = object.__new__(Measurement)
    measurement.context = worker.WorkerContext(0, 1, torch.device("cpu"), 0.01)
    measurement.now, measurement._done, measurement._total = time.perf_counter, 0, 10
    monkeypatch.setattr(measurement, "list_runs", lambda: [(0, small, 0.01), (3, experts, 0.01)], raising=False)
    measurement.points = TINY.replace(step_seconds=1000.0)
    monkeypatch.setattr(worker.WorkerContext, "max_over_ranks", lambda _self, seconds: seconds)
    with init_null_process_group(rank=0, world=1):
        measurement.measure_alone()
    lines = [line for line in capsys.readouterr().out.splitlines() if '"timed"' in line]
    profiles = [RankProfile.model_validate_json(line) for line in lines]
    assert [profile.run for profile in profiles] == [0, 3]
    assert all({"F block 0", "BW block 0", "update"} <= set(profile.timed) for profile in profiles)
    overhead = fit_overhead(
        with_curves(), [(run, [profile]) for run, profile in zip((small, experts), profiles, strict=True)], ranks=1
    )
    assert (overhead.ranks, overhead.start_seconds, overhead.drift_seconds) == (1, 0, 0)


def test_the_clock_of_a_gpu_counts_events(monkeypatch):
    """The path of a GPU, with events of the host's clock in place of CUDA's."""

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at = time.perf_counter()

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    layout = Layout.parse("dp1 mbs2")
    with init_null_process_group(rank=0, world=1):
        built = build(model=NANO, layout=layout, job=JOB, device=torch.device("cpu"), streams=False)
        engine = Engine(built, model=NANO, layout=layout, job=JOB)
        clock = UnitClock(engine)
        clock._cuda = True
        clock.start()
        begin = time.perf_counter()
        engine.step(torch.randint(0, NANO.vocab, (layout.micro_batches(JOB), 2, JOB.sequence + 1)))
        seconds = time.perf_counter() - begin
        result = clock.stop()
    assert result.seconds.total() == pytest.approx(seconds, rel=0.05, abs=1e-3)
    assert result.step == pytest.approx(result.seconds.total())
    assert result.times["F", "block 0"] == layout.micro_batches(JOB)


def test_a_gpus_grid_is_planned_and_fits_its_memory():
    """On a catalog GPU: every run of the grid is legal, and those that are kept fit."""
    for name in ("h100:1", "l40s:1"):
        gpu = resolve(name, local=Path("/nowhere"))
        runs = select_fitting_runs(list_grid_runs(1, gpu=True, quick=False), gpu)
        assert len({run.model.width for _, run, _ in runs}) >= 2
        assert all(estimate.peak_bytes < gpu.chip.memory_bytes for *_, estimate in runs)


def test_no_product_is_faster_than_the_peak() -> None:
    """Products that take less time within a step than when repeated raise the peak, which MFU is relative to."""
    quick = StepFactor(kind="matmul", ranks=2, dtype="bf16", forward=0.25, backward=0.5)
    slow = StepFactor(kind="matmul", ranks=2, dtype="fp32", forward=1.2, backward=0.0)
    other = StepFactor(kind="memory", ranks=2, dtype="fp32", forward=0.1, backward=0.1)
    alone = StepFactor(kind="matmul", ranks=1, dtype="fp32", forward=0.1, backward=0.1)
    peaks = calibration._raise_peaks({"bf16": 3e9, "fp32": 9e10}, [quick, slow, other, alone], ranks=2)
    assert peaks == {"bf16": 12e9, "fp32": 9e10}
