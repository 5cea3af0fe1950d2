"""Predict several cases (models, machines, layouts, jobs) and compare their steps, quantity by quantity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from string import ascii_uppercase
from typing import Any, NamedTuple

from fivefold.errors import UserError
from fivefold.job import RECIPES, Job, Recipe, get_recipe
from fivefold.layout.spec import Layout
from fivefold.layout.validity.vision import count_image_tokens
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.memory.allocator import count_driver_bytes
from fivefold.planner.predict import predict
from fivefold.planner.time.ratio_errors import describe_run, estimate_speed_ratio
from fivefold.results.comparison import Comparison, Quantity, Unit, Variant, VariantRatio
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import FACTS, Stack
from fivefold.step import FITS_RISK, Step

MAX_VARIANTS = 12  # variants: more cannot be read side by side
STATES = {
    "parameters": "parameter state",
    "gradients": "gradient state",
    "optimizer": "optimizer state",
    "activations": "activations",
    "temporary": "temporary",
}
TIME_PARTS = ("bubble", "optimizer", "data", "host")
COST_TOKENS = 1e12  # tokens to which hours and dollars are stated


class ComparedCase(NamedTuple):
    """The inputs of one predicted step: model, machine, job and layout."""

    model: Model
    machine: Machine
    layout: Layout
    job: Job


def compare(cases: Sequence[ComparedCase], *, risk: float = FITS_RISK) -> Comparison:
    """Predict every case. A case that cannot run is kept with its reason.

    Raises ``UserError`` if none can run, or for fewer than two or more than ``MAX_VARIANTS`` distinct cases.
    """
    distinct = list(dict.fromkeys(cases))
    if not 2 <= len(distinct) <= MAX_VARIANTS:
        fix = "leave some out" if distinct[1:] else "add a layout, a machine or --stacks"
        raise UserError(f"compare takes 2 to {MAX_VARIANTS} different steps, not {len(distinct)}; {fix}")
    facts = _list_facts(distinct)
    variants = [_build_variant(*fields) for fields in zip(ascii_uppercase, distinct, facts, strict=False)]
    predicted = [
        (case, variant.step) for case, variant in zip(distinct, variants, strict=True) if variant.step is not None
    ]
    if not predicted:
        raise UserError(variants[0].error)
    common = tuple(fact for fact in facts[0] if all(fact in other for other in facts))
    variants_without_common = [
        variant.replace(facts=tuple(f for f in variant.facts if f not in common)) for variant in variants
    ]
    rows = tuple(row for row in _list_rows(predicted) if any(value not in (None, 0.0) for value in row.values))
    return Comparison(
        common=common,
        variants=tuple(variants_without_common),
        rows=rows,
        ratios=tuple(_list_ratios(distinct, variants)),
        risk=risk,
    )


def _list_ratios(cases: Sequence[ComparedCase], variants: Sequence[Variant]) -> Iterator[VariantRatio]:
    """Yield the ratio of every two variants on GPUs whose difference is of a kind with published pairs."""
    described = [
        (variant.name, variant.step, describe_run(*case))
        for case, variant in zip(cases, variants, strict=True)
        if variant.step is not None
    ]
    for (first, step, facts), (second, other, other_facts) in combinations(described, 2):
        speeds = [one.tokens_per_second_per_gpu * one.world for one in (step, other)]
        if (ratio := estimate_speed_ratio(facts, other_facts, (speeds[0], speeds[1]))) is not None:
            yield VariantRatio(first=first, second=second, speed=ratio)


def with_stack(job: Job, stack: str) -> Job:
    """Return the job run by the software called ``stack``. Facts of its stack that ``job`` has changed stay changed.

    Raises a ``UserError`` if they contradict the other facts of that software.
    """
    usual = build_stack(job.stack.name)
    changed = {name: getattr(job.stack, name) for name in FACTS if getattr(job.stack, name) != getattr(usual, name)}
    widened = job.stack.reduce_in_fp32
    recipe_names = [
        name for name, entry in RECIPES.items() if entry.with_reduce_dtype(in_fp32=widened).name == job.precision.name
    ]
    other = job.replace(stack=Stack.read(build_stack(stack).model_dump() | changed, origin=f"stack {stack}"))
    return with_precision(other, recipe_names[0]) if recipe_names else other


def with_precision(job: Job, name: str) -> Job:
    """Return the job in the recipe called ``name``, with gradients as its software reduces them.

    Parts of its precision that ``job`` has changed stay changed.
    """
    named = get_recipe(name).with_reduce_dtype(in_fp32=job.stack.reduce_in_fp32)
    values = named.model_dump() | job.precision.list_changes()
    return job.replace(precision=Recipe.read(values, origin=f"precision {name}"))


def _build_variant(name: str, case: ComparedCase, facts: Sequence[str]) -> Variant:
    step, error = None, ""
    try:
        step = predict(model=case.model, machine=case.machine, layout=case.layout, job=case.job)
    except UserError as mistake:
        error = str(mistake)
    price = case.machine.dollars_per_rank_hour
    return Variant(name=name, facts=tuple(facts), step=step, error=error, dollars_per_rank_hour=price)


def _list_facts(cases: Sequence[ComparedCase]) -> list[list[str]]:
    """Return the keywords of each case: model, machine, software, job and layout.

    Other fields of the jobs are listed where they differ.
    """
    jobs = [_flatten(case.job.model_dump(mode="json")) for case in cases]
    names = {"stack": {case.job.stack.name for case in cases}, "precision": {c.job.precision.name for c in cases}}
    shown_fields = {"sequence", "global_batch", "stack.name", "precision.name"}
    fields = [
        field
        for field in dict.fromkeys(field for job in jobs for field in job)
        if field not in shown_fields
        and len({job.get(field) for job in jobs}) > 1
        and len(names.get(field.partition(".")[0], {""})) == 1
    ]
    fact_lists = []
    for case, job in zip(cases, jobs, strict=True):
        machine, *words = case.machine.name.split()
        job_facts = [f"{field.removeprefix('stack.')}={job.get(field, 'none')}" for field in fields]
        size = " ".join([f"{machine}:{case.machine.ranks}", *words])
        batch = f"seq {case.job.sequence}", f"gbs {case.job.global_batch}"
        case_names = case.model.name, size, case.job.stack.name, case.job.precision.name
        fact_lists.append([*case_names, *batch, *job_facts, *str(case.layout).split()])
    return fact_lists


def _flatten(values: Mapping[str, Any], within: str = "") -> dict[str, str]:
    """Flatten a record's dump to one level: ``{"optimizer": {"kind": "adamw"}}`` → ``{"optimizer.kind": "adamw"}``."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{within}{key}.") if isinstance(value, dict) else {f"{within}{key}": str(value)}
    return flat


