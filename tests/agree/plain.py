"""Compare what plain ``calibrate`` predicts of drawn runs with their steps, measured in turns with its grid.

    python -m tests.agree.plain --groups 5 --each 4 --seed 0 --full
    python -m tests.agree.plain

Rounds of kernels, steps of the grid and steps of the drawn runs follow one another, so that load and clock of the
computer meet all of them: the error is that of the method, and not of the hour. All measurements are kept in
FOLDER/*.json. The second command measures nothing: it judges those of the folder by the present cost model, which holds
for as long as the grid (``calibration/step_grid.py``) stays as it is.

Units and update are processor time, the full step is the clock's. All runs are in fp32, which every CPU computes fast.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fivefold.calibration import Measurements, build_machine, measure
from fivefold.calibration.orders import CaseOrder, RankProfile
from fivefold.calibration.profile import measure_unit_seconds
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.catalog import resolve
from fivefold.planner.predict import get_planner
from fivefold.planner.time.units import Units
from fivefold.record import Record
from tests.agree.time import cases

DEMO = Job(sequence=256, global_batch=8, precision="fp32", steps=1)
DEMO_LAYOUTS = {1: ("dp1 mbs1", "dp1 mbs4"), 2: ("dp2 zero1 mbs1", "dp2 zero0 mbs4", "tp2 mbs1")}
PARTS = ("work", "update", "messages", "rest")  # of a step by the clock; work: operations, and the host between them


class Stored(Record):
    """Measurements of a calibration and of the drawn runs for each number of ranks."""

    cases: dict[int, tuple[CaseOrder, ...]]
    measurements: Measurements


class Compared(NamedTuple):
    """Predicted and measured seconds of a run: all passes of its units, its update, its step, and the step's parts."""

    job: str  # runs of one job differ in the layout
    layout: str
    units: tuple[float, float]
    update: tuple[float, float]
    step: tuple[float, float]
    predicted: dict[str, float]
    measured: dict[str, float]


def draw(*, seed: int, groups: int, each: int, world: int) -> tuple[CaseOrder, ...]:
    """The demo's model, and drawn models and layouts of ``world`` ranks in fp32."""
    orders = [CaseOrder(model=resolve("tiny"), layout=layout, job=DEMO) for layout in DEMO_LAYOUTS[world]]
    for case in cases(seed=seed, groups=groups, each=each, world=2):
        if case.layout.world == world:
            job = case.job.replace(precision=DEMO.precision)
            orders.append(CaseOrder(model=case.model, layout=str(case.layout), job=job))
    return tuple(orders)


def compare(order: CaseOrder, profiles: Sequence[RankProfile], machine: Machine, *, name: str) -> Compared:
    """Compare one run; ``name`` of its draw. Parts are means over ranks."""
    layout, plans = Layout.parse(order.layout), get_planner(order.model, machine, order.job)
    counts = plans.counts
    units, step = Units(counts, machine), plans.estimate(layout).step_time
    predicted = measured = 0.0
    for profile in profiles:
        rows = measure_unit_seconds(profile, counts=counts, layout=layout, curves=units)
        for unit, number in (entry for stage in counts.stage_work(layout) for entry in stage):
            if unit in rows:
                time, passes = units.unit(layout, unit), rows[unit]
                predicted += number * (time.forward + time.backward + time.weight)
                measured += number * (passes.forward + passes.backward + passes.weight)
    parts = [measure_parts(profile) for profile in profiles]
    mean = {part: statistics.fmean(of_rank[part] for of_rank in parts) for part in PARTS}
    planned = {
        "work": step.compute + step.host,
        "update": step.optimizer,
        "messages": sum(step.exposed.values()),
    }
    planned["rest"] = step.seconds - sum(planned.values())
    seconds = max(profile.timed["step"].seconds for profile in profiles)
    return Compared(
        f"{name} {order.model.name}",
        str(order.layout),
        (predicted, measured),
        (step.optimizer, mean["update"]),
        (step.seconds, seconds),
        planned,
        mean,
    )


