"""The global batch of a question that names none: one sequence per GPU, so that each GPU has work.

``requests/batch.py`` chooses that of a complete run, which may have more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout

MAX_TOKENS = 2**24  # of a step: the largest batch of Llama 3 405B (arXiv:2407.21783 §3.4.1)
MAX_TRIED_GPUS = 16_384  # of a machine that is named without a number: the GPUs of that run
DEADLINE_COUNTS = f"1-{MAX_TRIED_GPUS}"


def choose_gpu_counts(gpu_counts: str | None, deadline: str | None, machines: Iterable[object]) -> str | None:
    """Return the range of numbers of GPUs to try.

    It is ``gpu_counts``, or ``DEADLINE_COUNTS`` if a deadline asks for the fewest GPUs of ``machines`` (their texts or
    records) that are named without a number.
    """
    from fivefold.machine.catalog import has_ranks

    if gpu_counts is not None or deadline is None:
        return gpu_counts
    return None if any(not isinstance(machine, str) or has_ranks(machine) for machine in machines) else DEADLINE_COUNTS


def find_most_ranks(ranks: Iterable[int], gpu_counts: str | None = None) -> int:
    """Return the largest number of GPUs that a question compares: that of ``gpu_counts``, or of its machines.

    It is 1 for ``DEADLINE_COUNTS``: whoever gives a deadline but no number of GPUs has none to fill.
    """
    if gpu_counts == DEADLINE_COUNTS:
        return 1
    last = (gpu_counts or "").rpartition("-")[2].strip()
    return int(last) if last.isdecimal() and int(last) else max(ranks, default=1)


def fill_batch(job: Job, *, ranks: int, stated: Collection[str], layouts: Iterable[Layout] = ()) -> Job:
    """Return ``job`` with a global batch for ``ranks`` GPUs, unless ``stated`` has one.

    It has the fewest sequences that a micro-batch may have for each GPU, at least the default of ``Job`` and at most
    ``MAX_TOKENS``, rounded up to a multiple of what each layout takes at a time. A batch that was filled in before, for
    other layouts, does not matter.
    """
    from fivefold.layout.spec import find_divisor_below
    from fivefold.units import ceil_div

    if "global_batch" in stated or job.ramp is not None:
        return job
    least = job.min_micro_batch
    turn = least * find_divisor_below(ranks, max(1, MAX_TOKENS // (job.sequence * least)))
    batch = ceil_div(type(job).model_fields["global_batch"].default, turn) * turn
    chunk = lcm(*(layout.dp * layout.mbs for layout in layouts))
    batch = ceil_div(batch, chunk) * chunk
    return job if batch == job.global_batch else job.replace(global_batch=batch)
