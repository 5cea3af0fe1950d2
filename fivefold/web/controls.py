"""The keywords of a layout as rows of choices, with the reason why a choice is not valid.

    tensor  1  2  [4]  8  –16–   heads=40 is not divisible by tp=16
A choice changes one keyword and adapts dependent ones: dp, to keep the number of ranks, and mbs, ep, v and groups, to
values that divide.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from typing import Any, NamedTuple

from fivefold.bounded_types import RANKS
from fivefold.layout.legal import reasons
from fivefold.layout.schedule import PIPELINE_SCHEDULES
from fivefold.layout.schedule.pipeline_schedule import DEFAULT_SCHEDULE, SCHEDULES, ScheduleName, usual_schedule
from fivefold.layout.spec import Layout, divisor_below, divisors
from fivefold.record import UserError
from fivefold.web.question import ResolvedRequest

MAX_BUTTONS = 8  # largest number of choices in a row


class Option(NamedTuple):
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
    options: tuple[Option, ...]


HELP = {
    "dp": ("data", "replicas that each take a part of the batch"),
    "tp": ("tensor", "ranks that split every matrix; they speak in every layer, so keep them in one node"),
    "cp": ("context", "ranks that split every sequence"),
    "pp": ("pipeline", "ranks that each hold a part of the layers"),
    "v": ("virtual stages", "parts of the model per pipeline rank: smaller bubbles, more messages"),
    "schedule": ("schedule", "in what order a pipeline works"),
    "ep": ("expert", "ranks that split the experts"),
    "zero": ("ZeRO", "what is sharded over data parallel ranks: 1 optimizer, 2 gradients too, 3 weights too"),
    "mbs": ("micro-batch", "sequences that go through the model at once"),
    "ac": ("recompute", "activations that are not kept but computed again in the backward"),
    "offload": ("offload", "what is kept in host memory instead of on the GPU"),
    "cp_kind": ("context by", "ring: keys and values go round; ulysses: heads are exchanged for tokens"),
    "sp": ("sequence parallel", "norms and streams are split over tp too"),
}


def controls(noun: ResolvedRequest, layout: Layout) -> list[Control]:
    """Return a row for every keyword that matters to this model and layout."""
    rows = {field: [*choices(noun, layout, field)] for field in HELP}
    return [Control(field, *HELP[field], tuple(options)) for field, options in rows.items() if len(options) > 1]


def choices(noun: ResolvedRequest, layout: Layout, field: str) -> Iterator[Option]:
    """Yield the choices of one keyword."""
    for value in _values(noun, layout, field):
        text = _text(value)
        try:
            other = changed(noun, layout, **{field: value})
        except UserError as mistake:
            yield Option(text, "", False, str(mistake).removeprefix("layout: "))
            continue
        why = next(reasons(other, model=noun.model, job=noun.job, machine=noun.machine), "")
        yield Option(text, str(other), getattr(layout, field) == value, why)


def _text(value: object) -> str:
    """Return a value of a field as the page shows it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "+".join(value) or "none" if isinstance(value, tuple) else str(value)


