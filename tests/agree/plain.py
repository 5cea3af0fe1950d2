"""Compare units that plain ``calibrate`` predicts with units of drawn runs that are measured in turns with its grid.

    python -m tests.agree.plain --groups 6 --each 2 --seed 0 [--full]

Rounds of kernels, steps of the grid and steps of the drawn runs follow one another, so that load and clock of the
computer meet all of them: the error is that of the method, and not of the hour. Compute is compared; messages, whose
seconds depend on what else runs, are printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fivefold.calibration import calibrate
from fivefold.calibration.orders import CaseOrder, RankProfile
from fivefold.calibration.profile import measure_unit_seconds
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.catalog import resolve
from fivefold.planner.predict import get_planner
from fivefold.planner.time.units import Units
from tests.agree.time import cases

DEMO = Job(sequence=256, global_batch=8, precision="fp32", steps=1)
DEMO_LAYOUTS = {1: ("dp1 mbs1", "dp1 mbs4"), 2: ("dp2 zero1 mbs1", "dp2 zero0 mbs4", "tp2 mbs1")}


class Compared(NamedTuple):
    """Seconds of all passes of a rank through its units, per micro-batch, and of its update and its messages."""

    name: str
    predicted: float
    measured: float
    update: tuple[float, float]
    messages: tuple[float, float]

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.measured - 1


def draw(*, seed: int, groups: int, each: int, world: int) -> list[CaseOrder]:
    """The demo's model, and drawn models and layouts of ``world`` ranks in fp32."""
    orders = [CaseOrder(model=resolve("tiny"), layout=layout, job=DEMO) for layout in DEMO_LAYOUTS[world]]
    for case in cases(seed=seed, groups=groups, each=each, world=2):
        if case.layout.world == world:
            job = case.job.replace(precision=DEMO.precision)
            orders.append(CaseOrder(model=case.model, layout=str(case.layout), job=job))
    return orders


def compare(order: CaseOrder, profiles: Sequence[RankProfile], machine: Machine) -> Compared:
    """Predicted and measured seconds of one run, means over ranks."""
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
    updates = statistics.fmean(profile.timed["update"].seconds for profile in profiles)
    sent = (timed.seconds for profile in profiles for name, timed in profile.timed.items() if "message" in name)
    name = f"{order.model.name} {order.layout}"
    return Compared(name, predicted, measured, (step.optimizer, updates), (sum(step.exposed.values()), sum(sent)))


def summary(errors: Iterable[float]) -> str:
    """Median, nine tenths and bias."""
    errors = list(errors)
    sizes = sorted(map(abs, errors))
    return (
        f"{len(sizes)} runs: error median {statistics.median(sizes):.1%}, nine tenths within "
        f"{sizes[int(0.9 * (len(sizes) - 1))]:.1%}, largest {sizes[-1]:.1%}; bias {statistics.fmean(errors):+.1%}"
    )


def progress(what: str, done: int, total: int) -> None:
    """One line of progress."""
    print(f"\r{what}: {done} of {total}   ", end="", file=sys.stderr, flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--full", action="store_true", help="calibrate without --quick")
    given = parser.parse_args()
    orders = {
        world: tuple(draw(seed=given.seed, groups=given.groups, each=given.each, world=world)) for world in given.ranks
    }
    profiles: dict[tuple[int, int], list[RankProfile]] = defaultdict(list)
    machine = calibrate(
        ranks=tuple(given.ranks),
        quick=not given.full,
        cases=orders,
        on_case=lambda profile: profiles[profile.workers, profile.run].append(profile),
        progress=progress,
    )
    rows = [compare(orders[world][run], profiles[world, run], machine) for world, run in sorted(profiles)]
    for row in rows:
        update = row.update[0] / row.update[1] - 1
        print(f"{row.name:48} {row.error:+6.1%}  update {update:+6.1%}  messages {row.messages[0] * 1e3:.1f} ms")
    print(summary(row.error for row in rows))
    bare = machine.replace(calibration=machine.calibration.replace(steps=())) if machine.calibration else machine
    curves = (compare(orders[world][run], profiles[world, run], bare).error for world, run in sorted(profiles))
    print("curves alone,", summary(curves))


if __name__ == "__main__":
    main()
