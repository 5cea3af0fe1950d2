"""What must hold of every answer of the planner, whatever was asked: the checks of a drawn ``Case``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from fivefold.errors import UserError
from fivefold.layout.validity import is_legal
from fivefold.machine.catalog import with_ranks
from fivefold.machine.datacenter import Site
from fivefold.planner.counts.memory.peak import count_rank_memory, list_live_bytes
from fivefold.planner.predict import get_planner, predict
from fivefold.planner.questions.batches import list_reasonable_batches
from fivefold.planner.questions.changes import list_changes
from fivefold.planner.questions.micro_batch import find_largest_micro_batch
from fivefold.planner.questions.sequence import search_longest_sequence
from fivefold.planner.ratios import compute_ratios
from fivefold.planner.run_estimate import predict_full_run
from fivefold.planner.search import search
from fivefold.planner.time.memory_over_time import list_levels
from fivefold.planner.time.spans import build_spans
from fivefold.record import Record
from fivefold.step import FITS_RISK
from fivefold.trainer.supported import check_supported
from tests.planner.draws import Case


def check_step(case: Case) -> None:
    """Finite, positive and consistent."""
    step = predict(**case._asdict())
    model, machine, layout, job = case
    assert all(math.isfinite(value) and value >= 0 for value in numbers(step.model_dump()))
    assert step.world == layout.world
    for stage in step.memory.stages:
        assert stage.parameters_bytes > 0 or "parameters" in layout.list_offloaded(job)
        assert stage.states_bytes <= stage.peak_bytes, stage
        assert stage.activations_bytes <= stage.peak_bytes - stage.parameters_bytes - stage.optimizer_bytes, stage
        assert stage.peak_cause
    assert len(step.memory.stages) == layout.pp
    assert step.memory.peak_bytes == max(stage.peak_bytes for stage in step.memory.stages)
    assert step.memory.risk is not None
    assert step.memory.fits == get_planner(model, machine, job).fits(layout) == (step.memory.risk <= FITS_RISK)
    assert step.memory.fits or step.memory.verdict in ("tight", "does not fit")
    if machine.backend == "gloo":
        assert step.memory.risk == (step.memory.peak_bytes > machine.chip.memory_bytes)
    if step.memory.reserved_bytes is not None and step.memory.driver_bytes is not None:
        assert step.memory.peak_bytes <= step.memory.reserved_bytes <= step.memory.driver_bytes
    time, work = step.time, step.work
    parts = time.compute_seconds + time.bubble_seconds + time.optimizer_seconds + time.host_seconds
    parts += sum(time.exposed_seconds.values())
    assert math.isclose(parts, time.step_seconds, rel_tol=1e-9)
    assert min(time.step_seconds, time.compute_seconds) > 0
    assert time.longest_part
    if machine.calibration is None:  # else what was measured need not be below the peak
        assert step.mfu.causal <= 1, "faster than the chip"
    assert 0 < work.active_parameters <= work.parameters == model.parameters + (work.vision_parameters or 0)
    assert 0 < work.model_flops_causal <= work.model_flops_non_causal
    assert math.isclose(step.tokens_per_second_per_gpu * step.world * time.step_seconds, job.tokens_per_step)
    assert all(item.calls > 0 for item in step.traffic)
    assert all(operation.times > 0 for operation in step.operations)


def check_single_shard(case: Case) -> None:
    """ZeRO over one shard keeps what ZeRO-0 keeps, but for DeepSpeed and FSDP, which run it on one rank too."""
    (model, machine, layout, job), stack = case, case.job.stack
    runs_alone = stack.reduce_bucket > 0 or not stack.offloads_with_parameters or stack.reduced_gradients == "updated"
    if layout.shards > 1 or runs_alone or job.offload:
        return
    layouts = [layout.replace(zero=zero, shard_group=1 if zero else None) for zero in range(4)]
    legal = [other for other in layouts if is_legal(other, model=model, job=job)]
    memories = [get_planner(model, machine, job).step(other).memory for other in (layout, *legal)]
    assert len({(memory.peak_bytes, memory.reserved_bytes, memory.driver_bytes) for memory in memories}) == 1


def check_pictures(case: Case) -> None:
    """The step drawn: it ends when the step does, and its fullest moment is the peak."""
    model, machine, layout, job = case
    plan = get_planner(model, machine, job)
    ranks, result = count_rank_memory(plan.counts, layout), plan.estimate(layout)
    count = layout.micro_batches(job)
    if count <= 64:  # the timeline plays the first rounds and continues them in a straight line
        end = max(row[-1].end for row in build_spans(plan, layout))
        assert math.isclose(
            end, result.step_time.seconds, rel_tol=1e-9 if layout.pp == 1 or count <= 3 * layout.pp else 0.02
        )
    for rank in {0, layout.pp - 1}:
        moments = list_live_bytes(plan.counts, layout, rank=rank)
        assert all(min(moment[1:]) >= 0 for moment in moments)
        assert all(sum(moment[3:]) == moment.live_bytes for moment in moments)
        assert max(moment.live_bytes for moment in moments) == ranks[rank].peak_bytes
        drawn = list_levels(plan, layout, rank=rank, limit=8)
        assert all(level.seconds >= 0 and min(level[1:7]) >= 0 for level in drawn)


def check_questions(case: Case) -> None:
    """Each of them about a layout is answered, or refused in one line."""
    for ask in (find_largest_micro_batch, search_longest_sequence, list_changes):
        check_answered(lambda ask=ask: ask(**case._asdict()))
    check_answered(
        lambda: [
            predict_full_run(
                step=predict(**case._asdict()),
                model=case.model,
                machine=case.machine,
                job=case.job,
                tokens=1e9,
                site=Site(),
            )
        ]
    )
    check_answered(lambda: list_reasonable_batches(job=case.job, layout=case.layout, tokens=1e12))
    check_answered(lambda: [compute_ratios(case.model, machine=case.machine, layout=case.layout, job=case.job)])


def check_engine(case: Case) -> None:
    """It takes a job, or refuses it in one line."""
    check_answered(lambda: check_supported(case.layout, case.job, model=case.model) or [])


def check_search(case: Case) -> None:
    """On as many ranks as the layout has: no slower than the layout itself, where that is among those searched."""
    model, layout, job = case.model, case.layout, case.job
    machine = with_ranks(case.machine, layout.world)
    result = search(model=model, machine=machine, job=job, top=3)
    for best in result.best:
        assert best.step.memory.fits
    estimate = get_planner(model, machine, job).estimate(layout)
    searched = not layout.stages and layout.ac in ("none", "selective", "full")
    if searched and get_planner(model, machine, job).fits(layout, estimate.ranks):
        assert result.best[0].step.time.step_seconds <= estimate.step_time.seconds * (1 + 1e-9)


def check_answered(ask: Callable[[], Any]) -> None:
    """With numbers, or with one line."""
    try:
        results = ask()
    except UserError as mistake:
        results, line = [], str(mistake)
    else:
        line = "answered"
    assert line
    assert "\n" not in line
    for record in results if isinstance(results, list) else [results]:
        assert isinstance(record, Record)
        assert all(math.isfinite(value) for value in numbers(record.model_dump()))


def numbers(values: object) -> Iterator[float]:
    """All in nested containers."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from numbers(value)
    elif isinstance(values, int | float):
        yield values
