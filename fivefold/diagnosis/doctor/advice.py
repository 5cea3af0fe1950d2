"""Choose the modules to recompute so that a step fits a memory budget with the least extra work, and verify them.

    saved(module) = activations made in it - its outputs - inputs that only it would keep  work = its forward again
    choices in order of work → predicted peak: the tape without these bytes → step examined again with modules wrapped

Candidates are the children of ModuleList and Sequential, and the modules directly inside of them. A choice recomputes a
candidate entirely, or some modules inside of it, or neither. Only Pareto-optimal choices (bytes, work) are tried,
cheapest first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from fivefold.diagnosis.doctor.memory import StepLifetimes, describe_peak
from fivefold.diagnosis.doctor.steps import ExaminedSteps
from fivefold.diagnosis.doctor.watch import ForwardCall
from fivefold.dry_run.record.tape import ALLOC, KERNEL, SCOPE
from fivefold.errors import UserError
from fivefold.results.diagnosis import Advice, Fullest, generalize_path
from fivefold.units import show_bytes

# FLOPs that an H100 does in the time it moves a byte: 989e12 FLOP/s of bf16 ÷ 3.35e12 B/s (NVIDIA's data sheet)
FLOPS_PER_BYTE = 295
MAX_CHOICES = 600  # Pareto-optimal choices that are kept; more are thinned out evenly
MAX_TRIALS = 6  # choices that are examined


class Drop(NamedTuple):
    """The effect of recomputing one call.

    The step holds ``bytes`` less from the ``end`` of the forward to ``backward_start``, where its backward begins.
    There the forward runs again: its peak is ``rise`` bytes above its beginning, its cost ``flops`` and ``work``
    (FLOPs).
    """

    end: int
    backward_start: int
    bytes: int
    rise: int
    flops: int
    work: int


class RecomputeChoice(NamedTuple):
    """A set of modules to recompute. ``lateness`` breaks ties: bytes that are dropped early are absent longest."""

    bytes: int
    work: int
    lateness: int
    modules: tuple[str, ...]


class RecomputeTrial(NamedTuple):
    """A choice that was examined, and the peak that was predicted for it."""

    modules: tuple[str, ...]
    predicted: int
    seen: ExaminedSteps


def list_candidates(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of modules that might be recomputed; for a model without lists, its children."""
    lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    paths = {path: part for path, part in model.named_modules() if path}
    parents = {path: path.rpartition(".")[0] for path in paths}
    members = {path for path in paths if isinstance(model.get_submodule(parents[path]), lists)}
    members = members or {path for path in paths if not parents[path]}
    uncalled = (nn.ModuleList, nn.ModuleDict)
    return tuple(path for path in paths if members & {path, parents[path]} and not isinstance(paths[path], uncalled))


def advise(seen: ExaminedSteps, *, budget_bytes: int, examine: Callable[[tuple[str, ...]], ExaminedSteps]) -> Advice:
    """Return the cheapest choice that fits, else the one with the lowest peak.

    ``examine``: examines the step with these modules recomputed.
    """
    best = RecomputeTrial((), seen.peak_bytes, seen)
    lifetimes, reasons = seen.peak_step, dict[str, str]()
    drops = _find_drops(lifetimes, [call for call in seen.calls if call.tape is lifetimes.tape])
    ranked, margin = _rank(lifetimes, drops), 0
    for _ in range(MAX_TRIALS if seen.peak_bytes > budget_bytes else 0):
        first_fitting = next((index for index, (_, peak) in enumerate(ranked) if peak + margin <= budget_bytes), None)
        modules, peak = ranked[first_fitting] if first_fitting is not None else min(ranked, key=lambda item: item[1])
        try:
            trial = RecomputeTrial(modules, peak, examine(modules))
        except UserError as error:
            reasons |= _find_unrecomputable(examine, modules, error)
            drops = {path: module_drops for path, module_drops in drops.items() if generalize_path(path) not in reasons}
            ranked = _rank(lifetimes, drops)
            continue
        best = min(best, trial, key=lambda item: item.seen.peak_bytes)
        if best.seen.peak_bytes <= budget_bytes or first_fitting is None:
            break
        margin = max(margin + 1, trial.seen.peak_bytes - peak)
    return _build_advice(best, seen, budget_bytes=budget_bytes, refused=reasons)


