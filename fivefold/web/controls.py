"""The words of a layout as rows of choices: which are legal, and of the others why not.

    tensor  1  2  [4]  8  –16–   heads=40 is not divisible by tp=16
A choice changes one word; what must follow does: dp so that as many ranks work, mbs, ep, v and groups to what divides.
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
from fivefold.record import Mistake
from fivefold.web.question import Noun

MOST = 8  # choices in a row


class Option(NamedTuple):
    """One choice. ``layout``: with it; ``reason``: in one line, why it may not be taken, or empty."""

    text: str
    layout: str
    chosen: bool
    reason: str


class Control(NamedTuple):
    """A row. ``word``: as in the layout's text."""

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


def controls(noun: Noun, layout: Layout) -> list[Control]:
    """A row for every word that matters to this model and layout."""
    rows = {field: [*choices(noun, layout, field)] for field in HELP}
    return [Control(field, *HELP[field], tuple(options)) for field, options in rows.items() if len(options) > 1]


def choices(noun: Noun, layout: Layout, field: str) -> Iterator[Option]:
    """The choices of one word."""
    for value in _values(noun, layout, field):
        text = _text(value)
        try:
            other = changed(noun, layout, **{field: value})
        except Mistake as mistake:
            yield Option(text, "", False, str(mistake).removeprefix("layout: "))
            continue
        why = next(reasons(other, model=noun.model, job=noun.job, machine=noun.machine), "")
        yield Option(text, str(other), getattr(layout, field) == value, why)


def _text(value: object) -> str:
    """Return a value of a field as a page shows it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "+".join(value) or "none" if isinstance(value, tuple) else str(value)


def changed(noun: Noun, layout: Layout, **change: Any) -> Layout:
    """The layout with one word changed, and what must follow; a ``Mistake`` if nothing can."""
    values = {name: getattr(layout, name) for name in Layout.model_fields} | change
    ranks = layout.world if layout.world <= noun.machine.ranks else noun.machine.ranks
    others = values["tp"] * values["cp"] * values["pp"]
    if "dp" not in change:
        if ranks % others:
            raise Mistake(f"tp·cp·pp={others} does not divide the {ranks} ranks")
        values["dp"] = ranks // others
    _follow(values, change)
    batch = noun.job.global_batch
    if "mbs" not in change and batch % values["dp"] == 0:
        values["mbs"] = divisor_below(batch // values["dp"], values["mbs"])
    return Layout.read(values, origin="layout")


def _follow(values: dict[str, Any], change: dict[str, Any]) -> None:
    """Words that mean nothing without another one, or that must divide it."""
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


def _values(noun: Noun, layout: Layout, field: str) -> list[Any]:
    """What a row offers: legal or not, but not absurd."""
    ranks, model, now = noun.machine.ranks, noun.model, getattr(layout, field)
    if field == "zero":
        return [0, 1, 2, 3]
    if field == "ac":
        some = ["full@1"] if layout.pp > 1 else []
        return [*dict.fromkeys(["none", "selective", "norm+act", *some, "full", now])]
    if field == "offload":
        return [(), ("optimizer",), ("activations",), ("optimizer", "activations")]
    if field == "schedule":
        return list(SCHEDULES) if layout.pp > 1 else []
    if field in ("cp_kind", "sp"):
        kinds: list[Any] = ["ring", "ulysses"] if layout.cp > 1 else []
        return kinds if field == "cp_kind" else [True, False] if layout.tp > 1 and not model.moe else []
    if field == "mbs":
        return _few(divisors(max(1, noun.job.global_batch // layout.dp)), most=64, now=now)
    if field == "v":
        return _few(range(1, 9), most=max(1, model.layers // layout.pp), now=now) if layout.pp > 1 else []
    if field == "ep":
        return _few(divisors(model.moe.experts), most=ranks, now=now) if model.moe else []
    most = {"tp": min(ranks, 64), "cp": min(ranks, 64), "pp": min(ranks, model.layers), "dp": ranks}[field]
    return _few(divisors(ranks), most=most, now=now)


def _few(values: Any, *, most: int, now: int) -> list[int]:
    """At most ``MOST`` numbers up to ``most``; where there are more, powers of two go first, nearest to the present."""
    found = [value for value in values if value <= most]
    if len(found) > MOST:
        found = [value for value in found if value & (value - 1) == 0]
    if len(found) > MOST:
        found = sorted(found, key=lambda value: abs(log2(value / now)))[:MOST]
    return sorted({*found, now})


class Size(NamedTuple):
    """A number of ranks to change to, and the layout that then goes on using all of them, if it did."""

    ranks: int
    layout: str


def sizes(noun: Noun, layout: Layout) -> list[Size]:
    """Halves and doubles of the machine."""
    now = noun.machine.ranks
    near = {now >> shift for shift in (2, 1, 0)} | {now << shift for shift in (1, 2)}
    return [Size(size, str(_grown(noun, layout, size))) for size in sorted(near) if 1 <= size <= RANKS]


def _grown(noun: Noun, layout: Layout, ranks: int) -> Layout:
    """The layout with as many replicas as ``ranks`` have room for; as it is if they have not, or if it used fewer."""
    dp, rest = divmod(ranks * layout.dp, noun.machine.ranks)
    if layout.world != noun.machine.ranks or rest or not dp:
        return layout
    try:
        return changed(noun, layout, dp=dp)
    except Mistake:
        return layout