def _list_rows(predicted: Sequence[tuple[ComparedCase, Step]]) -> Iterator[Quantity]:
    """Yield the rows of a comparison: each quantity of all steps, and whether less or more is better."""
    steps = [step for _, step in predicted]

    def row(name: str, unit: Unit, better: Any, of: Callable[[Step], float | str | None]) -> Quantity:
        values = (of(step) for step in steps)
        return Quantity(
            name=name,
            unit=unit,
            better=better,
            values=tuple(float(value) if isinstance(value, int) else value for value in values),
        )

    yield row("step time", "seconds", "less", lambda step: step.time.step_seconds)
    yield row("tokens/s per GPU", "per second", "more", lambda step: step.tokens_per_second_per_gpu)
    yield row("tokens/s, all GPUs", "per second", "more", lambda step: step.tokens_per_second_per_gpu * step.world)
    yield row("MFU", "share", "more", lambda step: step.mfu.causal)
    yield row("most time in", "words", "neither", lambda step: step.time.longest_part)
    yield row("GPU hours of 1 T tokens", "count", "less", _count_gpu_hours)
    yield Quantity(
        name="cost of 1 T tokens",
        unit="dollars",
        better="less",
        values=tuple(
            None if (price := case.machine.dollars_per_rank_hour) is None else _count_gpu_hours(step) * price
            for case, step in predicted
        ),
    )
    yield row("peak memory", "bytes", "less", lambda step: step.memory.peak_bytes)
    reserved = [float(_count_reserved_bytes(case, step)) for case, step in predicted]
    capacities = [case.machine.chip.memory_bytes for case, _ in predicted]
    yield Quantity(name="reserved, with driver", unit="bytes", better="less", values=tuple(reserved))
    free = tuple(capacity - size for capacity, size in zip(capacities, reserved, strict=True))
    yield Quantity(name="free memory", unit="bytes", better="more", values=free)
    yield row("risk of out of memory", "share", "less", lambda step: step.memory.risk)
    for part in STATES:
        name = STATES[part]
        yield row(name, "bytes", "less", lambda step, part=part: getattr(_find_peak_stage(step), f"{part}_bytes"))  # type: ignore[misc]
    yield from _time_rows(steps, row)
    yield row("parameters of the model", "count", "neither", lambda step: step.work.parameters)
    yield row("parameters of the vision tower", "count", "neither", lambda step: step.work.vision_parameters)
    yield Quantity(
        name="image tokens of a sequence",
        unit="count",
        better="neither",
        values=tuple(float(count_image_tokens(case.model, case.job)) for case, _ in predicted),
    )
    yield row("FLOPs of images", "FLOPs", "neither", lambda step: step.work.vision_flops)
    yield row("hardware FLOPs", "FLOPs", "less", lambda step: step.work.hardware_flops)
    for axis in dict.fromkeys(item.axis for step in steps for item in step.traffic):
        yield row(f"sent over axis {axis}", "bytes", "less", lambda step, axis=axis: _sum_sent_bytes(step, axis))  # type: ignore[misc]


def _count_reserved_bytes(case: ComparedCase, step: Step) -> int:
    """Return what the allocator and the driver take of the device's memory."""
    driver = count_driver_bytes(case.machine, Layout.parse(step.layout), case.job.stack)
    return driver + max(step.memory.peak_bytes, step.memory.reserved_bytes or 0)


def _time_rows(steps: Sequence[Step], row: Callable[..., Quantity]) -> Iterator[Quantity]:
    """Yield the rows of the time breakdown: compute, exposed communication by axis, and the other parts."""
    yield row("compute", "seconds", "less", lambda step: step.time.compute_seconds)
    for axis in dict.fromkeys(axis for step in steps for axis in step.time.exposed_seconds):
        yield row(
            f"exposed {axis} communication",
            "seconds",
            "less",
            lambda step, axis=axis: step.time.exposed_seconds.get(axis),
        )
    for part in TIME_PARTS:
        name = {"optimizer": "optimizer step", "bubble": "pipeline bubble"}.get(part, part)
        yield row(name, "seconds", "less", lambda step, part=part: getattr(step.time, f"{part}_seconds"))
        if part == "bubble":
            yield row("bubble share", "share", "less", lambda step: step.time.bubble_seconds / step.time.step_seconds)


def _find_peak_stage(step: Step) -> Any:
    return max(step.memory.stages, key=lambda stage: stage.peak_bytes)


def _count_gpu_hours(step: Step) -> float:
    return COST_TOKENS / step.tokens_per_second_per_gpu / 3600


def _sum_sent_bytes(step: Step, axis: str) -> int:
    return sum(item.bytes for item in step.traffic if item.axis == axis)
