"""The global batch of a question that names none; for a complete run at least the one advised for its tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from fivefold.layout.batch import fill_batch

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.model.spec import Model


def choose_batch(
    model: Model,
    job: Job,
    *,
    run_tokens: float | None,
    ranks: int,
    stated: Collection[str],
    layouts: Iterable[Layout] = (),
) -> tuple[Job, str]:
    """Return ``job`` with a global batch, unless ``stated`` has one, and the reason if it is not one per GPU.

    ``run_tokens``: the training tokens of a complete run, or None if the question is about a step. A run takes the
    multiple of one per GPU that is nearest to the power of two that ``plan`` advises. Raises ``UserError`` if no run
    has that many tokens.
    """
    filled = fill_batch(job, ranks=ranks, stated=stated, layouts=layouts)
    if run_tokens is None or "global_batch" in stated or job.ramp is not None:
        return filled, ""
    from fivefold.planner.batch import advise_sequences
    from fivefold.planner.run_estimate import validate_tokens
    from fivefold.units import show_count

    advised = advise_sequences(model, sequence=job.sequence, tokens=validate_tokens(run_tokens))
    times = round(advised / filled.global_batch)
    if times <= 1:
        return filled, ""
    reason = f"advised for {show_count(run_tokens).replace('.00', '')} tokens"
    return filled.replace(global_batch=times * filled.global_batch), reason
