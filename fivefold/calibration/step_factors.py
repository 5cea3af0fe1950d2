"""Fit how kernels run within a step (``StepFactor``) to the units of small training runs that ``calibrate`` measured.

    grid of runs (step_grid.py) → workers (worker.py) → seconds of units → factors by kind of kernel

A unit's seconds are modelled as Σ over kinds of (factor · seconds of the curves + seconds per kernel · kernels). The
factors minimize the squared relative error over all units, and stay close to their common value where the grid cannot
tell two kinds from each other.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np

from fivefold.calibration.orders import RankProfile
from fivefold.calibration.profile import UnitPasses, collect_step_points, measure_unit_seconds
from fivefold.calibration.step_grid import GridRun
from fivefold.layout.mesh import group
from fivefold.machine.spec import BUSY_CORES, CollectivePoint, KernelKind, Machine, StepFactor, StepOverhead
from fivefold.planner.counts.counts import UnitGroup, get_group_degrees
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.planner.counts.operations.local_shapes import get_activation_width, get_local_degrees
from fivefold.planner.counts.update import list_stages
from fivefold.planner.predict import get_planner
from fivefold.planner.time.measured_kernels import count_kernels, count_messages, find_kernel_kind
from fivefold.planner.time.profiled import count_ranks_per_host
from fivefold.planner.time.step_overhead import count_operations, sum_deviations
from fivefold.planner.time.units import Units
from fivefold.planner.time.update_time import count_weights, estimate_elementwise_seconds
from fivefold.units import Dtype

CURVE_UNITS = 4.0  # units that the common factor's distance from 1 weighs as much as: kernels are those of the curves
PRIOR_UNITS = 3.0  # units that a factor's distance from the common one weighs as much as
SWEEPS = 500  # of the coordinate descent
KINDS: tuple[KernelKind, ...] = get_args(KernelKind)
# Kinds with their own seconds per kernel; the others share one.
OWN_HOST: tuple[KernelKind, ...] = ("experts", "routing", "embedding", "loss", "message")


class UnitWork(NamedTuple):
    """The kernels of one pass through a unit: seconds by the curves and number, by kind."""

    seconds: dict[KernelKind, float]
    kernels: dict[KernelKind, int]


class MeasuredUnit(NamedTuple):
    """A unit that was measured in a step: its kernels, and seconds of a forward and a backward.

    ``recomputed``: the forward of what the backward recomputes; ``longest_seconds``: both passes of the run's longest
    unit.
    """

    forward: UnitWork
    backward: UnitWork
    recomputed: UnitWork
    forward_seconds: float
    backward_seconds: float
    longest_seconds: float


class Factors(NamedTuple):
    """Factors of one direction, and seconds per kernel, by kind."""

    factor: dict[KernelKind, float]
    host: dict[KernelKind, float]

    def seconds(self, work: UnitWork) -> float:
        """Return the seconds of ``work``."""
        return sum(
            self.factor[kind] * seconds + self.host[kind] * work.kernels[kind] for kind, seconds in work.seconds.items()
        )


def collect_units(
    machine: Machine, measured: Sequence[tuple[GridRun, list[RankProfile]]]
) -> dict[Dtype, list[MeasuredUnit]]:
    """Return the units of the profiles by dtype; ``machine`` holds the curves."""
    units_by_dtype: dict[Dtype, list[MeasuredUnit]] = defaultdict(list)
    for run, profiles in measured:
        counts = get_planner(run.model, machine, run.job).counts
        curves = Units(counts, machine)
        ranks = count_ranks_per_host(run.layout, machine)
        rows: dict[UnitGroup, list[UnitPasses]] = defaultdict(list)
        for profile in profiles:
            for unit, passes in measure_unit_seconds(profile, counts=counts, layout=run.layout, curves=curves).items():
                rows[unit].append(passes)
        seconds = {
            unit: (
                statistics.fmean(passes.forward for passes in of_ranks),
                statistics.fmean(passes.backward + passes.weight for passes in of_ranks),
            )
            for unit, of_ranks in rows.items()
        }
        longest = max(map(sum, seconds.values()))
        for unit, (forward_seconds, backward_seconds) in seconds.items():
            forward, backward, recomputed = count_work(curves, run, unit, ranks=ranks)
            units_by_dtype[run.job.precision.compute].append(
                MeasuredUnit(forward, backward, recomputed, forward_seconds, backward_seconds, longest)
            )
    return units_by_dtype


def count_work(curves: Units, run: GridRun, unit: UnitGroup, *, ranks: int) -> tuple[UnitWork, UnitWork, UnitWork]:
    """Return the kernels of a unit: forward, backward, and the recomputed forward."""
    part = get_group_degrees(get_local_degrees(run.layout), unit)
    passes = tuple(UnitWork(defaultdict(float), defaultdict(int)) for _ in range(3))
    width = get_activation_width(run.job)
    times = curves.kernels(part, unit, ranks=ranks)
    for op, time in zip(curves.counts.list_ops(part, unit.name), times, strict=True):
        kind, kernels = find_kernel_kind(op), count_kernels(op, width=width)
        rows = (time.forward, kernels.forward), (time.backward + time.weight, kernels.backward)
        for work, (seconds, number) in zip(passes, (*rows, rows[0]) if op.recomputed else rows, strict=False):
            work.seconds[kind] += seconds
            work.kernels[kind] += number
        if op.message is not None:
            messages = count_messages(op)
            numbers = messages.forward, messages.backward, messages.forward if op.recomputed else 0
            for work, number in zip(passes, numbers, strict=True):
                work.seconds["message"] += 0.0
                work.kernels["message"] += number
    return passes[0], passes[1], passes[2]


def fit(units: Sequence[MeasuredUnit], *, counts_host: bool = True) -> tuple[Factors, Factors]:
    """Return the factors of forward and backward passes.

    The error of a pass counts relative to the longest unit of its run, so that an embedding does not outweigh blocks.
    Without ``counts_host`` all seconds per kernel are 0: a GPU computes while its host launches.
    """
    forward = _fit(
        [(unit.forward, unit.forward_seconds, unit.longest_seconds) for unit in units], counts_host=counts_host
    )
    recomputed_seconds = [forward.seconds(unit.recomputed) for unit in units]
    backward = _fit(
        [
            (unit.backward, max(0.0, unit.backward_seconds - seconds), unit.longest_seconds)
            for unit, seconds in zip(units, recomputed_seconds, strict=True)
        ],
        counts_host=counts_host,
    )
    return forward, backward


def _fit(passes: Sequence[tuple[UnitWork, float, float]], *, counts_host: bool) -> Factors:
    """Return the factors of one direction, by least squares with a weak prior: of all kinds the same factor.

    ``passes``: kernels, seconds, and the seconds that an error is relative to. ``counts_host``: whether the host's time
    for each kernel is fitted too; else it is 0.
    """
    works = [work for work, *_ in passes]
    scale = np.array([longest for *_, longest in passes])
    target = np.array([seconds for _, seconds, _ in passes]) / scale
    kinds = [kind for kind in KINDS if any(kind in work.seconds for work in works)]
    common = tuple(kind for kind in kinds if kind not in OWN_HOST)
    hosts = [common, *((kind,) for kind in kinds if kind in OWN_HOST)]
    totals = np.array([[sum(work.seconds.values()), counts_host * sum(work.kernels.values())] for work in works])
    ratio, host = solve_nonnegative_least_squares(
        totals / scale[:, None], target, prior=np.array([1.0, 1e-6]), weight=np.array([CURVE_UNITS, 1e-9])
    )
    columns = [[work.seconds.get(kind, 0.0) for kind in kinds] for work in works]
    counted = [[counts_host * sum(work.kernels.get(kind, 0) for kind in group) for group in hosts] for work in works]
    rows = np.hstack([np.array(columns), np.array(counted)]) / scale[:, None]
    prior = np.array([ratio] * len(kinds) + [counts_host * max(host, 1e-7)] * len(hosts))
    fitted = solve_nonnegative_least_squares(rows, target, prior=prior, weight=PRIOR_UNITS)
    host_by_kind = {kind: float(fitted[len(kinds) + at]) for at, group in enumerate(hosts) for kind in group}
    return Factors({kind: float(factor) for kind, factor in zip(kinds, fitted, strict=False)}, host_by_kind)


def solve_nonnegative_least_squares(
    rows: np.ndarray, target: np.ndarray, *, prior: np.ndarray, weight: float | np.ndarray
) -> np.ndarray:
    """Return x >= 0 that minimizes |rows·x - target|² + Σ weight_k · (mean of column k)² · (x_k - prior_k)².

    Coordinate descent, which converges as the function is convex and the constraints are separate.
    """
    x, penalty = prior.copy(), weight * rows.mean(axis=0) ** 2 + 1e-30
    for _ in range(SWEEPS):
        for column in range(len(x)):
            values = rows[:, column]
            rest = target - rows @ x + values * x[column]
            x[column] = max(
                0.0, (values @ rest + penalty[column] * prior[column]) / (values @ values + penalty[column])
            )
    return x


def collect_messages(
    machine: Machine, measured: Sequence[tuple[GridRun, list[RankProfile]]], *, ranks: int
) -> list[CollectivePoint]:
    """Return the messages of the steps; of equal ones the geometric mean."""
    seconds_by_message: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run, profiles in measured if ranks > 1 else ():
        counts = get_planner(run.model, machine, run.job).counts
        for point in collect_step_points(profiles, counts=counts, layout=run.layout, ranks=ranks):
            seconds_by_message[point.collective, point.bytes].append(point.seconds)
    return [
        CollectivePoint(collective=collective, ranks=ranks, bytes=size, seconds=statistics.geometric_mean(seconds))
        for (collective, size), seconds in seconds_by_message.items()
    ]


def join_messages(curves: Sequence[CollectivePoint], steps: Sequence[CollectivePoint]) -> list[CollectivePoint]:
    """Return the curves of collectives with their seconds in a step, where those were measured.

    Between the smallest and the largest message of the steps, theirs replace the curve's; beyond, the curve keeps its
    form and continues from them. Point-to-point messages keep their curve: it tells what overlaps.
    """
    joined = list[CollectivePoint]()
    for key in dict.fromkeys((point.collective, point.ranks, point.nodes) for point in (*curves, *steps)):
        curve, measured = (
            sorted((p for p in points if (p.collective, p.ranks, p.nodes) == key), key=lambda p: p.bytes)
            for points in (curves, steps)
        )
        if not measured or not curve or key[0] == "p2p":
            joined += curve or measured
            continue
        sizes = [point.bytes for point in curve]
        seconds = [point.seconds for point in curve]
        low, high = (end.seconds / float(np.interp(end.bytes, sizes, seconds)) for end in (measured[0], measured[-1]))
        smaller = [p.replace(seconds=low * p.seconds) for p in curve if p.bytes < measured[0].bytes]
        larger = [p.replace(seconds=high * p.seconds) for p in curve if p.bytes > measured[-1].bytes]
        joined += [*smaller, *measured, *larger]
    return joined


def list_updates(
    machine: Machine, measured: Sequence[tuple[GridRun, list[RankProfile]]]
) -> dict[Dtype, list[tuple[float, int, float]]]:
    """Return a row for each rank's optimizer update, by the dtype of its matmuls.

    A row has the seconds that the measured bandwidth curves predict, the number of the rank's weights, and the measured
    seconds.
    """
    rows: dict[Dtype, list[tuple[float, int, float]]] = defaultdict(list)
    for run, profiles in measured:
        counts = get_planner(run.model, machine, run.job).counts
        units = Units(counts, machine)
        memory_by_rank = count_rank_memory(counts, run.layout)
        held = list_stages(run.layout)
        for profile in profiles:
            stage = group(run.layout, "pp").place(profile.rank)
            chunks = tuple(held[stage])
            rows[run.job.precision.compute].append(
                (
                    estimate_elementwise_seconds(units, run.layout, memory_by_rank[stage], chunks),
                    count_weights(units, run.layout, chunks),
                    profile.timed["update"].seconds,
                )
            )
    return rows


def fit_update(rows: Sequence[tuple[float, int, float]]) -> tuple[float, float, float]:
    """Fit the seconds of the rows of ``list_updates``, by least relative squares.

    Returns the factor of the seconds that the curves predict, the seconds per weight, and the seconds per step.
    """
    curve_seconds, weights, seconds = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    columns = np.stack([curve_seconds, weights, np.ones(len(rows))], axis=1) / seconds[:, None]
    factor, per_weight, per_step = solve_nonnegative_least_squares(
        columns, np.ones(len(rows)), prior=np.array([1.0, 1e-5, 1e-3]), weight=1e-6
    )
    return float(factor), float(per_weight), float(per_step)


def fit_step_factors(
    machine: Machine, measured: Sequence[tuple[GridRun, list[RankProfile]]], *, ranks: int
) -> list[StepFactor]:
    """Return the factors of the units and updates of ``measured``, by dtype and kind; ``machine`` holds the curves."""
    factors, updates = [], list_updates(machine, measured)
    for dtype, units in collect_units(machine, measured).items():
        forward, backward = fit(units, counts_host=not machine.has_gpus)
        factors += [
            StepFactor(
                kind=kind,
                ranks=ranks,
                dtype=dtype,
                forward=forward.factor[kind],
                backward=backward.factor[kind],
                forward_kernel_seconds=forward.host[kind],
                backward_kernel_seconds=backward.host[kind],
            )
            for kind in forward.factor
        ]
        factor, per_weight, per_step = fit_update(updates[dtype])
        factors.append(
            StepFactor(
                kind="update",
                ranks=ranks,
                dtype=dtype,
                forward=factor,
                backward=0.0,
                forward_kernel_seconds=per_weight,
                backward_kernel_seconds=per_step,
            )
        )
    return factors


def fit_overhead(
    machine: Machine, measured: Sequence[tuple[GridRun, list[RankProfile]]], *, ranks: int
) -> StepOverhead | None:
    """Return what the steps of ``measured`` have besides the processor time of their work and their messages.

    The host's seconds between operations are medians over the runs. Share and waits are fitted to what work and
    messages leave of the clock, by least relative squares. In a pipeline this includes the bubble, so that runs of one
    stage count alone; None if there is none. If other programs disturbed the runs, the clock of work and waits counts
    less by the part of the cores that they used.
    """
    assert machine.calibration is not None, "the grid is measured with the curves"
    rows, rests = list[tuple[float, float, float]](), list[float]()
    gaps = list[tuple[float, float]]()
    for run, profiles in measured:
        if run.layout.pp > 1:
            continue
        work, rest, step = map(statistics.fmean, zip(*map(split_step, profiles), strict=True))
        counts = get_planner(run.model, machine, run.job).counts
        deviations = sum_deviations(counts, run.layout, (0,), work_seconds=work)
        rows.append((work / step, deviations.start / step, deviations.drift / step))
        disturbance = max(0.0, profiles[0].cores_of_others - BUSY_CORES) / machine.calibration.cores
        rests.append((max(0.0, 1 - disturbance) * (work + rest) - work) / step)
        forward, backward = count_operations(counts, run.layout, (0,))
        gaps += [(profile.gaps["F"] / forward, profile.gaps["BW"] / backward) for profile in profiles if profile.gaps]
    if not rows:
        return None
    fitted = solve_nonnegative_least_squares(np.array(rows), np.array(rests), prior=np.zeros(3), weight=1e-6)
    host_share, start_seconds, drift_seconds = map(float, fitted)
    forward_gap, backward_gap = map(statistics.median, zip(*gaps, strict=True)) if gaps else (0.0, 0.0)
    return StepOverhead(
        ranks=ranks,
        host_share=host_share,
        forward_gap_seconds=forward_gap,
        backward_gap_seconds=backward_gap,
        start_seconds=start_seconds,
        drift_seconds=drift_seconds,
    )


class StepSplit(NamedTuple):
    """Seconds of a rank's step: its units and update, what they and the messages leave of the clock, and the step."""

    work: float
    rest: float
    step: float


def split_step(profile: RankProfile) -> StepSplit:
    """Return the seconds of a rank's step."""
    work = messages = 0.0
    for name, timed in profile.timed.items():
        if name.startswith("message "):
            messages += timed.times * timed.seconds
        elif name != "step":
            work += timed.times * timed.seconds
    step = profile.timed["step"].seconds
    return StepSplit(work, step - work - messages, step)
