"""Why layouts lost: their number by cause with the nearest example of each, and near misses if nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.layout.validity.stack import list_unwritten
from fivefold.machine.spec import Machine
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.host import count_host_bytes
from fivefold.planner.predict import Estimate, Planner, find_max_peak_bytes
from fivefold.planner.search.bounds import TIME_PARTS
from fivefold.planner.search.columns import Ints
from fivefold.planner.search.job_changes import list_job_changes, list_smaller_precisions
from fivefold.planner.search.layout_changes import list_offloadings
from fivefold.results.search_result import NearMiss, Reason
from fivefold.units import show_bytes, show_risk, show_seconds

CAUSE_DESCRIPTIONS = {
    "compute": "slower kernels or more recomputation",
    "tp": "limited by tp communication",
    "cp": "limited by cp communication",
    "ep": "limited by ep communication",
    "dp": "limited by dp communication",
    "bubble": "limited by the pipeline bubble",
    "bound": "ruled out by lower bounds of memory and step time",
    "unfit": "no faster than the tight layout, or not examined within the work limit",
}


class Rejections:
    """Counts rejected layouts by cause."""

    def __init__(self, largest_peak: int) -> None:
        self.largest_peak = largest_peak
        self.large = 0
        self.lowest_bound = np.inf  # of layouts that were dropped though they may be better than the best
        self.nearest: tuple[float, Layout] | None = None
        self.slow: dict[str, tuple[int, Layout]] = {}
        self.longest_part: dict[str, tuple[int, float, Layout]] = {}

    def add_too_large(self, n_layouts: Ints, size: NDArray[np.float64], layout: Callable[[int], Layout]) -> None:
        """Count layouts of at least ``size`` bytes each; each row stands for ``n_layouts`` of them."""
        if not len(size):
            return
        self.large += int(n_layouts.sum())
        smallest = int(size.argmin())
        if self.nearest is None or size[smallest] < self.nearest[0]:
            self.nearest = float(size[smallest]), layout(smallest)

    def add_slower(self, cause: str, n_layouts: int, layout: Layout) -> None:
        """Count layouts whose lower bound exceeds the best."""
        count, example = self.slow.get(cause, (0, layout))
        self.slow[cause] = count + n_layouts, example

    def count_fitting(self, estimate: Estimate) -> None:
        """Count an evaluated layout that fits, by what bounds its step."""
        step_time = estimate.step_time
        count, seconds, layout = self.longest_part.get(step_time.longest_part, (0, np.inf, estimate.layout))
        if step_time.seconds < seconds:
            seconds, layout = step_time.seconds, estimate.layout
        self.longest_part[step_time.longest_part] = count + 1, seconds, layout

    def parts(self, estimate: Estimate) -> NDArray[np.float64]:
        """Return the seconds of a step by ``TIME_PARTS``."""
        step_time = estimate.step_time
        exposed = step_time.exposed
        seconds_by_part = {
            **exposed,
            "ep": exposed.get("ep", 0.0) + exposed.get("etp", 0.0),
            "bubble": step_time.bubble - step_time.waits,
            "compute": step_time.compute + step_time.optimizer,
        }
        return np.array([seconds_by_part.get(part, 0.0) for part in TIME_PARTS])

    def reasons(
        self, machine: Machine, best: Estimate | None, *, risk: float, smallest: str = ""
    ) -> tuple[Reason, ...]:
        """Return all causes, the one with the most layouts first.

        ``risk``: the accepted probability of running out of memory. ``smallest``: the layout that needs the least, if
        it is known; otherwise the one of the smallest bound is named.
        """
        reasons = []
        capacity = show_bytes(machine.chip.memory_bytes)
        limit = f"{show_risk(risk)} risk of running out of {capacity}" if machine.has_gpus else capacity
        if self.nearest is not None:
            size, layout = self.nearest
            reasons.append(
                Reason(
                    cause="memory",
                    layouts=self.large,
                    nearest=smallest or str(layout),
                    line=f"above {limit}: peaks of {show_bytes(size)} or more",
                )
            )
        for cause, (count, layout) in self.slow.items():
            line = CAUSE_DESCRIPTIONS[cause if best else "unfit"]
            reasons.append(Reason(cause=cause, layouts=count, nearest=str(layout), line=line))
        for bound, (count, seconds, layout) in self.longest_part.items():
            line = f"{show_seconds(seconds)} or more, most time in {bound}"
            if best is None or layout != best.layout or count > 1:
                reasons.append(Reason(cause=f"evaluated, {bound}", layouts=count, nearest=str(layout), line=line))
        return tuple(sorted(reasons, key=lambda reason: -reason.layouts))


def make_near_miss(estimate: Estimate, planner: Planner) -> NearMiss:
    """Record of a layout that does not fit, with changes that would make it fit."""
    largest = max(estimate.ranks, key=lambda rank: rank.peak_bytes)
    return NearMiss(
        layout=str(estimate.layout),
        needs_bytes=largest.peak_bytes,
        has_bytes=planner.machine.chip.memory_bytes,
        risk=planner.out_of_memory_risk(estimate.layout, estimate.ranks),
        cause=largest.peak_cause,
        fixes=tuple(fix.line for fix in find_fixes(planner, estimate.layout)),
    )


class Fix(NamedTuple):
    """A change that makes a layout fit, and the memory that it then needs."""

    words: str
    memory: str

    @property
    def line(self) -> str:
        """Return both, such as ``adamw8bit: 50.02 GiB``."""
        return f"{self.words}: {self.memory}"


def find_fixes(planner: Planner, layout: Layout) -> Iterator[Fix]:
    """Yield single changes that make a layout fit: those of the job, and the fewest further ranks."""
    yield from find_job_fixes(planner, layout)
    job = planner.job
    sharded = layout.replace(zero=max(job.stack.runs.zero_with(layout.pp)), shard_group=None)
    for factor in (2, 4, 8, 16, 32, 64):
        scaled_layout = sharded.replace(dp=layout.dp * factor)
        for batch in (job.global_batch, job.global_batch * factor):
            scaled_job = job.replace(global_batch=batch)
            if not is_legal(scaled_layout, model=planner.model, job=scaled_job):
                continue
            if size := _predict_fitting_peak(planner, scaled_job, scaled_layout):
                with_batch = f" with gbs {batch}" if batch != job.global_batch else ""
                yield Fix(f"{scaled_layout.world} ranks{with_batch} as {str(scaled_layout)!r}", show_bytes(size))
                return
            break  # of equal micro-batches the batch changes no memory


def find_job_fixes(planner: Planner, layout: Layout) -> Iterator[Fix]:
    """Yield changes of the job that its software has and that make a layout fit: the nearest precision and length."""
    model, machine, job = planner.model, planner.machine, planner.job
    for words, offloaded, other in list_offloadings(layout, job, model=model):
        is_run = is_legal(offloaded, model=model, job=other, machine=machine)
        if is_run and (size := _predict_fitting_peak(planner, other, offloaded)):
            host_memory = show_bytes(count_host_bytes(Counts(model, other), offloaded, machine))
            yield Fix(words, f"{show_bytes(size)}, and {host_memory} of host memory per node")
            break
    for recipe in list_smaller_precisions(model, job):
        recipe_job = job.replace(precision=recipe)
        has_units = machine.chip.find_format(recipe.compute) == recipe.compute
        if not has_units or not is_legal(layout, model=model, job=recipe_job):
            continue
        if size := _predict_fitting_peak(planner, recipe_job, layout):
            yield Fix(f"--precision {recipe.name}", show_bytes(size))
            break
    for change in list_job_changes(model, job, layout):
        is_written = next(list_unwritten(model, change.job, ("optimizer",)), None) is None
        if change.goal == "time" or not is_written or not is_legal(layout, model=model, job=change.job):
            continue
        if size := _predict_fitting_peak(planner, change.job, layout):
            yield Fix(change.words, show_bytes(size))
            if change.job.sequence < job.sequence:  # shorter ones, which come last, fit too
                break


def _predict_fitting_peak(planner: Planner, job: Job, layout: Layout) -> int:
    """Return the peak of a rank in bytes with a changed job or layout; 0 if it does not fit."""
    changed = Planner(model=planner.model, machine=planner.machine, job=job, risk=planner.risk)
    ranks = changed.memory(layout)
    return find_max_peak_bytes(ranks) if changed.fits(layout, ranks) else 0
