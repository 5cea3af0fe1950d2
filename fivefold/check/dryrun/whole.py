"""The rehearsal on one page: the real training code on tensors that hold nothing, in a world that is not there.

rehearse   two steps of a rank of each pipeline rank, or of every rank → tapes
judge      memory and the chip, messages of the ranks against one another → findings
report     tapes priced and played in time → a step of the kind "rehearsed"

A job that would fail is a finding and no exception.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fivefold.check.dryrun import report
from fivefold.check.dryrun.failed import failed
from fivefold.check.dryrun.match import findings as mismatches
from fivefold.check.dryrun.play import play
from fivefold.check.dryrun.rehearse import RankTapes, rehearse_rank
from fivefold.check.dryrun.report import Rehearsal, Share
from fivefold.check.dryrun.world import representatives
from fivefold.job import Job
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout, refuse
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.record import Fault, Mistake
from fivefold.train.supported import check_supported

__all__ = ["Rehearsal", "dryrun"]


def dryrun(
    *, model: Model, machine: Machine, layout: Layout, job: Job, table: Table | None = None, every_rank: bool = False,
    replay: bool = True, ranks: Sequence[int] = (), progress: Callable[[int, int], None] | None = None,
) -> Rehearsal:  # fmt: skip
    """Rehearse a step. ``ranks``: also these, whose tapes are kept. ``table``: a pipeline schedule of one's own.

    ``progress`` is told how many ranks of how many are done. A ``Mistake`` for what is refused before it is built.
    """
    refuse(layout, model=model, job=job, machine=machine)
    check_supported(layout, job, model=model)
    beyond = [rank for rank in ranks if not 0 <= rank < layout.world]
    if beyond:
        raise Mistake(f"no rank {beyond[0]} in layout {str(layout)!r}; its ranks are 0 to {layout.world - 1}")
    gpu = machine.backend == "nccl"
    if not gpu:  # one stream: nothing runs beside compute
        job = job.replace(overlap=())
    kept = {*representatives(layout), *ranks}
    chosen = range(layout.world) if every_rank else sorted(kept)
    shares: list[Share] = []
    tapes: dict[int, RankTapes] = {}
    for done, rank in enumerate(chosen):
        if progress:
            progress(done, len(chosen))
        try:
            found = rehearse_rank(
                model=model, layout=layout, job=job, rank=rank, streams=gpu, table=table, replay=replay
            )
        except (Mistake, Fault, MemoryError):
            raise
        except Exception as error:
            return Rehearsal(step=None, findings=(failed(error, rank=rank),))
        shares.append(report.share(found, layout=layout, job=job, gpu=gpu))
        if rank in kept:
            tapes[rank] = found
    return _judged(shares, tapes, model=model, machine=machine, layout=layout, job=job)
