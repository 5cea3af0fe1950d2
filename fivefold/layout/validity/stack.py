"""What the training software runs, and what a config of it can express."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import get_args

from fivefold.job import Job
from fivefold.layout.names import DEFAULT_ORDER, Axis
from fivefold.layout.spec import Layout
from fivefold.layout.validity.order import has_legal_order
from fivefold.model.spec import Model
from fivefold.stack.spec import Stack, SupportedLayouts


def can_express(layout: Layout, *, model: Model, job: Job) -> bool:
    """Tell whether the config of the job's stack can express axes, ZeRO stage, recomputation and experts."""
    runs = job.stack.runs
    axes = all(getattr(layout, axis) == 1 for axis in get_args(Axis) if axis not in (runs.config_axes or runs.axes))
    return axes and next(list_inexpressible(layout, model=model, job=job), None) is None


def list_inexpressible(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield what the config of the job's stack cannot express of a layout with these axes, one line each.

    Such a layout is predicted all the same, as some configs are read as the nearest one, but it is neither searched nor
    written.
    """
    runs, moe = job.stack.runs, model.moe is not None
    config = f"a config of {job.stack.name} cannot express"
    if layout.dp * layout.cp > 1:
        stages = runs.expressible_zero(layout.pp, layout.cp)
        if layout.zero not in stages:
            fix = " or ".join(f"zero{stage}" for stage in stages)
            yield f"{config} zero{layout.zero}; use {f'{fix} or another stack' if fix else 'another stack'}"
        elif not runs.can_express_shards(layout.shards, layout.cp):
            yield f"{config} shard groups that are not whole groups of cp={layout.cp}; use a multiple of it"
    if not runs.can_express(layout.ac, experts=moe):
        known = [f"ac={ac}" for ac in ("none", *runs.recomputes, *(runs.expert_recomputes if moe else ()))]
        yield f"{config} ac={layout.ac}; use {', '.join(known[:-1])} or {known[-1]}, or another stack"
    default_etp = layout.tp if layout.ep == 1 else 1
    if moe and runs.experts_as_mlp and layout.etp != default_etp:
        yield f"{config} etp{layout.etp} with tp{layout.tp} and ep{layout.ep}; use etp{default_etp}"


def list_unwritten(model: Model, job: Job, fields: Sequence[str] = ("optimizer", "precision")) -> Iterator[str]:
    """Yield which optimizer or precision of a job its stack, or a config of it, does not have: one line for each field.

    Such a job is predicted all the same: some software has more than what is recorded of it.
    """
    runs = job.stack.runs
    unwritten = f"no config of {job.stack.name} is written"
    untrained = f"{job.stack.name} is not known to train"
    precisions = runs.list_precisions(experts=model.moe is not None)
    facts = {
        "optimizer": (job.optimizer.kind, runs.config_optimizers, unwritten),
        "precision": (job.precision.name, precisions, untrained if runs.precisions else unwritten),
    }
    for field in fields:
        value, known, reason = facts[field]
        if known and value not in known:
            *others, last = known
            fix = f"{', '.join(others)} or {last}" if others else last
            yield f"{reason} with {field} {value}; use {fix}, or another stack"


def check_stack(layout: Layout, model: Model, stack: Stack) -> Iterator[str]:
    """Yield the reasons why the stack (the training software) cannot run the layout."""
    runs = stack.runs
    for axis in (axis for axis in get_args(Axis) if axis not in runs.axes and getattr(layout, axis) > 1):
        yield f"{stack.name} does not support {axis}; use {axis}1 or another stack"
    if layout.pp > 1 and layout.schedule not in runs.schedules:
        yield f"{stack.name} does not support {layout.schedule}; use {' or '.join(runs.schedules)}, or another stack"
    stages = runs.zero_with(layout.pp)
    if layout.dp * layout.cp > 1 and layout.zero not in stages:
        context = " with pipelines" if layout.pp > 1 else ""
        fix = " or ".join(f"zero{n}" for n in stages) or "pp1"
        yield f"{stack.name} does not support zero{layout.zero}{context}; use {fix}, or another stack"
    if layout.cp > 1 and layout.cp_kind not in runs.cp_kinds:
        yield f"{stack.name} does not support cp={layout.cp_kind}; use cp={runs.cp_kinds[0]} or another stack"
    for is_missing, feature, fix in (
        (layout.shard_group and not runs.shard_groups, "shard groups", f"zero{layout.zero}"),
        (
            layout.etp > 1 and not (runs.expert_tensor and "ep" in runs.axes),
            "tensor parallelism of experts",
            "etp1",
        ),
        (not layout.sp and not runs.no_sp, "tensor parallelism without sequence parallelism", "it without nosp"),
        (bool(layout.stages) and not runs.uneven_stages, "stages of other sizes", "it without stages="),
    ):
        if is_missing:
            yield f"{stack.name} does not support {feature}; use {fix} or another stack"
    if not runs.supports_order(layout.order):
        orders = _format_orders(layout, model, runs)
        yield f"{stack.name} does not support other orders of the ranks; use {orders} or another stack"


def _format_orders(layout: Layout, model: Model, runs: SupportedLayouts) -> str:
    """Return the orders of ranks that the stack supports and the layout allows, for a message."""
    others = (order for order in permutations(DEFAULT_ORDER) if order != DEFAULT_ORDER and runs.supports_order(order))
    allowed = (order for order in others if has_legal_order(layout, model, order))
    return " or ".join(["it without order=", *(f"order={'-'.join(order)}" for order in allowed)])
