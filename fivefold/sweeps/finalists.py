"""``search --measure K``: trains a few steps of each of the K best different layouts, and ranks them by what they took.

Their units are measured first (``calibrate --for``), so that this machine's predictions are better from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fivefold.calibration import cores
from fivefold.calibration.profile import measured as is_measured
from fivefold.calibration.profile import profile
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.predict import predict
from fivefold.planner.search import search
from fivefold.record import Mistake
from fivefold.results.search_result import Finalist
from fivefold.sweeps.trial import STEPS, trial

CANDIDATES = 12  # best layouts, per one that is measured, among which are so many different ones
ROUNDS = 2  # of trials, as one may fall on a busy moment


def measure_best(
    *, model: Model, machine: Machine, job: Job, count: int,
    report: Callable[[str, int, int], None] | None = None,
) -> tuple[list[Finalist], Machine]:  # fmt: skip
    """The ``count`` best different layouts, the fastest measured first, and ``machine`` with their units in its store.

    What could not run comes last, with the reason. ``Mistake`` if ``machine`` is not this computer, calibrated.
    """
    if machine.calibration is None:
        raise Mistake(f"{machine.name} is not calibrated, so layouts cannot be measured here; take local")
    if machine.backend == "gloo" and machine.ranks > machine.ranks_per_node:
        raise Mistake(
            f"{machine.ranks} ranks are more than the {machine.ranks_per_node} of this computer; measure on local"
        )
    found = search(model=model, machine=machine, job=job, top=CANDIDATES * count)
    chosen = different([Layout.parse(each.step.layout) for each in found.best], count=count)
    for done, layout in enumerate(chosen):
        if report:
            report(f"units of {layout}", done, 3 * count)
        if not job.stack.pairs and not is_measured(machine, model=model, layout=layout, job=job):
            machine = profile(model=model, layout=layout, job=job, machine=machine, cores=cores())
    took: dict[Layout, list[float]] = {layout: [] for layout in chosen}
    why: dict[Layout, str] = {}
    for turn in range(ROUNDS):
        for done, layout in enumerate(chosen):
            if report:
                report(f"steps of {layout}", (1 + turn) * len(chosen) + done, 3 * count)
            if layout in why:
                continue
            ended = trial(model=model, machine=machine, layout=layout, job=job, steps=STEPS)
            if ended.measured is None:
                why[layout] = ended.why
            else:
                took[layout].append(ended.measured.time.step_seconds)
    finalists = [
        Finalist(
            layout=str(layout),
            predicted_seconds=predict(model=model, machine=machine, layout=layout, job=job).time.step_seconds,
            measured_seconds=min(took[layout]) if layout not in why else None,
            why=why.get(layout, ""),
        )
        for layout in chosen
    ]
    return sorted(finalists, key=lambda each: each.measured_seconds or float("inf")), machine


def different(layouts: Iterable[Layout], *, count: int) -> list[Layout]:
    """The first ``count`` that differ in more than what hardly changes a step: its order of axes, or ZeRO-1 or -2."""
    found: dict[object, Layout] = {}
    for layout in layouts:
        same = (layout.dp, layout.tp, layout.cp, layout.pp, layout.v, layout.ep, layout.schedule, layout.mbs,
                layout.ac, layout.zero == 3)  # fmt: skip
        if len(found) < count:
            found.setdefault(same, layout)
    return list(found.values())