def _rank(lifetimes: StepLifetimes, drops: dict[str, list[Drop]]) -> list[tuple[tuple[str, ...], int]]:
    """Return choices with their predicted peaks, in order of work."""
    choices = sorted(_list_choices(drops), key=lambda choice: (choice.work, choice.lateness))
    return [
        (choice.modules, _predict_peak(lifetimes, [drop for path in choice.modules for drop in drops[path]]))
        for choice in choices
    ]


def _find_unrecomputable(
    examine: Callable[[tuple[str, ...]], ExaminedSteps], modules: tuple[str, ...], error: UserError
) -> dict[str, str]:
    """Return the kinds of modules that cannot be recomputed, with the reason.

    If each kind can be recomputed by itself, all kinds are returned.
    """
    reasons: dict[str, str] = {}
    first = {generalize_path(path): path for path in reversed(modules)}
    for kind, path in first.items() if len(first) > 1 else ():
        try:
            examine((path,))
        except UserError as alone:
            reasons[kind] = str(alone)
    return reasons or dict.fromkeys(first, str(error))


def _explain_least_peak(peak: int, seen: ExaminedSteps, at: Fullest) -> str:
    """Say what fills the memory at the lowest peak (bytes) that recomputation reaches, and what else lowers it."""
    opening = f"{show_bytes(peak)} is the least that recomputation reaches"
    if at.phase == "update":
        remedy = (
            f"; {type(seen.optimizer).__name__}(fused=True) needs none" if "fused" in seen.optimizer.defaults else ""
        )
        return f"{opening}: it peaks in the update, with {show_bytes(at.temporary_bytes)} of temporaries{remedy}"
    states = at.parameters_bytes + at.buffers_bytes + at.gradients_bytes + at.optimizer_bytes
    return (
        f"{opening}, of which {show_bytes(states)} are weights, gradients and optimizer, and "
        f"{show_bytes(at.activations_bytes)} activations: make the batch smaller, or keep states in fewer bytes"
    )


def _build_advice(best: RecomputeTrial, seen: ExaminedSteps, *, budget_bytes: int, refused: dict[str, str]) -> Advice:
    """Return the modules to recompute, with the peak memory and the FLOPs that the trial measured."""
    total, peak = _count_flops(seen), best.seen.peak_bytes
    extra, fits = _count_flops(best.seen) - total, peak <= budget_bytes
    return Advice(
        budget_bytes=budget_bytes,
        fits=fits,
        modules=best.modules,
        predicted_peak_bytes=best.predicted,
        peak_bytes=peak,
        extra_flops=extra,
        extra_share=extra / total if total else 0.0,
        not_recomputable=tuple(f"{kind} cannot be recomputed: {why}" for kind, why in refused.items()),
        reason="" if fits else _explain_least_peak(peak, seen, describe_peak(best.seen.peak_step)),
    )


def _count_flops(seen: ExaminedSteps) -> int:
    tape = seen.steady.tape
    return sum(tape.kernels[first].flops for kind, first, _, _ in tape if kind == KERNEL)


# What recomputing a call saves


def _find_drops(lifetimes: StepLifetimes, calls: Sequence[ForwardCall]) -> dict[str, list[Drop]]:
    """Return, by module, what dropping the activations of a call would free, if its backward is known."""
    backward_starts = _find_backward_starts(lifetimes)
    lives = {life.key: life for life in lifetimes.lives}
    birth_events = np.array([life.birth for life in lifetimes.lives])
    work, flops = _sum_work(lifetimes)
    drops_by_module: dict[str, list[Drop]] = defaultdict(list)
    for call in calls:
        backward_begin = next((start for start in backward_starts.get(call.module, ()) if start >= call.end), None)
        if backward_begin is None:
            continue
        first, last = np.searchsorted(birth_events, [call.begin, call.end])
        lives_made = lifetimes.lives[first:last]
        size = sum(
            life.bytes
            for life in lives_made
            if life.category == "activations" and life.death >= backward_begin and life.key not in call.outputs
        )
        for key in call.inputs & lives.keys():
            if call.end < lives[key].death < backward_begin:
                size -= lives[key].bytes
        level = int(lifetimes.live_bytes[call.begin - 1])
        rise = int(lifetimes.live_bytes[call.begin : call.end].max(initial=level)) - level
        drops_by_module[call.module].append(
            Drop(
                call.end,
                backward_begin,
                size,
                rise,
                int(flops[call.end] - flops[call.begin]),
                int(work[call.end] - work[call.begin]),
            )
        )
    return drops_by_module


