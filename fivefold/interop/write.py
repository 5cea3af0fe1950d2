"""Model, layout and job -> the config of another software.

What is written is read back: where that is another model, layout or job, the writing is refused by the field's name.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from fivefold.interop.equivalence import fitted, resolve_rate
from fivefold.interop.format import Asked, Format, Plan, Written
from fivefold.interop.read import read
from fivefold.interop.registry import find_format
from fivefold.layout.legal import refuse
from fivefold.layout.spec import Layout
from fivefold.layout.stages import stage_layers
from fivefold.model.huggingface.write import differs
from fivefold.model.spec import Model
from fivefold.record import Mistake, difference
from fivefold.results.reading import Reading
from fivefold.stack.catalog import named as stack_named

# Of a job: what costs nothing, or is the software's own affair and told as a remark.
FREE = ("stack", "learning_rate", "seed", "steps", "documents", "emulate", "imbalance")


def write(plan: Plan, *, to: str) -> Written:
    """The files; raises ``Mistake`` for what ``to`` cannot run or cannot say."""
    form = find_format(to)
    assert form.emit is not None
    if form.stack and plan.job.stack.name != form.stack:
        plan = plan._replace(job=plan.job.replace(stack=stack_named(form.stack)))
    plan = plan._replace(layout=plain(plan.layout, plan.model))
    if plan.layout.offload:  # which configs say as a setting of the job
        job = plan.job.replace(offload=tuple(sorted(plan.layout.offloads(plan.job), reverse=True)))
        plan = plan._replace(layout=plan.layout.replace(offload=()), job=job)
    refuse(plan.layout, model=plan.model, job=plan.job)
    if form.stack and plan.layout.ac != plan.layout.recomputation:
        raise Mistake(
            f"--to {form.name}: ac={plan.layout.ac}: it recomputes on all pipeline ranks alike; "
            f"take ac={plan.layout.recomputation}"
        )
    found = form.emit(plan)
    if form.parse is None:
        return found
    back = _read_back(found, plan)
    return found._replace(remarks=(*found.remarks, *check(plan, back, form)))


def plain(layout: Layout, model: Model) -> Layout:
    """The layout without ``stages`` that are as they would be without them."""
    if sum(layout.stages) != model.layers:
        return layout
    plain = layout.replace(stages=())
    return plain if tuple(map(len, stage_layers(model.layers, plain))) == layout.stages else layout


def _read_back(found: Written, plan: Plan) -> Reading:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in found.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        asked = Asked(ranks=plan.layout.world, ranks_per_node=plan.ranks_per_node)
        return read([str(Path(folder) / next(iter(found.files)))], asked)


def check(plan: Plan, back: Reading, form: Format) -> tuple[str, ...]:
    """Remarks on what is read back otherwise at no cost; ``Mistake`` for what would cost something else."""
    said = f"--to {form.name}"
    if back.model is None or back.layout is None or back.job is None:
        raise Mistake(f"{said}: the config would not say {'; '.join(back.missing)}")
    if why := differs(back.model, fitted(plan.model, back.model)):
        raise Mistake(f"{said}: of model {plan.model.name!r} it can only say {why}")
    if back.layout != plan.layout:
        raise Mistake(f"{said}: of layout {str(plan.layout)!r} it can only say {str(back.layout)!r}; take that")
    if why := difference(back.job, plan.job, skip=FREE):
        raise Mistake(f"{said}: of the job it can only say {why}")
    remarks = []
    if plan.model.rope_scaling != back.model.rope_scaling:
        remarks.append("rotary positions are scaled otherwise than the model's")
    if plan.model.moe and back.model.moe and plan.model.moe.balance != back.model.moe.balance:
        remarks.append(f"experts are balanced by {back.model.moe.balance!r}, not by {plan.model.moe.balance!r}")
    rates = [resolve_rate(job.learning_rate, steps=job.steps) for job in (back.job, plan.job)]
    if why := difference(rates[0], rates[1]):
        remarks.append(f"the learning rate is written with {why}")
    if why := difference(back.job, plan.job, skip=("stack", "learning_rate", "documents", "emulate", "imbalance")):
        remarks.append(f"the job is written with {why}")
    if why := difference(back.job.stack, plan.job.stack, skip=("runs",)):
        remarks.append(f"{form.name} {form.version} runs with {why}")
    return tuple(remarks)
