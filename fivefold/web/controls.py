"""The keywords of a layout as rows of choices, and fields of the job as lists, with why a choice is not valid.

    tensor  1  2  [4]  8  –16–   heads=40 is not divisible by tp=16
A choice changes one keyword and adapts dependent ones: dp, to keep the number of ranks, and mbs, ep, v and groups, to
values that divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from math import log2
from typing import Any, NamedTuple, get_args

from fivefold.adapter import ADAPTERS, ALL_LINEAR, EXPERT_TARGETS, SAVED, Adapter
from fivefold.bounded_types import RANKS
from fivefold.errors import UserError
from fivefold.job import RECIPES, Job, Recipe
from fivefold.layout.batch import fill_batch
from fivefold.layout.names import CP_KINDS
from fivefold.layout.remarks import describe_unused_fused_scans
from fivefold.layout.schedule import PIPELINE_SCHEDULES
from fivefold.layout.schedule.pipeline_schedule import DEFAULT_SCHEDULE, SCHEDULES, ScheduleName, get_1f1b_name
from fivefold.layout.spec import Layout, find_divisor_below, list_divisors
from fivefold.layout.stages import distribute_evenly, distribute_parts, sum_parts
from fivefold.layout.text import format_stages
from fivefold.layout.validity import list_reasons
from fivefold.layout.validity.pipeline import count_max_stages
from fivefold.layout.validity.stack import list_inexpressible, list_unwritten
from fivefold.model.spec import Model
from fivefold.planner.compare import with_precision, with_stack
from fivefold.stack.catalog import STACKS, WRAPPED_STACKS
from fivefold.stack.spec import Attention, Stack
from fivefold.update import Kind as OptimizerKind
from fivefold.web.question import PRECISION_PARTS, ResolvedRequest
from fivefold.web.wording import use_page_words

MAX_BUTTONS = 8  # largest number of choices in a row
MAX_MICRO_BATCH = 64  # sequences of the largest one that is offered


class LayoutOption(NamedTuple):
    """One choice. ``layout``: the layout with it; ``reason``: one line why it is not valid, or empty."""

    text: str
    layout: str
    chosen: bool
    reason: str


class Control(NamedTuple):
    """A row of choices. ``word``: the keyword in the layout's text."""

    word: str
    label: str
    help: str
    options: tuple[LayoutOption, ...]


HELP = {
    "dp": ("data", "replicas that each take a part of the batch"),
    "tp": ("tensor", "ranks that split every matrix; they communicate in every layer, so keep them in one node"),
    "cp": ("context", "ranks that split every sequence"),
    "pp": ("pipeline", "ranks that each hold a part of the layers"),
    "v": ("virtual stages", "parts of the model per pipeline rank: smaller bubbles, more messages"),
    "stages": (
        "layers per stage",
        "even, or one layer less at the ends, which also hold the embedding and the head, or none, as in Llama 3 405B",
    ),
    "schedule": ("schedule", "in what order a pipeline works"),
    "ep": ("expert", "ranks that split the experts"),
    "zero": ("ZeRO", "what is sharded over data parallel ranks: 1 optimizer, 2 gradients too, 3 weights too"),
    "shard_group": (
        "sharding group",
        "data parallel ranks over which ZeRO shards; smaller groups each hold a copy, and gather over faster links",
    ),
    "mbs": ("micro-batch", "sequences that go through the model at once"),
    "ac": ("recompute", "activations that are not kept but computed again in the backward"),
    "offload": ("offload", "what is kept in host memory instead of on the GPU"),
    "cp_kind": ("context by", "ring: keys and values go round; ulysses: heads are exchanged for tokens"),
    "sp": ("sequence parallel", "norms and streams are split over tp too"),
}


def list_controls(resolved: ResolvedRequest, layout: Layout) -> list[Control]:
    """Return a row for every keyword that matters to this model and layout."""
    rows = {field: [*list_choices(resolved, layout, field)] for field in HELP}
    return [Control(field, *HELP[field], tuple(options)) for field, options in rows.items() if len(options) > 1]