def _find_backward_starts(lifetimes: StepLifetimes) -> dict[str, list[int]]:
    """Return, by module, the first event of it or of a module inside of it in each backward."""
    starts_by_module: dict[str, list[int]] = defaultdict(list)
    seen_modules: set[str] = set()
    tape = lifetimes.tape
    backward_scopes = {index for index, scope in enumerate(lifetimes.tape.scopes) if scope.phase == "backward"}
    is_backward = False
    for event, (kind, first, _, third) in enumerate(tape):
        if kind == SCOPE:
            phase = tape.scopes[first].phase
            is_backward = first in backward_scopes
            if phase == "forward":
                seen_modules = set()
        elif is_backward and kind in (KERNEL, ALLOC):
            module = tape.sites[tape.kernels[first].site if kind == KERNEL else third].module
            while module and module not in seen_modules:
                seen_modules.add(module)
                starts_by_module[module].append(event)
                module = module.rpartition(".")[0]
    return starts_by_module


def _sum_work(lifetimes: StepLifetimes) -> tuple[np.ndarray, np.ndarray]:
    """Return cumulative work and FLOPs before each event; the work of a kernel is max(FLOPs, 295 · bytes moved)."""
    flops, moved_bytes = np.zeros((2, len(lifetimes.tape) + 1), np.int64)
    for event, (kind, first, _, _) in enumerate(lifetimes.tape):
        if kind == KERNEL:
            kernel = lifetimes.tape.kernels[first]
            flops[event + 1], moved_bytes[event + 1] = kernel.flops, kernel.moved_bytes
    return np.cumsum(np.maximum(flops, FLOPS_PER_BYTE * moved_bytes)), np.cumsum(flops)


# The choices


def _predict_peak(lifetimes: StepLifetimes, drops: Sequence[Drop]) -> int:
    """Return the predicted peak of the step with these drops."""
    change = np.zeros(len(lifetimes.tape) + 1, np.int64)
    for drop in drops:
        change[drop.end] -= drop.bytes
        change[drop.backward_start] += drop.bytes
    live_bytes = lifetimes.live_bytes + np.cumsum(change[:-1])
    recompute_peaks = [int(live_bytes[drop.backward_start - 1]) + drop.rise for drop in drops]
    return (
        max(int(live_bytes[lifetimes.begin :].max()), *recompute_peaks)
        if recompute_peaks
        else int(live_bytes[lifetimes.begin :].max())
    )


def _list_choices(drops: dict[str, list[Drop]]) -> list[RecomputeChoice]:
    """Return the Pareto-optimal choices over the tree of modules: each entirely, or by modules inside of it."""
    inside: dict[str, list[str]] = defaultdict(list)
    for path in drops:
        parent = path.rpartition(".")[0]
        while parent and parent not in drops:
            parent = parent.rpartition(".")[0]
        inside[parent].append(path)
    return _list_subtree_choices("", drops, inside)


def _list_subtree_choices(
    path: str, drops: dict[str, list[Drop]], inside: dict[str, list[str]]
) -> list[RecomputeChoice]:
    """Return the Pareto-optimal sets of modules to recompute within ``path``, by bytes saved and work repeated."""
    choices = [RecomputeChoice(0, 0, 0, ())]
    for child in inside.get(path, ()):
        options = _list_subtree_choices(child, drops, inside)
        choices = _select_pareto_optimal(
            RecomputeChoice(a.bytes + b.bytes, a.work + b.work, a.lateness + b.lateness, a.modules + b.modules)
            for a in choices
            for b in options
        )
    if path in drops:
        own_drops = drops[path]
        size = max(drop.bytes for drop in own_drops)
        full_choice = RecomputeChoice(size, sum(drop.work for drop in own_drops), size * own_drops[0].end, (path,))
        choices = _select_pareto_optimal([*choices, full_choice])
    return choices


def _select_pareto_optimal(choices: Iterable[RecomputeChoice]) -> list[RecomputeChoice]:
    """Return the choices that no other beats in both bytes and work.

    If there are more than ``MAX_CHOICES``, evenly spaced ones are kept.
    """
    optimal: list[RecomputeChoice] = []
    for choice in sorted(choices, key=lambda option: (option.work, -option.bytes, option.lateness)):
        if not optimal or choice.bytes > optimal[-1].bytes:
            optimal.append(choice)
    if len(optimal) <= MAX_CHOICES:
        return optimal
    return [optimal[round(index * (len(optimal) - 1) / (MAX_CHOICES - 1))] for index in range(MAX_CHOICES)]
