"""Stages, schedules and micro-batches of pipelines, also while the batch ramps up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from fivefold.bounded_types import MAX_SIMULATED_ACTIONS
from fivefold.job import Job
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES, ScheduleName
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.layout.text import format_stages
from fivefold.layout.validity.fixes import suggest_more_micro_batches
from fivefold.model.spec import Model


def count_max_stages(model: Model, job: Job) -> int:
    """Return the most stages; embedding and head may be stages of their own (Llama 3 405B, arXiv:2407.21783 §3.3.2)."""
    return len(model.stage_parts) + 2 * job.stack.runs.uneven_stages


def check_pipeline(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield an error for each rule of pipelines that the layout breaks: number of stages, layers and micro-batches."""
    pp, v, layers = layout.pp, layout.v, model.layers
    most = count_max_stages(model, job)
    if pp * v > most:
        step = 2 if layout.pipeline.enters_both_ends else 1
        fewer = range(min(pp - step, most // v // step * step), 1, -step)
        fixes = [f"pp{n}" for n in fewer if layout.world % n == 0][:1]
        fixes += [f"v{n}" for n in range(min(v - 1, most // pp), 1, -1) if layout.pipeline.is_interleaved][:1]
        fix = f"try {' or '.join(fixes)}" if fixes else "lower pp or v"
        parts = len(model.stage_parts)
        limit = f"layers={layers}" + (f" in {parts} parts" if parts < layers else "")
        limit += ", embedding and head" if job.stack.runs.uneven_stages else ""
        yield f"pp·v={pp * v} stages are more than {limit}; {fix}"
    if pp > 1 and not can_simulate(layout.schedule, pp=pp, v=v, micro_batches=layout.micro_batches(job)):
        micro = layout.micro_batches(job)
        fix = "raise dp or mbs, or lower pp or gbs"
        yield f"{micro} micro-batches of pp·v={pp * v} stages are too many to simulate; {fix}"
    if layout.stages and sum(layout.stages) != layers:
        yield f"{format_stages(layout.stages)} hold {sum(layout.stages)} layers, not layers={layers}"
    elif layout.stages:
        yield from _check_stage_starts(layout, model)
    micro, needed = layout.micro_batches(job), layout.pipeline.min_rounds * pp
    multiple = 2 if layout.pipeline.enters_both_ends else 1
    chunk = layout.dp * layout.mbs
    if micro % multiple:
        fix = suggest_more_micro_batches(layout, job, lambda n: n % multiple == 0, gbs=(micro + 1) * chunk)
        yield f"{layout.schedule} sends half of the micro-batches from each end, but {micro} is odd; {fix}"
    if micro < needed:
        fix = suggest_more_micro_batches(layout, job, lambda n: n >= needed and n % multiple == 0, gbs=needed * chunk)
        yield f"{layout.schedule} needs {needed} micro-batches or more, but the batch gives {micro}; {fix}"


def _check_stage_starts(layout: Layout, model: Model) -> Iterator[str]:
    """Yield an error if a stage begins after a layer of which it reads more than the stream."""
    starts = {0, *accumulate(model.stage_parts)}
    for start in (layers.start for layers in list_stage_layers(model, layout) if layers.start not in starts):
        lenders = ((layer, model.find_lender(layer)) for layer in range(start, model.layers))
        layer, reads = next((layer, lender[1]) for layer, lender in lenders if lender and lender[0] < start)
        reader = "which" if layer == start else f"but layer {layer}"
        nearest = (max(other for other in starts if other < start), min(other for other in starts if other > start))
        fix = " or ".join(str(other) for other in nearest if 0 < other < model.layers)
        yield (
            f"{format_stages(layout.stages)}: a stage begins with layer {start} of {model.name}, {reader} {reads}; "
            f"{f'begin it with layer {fix}, or ' if fix else ''}leave stages= out"
        )
        return


def can_simulate(schedule: ScheduleName, *, pp: int, v: int, micro_batches: Any) -> Any:
    """Tell whether a schedule, or one period of it, has few enough actions to simulate.

    ``micro_batches``: an int or an array of them; the answer is a bool or an array.
    """
    max_micro_batches = MAX_SIMULATED_ACTIONS // (pp * v)
    pipeline = PIPELINE_SCHEDULES[schedule]
    has_short_period = 4 * pp <= max_micro_batches and not pipeline.forwards_first
    return (micro_batches <= max_micro_batches) | (
        has_short_period & (micro_batches % pp == 0 if pipeline.is_interleaved else True)
    )


def check_ramp(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield the reason why a batch size of the ramp-up is not valid."""
    ramp, final, chunk = job.ramp, job.global_batch, layout.dp * layout.mbs
    if ramp is None:
        return
    if ramp.first >= final or (final - ramp.first) % ramp.step:
        yield f"ramp: from first={ramp.first} by step={ramp.step} no batch becomes the global batch {final}; change one"
        return
    for size in ramp.sizes(final):
        if size % chunk:
            fix = f"let first and step be multiples of {chunk}"
            yield f"ramp: batch {size} is not divisible by dp·mbs={layout.dp}·{layout.mbs}={chunk}; {fix}"
            return
        for reason in check_pipeline(layout, model=model, job=job.replace(global_batch=size, ramp=None)):
            yield f"ramp: batch {size}: {reason.rpartition('; ')[0]}; begin with a larger one, or lower mbs or pp"
            return
