"""``calibrate --for MODEL LAYOUT``: time every distinct unit of a run in the trainer's own step, rank by rank.

One rank of each pipeline stage runs its real step (``unit_worker.py``), with as many ranks in parallel as share this
computer. Their units enter the machine's store, where predictions find them by what they compute
(``planner/time/profiled.py``). Messages return at once and the network model adds their time, so that one GPU can price
a run on a thousand GPUs. Where all ranks of the layout run on this computer's cores, messages are really sent and timed
as well.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from fivefold.calibration.messages import Timed, distinct_messages, heard
from fivefold.calibration.processes import side_by_side
from fivefold.calibration.unit_worker import ProfileOrder, RankProfile
from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.layout.spec import Layout
from fivefold.layout.stages import recomputed_layers, stage_layers
from fivefold.machine.spec import CollectivePoint, Machine, UnitPoint, UpdatePoint
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts, UnitGroup
from fivefold.planner.counts.memory.peak import memory
from fivefold.planner.counts.traffic import messages
from fivefold.planner.predict import Planner, planner
from fivefold.planner.time.profiled import Profiled, ranks_per_host
from fivefold.planner.time.unit_time import UnitTime
from fivefold.planner.time.units import Units
from fivefold.record import RunFailure, UserError

SILENCE_SECONDS = 300.0
STEPS, SECONDS = 7, 2.0  # least number of measured steps, and least time they take
LEAST_WORK, MOST_WORK = 1e-3, 20e-3  # bounds of the seconds of compute between two timed messages
DEEP = 6  # layers of a stage that are run: with fewer, more tensors would stay in the caches than in the full model


def profile(
    *,
    model: Model,
    layout: Layout,
    job: Job,
    machine: Machine,
    cores: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> Machine:
    """Return ``machine`` with the units of this run in its store; earlier units with the same key are replaced.

    ``machine`` is a calibrated one. Raises ``UserError`` for micro-batches that alternate within a unit, ``RunFailure``
    when a worker dies or hangs.
    """
    assert machine.calibration is not None, "profile() adds to a calibration"
    if job.stack.pairs:
        raise UserError("pairs = true: two micro-batches alternate within a unit, which cannot be timed; drop it")
    together, model = ranks_per_host(layout, machine), shorten_model(model, layout, job)
    ranks, plans = _measured_ranks(layout, together), planner(model, machine, job)
    profiles: list[RankProfile] = []
    for done, first in enumerate(range(0, len(ranks), together)):
        if progress:
            progress("ranks", done * together, len(ranks))
        profiles += _run(ranks[first : first + together], plans=plans, model=model, layout=layout, job=job, cores=cores)
    return add(machine, profiles, model=model, layout=layout, job=job)


def add(machine: Machine, profiles: list[RankProfile], *, model: Model, layout: Layout, job: Job) -> Machine:
    """Return ``machine`` with the units of ``profiles`` in its store."""
    calibration = machine.calibration
    assert calibration is not None
    unprofiled_machine = machine.replace(calibration=calibration.replace(units=(), updates=()))
    counts = planner(model, unprofiled_machine, job).counts  # the job as it runs on this machine's backend
    keys, curves, ranks = Profiled(counts, machine), Units(counts, unprofiled_machine), ranks_per_host(layout, machine)
    points_by_key: dict[str, list[UnitPoint]] = defaultdict(list)
    for rank_profile in profiles:
        for point in _points(rank_profile, counts=counts, layout=layout, keys=keys, curves=curves, ranks=ranks):
            points_by_key[point.key].append(point)
    units = {(p.key, p.ranks): p for p in calibration.units}
    units |= {(key, ranks): _mean(points) for key, points in points_by_key.items()}
    memory_by_rank = memory(counts, layout)
    updates = {(p.key, p.ranks): p for p in calibration.updates}
    update = UpdatePoint(
        key=keys.update_key(layout),
        label=f"{job.optimizer.kind} {layout}",
        ranks=ranks,
        elements=round(
            statistics.fmean(
                memory_by_rank[_stage_rank(layout, rank_profile.rank)].updated for rank_profile in profiles
            )
        ),
        seconds=statistics.fmean(rank_profile.timed["update"].seconds for rank_profile in profiles),
        spread=max(rank_profile.timed["update"].spread for rank_profile in profiles),
    )
    updates[update.key, ranks] = update
    collectives = {(p.collective, p.ranks, p.nodes, p.bytes): p for p in calibration.collectives}
    points = [p for rank_profile in profiles for p in rank_profile.messages] + _collect_step_points(
        profiles, counts=counts, layout=layout, ranks=ranks
    )
    collectives |= {(p.collective, p.ranks, p.nodes, p.bytes): p for p in points}
    store = {
        "collectives": tuple(collectives.values()),
        "units": tuple(units.values()),
        "updates": tuple(updates.values()),
    }
    return machine.replace(calibration=calibration.replace(**store))


def _collect_step_points(
    profiles: list[RankProfile], *, counts: Counts, layout: Layout, ranks: int
) -> list[CollectivePoint]:
    """Return the messages that were timed in the step, with the mean seconds over ranks.

    The mean is taken because some ranks arrive late and others wait for them.
    """
    orders = distinct_messages(counts, layout, beside=ranks) if ranks > 1 else ()
    seconds_by_order = {
        order: [value for rank_profile in profiles for value in heard(order, rank_profile.timed)] for order in orders
    }
    return [
        CollectivePoint(collective=o.collective, ranks=o.ranks, bytes=o.bytes, seconds=statistics.fmean(seconds))
        for o, seconds in seconds_by_order.items()
        if seconds
    ]


def is_profiled(machine: Machine, *, model: Model, layout: Layout, job: Job) -> bool:
    """Return whether the store holds every unit of a layout under its own key."""
    counts = planner(model, machine, job).counts
    store = Profiled(counts, machine)
    units = {run for stage in counts.stage_work(layout) for run, _ in stage}
    return all((p := store.unit(layout, run)) and p.key == store.unit_key(layout, run) for run in units)


def shorten_model(model: Model, layout: Layout, job: Job) -> Model:
    """Return ``model`` with at most ``DEEP`` layers per stage, provided that every kind of block is still there."""
    layers, kinds = layout.pp * layout.v * DEEP, set(Counts(model, job).kinds)
    if model.moe is not None:
        layers = max(layers, model.moe.dense_layers + 1)
    while not layout.stages and layers < model.layers:
        short = model.replace(layers=layers)
        if set(Counts(short, job).kinds) == kinds:
            return short
        layers *= 2
    return model


def _measured_ranks(layout: Layout, together: int) -> list[int]:
    """Return one rank of each pipeline stage; without a pipeline, as many ranks as run in parallel."""
    pp = group(layout, "pp")
    ranks = [stage * pp.stride for stage in range(pp.ranks)]
    other_ranks = [rank for rank in range(layout.world) if rank not in ranks]
    return ranks + other_ranks[: -len(ranks) % together]


def _stage_rank(layout: Layout, rank: int) -> int:
    return group(layout, "pp").place(rank)


def _run(ranks: list[int], *, plans: Planner, model: Model, layout: Layout, job: Job, cores: int) -> list[RankProfile]:
    """Run workers for ``ranks`` in parallel. ``plans`` is the planner of this model and job on this machine."""
    profiles: list[RankProfile] = []
    message_orders = distinct_messages(plans.counts, layout, beside=len(ranks)) if len(ranks) > 1 else ()
    work = _estimate_message_interval(plans, layout) if message_orders else MOST_WORK
    with TemporaryDirectory(prefix="fivefold-") as folder:
        orders = [
            ProfileOrder(
                place=index,
                beside=len(ranks),
                rank=rank,
                model=model,
                layout=str(layout),
                job=job,
                threads=max(1, cores // len(ranks)),
                meeting=str(Path(folder) / "meeting"),
                seconds=SECONDS,
                steps=STEPS,
                silence_seconds=SILENCE_SECONDS,
                messages=message_orders,
                work_seconds=work,
            )
            for index, rank in enumerate(ranks)
        ]
        commands = [
            [sys.executable, "-m", "fivefold.calibration.unit_worker", order.model_dump_json()] for order in orders
        ]
        side_by_side(
            commands,
            silence_seconds=SILENCE_SECONDS,
            on_line=lambda line: profiles.append(RankProfile.model_validate_json(line)),
        )
    if len(profiles) != len(ranks):
        raise RunFailure(f"{len(ranks)} workers reported {len(profiles)} profiles; run it again")
    return profiles


def _estimate_message_interval(plans: Planner, layout: Layout) -> float:
    """Return the seconds that a rank computes between two messages, estimated from the curves and bounded."""
    message_count = sum(message.times for message in messages(plans.counts, layout))
    compute = plans.estimate(layout).step_time.compute
    return min(MOST_WORK, max(LEAST_WORK, compute / max(1, message_count)))


def _points(
    one: RankProfile, *, counts: Counts, layout: Layout, keys: Profiled, curves: Units, ranks: int
) -> list[UnitPoint]:
    """Return the units of one rank, each averaged over its layers.

    The weight-gradient seconds of a stage (W) are distributed over its units in proportion to the curves.
    """
    stages, last = stage_layers(counts.model.layers, layout), layout.pp * layout.v - 1
    rows_by_run: dict[UnitGroup, list[tuple[float, float, float, float]]] = defaultdict(list)
    for stage, work in enumerate(counts.stage_work(layout)):
        names = [
            *(["embed"] if stage == 0 else []),
            *(f"block {layer}" for layer in stages[stage]),
            *(["head"] if stage == last else []),
        ]
        if not any(f"F {name}" in one.timed for name in names):
            continue
        runs = {name: _run_of(name, counts, layout) for name in names}
        times = {run: curves.unit(layout, run) for run, _ in work}
        weights = sum(times[run].weight for run in runs.values()) or 1.0
        stage_weight = one.timed.get(f"W {stage}", Timed(seconds=0.0, spread=0.0)).seconds
        for name, run in runs.items():
            forward = one.timed[f"F {name}"]
            rows_by_run[run].append(
                (forward.seconds, *_backward(one, name, stage_weight * times[run].weight / weights))
            )
    return [
        _point(run, rows, key=keys.unit_key(layout, run), curve=curves.unit(layout, run), ranks=ranks, layout=layout)
        for run, rows in rows_by_run.items()
    ]


def _backward(one: RankProfile, name: str, weight: float) -> tuple[float, float, float]:
    """Return the seconds of B and of W, and their spread.

    Where a schedule runs both B and BW, the more frequent BW determines the sum of the two.
    """
    full, input_gradient = one.timed.get(f"BW {name}"), one.timed.get(f"B {name}")
    if input_gradient is None:
        assert full is not None, f"{name} ran no backward"
        return full.seconds, 0.0, full.spread
    scale = 1.0 if full is None else full.seconds / (input_gradient.seconds + weight)
    return scale * input_gradient.seconds, scale * weight, (full or input_gradient).spread


def _point(
    run: UnitGroup,
    rows: list[tuple[float, float, float, float]],
    *,
    key: str,
    curve: UnitTime,
    ranks: int,
    layout: Layout,
) -> UnitPoint:
    forward, backward, weight = (statistics.fmean(row[i] for row in rows) for i in range(3))
    return UnitPoint(
        key=key,
        label=f"{run.name if isinstance(run.name, str) else 'block'} {layout}",
        ranks=ranks,
        forward_seconds=forward,
        backward_seconds=backward,
        weight_seconds=weight,
        over_curves=(forward + backward + weight) / (curve.forward + curve.backward + curve.weight),
        spread=statistics.median(row[3] for row in rows),
    )


def _run_of(name: str, counts: Counts, layout: Layout) -> UnitGroup:
    """Return the unit of a name as ``stage_work`` has it."""
    if name in ("embed", "head"):
        return UnitGroup(name, 0, 1) if name == "embed" else counts.head(layout)
    layer = int(name.split()[1])
    kind = counts.kinds[layer]
    return UnitGroup(kind, counts.example[kind], 1, recomputed_layers(counts.model.layers, layout)[layer])


def _mean(points: list[UnitPoint]) -> UnitPoint:
    """Return the mean over ranks: where ranks exchange messages, each waits for the other in turn."""
    fields = ("forward_seconds", "backward_seconds", "weight_seconds", "over_curves", "spread")
    return points[0].replace(**{name: statistics.fmean(getattr(p, name) for p in points) for name in fields})
