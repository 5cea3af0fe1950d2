"""Dry-run random models under random layouts on every rank: all messages match, no ranks deadlock, and
the planner counts the same states, activations, FLOPs and messages.

python -m tests.agree.dry_run.drawn --count 300 --seed 0
python -m tests.agree.dry_run.drawn --count 60 --seed 5 --peaks adapted    how near planned peaks are; or --peaks plain
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import traceback
from typing import NamedTuple

from fivefold.dry_run.match import list_findings
from fivefold.dry_run.rank_tapes import run_rank
from fivefold.errors import UserError
from fivefold.job import RECIPES, Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.rendering.progress import show_progress
from fivefold.trainer.supported import check_supported
from tests.agree.drawn import Drawn, draw_cases, select_covering
from tests.agree.dry_run.cases import machine
from tests.agree.dry_run.compare import SCALARS, Stage, run
from tests.dry_run.record.tape_events import list_events
from tests.endure.stop_signals import end_at_stop_signal

PEAK_BOUNDS = (0.002, 0.01, 0.03)
WORST_PEAK = 0.03  # in models so small that a gradient of a few rows is a percent


def find_unmet(case: Drawn) -> list[str]:
    """What is wrong with the messages of all ranks; odd numbers on GPUs, even ones on processes of one stream."""
    streams = bool(case.number % 2)
    job = case.job if streams else case.job.replace(overlap=())
    tapes = [
        run_rank(model=case.model, layout=case.layout, job=job, rank=rank, streams=streams)
        for rank in range(case.layout.world)
    ]
    steps = ([tape.first for tape in tapes], [tape.steady for tape in tapes])
    return [line for step in steps for line in list_findings(step, streams=streams)]


class Counted(NamedTuple):
    """A drawn case as ``compare.run`` reads it; what is even in a dry run is even in the planner too."""

    model: Model
    layout: Layout
    job: Job
    streams: bool

    @classmethod
    def from_case(cls, case: Drawn) -> Counted:
        """Return ``case`` without capacity and with joined documents, on GPUs for odd numbers and on CPUs for even.

        Its micro-batches have as many rows as can be spread evenly over the ranks of the experts.
        """
        model, layout, job = case.model, case.layout, case.job.replace(documents="joined")
        if model.moe is not None:
            model = model.replace(moe=model.moe.replace(capacity=None))
            rows = layout.mbs * job.sequence // layout.cp // (layout.tp if layout.sp else 1)
            if rows * model.moe.topk % layout.ep:
                layout = layout.replace(mbs=layout.ep * layout.mbs)
                job = job.replace(global_batch=layout.ep * job.global_batch)
        return cls(model, layout, job, streams=bool(case.number % 2))

    @property
    def machine(self) -> Machine:
        return machine("nccl" if self.streams else "gloo", self.layout.world)


def lengthen(case: Drawn) -> Drawn:
    """Return every third case with six times the micro-batches, most of which are copied; others as they are."""
    return case._replace(job=case.job.replace(global_batch=6 * case.job.global_batch)) if case.number % 3 == 0 else case


def change_precision(case: Drawn) -> Drawn:
    """Return two of three cases in another precision that their layout and features can have, which is drawn."""
    chance = random.Random(f"{case.number} precision")
    names = chance.sample(sorted(RECIPES), len(RECIPES)) if chance.random() < 2 / 3 else ()
    for name in names:
        job = case.job.replace(precision=RECIPES[name])
        if is_legal(case.layout, model=case.model, job=job) and _is_supported(case, job):
            return case._replace(job=job)
    return case


def _is_supported(case: Drawn, job: Job) -> bool:
    try:
        check_supported(case.layout, job, model=case.model)
    except UserError:
        return False
    return True


def list_miscopied(case: Drawn) -> list[str]:
    """Return a line for each rank whose tapes are other than those of a run of all micro-batches."""
    wrong = []
    for rank in range(case.layout.world):
        copied, ran = (
            run_rank(model=case.model, layout=case.layout, job=case.job, rank=rank, streams=True, repeats=repeats)
            for repeats in (True, False)
        )
        if any(list_events(ours) != list_events(theirs) for ours, theirs in zip(copied[1:3], ran[1:3], strict=True)):
            wrong.append(f"rank {rank}: copied micro-batches are other than those that run")
    return wrong


def list_miscounts(case: Drawn) -> list[str]:
    """Return one line for each count of the planner that differs from the dry run."""
    return list(run(Counted.from_case(case)).unequal)


def list_wrong_peaks(case: Drawn) -> list[str]:
    """Return a line if the planner's peak of a case with an adapter is not near that of the dry run."""
    if case.job.adapter is None:
        return []
    error = run(Counted.from_case(case)).error
    return [f"peak {error:+.2%}"] if abs(error) > WORST_PEAK else []


def print_peaks(*, seed: int, count: int, adapted: bool) -> None:
    """Print the share of stages whose planned peak is near that of the dry run, of ``count`` draws."""
    cases = (case for case in draw_cases(seed) if (case.job.adapter is not None) == adapted)
    stages: list[Stage] = []
    for case in map(change_precision, map(lengthen, itertools.islice(cases, count))):
        verdict = run(Counted.from_case(case))
        stages += verdict.stages
        if abs(verdict.worst_stage) > PEAK_BOUNDS[0]:
            print(f"{verdict.worst_stage:+.2%} {case.number} · {case.layout}", flush=True)
    equal = sum(abs(stage.planned - stage.dry_run) <= 2 * SCALARS for stage in stages)
    shares = [f"{equal / len(stages):.0%} equal but for scalars"]
    for bound in PEAK_BOUNDS:
        near = sum(abs(stage.error) <= bound for stage in stages)
        shares.append(f"{near / len(stages):.0%} within {bound:.1%}")
    print(f"{len(stages)} peaks of {count} draws: {', '.join(shares)}; worst {max(abs(s.error) for s in stages):.1%}")


def main() -> int:
    """Print what does not meet in each case, or the error in which it ends; 1 if there is one."""
    parser = argparse.ArgumentParser(description="random models under random layouts, dry-run on every rank")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", action="store_true", help="only cases with a pair of features that none before has")
    parser.add_argument("--peaks", choices=("adapted", "plain"), help="only count how near peaks are, of --count draws")
    options = parser.parse_args()
    if options.peaks:
        print_peaks(seed=options.seed, count=options.count, adapted=options.peaks == "adapted")
        return 0
    done = wrong = 0
    with show_progress("dry-run") as report, end_at_stop_signal():
        cases = list(itertools.islice(draw_cases(options.seed, first=options.first), options.count))
        cases = list(map(lengthen, select_covering(cases) if options.pairs else cases))
        cases = list(map(change_precision, cases))
        for case in cases:
            report(str(case.layout), done, len(cases))
            try:
                results = [
                    *find_unmet(case),
                    *list_miscounts(case),
                    *list_wrong_peaks(case),
                    *(list_miscopied(case) if case.number % 3 == 0 else ()),
                ]
            except Exception:
                results = [traceback.format_exc()]
            done, wrong = done + 1, wrong + bool(results)
            if results:
                print("\n  ".join((str(case), *results)), flush=True)
    print(f"{done - wrong} of {done} meet and are counted")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
