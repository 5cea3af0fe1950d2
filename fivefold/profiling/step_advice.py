"""Advice on a measured step: how much longer than predicted it is, the largest cause that was measured, the change.

    The largest loss is FLOPs beyond the prediction, 31.0 ms or 17% of a step. 28% more FLOPs ran than predicted. …

FLOPs, bytes, the optimizer's time and waits for data are measured, so what they do not explain is in kernels, waits
for messages or the host: a trace names which.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fivefold.profiling.trace_advice import MIN_SHARE
from fivefold.results.advice import StepAdvice
from fivefold.results.step_comparison import compare
from fivefold.step import Step
from fivefold.units import show_seconds

MIN_OPTIMIZER_SHARE = 0.15  # share of a step above which the optimizer is named without a prediction
FUSED = "Use a fused optimizer (fused=True), and clip gradients without .item()."
LOAD_AHEAD = (
    "Load batches in workers ahead of the step (num_workers, prefetch_factor, pin_memory), and take logging, .item() "
    "and checkpoints out of the step or do them every few steps."
)


class Excess(NamedTuple):
    """Seconds of a step beyond the prediction, and what to do about them."""

    name: str
    seconds: float
    evidence: str
    change: str


def advise_on_step(measured: Step, predicted: Step | None = None) -> StepAdvice | None:
    """Return the advice; None if no time was measured."""
    seconds = measured.time.step_seconds
    if not seconds:
        return None
    expected = predicted.time.step_seconds if predicted is not None else None
    if predicted is None:
        excesses = [*_list_losses(measured)]
    else:
        excesses = (
            [*_list_excesses(measured, predicted)]
            if seconds - predicted.time.step_seconds >= MIN_SHARE * seconds
            else []
        )
    excess = max(excesses, key=lambda excess: excess.seconds, default=None)
    if excess is None:
        return StepAdvice(
            loss="",
            loss_seconds=0.0,
            share=0.0,
            evidence=f"A step takes {show_seconds(seconds)}.",
            change="For the cause of a loss compare it with a prediction (against=(MODEL, MACHINE, LAYOUT)), or record "
            "some steps for `fivefold trace`."
            if predicted is None
            else "What is left to gain is in the layout: search another one with `fivefold search`.",
            step_seconds=seconds,
            expected_seconds=seconds,
            predicted_seconds=expected,
        )
    return StepAdvice(
        loss=excess.name,
        loss_seconds=excess.seconds,
        share=excess.seconds / seconds,
        evidence=excess.evidence,
        change=excess.change,
        step_seconds=seconds,
        expected_seconds=max(0.0, seconds - excess.seconds),
        predicted_seconds=expected,
    )


def _list_losses(measured: Step) -> Iterator[Excess]:
    """Yield the losses that are seen without a prediction, if they are large."""
    time = measured.time
    if time.data_seconds >= MIN_SHARE * time.step_seconds:
        yield _get_wait_for_data(measured)
    if time.optimizer_seconds > MIN_OPTIMIZER_SHARE * time.step_seconds:
        yield Excess("the optimizer", time.optimizer_seconds, "It is not overlapped with anything.", FUSED)


def _get_wait_for_data(measured: Step) -> Excess:
    return Excess(
        "the time between steps",
        measured.time.data_seconds,
        "From the end of optimizer.step() to the next forward the loop loads a batch, logs, or zeroes gradients.",
        LOAD_AHEAD,
    )


def _list_excesses(measured: Step, predicted: Step) -> Iterator[Excess]:
    """Yield the causes that counts show, priced as the prediction prices them, and the rest."""
    time = predicted.time
    more_flops = _get_ratio(measured.work.hardware_flops, predicted.work.hardware_flops) - 1
    sent = [row for row in compare(predicted, measured) if row.quantity.endswith(", sent")]
    more_bytes = _get_ratio(sum(row.measured for row in sent), sum(row.predicted for row in sent)) - 1
    excesses = [
        Excess(
            "FLOPs beyond the prediction",
            max(0.0, more_flops) * time.compute_seconds,
            f"{more_flops:.0%} more FLOPs ran than predicted.",
            "Recompute less, or predict with the sequence length and the micro-batch that run.",
        ),
        Excess(
            "communication beyond the prediction",
            max(0.0, more_bytes) * (sum(time.exposed_seconds.values()) + sum(time.overlapped_seconds.values())),
            f"{more_bytes:.0%} more bytes were sent than predicted.",
            "Look for gradients that are reduced in every micro-batch (no_sync()), and for modules that are gathered "
            "twice.",
        ),
        Excess(
            "the optimizer",
            max(0.0, measured.time.optimizer_seconds - time.optimizer_seconds),
            "The optimizer takes longer than predicted.",
            FUSED,
        ),
        _get_wait_for_data(measured),
    ]
    yield from excesses
    rest = measured.time.step_seconds - time.step_seconds - sum(excess.seconds for excess in excesses)
    yield Excess(
        "time that no count explains",
        max(0.0, rest),
        "FLOPs, bytes, the optimizer and the time between steps do not explain most of the difference.",
        "Kernels, waits for messages or the host are slower than predicted: record some steps, and "
        "`fivefold trace --against` names which.",
    )


def _get_ratio(measured: float, predicted: float) -> float:
    """Return measured over predicted; 1 if nothing is predicted."""
    return measured / predicted if predicted else 1.0