def list_choices(resolved: ResolvedRequest, layout: Layout, field: str) -> Iterator[LayoutOption]:
    """Yield the choices of one keyword; of what the software's config cannot express, only what ``layout`` has not."""
    known = set(list_inexpressible(layout, model=resolved.model, job=resolved.job))
    for value in _list_values(resolved, layout, field):
        text = format_stages(value).removeprefix("stages=") or "even" if field == "stages" else _format_value(value)
        try:
            other = change_keyword(resolved, layout, **{field: value})
        except UserError as mistake:
            yield LayoutOption(text, "", False, use_page_words(mistake).removeprefix("layout: "))
            continue
        job = fill_batch(resolved.job, ranks=resolved.machine.ranks, stated=resolved.stated, layouts=[other])
        inexpressible = list_inexpressible(other, model=resolved.model, job=job)
        reasons = chain(
            list_reasons(other, model=resolved.model, job=job, machine=resolved.machine),
            (reason for reason in inexpressible if reason not in known),
        )
        why = next(reasons, "")
        yield LayoutOption(text, str(other), getattr(layout, field) == value, use_page_words(why))


def _format_value(value: object) -> str:
    """Return a value of a field as the page shows it; None is a sharding group of all ranks."""
    if value is None:
        return "all"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "+".join(value) or "none" if isinstance(value, tuple) else str(value)


