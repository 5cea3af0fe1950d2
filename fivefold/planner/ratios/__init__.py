"""The largest degree of each axis at which its messages still overlap with compute.

    a message overlaps while   FLOPs ÷ bytes of the layer  ≥  peak FLOP/s ÷ bytes/s of the machine

The left side is the arithmetic intensity of the layer, the right side the balance of the machine. ``exchanges`` has one
function for each message of an axis. Peaks and links are those of the data sheet: large matmuls and large messages both
reach about four fifths of them, so their ratio hardly changes. Formulas and worked numbers:
docs/explanation/how-a-step-costs/ratios.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, floor, gcd
from typing import NamedTuple

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.machine.spec import Link, Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.operations.local_shapes import get_activation_width
from fivefold.planner.ratios import exchanges
from fivefold.planner.ratios.exchanges import Exchange
from fivefold.results.balance import Axis, Degree, Ratios, Sizing


class RatioQuestion(NamedTuple):
    """A row of the table: a message of an axis, the compute that can hide it, and the formula of their ratio."""

    axis: str  # of the layout, or tp2d, zero3
    sends: str
    overlapped_with: str
    formula: str
    exchange: Callable[[Model, Job, Layout], Exchange]


QUESTIONS = (
    RatioQuestion("tp", "output", "output projection", "2·N·H / (w·(tp−1))", exchanges.build_tensor_exchange),
    RatioQuestion(
        "tp2d",
        "input and output",
        "output projection",
        "2·N·H·D / (g·N·H·(y−1) + w·D·(x−1))",
        exchanges.build_tensor_exchange,
    ),
    RatioQuestion(
        "cp", "K and V, one hop", "attention of a chunk", "(N/K)·(T/cp) / w", exchanges.build_context_exchange
    ),
    RatioQuestion(
        "zero3",
        "weights",
        "a layer forward",
        "msl·(2·P+2·T·D) / (P·w) · n/(n−1)",
        exchanges.build_zero3_forward_exchange,
    ),
    RatioQuestion(
        "zero3",
        "weights, gradients",
        "a layer backward",
        "2·msl·(2·P+2·T·D) / (P·(w+g)) · n/(n−1)",
        exchanges.build_zero3_backward_exchange,
    ),
    RatioQuestion(
        "dp",
        "gradients",
        "the last backward",
        "2·msl·(2·P+2·T·D) / (P·r) · n/(n−1)",
        exchanges.build_last_gradient_exchange,
    ),
    RatioQuestion(
        "dp",
        "gradients, weights",
        "the full step",
        "3·m·msl·(2·P+2·T·D) / (P·s) · n/(n−1)",
        exchanges.build_step_gradient_exchange,
    ),
    RatioQuestion("ep", "two all-to-alls", "routed experts", "6·F / (g+w) · n/(n−1)", exchanges.build_expert_exchange),
    RatioQuestion(
        "ep",
        "two all-to-alls",
        "a full layer",
        "(2·P+2·T·D) / (k·D·(g+w)) · n/(n−1)",
        exchanges.build_expert_layer_exchange,
    ),
    RatioQuestion(
        "pp", "activations", "a stage forward", "L/(pp·v)·(2·P+2·T·D) / (D·w)", exchanges.build_pipeline_exchange
    ),
)


def compute_ratios(model: Model, *, machine: Machine, job: Job, layout: Layout | None = None) -> Ratios:
    """Return the ratios of each axis when only that one varies, and the others are as in ``layout``.

    Raises ``UserError`` if the model, job or machine does not support ``layout``.
    """
    layout = layout or Layout()
    refuse(layout, model=model, job=job, machine=machine)
    routed = model.is_moe(model.layers - 1)
    questions = [question for question in QUESTIONS if routed or question.axis != "ep"]
    peak = machine.chip.peak(job.precision.compute)
    return Ratios(
        model=model.name,
        machine=machine.name,
        layout=str(layout),
        sequence=job.sequence,
        global_batch=job.global_batch,
        precision=job.precision.name,
        peak_flops=peak,
        balances={link.name: peak / link.bandwidth for link in machine.links},
        axes=tuple(answer(question, model, machine=machine, job=job, layout=layout) for question in questions),
        sizing=tuple(compute_sizing(model, machine=machine, job=job, link=link) for link in machine.links if routed),
    )


def answer(question: RatioQuestion, model: Model, *, machine: Machine, job: Job, layout: Layout) -> Axis:
    """Return all legal degrees of one axis.

    The record has the largest one at which its messages overlap fully, and why no larger one does.
    """
    degrees: list[Degree] = []
    refused = ""
    for changes in _list_changes(question.axis, layout, machine.ranks):
        degree_list = []
        for change in changes:
            try:
                legal = layout.replace(**change)
                refuse(legal, model=model, job=job, machine=machine)
                exchange = question.exchange(model, job, legal)
                if not exchange.flops:
                    raise UserError(f"the most common layer has no {question.overlapped_with} to overlap messages with")
                degree_list.append(_compute_degree(question, legal, exchange, machine))
            except UserError as error:
                refused = refused or str(error).removeprefix("layout: ")
        if degree_list:
            degrees.append(max(degree_list, key=lambda degree: degree.flops_per_byte / degree.balance))
    failing = next((degree for degree in degrees if not degree.overlaps), None)
    largest = max((d.degree for d in degrees if failing is None or d.degree < failing.degree), default=1)
    if failing:
        have = f"{failing.flops_per_byte:,.0f}"
        need = f"{failing.balance:,.0f}"
        reason = f"{failing.token} has {have} FLOPs per byte, {failing.link} needs {need}"
    elif degrees:
        reason = f"overlapped at every degree possible with this model, batch and {machine.ranks} ranks"
    else:
        reason = refused or f"{layout} already uses {layout.world} of {machine.ranks} ranks"
    return Axis(
        axis=question.axis,
        sends=question.sends,
        overlapped_with=question.overlapped_with,
        formula=question.formula,
        degrees=tuple(degrees),
        largest=largest,
        reason=reason,
    )


def compute_sizing(model: Model, *, machine: Machine, job: Job, link: Link) -> Sizing:
    """Return the expert width F and the top-k k at which compute overlaps the all-to-alls.

    The condition: R + k·2·j·D·F FLOPs per token take at least as long as k·D·(g+w) bytes.

    j: matmuls per expert; R: the layer's other FLOPs per token. A ``UserError`` if the model has no experts.
    """
    moe = model.moe
    if moe is None or not model.is_moe(model.layers - 1):
        raise UserError(f"{model.name} has no experts; name a mixture-of-experts model such as qwen3-30b-a3b")
    layer = exchanges.find_most_common_layer(model, job, routed=True)
    rest = (layer.flops - layer.expert_flops) / job.sequence
    two_j = layer.expert_flops / (job.sequence * moe.topk * model.expert_width * moe.ffn)
    row = exchanges.get_gathered_width(job) + get_activation_width(job)
    required_flops = row * machine.chip.peak(job.precision.compute) / link.bandwidth  # FLOPs per routed element
    missing_flops = model.expert_width * (required_flops - two_j * moe.ffn)  # per token and routed expert
    return Sizing(
        link=link.name,
        ffn=moe.ffn,
        topk=moe.topk,
        ffn_alone=ceil(required_flops / two_j),
        ffn_layer=max(0, ceil((required_flops - rest / (moe.topk * model.expert_width)) / two_j)),
        topk_layer=floor(rest / missing_flops) if missing_flops > 0 else None,
    )


def _compute_degree(question: RatioQuestion, layout: Layout, exchange: Exchange, machine: Machine) -> Degree:
    """Return FLOPs per byte of one degree of an axis, next to the balance of the link that it uses."""
    field = _get_field(question.axis)
    degree = getattr(layout, field)
    two = f"{layout.tp // layout.tp_inner}x{layout.tp_inner}"
    offered, balance = exchange.flops_per_byte, exchange.balance(machine)
    return Degree(
        degree=degree,
        token=f"{field}{two if question.axis == 'tp2d' else degree}",
        link=machine.link(max(transfer.span for transfer in exchange.transfers if transfer.bytes)).name,
        flops_per_byte=offered,
        balance=balance,
        overlaps=offered >= balance,
    )


def _get_field(axis: str) -> str:
    return {"tp2d": "tp", "zero3": "dp"}.get(axis, axis)


def _list_changes(axis: str, layout: Layout, ranks: int) -> Iterator[list[dict[str, int | None]]]:
    """Yield changes of the layout for each degree, ascending: divisors of the ranks left by other axes.

    For 2D tensor parallelism all splits are tried.
    """
    field = _get_field(axis)
    room = ranks // (layout.pp * layout.etp if axis == "ep" else layout.world // getattr(layout, field))
    for n in (n for n in range(2, room + 1) if room % n == 0):
        if axis == "tp2d":
            yield [{"tp": n, "tp_inner": y} for y in range(2, n) if n % y == 0]
        elif axis == "zero3":
            yield [{"dp": n, "zero": 3, "shard_group": None}]
        elif axis == "ep":  # dp grows until n divides dp·cp·tp/etp
            held = layout.dp * layout.cp * layout.tp // layout.etp
            yield [{"ep": n, "dp": layout.dp * (n // gcd(held, n))}]
        else:
            yield [{field: n, "tp_inner": 1} if axis == "tp" else {field: n}]
