"""Measure this computer (matmuls, attention, memory-bound kernels, collectives) and return a machine named ``local``.

For each number of ranks, that many workers run in parallel, as in training: on a CPU each has its share of the cores,
on GPUs each has one GPU. This module starts the workers and fits the machine to their results.

points · kernels · worker · processes · hosts   what is measured; one worker; several workers; hosts under torchrun
step_grid · step_factors                        small training runs; how kernels run within their steps
profile · unit_worker · unit_clock              the units of one run; a rank's real step; its time by unit
null_process_group                              a process group that sends nothing
messages                                        timing of messages between stretches of compute
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from statistics import geometric_mean, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from fivefold.calibration.points import CalibrationProgress, Facts, Kind, MeasuredPoint, Points, WorkerOrder
from fivefold.calibration.processes import side_by_side
from fivefold.machine.spec import Calibration, Chip, CollectivePoint, Link, Machine, StepFactor
from fivefold.record import RunFailure, UserError
from fivefold.units import Dtype

SILENCE_SECONDS = 120.0
MESSAGE: TypeAdapter[Facts | CalibrationProgress | MeasuredPoint] = TypeAdapter(
    Facts | CalibrationProgress | MeasuredPoint
)
MAX_RANKS = 1024  # the largest number of ranks: more than any host has cores
PROGRESS_UNITS = 1000  # progress units for each number of ranks
STEP_PROGRESS_UNITS = 1000  # and for its steps
STEP_SECONDS, QUICK_STEP_SECONDS = 25.0, 5.0  # for the steps of each number of ranks


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
    without ``in_steps`` kernels are measured only by themselves, not within training steps.
    Raises ``UserError`` for an invalid number of ranks, ``RunFailure`` when a worker dies or hangs.
    """
    counts = sorted(set(ranks))
    if not counts or counts[0] < 1 or counts[-1] > MAX_RANKS:
        raise UserError(f"ranks={list(ranks)}: each number of processes must be 1 to {MAX_RANKS}; try 1 and 2")
    points_by_kind: dict[Kind, list[dict[str, Any]]] = {
        "matmuls": [],
        "attentions": [],
        "kernels": [],
        "collectives": [],
    }
    facts: Facts | None = None
    spreads: list[float] = []
    total = len(counts) * (PROGRESS_UNITS + (STEP_PROGRESS_UNITS if in_steps else 0))

    def advance(what: str, count: int, done: int) -> None:
        if progress:
            progress(f"{what} on {count} rank{'s' if count > 1 else ''}", done, total)

    for part, count in enumerate(counts):

        def note(message: CalibrationProgress | MeasuredPoint, part: int = part, count: int = count) -> None:
            if isinstance(message, MeasuredPoint):
                points_by_kind[message.kind].append(message.point)
                if message.spread is not None:
                    spreads.append(message.spread)
            else:
                advance(message.kind, count, part * PROGRESS_UNITS + PROGRESS_UNITS * message.done // message.total)

        facts = _measure(count, quick=quick, points=points, note=note)
    assert facts is not None, "there is at least one number of ranks"
    points_by_kind["collectives"] = make_monotonic(points_by_kind["collectives"])
    values: dict[str, Any] = {"date": date.today().isoformat(), "torch": facts.torch, "cores": cores()}
    values.update({str(kind): points_by_kind[kind] for kind in points_by_kind})
    if len(spreads) > 1:
        values["spread"] = quantiles(spreads, n=10)[-1]
    calibration = Calibration.model_validate(values)
    machine = fit_machine(calibration, facts=facts, ranks=counts[-1])
    if not in_steps:
        return machine
    begin = len(counts) * PROGRESS_UNITS

    def note_run(place: int, count: int, done: int, runs: int) -> None:
        advance("steps", count, begin + STEP_PROGRESS_UNITS * place + STEP_PROGRESS_UNITS * done // runs)

    return add_steps(machine, counts, quick=quick, note=note_run)


def add_steps(
    machine: Machine, counts: Sequence[int], *, quick: bool, note: Callable[[int, int, int, int], None]
) -> Machine:
    """Return ``machine`` with its kernels measured within steps of each number of processes.

    ``note`` gets the place of the number in ``counts``, the number, the runs done, and all runs.
    """
    from fivefold.calibration.step_factors import collect_messages, fit_step_factors, join_messages, measure_steps

    calibration, factors, messages = machine.calibration, list[StepFactor](), list[CollectivePoint]()
    assert calibration is not None, "steps are added to curves"
    on_gpus = machine.backend == "nccl"  # every rank has its own: one is enough
    for place, count in enumerate(counts[:1] if on_gpus else counts):
        measured = measure_steps(
            machine,
            count,
            cores=cores(),
            quick=quick,
            budget_seconds=QUICK_STEP_SECONDS if quick else STEP_SECONDS,
            note=partial(note, place, count),
        )
        factors += fit_step_factors(machine, measured, ranks=count)
        messages += collect_messages(machine, measured, ranks=count)
    collectives = [point.model_dump() for point in join_messages(calibration.collectives, messages)]
    values = {"steps": factors, "collectives": make_monotonic(collectives)}
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


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fit_machine(calibration: Calibration, *, facts: Facts, ranks: int) -> Machine:
    """Return a machine of ``ranks`` ranks with peaks, bandwidths and latency taken from the measured points."""
    shared = facts.backend == "gloo"  # ranks on a CPU share its memory; a GPU has its own
    return Machine(
        name="local",
        chip=Chip(
            name=f"{facts.device}, 1 of {ranks}" if shared and ranks > 1 else facts.device,
            peak_flops=_peaks(calibration, ranks=ranks),
            memory_bytes=facts.memory_bytes // ranks if shared else facts.memory_bytes,
            memory_bandwidth=_memory_bandwidth(calibration, ranks=ranks),
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


def _peaks(calibration: Calibration, *, ranks: int) -> dict[Dtype, float]:
    peaks: dict[Dtype, float] = {}
    for point in calibration.matmuls:
        if point.ranks == ranks:
            rate = 2 * point.m * point.n * point.k / point.seconds
            peaks[point.dtype] = max(rate, peaks.get(point.dtype, 0.0))
    return peaks


def _memory_bandwidth(calibration: Calibration, *, ranks: int) -> float:
    copies = [point for point in calibration.kernels if point.kernel == "copy" and point.ranks == ranks]
    largest = max(point.moved_bytes for point in copies)  # beyond the caches
    return max(point.moved_bytes / point.seconds for point in copies if point.moved_bytes == largest)


def _link(calibration: Calibration, *, ranks: int) -> Link:
    messages = [point for point in calibration.collectives if point.collective == "p2p" and point.ranks == ranks]
    if not messages:
        bandwidth = _memory_bandwidth(calibration, ranks=ranks)
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


def _measure(
    ranks: int, *, quick: bool, points: Points | None, note: Callable[[CalibrationProgress | MeasuredPoint], None]
) -> Facts:
    """Run ``ranks`` workers; pass the messages of rank 0 to ``note``; return its ``Facts`` about this computer."""
    messages: list[Facts] = []

    def on_line(line: str) -> None:
        message = MESSAGE.validate_json(line)
        if isinstance(message, Facts):
            messages.append(message)
        else:
            note(message)

    with TemporaryDirectory(prefix="fivefold-") as folder:
        orders = [
            WorkerOrder(
                rank=rank,
                ranks=ranks,
                threads=max(1, cores() // ranks),
                meeting=str(Path(folder) / "meeting"),
                silence_seconds=SILENCE_SECONDS,
                quick=quick,
                points=points,
            )
            for rank in range(ranks)
        ]
        commands = [[sys.executable, "-m", "fivefold.calibration.worker", order.model_dump_json()] for order in orders]
        side_by_side(commands, silence_seconds=SILENCE_SECONDS, on_line=on_line)
    if not messages:
        raise RunFailure(f"{ranks} workers ended without a result; run `fivefold calibrate` again")
    return messages[0]
