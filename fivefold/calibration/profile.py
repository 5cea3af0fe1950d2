"""``calibrate --for MODEL LAYOUT``: times every distinct unit of a run in the trainer's own step, rank by rank.

A rank of each pipeline stage runs its real step (``unit_worker.py``), as many ranks side by side as share this
computer. Their units enter the machine's store, where predictions find them by what they compute
(``planner/time/profiled.py``). Messages return at once, and the network's model adds them, so that one GPU prices a run
on a thousand; where all ranks of the layout are on this computer's cores they are sent, and timed as well.
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
from fivefold.planner.counts.counts import Counts, Run
from fivefold.planner.counts.memory.peak import memory
from fivefold.planner.counts.traffic import messages
from fivefold.planner.predict import Planner, planner
from fivefold.planner.time.profiled import Profiled, beside
from fivefold.planner.time.unit_time import UnitTime
from fivefold.planner.time.units import Units
from fivefold.record import Fault, Mistake

SILENCE_SECONDS = 300.0
STEPS, SECONDS = 7, 2.0  # measured steps: at least so many, for at least so long
LEAST_WORK, MOST_WORK = 1e-3, 20e-3  # seconds between two messages that are timed
DEEP = 6  # layers of a stage that are run: fewer find more of their tensors in the caches than a whole model does


def profile(
    *, model: Model, layout: Layout, job: Job, machine: Machine, cores: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> Machine:  # fmt: skip
    """Return ``machine`` with the units of this run in its store; earlier ones with the same key are replaced.

    ``machine`` is a calibrated one. Raises ``Mistake`` for micro-batches that alternate within a unit, ``Fault`` when a
    worker dies or hangs.
    """
    assert machine.calibration is not None, "profile() adds to a calibration"
    if job.stack.pairs:
        raise Mistake("pairs = true: two micro-batches alternate within a unit, which cannot be timed; drop it")
    together, model = beside(layout, machine), shortened(model, layout, job)
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
    bare = machine.replace(calibration=calibration.replace(units=(), updates=()))
    counts = planner(model, bare, job).counts  # of the job as it runs on this machine's backend
    keys, curves, ranks = Profiled(counts, machine), Units(counts, bare), beside(layout, machine)
    found: dict[str, list[UnitPoint]] = defaultdict(list)
    for one in profiles:
        for point in _points(one, counts=counts, layout=layout, keys=keys, curves=curves, ranks=ranks):
            found[point.key].append(point)
    units = {(p.key, p.ranks): p for p in calibration.units}
    units |= {(key, ranks): _mean(points) for key, points in found.items()}
    held = memory(counts, layout)
    updates = {(p.key, p.ranks): p for p in calibration.updates}
    update = UpdatePoint(
        key=keys.update_key(layout), label=f"{job.optimizer.kind} {layout}", ranks=ranks,
        elements=round(statistics.fmean(held[_stage_rank(layout, one.rank)].updated for one in profiles)),
        seconds=statistics.fmean(one.timed["update"].seconds for one in profiles),
        spread=max(one.timed["update"].spread for one in profiles),
    )  # fmt: skip
    updates[update.key, ranks] = update
    sent = {(p.collective, p.ranks, p.nodes, p.bytes): p for p in calibration.collectives}
    points = [p for one in profiles for p in one.messages] + _in_step(
        profiles, counts=counts, layout=layout, ranks=ranks
    )
    sent |= {(p.collective, p.ranks, p.nodes, p.bytes): p for p in points}
    store = {"collectives": tuple(sent.values()), "units": tuple(units.values()), "updates": tuple(updates.values())}
    return machine.replace(calibration=calibration.replace(**store))


def _in_step(profiles: list[RankProfile], *, counts: Counts, layout: Layout, ranks: int) -> list[CollectivePoint]:
    """The messages that were timed in the step, in the mean over ranks: of which some come late and others wait."""
    orders = distinct_messages(counts, layout, beside=ranks) if ranks > 1 else ()
    found = {order: [each for one in profiles for each in heard(order, one.timed)] for order in orders}
    return [
        CollectivePoint(collective=o.collective, ranks=o.ranks, bytes=o.bytes, seconds=statistics.fmean(seconds))
        for o, seconds in found.items()
        if seconds
    ]


def measured(machine: Machine, *, model: Model, layout: Layout, job: Job) -> bool:
    """Whether the store has every unit of a layout, by its own key."""
    counts = planner(model, machine, job).counts
    store = Profiled(counts, machine)
    units = {run for stage in counts.stage_work(layout) for run, _ in stage}
    return all((p := store.unit(layout, run)) and p.key == store.unit_key(layout, run) for run in units)


def shortened(model: Model, layout: Layout, job: Job) -> Model:
    """``model`` with no more layers per stage than ``DEEP``, if every kind of block is still there."""
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
    """One rank of each pipeline rank; of a layout without a pipeline as many as run side by side."""
    pp = group(layout, "pp")
    ranks = [place * pp.stride for place in range(pp.ranks)]
    others = [rank for rank in range(layout.world) if rank not in ranks]
    return ranks + others[: -len(ranks) % together]


def _stage_rank(layout: Layout, rank: int) -> int:
    return group(layout, "pp").place(rank)


def _run(ranks: list[int], *, plans: Planner, model: Model, layout: Layout, job: Job, cores: int) -> list[RankProfile]:
    """Run workers for ``ranks`` side by side; ``plans``: of this model and job here."""
    heard: list[RankProfile] = []
    sent = distinct_messages(plans.counts, layout, beside=len(ranks)) if len(ranks) > 1 else ()
    work = _between_messages(plans, layout) if sent else MOST_WORK
    with TemporaryDirectory(prefix="fivefold-") as folder:
        orders = [
            ProfileOrder(
                place=place, beside=len(ranks), rank=rank, model=model, layout=str(layout), job=job,
                threads=max(1, cores // len(ranks)), meeting=str(Path(folder) / "meeting"), seconds=SECONDS,
                steps=STEPS, silence_seconds=SILENCE_SECONDS, messages=sent, work_seconds=work,
            )
            for place, rank in enumerate(ranks)
        ]  # fmt: skip
        commands = [
            [sys.executable, "-m", "fivefold.calibration.unit_worker", order.model_dump_json()] for order in orders
        ]
        side_by_side(
            commands, silence_seconds=SILENCE_SECONDS,
            on_line=lambda line: heard.append(RankProfile.model_validate_json(line)),
        )  # fmt: skip
    if len(heard) != len(ranks):
        raise Fault(f"{len(ranks)} workers reported {len(heard)} profiles; run it again")
    return heard


def _between_messages(plans: Planner, layout: Layout) -> float:
    """Seconds that a rank computes between two messages, by the curves and within reason."""
    many = sum(message.times for message in messages(plans.counts, layout))
    compute = plans.estimate(layout).step_time.compute
    return min(MOST_WORK, max(LEAST_WORK, compute / max(1, many)))


def _points(
    one: RankProfile, *, counts: Counts, layout: Layout, keys: Profiled, curves: Units, ranks: int
) -> list[UnitPoint]:
    """The units of one rank, each averaged over its layers; W is shared among a stage's units as their curves say."""
    stages, last = stage_layers(counts.model.layers, layout), layout.pp * layout.v - 1
    found: dict[Run, list[tuple[float, float, float, float]]] = defaultdict(list)
    for stage, work in enumerate(counts.stage_work(layout)):
        names = [*(["embed"] if stage == 0 else []), *(f"block {layer}" for layer in stages[stage]),
                 *(["head"] if stage == last else [])]  # fmt: skip
        if not any(f"F {name}" in one.timed for name in names):
            continue
        runs = {name: _run_of(name, counts, layout) for name in names}
        times = {run: curves.unit(layout, run) for run, _ in work}
        weights = sum(times[run].weight for run in runs.values()) or 1.0
        stage_weight = one.timed.get(f"W {stage}", Timed(seconds=0.0, spread=0.0)).seconds
        for name, run in runs.items():
            forward = one.timed[f"F {name}"]
            found[run].append((forward.seconds, *_backward(one, name, stage_weight * times[run].weight / weights)))
    return [
        _point(run, rows, key=keys.unit_key(layout, run), curve=curves.unit(layout, run), ranks=ranks, layout=layout)
        for run, rows in found.items()
    ]


