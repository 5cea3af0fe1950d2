"""Advice on a measured step: how much longer than predicted it is, the largest cause that its counts show, the change.

    A step takes 182 ms, predicted are 140 ms. 28% more FLOPs ran than predicted, about 31 ms. Recompute less, …

FLOPs, bytes and the optimizer's time are measured, so what they do not explain is in kernels, waits or the host: a
trace names which.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fivefold.rendering.trace_advice import MIN_SHARE
from fivefold.results.step_comparison import compare
from fivefold.step import Step
from fivefold.units import show_seconds

MIN_OPTIMIZER_SHARE = 0.15  # share of a step above which the optimizer is named without a prediction


class Excess(NamedTuple):
    """Seconds of a step beyond the prediction, and what to do about them."""

    seconds: float
    evidence: str
    change: str


def advise_on_step(measured: Step, predicted: Step | None = None) -> str:
    """Return the advice in a few sentences; "" if no time was measured."""
    seconds = measured.time.step_seconds
    if not seconds:
        return ""
    if predicted is None:
        return _advise_alone(measured)
    expected = predicted.time.step_seconds
    sentences = [f"A step takes {show_seconds(seconds)}, predicted are {show_seconds(expected)}."]
    if seconds - expected < MIN_SHARE * seconds:
        return f"{sentences[0]} What is left to gain is in the layout: search another one with `fivefold search`."
    excess = max(_list_excesses(measured, predicted), key=lambda excess: excess.seconds)
    return " ".join(
        [
            *sentences,
            f"{excess.evidence}, {show_seconds(excess.seconds)} or {excess.seconds / seconds:.0%} of a step.",
            excess.change,
            f"Without it a step would take {show_seconds(seconds - excess.seconds)}.",
        ]
    )


def _advise_alone(measured: Step) -> str:
    time = measured.time
    share = time.optimizer_seconds / time.step_seconds
    optimizer = (
        f" The optimizer takes {share:.0%} of it: use a fused one (fused=True)." if share > MIN_OPTIMIZER_SHARE else ""
    )
    return (
        f"A step takes {show_seconds(time.step_seconds)}.{optimizer} For the cause of a loss compare it with a "
        "prediction (against=(MODEL, MACHINE, LAYOUT)), or record some steps for `fivefold trace`."
    )


def _list_excesses(measured: Step, predicted: Step) -> Iterator[Excess]:
    """Yield the causes that counts show, priced as the prediction prices them, and the rest."""
    time = predicted.time
    more_flops = _get_ratio(measured.work.hardware_flops, predicted.work.hardware_flops) - 1
    sent = [row for row in compare(predicted, measured) if row.quantity.endswith(", sent")]
    more_bytes = _get_ratio(sum(row.measured for row in sent), sum(row.predicted for row in sent)) - 1
    excesses = [
        Excess(
            max(0.0, more_flops) * time.compute_seconds,
            f"{more_flops:.0%} more FLOPs ran than predicted",
            "Recompute less, or predict with the sequence length and the micro-batch that run.",
        ),
        Excess(
            max(0.0, more_bytes) * (sum(time.exposed_seconds.values()) + sum(time.overlapped_seconds.values())),
            f"{more_bytes:.0%} more bytes were sent than predicted",
            "Look for gradients that are reduced in every micro-batch (no_sync()), and for modules that are gathered "
            "twice.",
        ),
        Excess(
            max(0.0, measured.time.optimizer_seconds - time.optimizer_seconds),
            "The optimizer takes longer than predicted",
            "Use a fused optimizer (fused=True), and clip gradients without .item().",
        ),
    ]
    yield from excesses
    rest = measured.time.step_seconds - time.step_seconds - sum(excess.seconds for excess in excesses)
    yield Excess(
        max(0.0, rest),
        "Counts of FLOPs, bytes and the optimizer do not explain most of the difference",
        "Kernels, waits for messages, the data loader or the host are slower than predicted: record some steps, and "
        "`fivefold trace --against` names which.",
    )


def _get_ratio(measured: float, predicted: float) -> float:
    """Return measured over predicted; 1 if nothing is predicted."""
    return measured / predicted if predicted else 1.0
