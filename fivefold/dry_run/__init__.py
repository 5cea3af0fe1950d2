"""Dry run: runs the real training code on fake tensors and a fake process group, for ranks of any world.

rank_tapes    runs two steps of one rank per pipeline rank, or of every rank (fake/), and records tapes (record/)
rank_processes runs ranks on several cores; turns an exception into a finding
report        compares memory/ with the chip and builds a step record of kind "dry run"
match         compares the messages of the ranks
time/         prices the tapes and gives every event its time

A job that would fail (out of memory, deadlock, shape error) yields a one-line finding, not an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fivefold.dry_run import match, report
from fivefold.dry_run.fake.world import has_uneven_cp_work, list_representatives
from fivefold.dry_run.rank_processes import RankJob, pause_garbage_collection, run_ranks
from fivefold.dry_run.rank_tapes import RankTapes, describe_assumptions
from fivefold.dry_run.report import DryRun, RankSummary
from fivefold.dry_run.time.simulation import simulate
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.trainer.supported import check_supported

__all__ = ["DryRun", "dryrun"]


def dryrun(
    *,
    model: Model,
    machine: Machine,
    layout: Layout,
    job: Job,
    table: Table | None = None,
    every_rank: bool = False,
    replay: bool = True,
    ranks: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> DryRun:
    """Run a dry run of a training step.

    ``ranks``: further ranks to run, whose tapes are kept. ``table``: a custom pipeline schedule. ``progress(done,
    total)`` is called before ranks. Raises ``UserError`` for an invalid layout or job.
    """
    refuse(layout, model=model, job=job, machine=machine)
    check_supported(layout, job, model=model)
    if job.stack.fused_scans:
        raise UserError(
            "fused_scans=true: a dry run has no values, and runs none of the kernels of flash-linear-attention; leave "
            "it out here (`predict` and `train` take it)"
        )
    unknown_ranks = [rank for rank in ranks if not 0 <= rank < layout.world]
    if unknown_ranks:
        raise UserError(f"no rank {unknown_ranks[0]} in layout {str(layout)!r}; its ranks are 0 to {layout.world - 1}")
    streams = machine.can_overlap
    job = job.replace(stack=job.stack.with_device_kernels(gpu=machine.has_gpus))
    job = job if streams else job.replace(overlap=())  # one stream: nothing overlaps with compute
    table = table or schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=layout.micro_batches(job))
    kept_ranks = {*list_representatives(layout, by_cp=has_uneven_cp_work(model, layout=layout, job=job)), *ranks}
    ranks_to_run = range(layout.world) if every_rank else sorted(kept_ranks)
    rank_job = RankJob(model, machine, layout, job, table, streams, replay, frozenset(kept_ranks))
    rank_summaries: list[RankSummary] = []
    tapes: dict[int, RankTapes] = {}
    for result in run_ranks(rank_job, ranks_to_run, progress=progress):
        if isinstance(result, str):
            return DryRun(step=None, findings=(result,))
        rank_tapes, rank_summary = result
        rank_summaries.append(rank_summary)
        tapes[rank_tapes.rank] = rank_tapes
    findings = report.find_out_of_memory(rank_summaries, model=model, machine=machine, layout=layout, job=job)
    mismatches = _find_message_errors(list(tapes.values()), streams=streams)
    if mismatches:
        return DryRun(step=None, findings=(*findings, *mismatches), rank_summaries=tuple(rank_summaries))
    tapes = {rank: tapes[rank] for rank in sorted(kept_ranks)}
    steady = [tapes_of_rank.steady for tapes_of_rank in tapes.values()]
    with pause_garbage_collection():
        simulation = simulate(steady, machine=machine, job=job, world=layout.world)
    step = report.build_dry_run_step(
        rank_summaries, steady[0], simulation, model=model, machine=machine, layout=layout, job=job
    )
    return DryRun(step, findings, tuple(rank_summaries), tapes, simulation, table, describe_assumptions(model, job))


@pause_garbage_collection()
def _find_message_errors(ranks: Sequence[RankTapes], *, streams: bool) -> list[str]:
    """Return mismatched messages and deadlocks of the first step, or else of the steady step."""
    first_step_findings = match.list_findings([rank.first for rank in ranks], streams=streams)
    return first_step_findings or match.list_findings([rank.steady for rank in ranks], streams=streams)