def _backward(one: RankProfile, name: str, weight: float) -> tuple[float, float, float]:
    """Seconds of B and of W, and their spread. Where a schedule runs B and BW, the many BW say what the two sum to."""
    whole, apart = one.timed.get(f"BW {name}"), one.timed.get(f"B {name}")
    if apart is None:
        assert whole is not None, f"{name} ran no backward"
        return whole.seconds, 0.0, whole.spread
    scale = 1.0 if whole is None else whole.seconds / (apart.seconds + weight)
    return scale * apart.seconds, scale * weight, (whole or apart).spread


def _point(
    run: Run, rows: list[tuple[float, float, float, float]], *, key: str, curve: UnitTime, ranks: int, layout: Layout
) -> UnitPoint:
    forward, backward, weight = (statistics.fmean(row[i] for row in rows) for i in range(3))
    return UnitPoint(
        key=key, label=f"{run.name if isinstance(run.name, str) else 'block'} {layout}", ranks=ranks,
        forward_seconds=forward, backward_seconds=backward, weight_seconds=weight,
        over_curves=(forward + backward + weight) / (curve.forward + curve.backward + curve.weight),
        spread=statistics.median(row[3] for row in rows),
    )  # fmt: skip


def _run_of(name: str, counts: Counts, layout: Layout) -> Run:
    """The unit of a name as ``stage_work`` has it."""
    if name in ("embed", "head"):
        return Run(name, 0, 1) if name == "embed" else counts.head(layout)
    layer = int(name.split()[1])
    kind = counts.kinds[layer]
    return Run(kind, counts.example[kind], 1, recomputed_layers(counts.model.layers, layout)[layer])


def _mean(points: list[UnitPoint]) -> UnitPoint:
    """The mean over ranks: where they exchange messages, each waits for the other in turn."""
    fields = ("forward_seconds", "backward_seconds", "weight_seconds", "over_curves", "spread")
    return points[0].replace(**{name: statistics.fmean(getattr(p, name) for p in points) for name in fields})
