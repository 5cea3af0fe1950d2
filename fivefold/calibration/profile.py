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
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from fivefold.calibration.message_orders import Timed, list_distinct_messages, list_measured_seconds
from fivefold.calibration.orders import ProfileOrder, RankProfile, RunOrder
from fivefold.calibration.processes import run_in_parallel
from fivefold.errors import RunFailure, UserError
from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_recomputed_layers, list_stage_layers
from fivefold.machine.spec import CollectivePoint, Machine, UnitPoint, UpdatePoint
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts, UnitGroup
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.planner.counts.traffic import list_messages
from fivefold.planner.predict import Planner, get_planner
from fivefold.planner.time.profiled import Profiled, count_ranks_per_host
from fivefold.planner.time.unit_time import UnitTime
from fivefold.planner.time.units import Units

SILENCE_SECONDS = 300.0
STEPS, SECONDS = 7, 2.0  # least number of measured steps, and least time they take
MIN_COMPUTE_SECONDS, MAX_COMPUTE_SECONDS = 1e-3, 20e-3  # bounds of the seconds of compute between two timed messages
MAX_STAGE_LAYERS = (
    6  # layers of a stage that are run: with fewer, more tensors would stay in the caches than in the full model
)


def profile_layout(
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
    together = count_ranks_per_host(layout, machine)
    model = shorten_model(model, layout, job)
    ranks = _select_measured_ranks(layout, together)
    plans = get_planner(model, machine, job)
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
    counts = get_planner(model, unprofiled_machine, job).counts  # the job as it runs on this machine's backend
    keys = Profiled(counts, machine)
    curves = Units(counts, unprofiled_machine)
    ranks = count_ranks_per_host(layout, machine)
    points_by_key: dict[str, list[UnitPoint]] = defaultdict(list)
    for rank_profile in profiles:
        for run, passes in measure_unit_seconds(rank_profile, counts=counts, layout=layout, curves=curves).items():
            key, curve = keys.make_unit_key(layout, run), curves.unit(layout, run)
            points_by_key[key].append(_build_point(run, passes, key=key, curve=curve, ranks=ranks, layout=layout))
    units = {(p.key, p.ranks): p for p in calibration.units}
    units |= {(key, ranks): _average_points(points) for key, points in points_by_key.items()}
    memory_by_rank = count_rank_memory(counts, layout)
    updates = {(p.key, p.ranks): p for p in calibration.updates}
    update = UpdatePoint(
        key=keys.update_key(layout),
        label=f"{job.optimizer.kind} {layout}",
        ranks=ranks,
        elements=round(
            statistics.fmean(
                memory_by_rank[group(layout, "pp").place(rank_profile.rank)].updated_numel for rank_profile in profiles
            )
        ),
        seconds=statistics.fmean(rank_profile.timed["update"].seconds for rank_profile in profiles),
        spread=max(rank_profile.timed["update"].spread for rank_profile in profiles),
    )
    updates[update.key, ranks] = update
    collectives = {(p.collective, p.ranks, p.nodes, p.bytes): p for p in calibration.collectives}
    points = [p for rank_profile in profiles for p in rank_profile.messages] + collect_step_points(
        profiles, counts=counts, layout=layout, ranks=ranks
    )
    collectives |= {(p.collective, p.ranks, p.nodes, p.bytes): p for p in points}
    store = {
        "collectives": tuple(collectives.values()),
        "units": tuple(units.values()),
        "updates": tuple(updates.values()),
    }
    return machine.replace(calibration=calibration.replace(**store))


def collect_step_points(
    profiles: list[RankProfile], *, counts: Counts, layout: Layout, ranks: int
) -> list[CollectivePoint]:
    """Return the messages that were timed in the step, with the mean seconds over ranks.

    The mean is taken because some ranks arrive late and others wait for them.
    """
    orders = list_distinct_messages(counts, layout, local_ranks=ranks) if ranks > 1 else ()
    seconds_by_order = {
        order: [value for rank_profile in profiles for value in list_measured_seconds(order, rank_profile.timed)]
        for order in orders
    }
    return [
        CollectivePoint(collective=o.collective, ranks=o.ranks, bytes=o.bytes, seconds=statistics.fmean(seconds))
        for o, seconds in seconds_by_order.items()
        if seconds
    ]


def is_profiled(machine: Machine, *, model: Model, layout: Layout, job: Job) -> bool:
    """Return whether the store holds every unit of a layout under its own key."""
    counts = get_planner(model, machine, job).counts
    store = Profiled(counts, machine)
    units = {run for stage in counts.stage_work(layout) for run, _ in stage}
    return all((p := store.unit(layout, run)) and p.key == store.make_unit_key(layout, run) for run in units)


def shorten_model(model: Model, layout: Layout, job: Job) -> Model:
    """Return ``model`` with at most ``MAX_STAGE_LAYERS`` layers per stage, which still have every kind of block."""
    layers, kinds = layout.pp * layout.v * MAX_STAGE_LAYERS, set(Counts(model, job).kinds)
    if model.moe is not None:
        layers = max(layers, model.moe.dense_layers + 1)
    while not layout.stages and layers < model.layers:
        short = model.replace(layers=layers)
        if set(Counts(short, job).kinds) == kinds:
            return short
        layers *= 2
    return model


def _select_measured_ranks(layout: Layout, n_parallel: int) -> list[int]:
    """Return one rank of each pipeline stage, and others, so that groups of ``n_parallel`` are full."""
    pp = group(layout, "pp")
    ranks = [stage * pp.stride for stage in range(pp.ranks)]
    other_ranks = [rank for rank in range(layout.world) if rank not in ranks]
    return ranks + other_ranks[: -len(ranks) % n_parallel]


def _run(ranks: list[int], *, plans: Planner, model: Model, layout: Layout, job: Job, cores: int) -> list[RankProfile]:
    """Run workers for ``ranks`` in parallel. ``plans`` is the planner of this model and job on this machine."""
    message_orders = list_distinct_messages(plans.counts, layout, local_ranks=len(ranks)) if len(ranks) > 1 else ()
    orders = [
        RunOrder(
            rank=rank,
            model=model,
            layout=str(layout),
            job=job,
            seconds=SECONDS,
            steps=STEPS,
            messages=message_orders,
            work_seconds=_estimate_message_interval(plans, layout) if message_orders else MAX_COMPUTE_SECONDS,
        )
        for rank in ranks
    ]
    profiles: list[RankProfile] = []
    _run_workers(orders, cores=cores, on_profile=profiles.append)
    if len(profiles) != len(ranks):
        raise RunFailure(f"{len(ranks)} workers reported {len(profiles)} profiles; run `fivefold calibrate` again")
    return profiles


def _run_workers(runs: Sequence[RunOrder], *, cores: int, on_profile: Callable[[RankProfile], None]) -> None:
    """Run one worker for each of ``runs`` in parallel, each with its share of the cores.

    ``on_profile`` gets the profile of every worker.
    """
    with TemporaryDirectory(prefix="fivefold-") as folder:
        orders = [
            ProfileOrder(
                place=place,
                workers=len(runs),
                threads=max(1, cores // len(runs)),
                rendezvous_file=str(Path(folder) / "meeting"),
                silence_seconds=SILENCE_SECONDS,
                run=run,
            )
            for place, run in enumerate(runs)
        ]
        files = [Path(folder) / f"order-{order.place}" for order in orders]
        for file, order in zip(files, orders, strict=True):
            file.write_text(order.model_dump_json())
        run_in_parallel(
            [[sys.executable, "-m", "fivefold.calibration.unit_worker", str(file)] for file in files],
            silence_seconds=SILENCE_SECONDS,
            on_line=lambda line: on_profile(RankProfile.model_validate_json(line)),
        )


def _estimate_message_interval(plans: Planner, layout: Layout) -> float:
    """Return the seconds that a rank computes between two messages, estimated from the curves and bounded."""
    message_count = sum(message.times for message in list_messages(plans.counts, layout))
    compute = plans.estimate(layout).step_time.compute
    return min(MAX_COMPUTE_SECONDS, max(MIN_COMPUTE_SECONDS, compute / max(1, message_count)))


class UnitPasses(NamedTuple):
    """Measured seconds of one unit's passes, averaged over its layers; ``weight``: W, if the schedule splits it off."""

    forward: float
    backward: float
    weight: float
    spread: float


def measure_unit_seconds(
    one: RankProfile, *, counts: Counts, layout: Layout, curves: Units
) -> dict[UnitGroup, UnitPasses]:
    """Return the seconds of the units of one rank.

    The weight-gradient seconds of a stage (W) are distributed over its units in proportion to the curves.
    """
    stages = list_stage_layers(counts.model, layout)
    last = layout.pp * layout.v - 1
    rows_by_run: dict[UnitGroup, list[UnitPasses]] = defaultdict(list)
    for stage, work in enumerate(counts.stage_work(layout)):
        names = [
            *(["embed"] if stage == 0 else []),
            *(f"block {layer}" for layer in stages[stage]),
            *(["head"] if stage == last else []),
        ]
        if not any(f"F {name}" in one.timed for name in names):
            continue
        runs = {name: find_unit(name, counts, layout) for name in names}
        times = {run: curves.unit(layout, run) for run, _ in work}
        weights = sum(times[run].weight for run in runs.values()) or 1.0
        stage_weight = one.timed.get(f"W {stage}", Timed(seconds=0.0, spread=0.0)).seconds
        for name, run in runs.items():
            forward = one.timed[f"F {name}"]
            backward = _backward(one, name, stage_weight * times[run].weight / weights)
            rows_by_run[run].append(UnitPasses(forward.seconds, *backward))
    return {
        run: UnitPasses(
            forward=statistics.fmean(row.forward for row in rows),
            backward=statistics.fmean(row.backward for row in rows),
            weight=statistics.fmean(row.weight for row in rows),
            spread=statistics.median(row.spread for row in rows),
        )
        for run, rows in rows_by_run.items()
    }


def _backward(one: RankProfile, name: str, weight: float) -> tuple[float, float, float]:
    """Return the seconds of B and of W, and their spread.

    Where a schedule runs both B and BW, the more frequent BW determines the sum of the two.
    """
    full = one.timed.get(f"BW {name}")
    input_gradient = one.timed.get(f"B {name}")
    if input_gradient is None:
        assert full is not None, f"{name} ran no backward"
        return full.seconds, 0.0, full.spread
    scale = 1.0 if full is None else full.seconds / (input_gradient.seconds + weight)
    return scale * input_gradient.seconds, scale * weight, (full or input_gradient).spread


def _build_point(
    run: UnitGroup, passes: UnitPasses, *, key: str, curve: UnitTime, ranks: int, layout: Layout
) -> UnitPoint:
    """Return the measured seconds of a unit, and their ratio to the sum of its kernels' curves."""
    return UnitPoint(
        key=key,
        label=f"{run.name if isinstance(run.name, str) else 'block'} {layout}",
        ranks=ranks,
        forward_seconds=passes.forward,
        backward_seconds=passes.backward,
        weight_seconds=passes.weight,
        over_curves=sum(passes[:3]) / (curve.forward + curve.backward + curve.weight),
        spread=passes.spread,
    )


def find_unit(name: str, counts: Counts, layout: Layout) -> UnitGroup:
    """Return the units that are named ``embed``, ``head`` or ``block N``, as ``Counts.stage_work`` lists them."""
    if name in ("embed", "head"):
        return UnitGroup(name, 0, 1) if name == "embed" else counts.head(layout)
    layer = int(name.split()[1])
    kind = counts.kinds[layer]
    return UnitGroup(kind, counts.example[kind], 1, list_recomputed_layers(counts.model, layout)[layer])


def _average_points(points: list[UnitPoint]) -> UnitPoint:
    """Return the mean over ranks: where ranks exchange messages, each waits for the other in turn."""
    fields = ("forward_seconds", "backward_seconds", "weight_seconds", "over_curves", "spread")
    return points[0].replace(**{name: statistics.fmean(getattr(p, name) for p in points) for name in fields})
