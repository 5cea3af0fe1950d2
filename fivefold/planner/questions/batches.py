"""Reasonable global batches of a layout, by published laws and runs."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, log2

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.batch import apply_scaling_laws, find_nearby_advice
from fivefold.planner.run_estimate import validate_tokens
from fivefold.results.search_result import Batch
from fivefold.units import show_count

SOUND_TOKENS = (4e6, 60e6)  # per step: Llama 1 (arXiv:2302.13971) to DeepSeek-V3 (arXiv:2412.19437)


def list_reasonable_batches(
    *,
    job: Job,
    layout: Layout,
    tokens: float,
    model: Model | None = None,
    noise: float | None = None,
    machine: Machine | None = None,
) -> list[Batch]:
    """Return the reasonable global batches that the layout can split, in powers of two.

    They have 4 to 60 million tokens for a run of ``tokens``, or fewer if the laws of ``batch.py`` for ``model``, or a
    measured ``noise`` scale in tokens, advise fewer. With a ``model`` only legal batches are returned, such as those
    with enough micro-batches for its pipeline. Raises ``UserError`` if there is none.
    """
    chunk, tokens = layout.dp * layout.mbs, validate_tokens(tokens)
    if noise is not None and not noise > 0:
        raise UserError(
            f"noise={noise:g}: the noise scale is a positive number of tokens; leave it out if it is unknown"
        )
    recommended = [
        *(law.tokens for law in (apply_scaling_laws(model, tokens) if model else [])),
        *([noise] if noise else []),
    ]
    ends = SOUND_TOKENS
    if recommended:
        ends = min(SOUND_TOKENS[0], min(recommended) / 1.5), min(SOUND_TOKENS[1], 8 * max(recommended))
    least, most = (limit / (chunk * job.sequence) for limit in ends)
    sizes = [2**power for power in range(40) if least <= 2**power <= most] or [max(1, round(least))]
    if model is not None:
        sizes = _list_legal_batches(sizes, model=model, machine=machine, job=job, layout=layout)
    return [
        Batch(
            global_batch=size * chunk,
            layout=str(layout),
            tokens=size * chunk * job.sequence,
            micro_batches=size,
            steps=ceil(tokens / (size * chunk * job.sequence)),
            references=tuple(_cite_references(size * chunk * job.sequence, model=model, tokens=tokens, noise=noise)),
        )
        for size in sizes
    ]


def _list_legal_batches(
    sizes: list[int], *, model: Model, machine: Machine | None, job: Job, layout: Layout
) -> list[int]:
    """Return the numbers of micro-batches with which the layout is legal; ``UserError`` if it is with none of them."""
    chunk = layout.dp * layout.mbs
    batch_sizes = list[int]()
    mistake = UserError()
    for size in sizes:
        try:
            fields = job.model_dump() | {"global_batch": size * chunk, "ramp": None}
            refuse(layout, model=model, job=Job.read(fields, origin="job"), machine=machine)
        except UserError as error:
            mistake = error
        else:
            batch_sizes.append(size)
    if not batch_sizes:
        raise mistake
    return batch_sizes


def _cite_references(size: float, *, model: Model | None, tokens: float, noise: float | None) -> Iterator[str]:
    """Yield the laws and published runs that have a batch of about ``size`` tokens."""
    if noise and abs(log2(noise / size)) < 0.5:
        yield f"the measured noise scale, {show_count(noise)}"
    for advice in find_nearby_advice(size, model=model, tokens=tokens) if model else ():
        yield f"{advice.who}, {show_count(advice.tokens)} ({advice.source})"
