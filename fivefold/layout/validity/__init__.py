"""Validate a layout for a model, job, machine and stack: one line per reason, with numbers and the nearest fixes.

stack           what the training software runs          pipeline   stages, schedules and the ramp of the batch
job             model and job, under any layout          frozen     freezing, and bases of adapters
vision          images and the vision tower              adapters   what adapters go together with
sharding        what the batch, tp, ep and cp divide     offload    states in host memory
mixers          token mixers other than attention        order      axes that must be neighbours
two_dimensional 2D tensor parallelism                    fixes      the nearest legal values

All validation is here: ``Planner`` validates a layout before it counts it, the trainer before it builds it, and both
raise the first reason. Code that tries changed layouts or jobs calls ``is_legal`` first, and
``planner/search/space.py`` yields only valid layouts.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity.frozen import check_frozen_layout
from fivefold.layout.validity.job import check_preferences, list_mismatches
from fivefold.layout.validity.mixers import check_indexer, check_mixers, check_shared_keys, explain_unsharded
from fivefold.layout.validity.offload import explain_unsupported_offload
from fivefold.layout.validity.order import check_order
from fivefold.layout.validity.pipeline import check_pipeline, check_ramp
from fivefold.layout.validity.sharding import check_batch, check_context, check_rows, check_sharding
from fivefold.layout.validity.stack import check_stack
from fivefold.layout.validity.two_dimensional import explain_unsupported_2d
from fivefold.layout.validity.vision import check_vision
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model


def refuse(layout: Layout, *, model: Model, job: Job, machine: Machine | None = None) -> None:
    """Raise a one-line ``UserError`` if the layout does not fit this model, job or machine."""
    reason = next(list_reasons(layout, model=model, job=job, machine=machine), None)
    if reason is not None:
        raise UserError(f"layout {str(layout)!r}: {reason}")


def list_reasons(layout: Layout, *, model: Model, job: Job, machine: Machine | None) -> Iterator[str]:
    """Yield every reason why the layout is not valid, one line each."""
    if machine is not None and layout.world > machine.ranks:
        world = layout.world
        yield f"needs {world} ranks, but {machine.name} has {machine.ranks}; lower a degree or use {world} ranks"
    yield from list_mismatches(model, job, machine)
    yield from check_stack(layout, model, job.stack)
    yield from check_batch(layout, job, machine)
    yield from check_sharding(layout, model, machine)
    if (reason := explain_unsupported_2d(layout, model=model, job=job)) is not None:
        yield reason
    yield from check_vision(layout, model=model, job=job)
    yield from check_mixers(layout, model, sequence=job.sequence)
    yield from check_indexer(layout, model)
    yield from check_shared_keys(layout, model)
    yield from explain_unsharded(layout, model)
    yield from check_context(layout, model=model, job=job)
    yield from check_rows(layout, model=model, job=job)
    yield from check_order(layout, model, job.stack.runs)
    yield from check_pipeline(layout, model=model, job=job)
    yield from check_ramp(layout, model=model, job=job)
    yield from check_frozen_layout(layout, model=model, job=job)
    if (offload := explain_unsupported_offload(layout.list_offloaded(job), zero=layout.zero, job=job)) is not None:
        yield offload
    yield from check_preferences(layout, model=model, job=job)


def is_legal(layout: Layout, *, model: Model, job: Job, machine: Machine | None = None) -> bool:
    """Tell whether the layout is valid for this model, job and machine."""
    return next(list_reasons(layout, model=model, job=job, machine=machine), None) is None