def change_keyword(resolved: ResolvedRequest, layout: Layout, **change: Any) -> Layout:
    """Return the layout with one keyword changed and dependent ones adapted; raises ``UserError`` if it cannot be."""
    values = {name: getattr(layout, name) for name in Layout.model_fields} | change
    ranks = layout.world if layout.world <= resolved.machine.ranks else resolved.machine.ranks
    other_ranks = values["tp"] * values["cp"] * values["pp"]
    if "dp" not in change:
        if ranks % other_ranks:
            raise UserError(f"tp·cp·pp={other_ranks} does not divide the {ranks} ranks; lower one")
        values["dp"] = ranks // other_ranks
    _follow(values, change)
    batch = resolved.job.global_batch
    if "mbs" not in change and not resolved.chosen_batch and batch % values["dp"] == 0:
        values["mbs"] = find_divisor_below(batch // values["dp"], values["mbs"])
    return Layout.read(values, origin="layout")


def _follow(values: dict[str, Any], change: dict[str, Any]) -> None:
    """Adapt keywords that need another one, or that must divide it."""
    if values["pp"] == 1 and "schedule" not in change and "v" not in change:
        values |= {"v": 1, "schedule": DEFAULT_SCHEDULE}
    if {"pp", "v", "schedule"} & change.keys():
        values["stages"] = ()
    if "v" in change and values["pp"] > 1:
        values["schedule"] = get_1f1b_name(values["v"]) if values["v"] > 1 else _drop_virtual_stages(values["schedule"])
    if "schedule" in change and values["pp"] > 1:
        values["v"] = PIPELINE_SCHEDULES[values["schedule"]].stages_per_rank or max(2, values["v"])
    kind, _, recomputing = values["ac"].partition("@")
    if (
        "ac" not in change
        and recomputing
        and (int(recomputing) >= values["pp"] or PIPELINE_SCHEDULES[values["schedule"]].enters_both_ends)
    ):
        values["ac"] = kind
    if "tp" in change:
        values |= {"tp_inner": 1, "etp": find_divisor_below(values["tp"], values["etp"])}
        values["sp"] = values["sp"] or values["tp"] == 1
    if values["cp"] == 1 and "cp_kind" not in change:
        values["cp_kind"] = "ring"
    replicas, group = values["dp"] * values["cp"], values["shard_group"]
    if values["zero"] == 0 or (group and replicas % group):
        values["shard_group"] = None
    if "ep" not in change:
        values["ep"] = find_divisor_below(replicas * values["tp"] // values["etp"], values["ep"])


def _drop_virtual_stages(schedule: ScheduleName) -> ScheduleName:
    return schedule if PIPELINE_SCHEDULES[schedule].stages_per_rank == 1 else DEFAULT_SCHEDULE


def _list_values(resolved: ResolvedRequest, layout: Layout, field: str) -> list[Any]:
    """Return the values that a row offers, valid or not, without pointless ones."""
    ranks = resolved.machine.ranks
    model = resolved.model
    most_stages = count_max_stages(model, resolved.job)
    current = getattr(layout, field)
    if field == "zero":
        return [0, 1, 2, 3]
    if field == "shard_group":
        replicas = layout.dp * layout.cp
        groups = _select_buttons(list_divisors(replicas)[1:-1], most=replicas, now=current or replicas)
        return [*(group for group in groups if group < replicas or group == current), None] if layout.zero else []
    if field == "ac":
        pipeline_choices = ["full@1"] if layout.pp > 1 else []
        joint = resolved.job.stack.runs.list_joint_recomputes()
        return [*dict.fromkeys(["none", "selective", "norm+act", *joint, *pipeline_choices, "full", current])]
    if field == "offload":
        offloads: list[tuple[str, ...]] = [(), ("optimizer",), ("activations",), ("optimizer", "activations")]
        offloads.append(("parameters",))
        if not resolved.job.stack.offloads_with_parameters:
            offloads.append(("optimizer", "parameters"))
        return [*dict.fromkeys([*offloads, current])]
    if field == "schedule":
        return list(SCHEDULES) if layout.pp > 1 else []
    if field in ("cp_kind", "sp"):
        kinds: list[Any] = [*CP_KINDS] if layout.cp > 1 else []
        return kinds if field == "cp_kind" else [True, False] if layout.tp > 1 and not model.moe else []
    if field == "mbs" and resolved.chosen_batch:  # the batch follows
        return _select_buttons(list_divisors(MAX_MICRO_BATCH), most=MAX_MICRO_BATCH, now=current)
    if field == "mbs":
        sizes = list_divisors(max(1, resolved.job.global_batch // layout.dp))
        return _select_buttons(sizes, most=MAX_MICRO_BATCH, now=current)
    if field == "v":
        return _select_buttons(range(1, 9), most=max(1, most_stages // layout.pp), now=current) if layout.pp > 1 else []
    if field == "stages":
        return _list_stage_sizes(model, layout)
    if field == "ep":
        return _select_buttons(list_divisors(model.moe.experts), most=ranks, now=current) if model.moe else []
    most = {"tp": min(ranks, 64), "cp": min(ranks, 64), "pp": min(ranks, most_stages), "dp": ranks}[field]
    return _select_buttons(list_divisors(ranks), most=most, now=current)


def _list_stage_sizes(model: Model, layout: Layout) -> list[tuple[int, ...]]:
    """Return the layers per stage that are offered: even, one less or none at the ends, the current ones."""
    stages, parts = layout.pp * layout.v, model.stage_parts
    if layout.pp == 1 or stages > len(parts) + 2:
        return []
    first, *middle, last = distribute_evenly(len(parts) + 2, stages)
    without_layers = (0, *distribute_parts(parts, stages - 2), 0) if stages > 2 else ()
    offered = [sum_parts(parts, (first - 1, *middle, last - 1)), without_layers] if stages > 2 else []
    even = distribute_parts(parts, stages)
    return [*dict.fromkeys([(), *(sizes for sizes in offered if sizes != even), layout.stages])]


def _select_buttons(values: Iterable[int], *, most: int, now: int) -> list[int]:
    """Return ``now`` and at most ``MAX_BUTTONS`` of ``values`` up to ``most``, the powers of two nearest to ``now``."""
    candidates = [value for value in values if value <= most]
    if len(candidates) > MAX_BUTTONS:
        candidates = [value for value in candidates if value & (value - 1) == 0]
    if len(candidates) > MAX_BUTTONS:
        candidates = sorted(candidates, key=lambda value: abs(log2(value / now)))[:MAX_BUTTONS]
    return sorted({*candidates, now})


class Size(NamedTuple):
    """A number of ranks to change to, and the layout for it, which uses all of them if it did before."""

    ranks: int
    layout: str


def list_sizes(resolved: ResolvedRequest, layout: Layout) -> list[Size]:
    """Return the machine with a quarter to four times its ranks."""
    current = resolved.machine.ranks
    rank_counts = {current >> shift for shift in (2, 1, 0)} | {current << shift for shift in (1, 2)}
    return [
        Size(size, str(_add_replicas(resolved, layout, size))) for size in sorted(rank_counts) if 1 <= size <= RANKS
    ]


def _add_replicas(resolved: ResolvedRequest, layout: Layout, ranks: int) -> Layout:
    """Return the layout with as many replicas as fit ``ranks``; unchanged if it cannot grow or left ranks idle."""
    dp, rest = divmod(ranks * layout.dp, resolved.machine.ranks)
    if layout.world != resolved.machine.ranks or rest or not dp:
        return layout
    try:
        return change_keyword(resolved, layout, dp=dp)
    except UserError:
        return layout


class JobChoice(NamedTuple):
    """One value of a field of the job, and one line why it is not valid with this layout, or empty.

    ``text``: the value as the page shows it.
    """

    value: str
    text: str
    reason: str = ""


ADAPTER_CHOICES = tuple(f"{kind}:{rank}" for kind in ADAPTERS for rank in (8, 16, 32, 64))
JOB_CHOICES: dict[str, tuple[str, ...]] = {
    "stack": tuple(STACKS),
    "precision": tuple(RECIPES),
    "optimizer": get_args(OptimizerKind),
    "adapter": ADAPTER_CHOICES,
    "attention": get_args(Attention),
    "loss": get_args(Stack.model_fields["loss"].annotation),
    "documents": get_args(Job.model_fields["documents"].annotation),
    "fused_scans": ("true",),
    "adapter_targets": (
        ALL_LINEAR,
        "q_proj,v_proj",
        "q_proj,k_proj,v_proj,o_proj",
        "gate_proj,up_proj,down_proj",
        ",".join((ALL_LINEAR, *EXPERT_TARGETS)),
        ",".join(("q_proj,k_proj,v_proj,o_proj", *EXPERT_TARGETS)),
    ),
    "modules_to_save": (*SAVED, ",".join(SAVED)),
    "weights_bytes": ("4", "2", "1"),
    "gradients_bytes": ("4", "2", "1"),
    "master_bytes": ("4", "2", "0"),
    "accumulated_bytes": ("4", "2", "0"),
    "moments_bytes": tuple(f"{first},{second}" for first in (4, 2, 1) for second in (4, 2, 1)),
    "scaling": get_args(Recipe.model_fields["scaling"].annotation),
    "gathers": get_args(Recipe.model_fields["gathers"].annotation),
    "dispatches": get_args(Recipe.model_fields["dispatches"].annotation),
}
OF_ADAPTER = {"adapter_targets": "targets", "modules_to_save": "modules_to_save"}  # lists of an adapter's record
PART_LABELS = {  # parts of the precision
    "weights_bytes": "weights",
    "gradients_bytes": "gradients",
    "master_bytes": "master weights",
    "accumulated_bytes": "accumulated gradients",
    "moments_bytes": "moments",
    "scaling": "scales of fp8 and fp4",
    "gathers": "ZeRO gathers",
    "dispatches": "experts receive",
}
FORMATS = {"4": "4 bytes", "2": "2 bytes", "1": "1 byte", "0": "not kept"}  # of a part of the precision
# Fields on which the legality of a layout may depend.
CHECKED = (
    "stack",
    "precision",
    "optimizer",
    "loss",
    "documents",
    "fused_scans",
    *OF_ADAPTER,
    *(part for part in PRECISION_PARTS if part != "moments_bytes"),
)
JOB_HELP = {
    "stack": "the software that runs the training: its kernels, what it keeps, sends and overlaps, and the layouts "
    "that it has. `fivefold config set stack NAME` keeps yours",
    "precision": "dtypes of matmuls, weights, gradients and optimizer states",
    "optimizer": "update rule. adamw keeps two moments per weight, adamw8bit in 8 bits, adamw4bit in 4, sgd one; "
    "adafactor keeps a row and a column; muon orthogonalizes the update of matrices",
    "adapter": "train low-rank adapters over frozen weights. lora:16 has rank 16; dora trains norms of rows "
    "too; q keeps the weights in 4 bits",
    "attention": "attention kernel. flash keeps no scores; unfused materializes them, T×T for each head",
    "loss": "kernel of the loss. chunked never holds all logits; fused holds them once, low_precision as PyTorch does "
    "in 16 bits; plain and those named upcast make copies in fp32",
    "documents": "sequence packing. joined: tokens attend to all of a sequence; separate: only to their own document. "
    "Both are counted equally",
    "fused_scans": "scans of a hybrid model: PyTorch's operations in groups of chunks, or one of the kernels of "
    "flash-linear-attention, as other software runs them",
    "adapter_targets": "linear layers with an adapter. all-linear: those of attention, MLPs and shared experts; "
    "experts.gate_up_proj and experts.down_proj: routed experts, which all-linear leaves frozen",
    "modules_to_save": "modules that are trained in full next to the adapter, as copies: the embedding, the output "
    "projection, or both",
    "weights_bytes": "bytes of a weight as it is gathered and multiplied",
    "gradients_bytes": "bytes of the gradient of a weight as the backward writes it",
    "master_bytes": "bytes of the copy of a weight that the optimizer updates",
    "accumulated_bytes": "bytes in which gradients are added up over micro-batches and ranks; not kept: in those of "
    "the gradient itself",
    "moments_bytes": "bytes of each of the two moments of AdamW",
    "scaling": "elements of an fp8 or fp4 operand that share one scale: the tensor, a row, a tile or a block",
    "gathers": "what ZeRO gathers of the matrices of blocks: weights, or their fp8 casts",
    "dispatches": "what is sent to experts: rows in 16 bits, or fp8 in tiles",
}


def list_job_choices(resolved: ResolvedRequest, layout: Layout) -> dict[str, list[JobChoice]]:
    """Return the values of the fields of a job, each with the reason why it is not valid with this layout."""
    if any(list_reasons(layout, model=resolved.model, job=resolved.job, machine=resolved.machine)):
        return list_values()  # the layout itself is not valid, with any of them
    choices = list_values()
    changed = _list_changed_jobs(resolved.job)
    for field in CHECKED:
        choices[field] = [
            choice._replace(reason=_check_choice(resolved, layout, field, changed[field, choice.value]))
            for choice in choices[field]
        ]
    reasons_by_kind = {
        kind: _check_choice(resolved, layout, "adapter", changed["adapter", f"{kind}:16"]) for kind in ADAPTERS
    }
    choices["adapter"] = [
        choice._replace(reason=reasons_by_kind[choice.value.partition(":")[0]]) for choice in choices["adapter"]
    ]
    return choices


@lru_cache(maxsize=8)
def _list_changed_jobs(job: Job) -> dict[tuple[str, str], Job | str]:
    """Return a job with each value of each checked field, or why there is none; most clicks change only the layout."""
    values = [(field, value) for field in CHECKED for value in JOB_CHOICES[field]]
    return {
        (field, value): _change_job_or_explain(job, field, value)
        for field, value in (*values, *(("adapter", f"{kind}:16") for kind in ADAPTERS))
    }


def _change_job_or_explain(job: Job, field: str, value: str) -> Job | str:
    try:
        return _change_job(job, field, value)
    except UserError as error:
        return str(error).removeprefix("precision: ").removeprefix("job: ")


def list_values() -> dict[str, list[JobChoice]]:
    """Return the values of the fields of a job without checking them."""
    return {
        field: [JobChoice(value, _show_choice(field, value)) for value in values]
        for field, values in JOB_CHOICES.items()
    }


def _show_choice(field: str, value: str) -> str:
    """Return a value of a field of the job as the page shows it."""
    if field == "moments_bytes":
        return value.replace(",", " and ") + " bytes"
    if field == "fused_scans":
        return "fused"
    if field == "stack" and value in WRAPPED_STACKS:
        return f"{value} (Accelerate, Axolotl, LLaMA-Factory, TRL)"
    return FORMATS[value] if field.endswith("_bytes") else value


def _check_choice(resolved: ResolvedRequest, layout: Layout, field: str, job: Job | str) -> str:
    """Return why a choice of a control is not possible with this layout; empty if it is."""
    if isinstance(job, str):
        return job
    reasons = list_reasons(layout, model=resolved.model, job=job, machine=resolved.machine)
    if field == "fused_scans":
        reasons = chain(reasons, describe_unused_fused_scans(resolved.model, job))
    elif field == "stack":
        reasons = chain(reasons, list_inexpressible(layout, model=resolved.model, job=job))
    elif field in ("precision", "optimizer"):
        reasons = chain(reasons, list_unwritten(resolved.model, job, fields=(field,)))
    return next(reasons, "")


def _change_job(job: Job, field: str, value: str) -> Job:
    """Return the job with another value of a field. Raises a ``UserError`` if other fields exclude it."""
    if field == "stack":
        return with_stack(job, value)
    if field == "precision":
        return with_precision(job, value)
    if field == "optimizer":
        return Job.read({**dict(job), "optimizer": job.optimizer.model_dump() | {"kind": value}}, origin="job")
    if field in OF_ADAPTER:
        if job.adapter is None:
            raise UserError("no adapter is chosen; use one, such as lora:16")
        changed = job.adapter.model_dump() | {OF_ADAPTER[field]: value.split(",")}
        return job.replace(adapter=Adapter.read(changed, origin="adapter"))
    if field in ("attention", "loss", "fused_scans"):
        return job.replace(stack=job.stack.replace(**{field: value}))
    if field == "scaling" and not job.precision.is_low_precision:
        raise UserError(f"matmuls in {job.precision.compute} have no scales; use a precision in fp8 or fp4")
    if field in PRECISION_PARTS:
        part = value.split(",") if field == "moments_bytes" else value
        return job.replace(precision=Recipe.read(job.precision.model_dump() | {field: part}, origin="precision"))
    return Job.read({**dict(job), field: value}, origin="job")
