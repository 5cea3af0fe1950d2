"""Measure this computer (matmuls, attention, memory-bound kernels, collectives) and return a machine named ``local``.

For each number of ranks, that many workers run in parallel, as in training: on a CPU each has its share of the cores,
on GPUs each has one GPU. This module starts the workers and fits the machine to their results.

points · kernels · worker · processes · hosts   what is measured; one worker; several workers; hosts under torchrun
other_programs                                  the cores that other programs use meanwhile
orders                                          the orders to the workers, and the profiles that they report
step_grid · step_factors                        small training runs; how kernels run within their steps
profile · unit_worker                           the units of one run, measured in its own steps
step_clock · unit_clock                         a rank's real step; its time by unit
null_process_group                              a process group that sends nothing
message_orders · messages                       the distinct messages of a run; their timing between compute
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import geometric_mean, quantiles
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt, TypeAdapter

from fivefold.calibration.orders import CaseOrder, RankProfile, RoundOrder, WorkerOrder
from fivefold.calibration.other_programs import ProcessorTime, count_cores_of_others
from fivefold.calibration.points import CalibrationProgress, Facts, Kind, MeasuredPoint, Points
from fivefold.calibration.processes import run_in_parallel
from fivefold.errors import RunFailure, UserError
from fivefold.machine.spec import Calibration, Chip, CollectivePoint, Link, Machine, StepFactor, StepOverhead
from fivefold.record import Record
from fivefold.units import Dtype

if TYPE_CHECKING:
    from fivefold.calibration.step_grid import GridRun

SILENCE_SECONDS = 120.0
MESSAGE: TypeAdapter[Facts | CalibrationProgress | MeasuredPoint | RankProfile] = TypeAdapter(
    Facts | CalibrationProgress | MeasuredPoint | RankProfile
)
MAX_RANKS = 1024  # the largest number of ranks: more than any host has cores


class Measurements(Record):
    """The reports of the workers of one calibration, from which ``build_machine`` computes a machine.

    ``profiles``: of the runs of the grid and, with higher numbers, of the further cases of ``measure``.
    """

    date: str
    cores: PositiveInt
    cores_of_others: NonNegativeFloat | None = None
    ranks: tuple[PositiveInt, ...]
    quick: bool
    facts: Facts
    points: tuple[MeasuredPoint, ...]
    profiles: tuple[RankProfile, ...]

    def group_profiles(self, ranks: int) -> tuple[list[tuple[GridRun, list[RankProfile]]], list[list[RankProfile]]]:
        """Return the runs of the grid on ``ranks`` processes with their profiles, and the profiles of each case."""
        from fivefold.calibration.step_grid import list_grid_runs

        grid = list_grid_runs(ranks, gpu=self.facts.backend == "nccl", quick=self.quick)
        profiles_by_run: dict[int, list[RankProfile]] = defaultdict(list)
        for profile in self.profiles:
            if profile.workers == ranks:
                profiles_by_run[profile.run].append(profile)
        runs = [(grid[run], profiles) for run, profiles in profiles_by_run.items() if run < len(grid)]
        return runs, [profiles_by_run[run] for run in sorted(profiles_by_run) if run >= len(grid)]


def calibrate(
    *,
    ranks: tuple[int, ...] = (1, 2),
    quick: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    points: Points | None = None,
    in_steps: bool = True,
) -> Machine:
    """Measure this computer with each number of ``ranks`` in parallel; ``quick``: fewer points and runs.

    ``progress(what, done, total)`` is called for each measurement. ``points`` replaces the default shapes and sizes;
    without ``in_steps`` kernels are measured only by themselves, not within training steps. Raises ``UserError`` for an
    invalid number of ranks, ``RunFailure`` when a worker dies or hangs.
    """
    return build_machine(measure(ranks=ranks, quick=quick, progress=progress, points=points, in_steps=in_steps))


def measure(
    *,
    ranks: tuple[int, ...] = (1, 2),
    quick: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    points: Points | None = None,
    in_steps: bool = True,
    cases: Mapping[int, tuple[CaseOrder, ...]] = MappingProxyType({}),
) -> Measurements:
    """Do the measurements of ``calibrate``, and return them.

    ``cases``: further runs for each number of ranks, measured in turns with the grid.
    """
    counts = sorted(set(ranks))
    if not counts or counts[0] < 1 or counts[-1] > MAX_RANKS:
        raise UserError(f"ranks={list(ranks)}: each number of processes must be 1 to {MAX_RANKS}; try 1 and 2")
    facts, points_measured, profiles = list[Facts](), list[MeasuredPoint](), list[RankProfile]()

    def on_line(line: str) -> None:
        message = MESSAGE.validate_json(line)
        if isinstance(message, Facts):
            facts.append(message)
        elif isinstance(message, RankProfile):
            profiles.append(message)
        elif isinstance(message, MeasuredPoint):
            points_measured.append(message)
        elif progress:
            part = len(facts) - 1
            count = counts[part]
            done = 100 * (part + message.done / message.total) / len(counts)
            progress(f"{message.kind} on {count} rank{'s' if count > 1 else ''}, per cent", int(done), 100)

    begin = ProcessorTime.read()
    _run_workers(counts, quick=quick, points=points, in_steps=in_steps, cases=cases, on_line=on_line)
    if not facts:
        raise RunFailure(f"{counts[-1]} workers ended without a result; run `fivefold calibrate` again")
    return Measurements(
        date=date.today().isoformat(),
        cores=count_cores(),
        cores_of_others=None if facts[-1].backend == "nccl" else count_cores_of_others(begin, ProcessorTime.read()),
        ranks=tuple(counts),
        quick=quick,
        facts=facts[-1],
        points=tuple(points_measured),
        profiles=tuple(profiles),
    )


def build_machine(measurements: Measurements) -> Machine:
    """Return the machine of ``measurements``: its curves, and how kernels and messages of the grid run in a step."""
    points: dict[Kind, list[dict[str, Any]]] = {kind: [] for kind in get_args(Kind)}
    for point in measurements.points:
        points[point.kind].append(point.point)
    facts = measurements.facts
    values: dict[str, Any] = {"date": measurements.date, "torch": facts.torch, "cores": measurements.cores}
    values["cores_of_others"] = measurements.cores_of_others
    values.update({str(kind): of_kind for kind, of_kind in points.items()})
    values["collectives"] = make_monotonic(points["collectives"])
    spreads = [point.spread for point in measurements.points if point.spread is not None]
    if len(spreads) > 1:
        values["spread"] = quantiles(spreads, n=10)[-1]
    machine = fit_machine(Calibration.model_validate(values), facts=facts, ranks=measurements.ranks[-1])
    return _add_steps(machine, measurements) if measurements.profiles else machine


def _add_steps(machine: Machine, measurements: Measurements) -> Machine:
    """Return ``machine`` with its kernels and messages as the runs of the grid had them within their steps."""
    from fivefold.calibration.step_factors import (
        collect_messages,
        fit_overhead,
        fit_step_factors,
        join_messages,
    )

    calibration = machine.calibration
    factors, overheads = list[StepFactor](), list[StepOverhead]()
    messages = list[CollectivePoint]()
    assert calibration is not None, "steps are added to curves"
    for ranks in sorted({profile.workers for profile in measurements.profiles}):
        measured, _cases = measurements.group_profiles(ranks)
        factors += fit_step_factors(machine, measured, ranks=ranks)
        messages += collect_messages(machine, measured, ranks=ranks)
        overheads += filter(None, [fit_overhead(machine, measured, ranks=ranks)])
    collectives = [point.model_dump() for point in join_messages(calibration.collectives, messages)]
    values = {"steps": factors, "overheads": overheads, "collectives": make_monotonic(collectives)}
    peaks = _raise_peaks(machine.chip.peak_flops, factors, ranks=machine.ranks)
    return machine.replace(chip=machine.chip.replace(peak_flops=peaks), calibration=calibration.replace(**values))


def _raise_peaks(peaks: Mapping[Dtype, float], factors: Sequence[StepFactor], *, ranks: int) -> dict[Dtype, float]:
    """Return the peak FLOP/s by dtype, at least those that products reach within a step: no MFU may exceed 100 %."""
    shares = {
        factor.dtype: min(share for share in (1.0, factor.forward, factor.backward) if share > 0)
        for factor in factors
        if factor.kind == "matmul" and factor.ranks == ranks
    }
    return {dtype: peak / shares.get(dtype, 1.0) for dtype, peak in peaks.items()}


def make_monotonic(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points of each collective with seconds that never fall as the message grows.

    Neighbours in the wrong order, which only noise can explain, are set to their geometric mean (isotonic regression).
    """
    curves: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in points:
        curves.setdefault((point["collective"], point["ranks"]), []).append(point)
    monotonic_points = []
    for curve in curves.values():
        curve.sort(key=lambda point: point["bytes"])
        levels: list[list[float]] = []
        for point in curve:
            levels.append([point["seconds"]])
            while len(levels) > 1 and geometric_mean(levels[-2]) > geometric_mean(levels[-1]):
                levels[-2:] = [levels[-2] + levels[-1]]
        seconds = [geometric_mean(level) for level in levels for _ in level]
        monotonic_points += [
            point | {"seconds": smoothed_seconds} for point, smoothed_seconds in zip(curve, seconds, strict=True)
        ]
    return monotonic_points


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fit_machine(calibration: Calibration, *, facts: Facts, ranks: int) -> Machine:
    """Return a machine of ``ranks`` ranks with peaks, bandwidths and latency taken from the measured points."""
    shared = facts.backend == "gloo"  # ranks on a CPU share its memory; a GPU has its own
    return Machine(
        name="local",
        chip=Chip(
            name=f"{facts.device}, 1 of {ranks}" if shared and ranks > 1 else facts.device,
            peak_flops=_fit_peaks(calibration, ranks=ranks),
            memory_bytes=facts.memory_bytes // ranks if shared else facts.memory_bytes,
            memory_bandwidth=_fit_memory_bandwidth(calibration, ranks=ranks),
            source=f"fivefold calibrate, {calibration.date}: best product and largest copy of one rank while {ranks} "
            f"ran side by side, so that ranks x peak is what the computer can do; memory is "
            f"{'an equal share of what it has' if shared else 'what the driver shows'}",
        ),
        ranks=ranks,
        ranks_per_node=ranks,
        links=(_link(calibration, ranks=ranks),),
        backend=facts.backend,
        calibration=calibration,
    )


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit ``seconds = latency + size / bandwidth``; return latency in seconds and bandwidth in bytes/s.

    Least squares of the relative error, so that small messages count as much as large ones.
    """
    size, time = np.array(sizes, dtype=float), np.array(seconds)
    latency, per_byte = np.linalg.lstsq(np.stack([1 / time, size / time], axis=1), np.ones_like(time), rcond=None)[0]
    if latency < 0 or per_byte <= 0:  # too noisy for a line: take bandwidth from the largest message
        return 0.0, float(size[-1] / time[-1])
    return float(latency), float(1 / per_byte)


def _fit_peaks(calibration: Calibration, *, ranks: int) -> dict[Dtype, float]:
    peaks: dict[Dtype, float] = {}
    for point in calibration.matmuls:
        if point.ranks == ranks:
            rate = 2 * point.m * point.n * point.k / point.seconds
            peaks[point.dtype] = max(rate, peaks.get(point.dtype, 0.0))
    return peaks


def _fit_memory_bandwidth(calibration: Calibration, *, ranks: int) -> float:
    copies = [point for point in calibration.kernels if point.kernel == "copy" and point.ranks == ranks]
    largest = max(point.moved_bytes for point in copies)  # beyond the caches
    return max(point.moved_bytes / point.seconds for point in copies if point.moved_bytes == largest)


def _link(calibration: Calibration, *, ranks: int) -> Link:
    """Return the link between two ranks, fitted to its messages; of a single rank a link with the memory bandwidth."""
    messages = [point for point in calibration.collectives if point.collective == "p2p" and point.ranks == ranks]
    if not messages:
        bandwidth = _fit_memory_bandwidth(calibration, ranks=ranks)
        return Link(
            name="none",
            span=ranks,
            bandwidth=bandwidth,
            latency_seconds=0.0,
            source="one rank sends nothing; this is its memory",
        )
    latency, bandwidth = fit_line([point.bytes for point in messages], [point.seconds for point in messages])
    source = f"fivefold calibrate, {calibration.date}: line through {len(messages)} message sizes between two ranks"
    return Link(name="local", span=ranks, bandwidth=bandwidth, latency_seconds=latency, source=source)


def _run_workers(
    counts: Sequence[int],
    *,
    quick: bool,
    points: Points | None,
    in_steps: bool,
    cases: Mapping[int, tuple[CaseOrder, ...]],
    on_line: Callable[[str], None],
) -> None:
    """Run the workers through every number of ranks; ``on_line`` gets the lines of the first worker."""
    with TemporaryDirectory(prefix="fivefold-") as folder:
        rounds = [
            RoundOrder(
                ranks=ranks,
                threads=max(1, count_cores() // ranks),
                rendezvous_file=str(Path(folder) / f"meeting-{ranks}"),
                points=points,
                in_steps=in_steps,
                cases=cases.get(ranks, ()),
            )
            for ranks in counts
        ]
        orders = [WorkerOrder(rank=rank, quick=quick, rounds=tuple(rounds)) for rank in range(counts[-1])]
        files = [Path(folder) / f"order-{order.rank}" for order in orders]
        for file, order in zip(files, orders, strict=True):
            file.write_text(order.model_dump_json())
        commands = [[sys.executable, "-m", "fivefold.calibration.worker", str(file)] for file in files]
        run_in_parallel(commands, silence_seconds=SILENCE_SECONDS, on_line=on_line)