def measure_parts(profile: RankProfile) -> dict[str, float]:
    """Seconds of a rank's step by part, by the clock; ``rest``: waits for other ranks and stages."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for name, timed in profile.timed.items():
        kind = name.partition(" ")[0]
        part = {"step": "rest", "update": "update", "message": "messages"}.get(kind, "work")
        is_work = part in ("work", "update") and timed.clock_seconds is not None
        seconds[part] += (timed.clock_seconds if is_work else timed.seconds) * timed.times
    seconds["rest"] -= seconds["work"] + seconds["update"] + seconds["messages"]
    return seconds


def summarize(pairs: Iterable[tuple[float, float]]) -> str:
    """Median, nine tenths and bias of the relative errors of pairs (predicted, measured)."""
    errors = [predicted / measured - 1 for predicted, measured in pairs]
    sizes = sorted(map(abs, errors))
    return (
        f"{len(sizes)} runs: error median {statistics.median(sizes):.1%}, nine tenths within "
        f"{sizes[int(0.9 * (len(sizes) - 1))]:.1%}, largest {sizes[-1]:.1%}; bias {statistics.fmean(errors):+.1%}"
    )


def summarize_regret(rows: Iterable[Compared]) -> str:
    """Of jobs with several layouts: measured seconds of the one with the best prediction, over those of the best."""
    steps: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        steps[row.job].append(row.step)
    regrets = [min(pairs)[1] / min(measured for _, measured in pairs) - 1 for pairs in steps.values() if len(pairs) > 1]
    return f"regret {statistics.fmean(regrets):.1%} in the mean, {max(regrets):.1%} at most, over {len(regrets)} jobs"


def report(rows: Sequence[Compared]) -> Iterable[str]:
    """Lines: one of each run, and the errors of units, update and step."""
    heading = " ".join(f"{part:>15}" for part in PARTS)
    yield f"{'ms, predicted/measured':52} units  update    step         step {heading}"
    for row in rows:
        errors = "  ".join(
            f"{predicted / measured - 1:+6.1%}" for predicted, measured in (row.units, row.update, row.step)
        )
        parts = [row.step, *((row.predicted[part], row.measured[part]) for part in PARTS)]
        shown = " ".join(f"{predicted * 1e3:7.1f}/{measured * 1e3:<7.1f}" for predicted, measured in parts)
        yield f"{row.job + ' ' + row.layout:50} {errors}  {shown}"
    yield f"units   {summarize(row.units for row in rows)}"
    yield f"updates {summarize(row.update for row in rows)}"
    yield f"steps   {summarize(row.step for row in rows)}; {summarize_regret(rows)}"


def judge(stored: Stored, *, name: str) -> list[Compared]:
    """Compare all runs of ``stored`` with what its grid predicts."""
    machine = build_machine(stored.measurements)
    return [
        compare(order, profiles, machine, name=name)
        for world, orders in sorted(stored.cases.items())
        for order, profiles in zip(orders, stored.measurements.group_profiles(world)[1], strict=True)
    ]


def progress(what: str, done: int, total: int) -> None:
    """One line of progress."""
    print(f"\r{what}: {done} of {total}   ", end="", file=sys.stderr, flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--seed", type=int, help="measure the runs of this draw first")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--full", action="store_true", help="calibrate without --quick")
    parser.add_argument("--folder", type=Path, default=Path("runs/agree-plain"))
    given = parser.parse_args()
    if given.seed is not None:
        size = {"groups": given.groups, "each": given.each}
        orders = {world: draw(seed=given.seed, world=world, **size) for world in given.ranks}
        measured = measure(ranks=tuple(given.ranks), quick=not given.full, cases=orders, progress=progress)
        name = "-".join(
            map(str, (given.seed, given.groups, given.each, *given.ranks, "full" if given.full else "quick"))
        )
        given.folder.mkdir(parents=True, exist_ok=True)
        (given.folder / f"{name}.json").write_text(Stored(cases=orders, measurements=measured).model_dump_json())
    files = sorted(given.folder.glob("*.json"))
    rows = list[Compared]()
    for file in files:
        stored = Stored.model_validate_json(file.read_text())
        print(f"{file.stem}: other programs used {stored.measurements.cores_of_others or 0:.2f} cores")
        rows += judge(stored, name=file.stem)
    print(*report(rows), sep="\n")


if __name__ == "__main__":
    main()