def changed(noun: ResolvedRequest, layout: Layout, **change: Any) -> Layout:
    """Return the layout with one keyword changed and dependent ones adapted; raises ``UserError`` if it cannot be."""
    values = {name: getattr(layout, name) for name in Layout.model_fields} | change
    ranks = layout.world if layout.world <= noun.machine.ranks else noun.machine.ranks
    other_ranks = values["tp"] * values["cp"] * values["pp"]
    if "dp" not in change:
        if ranks % other_ranks:
            raise UserError(f"tp·cp·pp={other_ranks} does not divide the {ranks} ranks")
        values["dp"] = ranks // other_ranks
    _follow(values, change)
    batch = noun.job.global_batch
    if "mbs" not in change and batch % values["dp"] == 0:
        values["mbs"] = divisor_below(batch // values["dp"], values["mbs"])
    return Layout.read(values, origin="layout")


def _follow(values: dict[str, Any], change: dict[str, Any]) -> None:
    """Adapt keywords that need another one, or that must divide it."""
    if values["pp"] == 1 and "schedule" not in change and "v" not in change:
        values |= {"v": 1, "schedule": DEFAULT_SCHEDULE}
    if {"pp", "v", "schedule"} & change.keys():
        values["stages"] = ()
    if "v" in change and values["pp"] > 1:
        values["schedule"] = usual_schedule(values["v"]) if values["v"] > 1 else _flat(values["schedule"])
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
        values |= {"tp_inner": 1, "etp": divisor_below(values["tp"], values["etp"])}
        values["sp"] = values["sp"] or values["tp"] == 1
    if values["cp"] == 1 and "cp_kind" not in change:
        values["cp_kind"] = "ring"
    replicas, group = values["dp"] * values["cp"], values["shard_group"]
    if values["zero"] == 0 or (group and replicas % group):
        values["shard_group"] = None
    if "ep" not in change:
        values["ep"] = divisor_below(replicas * values["tp"] // values["etp"], values["ep"])


def _flat(schedule: ScheduleName) -> ScheduleName:
    return schedule if PIPELINE_SCHEDULES[schedule].stages_per_rank == 1 else DEFAULT_SCHEDULE


def _values(noun: ResolvedRequest, layout: Layout, field: str) -> list[Any]:
    """Return the values that a row offers, valid or not, without pointless ones."""
    ranks, model, current = noun.machine.ranks, noun.model, getattr(layout, field)
    if field == "zero":
        return [0, 1, 2, 3]
    if field == "ac":
        pipeline_choices = ["full@1"] if layout.pp > 1 else []
        return [*dict.fromkeys(["none", "selective", "norm+act", *pipeline_choices, "full", current])]
    if field == "offload":
        return [(), ("optimizer",), ("activations",), ("optimizer", "activations")]
    if field == "schedule":
        return list(SCHEDULES) if layout.pp > 1 else []
    if field in ("cp_kind", "sp"):
        kinds: list[Any] = ["ring", "ulysses"] if layout.cp > 1 else []
        return kinds if field == "cp_kind" else [True, False] if layout.tp > 1 and not model.moe else []
    if field == "mbs":
        return _few(divisors(max(1, noun.job.global_batch // layout.dp)), most=64, now=current)
    if field == "v":
        return _few(range(1, 9), most=max(1, model.layers // layout.pp), now=current) if layout.pp > 1 else []
    if field == "ep":
        return _few(divisors(model.moe.experts), most=ranks, now=current) if model.moe else []
    most = {"tp": min(ranks, 64), "cp": min(ranks, 64), "pp": min(ranks, model.layers), "dp": ranks}[field]
    return _few(divisors(ranks), most=most, now=current)


def _few(values: Any, *, most: int, now: int) -> list[int]:
    """Return at most ``MAX_BUTTONS`` numbers up to ``most``; of more, powers of two nearest to the current value."""
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


def sizes(noun: ResolvedRequest, layout: Layout) -> list[Size]:
    """Return the machine with a quarter to four times its ranks."""
    current = noun.machine.ranks
    rank_counts = {current >> shift for shift in (2, 1, 0)} | {current << shift for shift in (1, 2)}
    return [Size(size, str(_grown(noun, layout, size))) for size in sorted(rank_counts) if 1 <= size <= RANKS]


def _grown(noun: ResolvedRequest, layout: Layout, ranks: int) -> Layout:
    """Return the layout with as many replicas as fit ``ranks``; unchanged if it cannot grow or left ranks idle."""
    dp, rest = divmod(ranks * layout.dp, noun.machine.ranks)
    if layout.world != noun.machine.ranks or rest or not dp:
        return layout
    try:
        return changed(noun, layout, dp=dp)
    except UserError:
        return layout
