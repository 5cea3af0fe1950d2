"""The dry run: run the real training code on fake tensors and a fake process group, for ranks of any world.

rehearse      runs two steps of one rank per pipeline rank, or of every rank (fake/), onto their tapes (record/)
report        compares memory/ with the chip and writes a step record of kind "rehearsed"; match compares the messages
time/         prices the tapes and gives every event its time          failures   an exception as a finding

A job that would fail (out of memory, deadlock, shape error) yields a one-line finding, not an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fivefold.dry_run import match, report
from fivefold.dry_run.failures import failed, quiet
from fivefold.dry_run.fake.world import differ_over_cp, representatives
from fivefold.dry_run.rehearse import RankTapes, assumed, rehearse_rank
from fivefold.dry_run.report import RankSummary, Rehearsal
from fivefold.dry_run.time.play import play
from fivefold.job import Job
from fivefold.layout.legal import refuse
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.record import Fault, Mistake
from fivefold.trainer.supported import check_supported

__all__ = ["Rehearsal", "dryrun"]


def dryrun(
    *, model: Model, machine: Machine, layout: Layout, job: Job, table: Table | None = None, every_rank: bool = False,
    replay: bool = True, ranks: Sequence[int] = (), progress: Callable[[int, int], None] | None = None,
) -> Rehearsal:  # fmt: skip
    """Rehearse a training step. ``ranks``: further ranks to run and keep the tapes of. ``table``: a custom pipeline
    schedule. ``progress(done, total)`` is called before each rank. Raises ``Mistake`` for an illegal layout or job.
    """
    refuse(layout, model=model, job=job, machine=machine)
    check_supported(layout, job, model=model)
    beyond = [rank for rank in ranks if not 0 <= rank < layout.world]
    if beyond:
        raise Mistake(f"no rank {beyond[0]} in layout {str(layout)!r}; its ranks are 0 to {layout.world - 1}")
    streams, job = machine.overlaps, job.replace(stack=job.stack.on(gpu=machine.backend == "nccl"))
    job = job if streams else job.replace(overlap=())  # one stream: nothing runs beside compute
    table = table or schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=layout.micro_batches(job))
    kept = {*representatives(layout, by_cp=differ_over_cp(model, layout=layout, job=job)), *ranks}
    rank_summaries: list[RankSummary] = []
    tapes: dict[int, RankTapes] = {}
    chosen = range(layout.world) if every_rank else sorted(kept)
    for done, rank in enumerate(chosen):
        if progress:
            progress(done, len(chosen))
        try:
            with quiet():
                found = rehearse_rank(
                    model=model, layout=layout, job=job, rank=rank, streams=streams, table=table, replay=replay
                )
        except (Mistake, Fault, MemoryError):
            raise
        except Exception as error:
            return Rehearsal(step=None, findings=(failed(error, rank=rank),))
        rank_summaries.append(report.summarise(found, machine=machine, layout=layout, job=job))
        tapes[rank] = found if rank in kept else report.messages_only(found)
    findings = report.too_large(rank_summaries, model=model, machine=machine, layout=layout, job=job)
    unmet = _message_findings(list(tapes.values()), streams=streams)
    if unmet:
        return Rehearsal(step=None, findings=(*findings, *unmet), rank_summaries=tuple(rank_summaries))
    tapes = {rank: tapes[rank] for rank in sorted(kept)}
    steady = [each.steady for each in tapes.values()]
    played = play(steady, machine=machine, job=job, world=layout.world)
    step = report.step(rank_summaries, steady[0], played, model=model, machine=machine, layout=layout, job=job)
    return Rehearsal(step, findings, tuple(rank_summaries), tapes, played, table, assumed(model, job))


def _message_findings(ranks: Sequence[RankTapes], *, streams: bool) -> list[str]:
    """Return mismatched messages and deadlocks of the first step, or else of the steady step."""
    first = match.findings([each.first for each in ranks], streams=streams)
    return first or match.findings([each.steady for each in ranks], streams=streams)
