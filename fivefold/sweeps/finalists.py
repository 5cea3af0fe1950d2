"""``search --measure K``: trains each of the K best distinct layouts for a few steps and ranks them by measured time.

Their units are measured first (``calibrate --for``), which improves later predictions for this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fivefold.calibration import count_cores
from fivefold.calibration.profile import is_profiled as is_measured
from fivefold.calibration.profile import profile_layout
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.predict import predict
from fivefold.planner.search import search
from fivefold.results.search_result import Finalist
from fivefold.sweeps.trial import STEPS, try_layout

CANDIDATES = 12  # best layouts requested of the search for each layout to measure: many of them are near-duplicates
TRIALS_PER_LAYOUT = 2  # trials of each layout, because one may run while the computer is busy


def measure_best(
    *, model: Model, machine: Machine, job: Job, count: int, report: Callable[[str, int, int], None] | None = None
) -> tuple[list[Finalist], Machine]:
    """Return the ``count`` best distinct layouts, fastest measured first, and ``machine`` with their units measured.

    Layouts that could not run come last, with the reason. Raises ``UserError`` unless ``machine`` is this computer,
    calibrated.
    """
    if machine.calibration is None:
        raise UserError(f"{machine.name} is not calibrated, so layouts cannot be measured here; use local")
    if not machine.has_gpus and machine.ranks > machine.ranks_per_node:
        raise UserError(
            f"{machine.ranks} ranks are more than the {machine.ranks_per_node} of this computer; measure on local"
        )
    result = search(model=model, machine=machine, job=job, top=CANDIDATES * count)
    layouts = select_different([Layout.parse(ranked.step.layout) for ranked in result.best], count=count)
    for done, layout in enumerate(layouts):
        if report:
            report(f"units of {layout}", done, 3 * count)
        if not job.stack.pairs and not is_measured(machine, model=model, layout=layout, job=job):
            machine = profile_layout(model=model, layout=layout, job=job, machine=machine, cores=count_cores())
    seconds_by_layout: dict[Layout, list[float]] = {layout: [] for layout in layouts}
    failure_by_layout: dict[Layout, str] = {}
    for round_number in range(TRIALS_PER_LAYOUT):
        for done, layout in enumerate(layouts):
            if report:
                report(f"steps of {layout}", (1 + round_number) * len(layouts) + done, 3 * count)
            if layout in failure_by_layout:
                continue
            outcome = try_layout(model=model, machine=machine, layout=layout, job=job, steps=STEPS)
            if outcome.measured is None:
                failure_by_layout[layout] = outcome.why
            else:
                seconds_by_layout[layout].append(outcome.measured.time.step_seconds)
    finalists = [
        Finalist(
            layout=str(layout),
            predicted_seconds=predict(model=model, machine=machine, layout=layout, job=job).time.step_seconds,
            measured_seconds=min(seconds_by_layout[layout]) if layout not in failure_by_layout else None,
            why=failure_by_layout.get(layout, ""),
        )
        for layout in layouts
    ]
    return sorted(finalists, key=lambda finalist: finalist.measured_seconds or float("inf")), machine


def select_different(layouts: Iterable[Layout], *, count: int) -> list[Layout]:
    """Return the first ``count`` layouts that differ in more than details, or ZeRO-1 against ZeRO-2.

    Those two stages hardly change the time of a step.
    """
    distinct: dict[Layout, Layout] = {}
    for layout in layouts:
        similar = layout.outline.model_copy(update={"zero": 1 if layout.zero == 2 else layout.zero})
        if len(distinct) < count:
            distinct.setdefault(similar, layout)
    return list(distinct.values())
