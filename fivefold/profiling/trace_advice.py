"""Advice on the traces of a run: the largest loss that can be avoided, its evidence, the change, and its largest gain.

    The largest loss is waiting for ranks that arrive late, 18% of a step. Rank 1 is last at 40 of its 52 messages …

Losses are means over ranks and steps, as shares of a step. What a prediction of the same step has too is a property of
the layout: it is named as such, and another layout is the change. Idle time is named by what the host does in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fivefold.results.advice import NextLoss, StepAdvice
from fivefold.results.trace_report import Breakdown, Category, KernelLine, TraceReport
from fivefold.step import Step
from fivefold.units import show_seconds

MIN_SHARE = 0.05  # smaller losses are no advice
STACK_OPTIONS = {  # loss → option by the beginning of a stack's name
    "exposed communication": {
        "megatron": "--overlap-grad-reduce, --overlap-param-gather and --tp-comm-overlap",
        "deepspeed": "overlap_comm: true, a larger reduce_bucket_size and stage3_prefetch_bucket_size",
        "torchtitan": 'parallelism.fsdp_reshard_after_forward = "never" where memory allows',
        "fsdp2": "set_modules_to_forward_prefetch and set_modules_to_backward_prefetch of FSDPModule",
        "ddp": "a larger bucket_cap_mb, and no_sync() around all but the last micro-batch",
    },
    "host-bound idle time": {
        "megatron": "--cuda-graph-impl, and fused kernels of Transformer Engine",
        "torchtitan": "compile.enable = true",
    },
    "data loading": {"megatron": "--num-workers"},
}


class Loss(NamedTuple):
    """Seconds of a step that do no work, and what to do about them."""

    name: str
    seconds: float
    evidence: str
    change: str


def advise(report: TraceReport, predicted: Step | None = None) -> StepAdvice | None:
    """Return the advice on the mean step of traces; None if no step takes any time."""
    ranks = report.average_steps()
    step_seconds = _average_field(ranks, "window_seconds")
    if not step_seconds:
        return None
    loss, following = sorted(_list_losses(report, ranks, predicted), key=lambda loss: -loss.seconds)[:2]
    predicted_seconds = predicted.time.step_seconds if predicted is not None else None
    if loss.seconds < MIN_SHARE * step_seconds:
        compute = _average_field(ranks, "compute_seconds") / step_seconds
        return StepAdvice(
            loss="",
            loss_seconds=0.0,
            share=0.0,
            evidence=f"No loss takes {MIN_SHARE:.0%} of a step or more: compute fills {compute:.0%}.",
            change="What is left is less compute: a lower precision, faster kernels, or less recomputation.",
            step_seconds=step_seconds,
            expected_seconds=step_seconds,
            predicted_seconds=predicted_seconds,
        )
    next_share = following.seconds / step_seconds
    return StepAdvice(
        loss=loss.name,
        loss_seconds=loss.seconds,
        share=loss.seconds / step_seconds,
        evidence=loss.evidence,
        change=loss.change,
        option=_name_option(loss.name, predicted.stack) if predicted is not None else "",
        stack=predicted.stack if predicted is not None else "",
        step_seconds=step_seconds,
        expected_seconds=max(0.0, step_seconds - loss.seconds),
        predicted_seconds=predicted_seconds,
        following=NextLoss(name=following.name, share=next_share) if next_share >= MIN_SHARE else None,
    )


def _name_option(loss: str, stack: str) -> str:
    """Return the option of a software that reduces a loss; "" if none is known."""
    options = STACK_OPTIONS.get(loss, {})
    return next((option for begin, option in options.items() if stack.startswith(begin)), "")


def _average_field(ranks: Sequence[Breakdown], field: str) -> float:
    """Return the mean of a field over ranks; 0 where it is not known."""
    return sum(getattr(rank, field) or 0.0 for rank in ranks) / len(ranks) if ranks else 0.0


def _list_losses(report: TraceReport, ranks: Sequence[Breakdown], predicted: Step | None) -> Iterator[Loss]:
    """Yield the losses of a step; those of communication without what the prediction has too."""
    waiting = _average_field(ranks, "waiting_seconds")
    yield Loss(
        "waiting for ranks that arrive late",
        waiting,
        _name_latest(report),
        "Give all ranks equal work: batches of equal length, balanced pipeline stages and experts; or replace a slow "
        "GPU or host.",
    )
    exposed = max(0.0, _average_field(ranks, "exposed_seconds") - waiting)
    expected = sum(predicted.time.exposed_seconds.values()) + predicted.time.bubble_seconds if predicted else 0.0
    if predicted is not None and exposed <= 1.25 * expected:
        yield Loss(
            "exposed communication",
            exposed,
            f"The prediction has {show_seconds(expected)} of it, so it belongs to the layout.",
            "Search another one: `fivefold search`.",
        )
    else:
        predicted_text = f" The prediction has {show_seconds(expected)} of it." if predicted else ""
        yield Loss(
            "exposed communication",
            exposed - expected,
            _name_longest(report) + predicted_text + _warn_of_missing_ranks(report),
            "Overlap it with compute (bucketed or asynchronous reductions, prefetched gathers), or send less over slow "
            "links: tensor parallelism within a node, fewer and larger messages.",
        )
    yield Loss(
        "copies that overlap nothing",
        _average_field(ranks, "memcpy_alone_seconds"),
        *_explain_copies(_get_category(report, "memcpy")),
    )
    yield from _list_idle_losses(report, ranks)


def _list_idle_losses(report: TraceReport, ranks: Sequence[Breakdown]) -> Iterator[Loss]:
    """Yield the kinds of idle time: what the host does in it, then the rest."""
    loading, allocation, blocked = (
        _average_field(ranks, f"idle_{state}_seconds") for state in ("loading", "allocation", "blocked")
    )
    yield Loss(
        "data loading",
        loading,
        "The device is idle while the host waits for the next batch of a DataLoader.",
        "Load batches in workers ahead of the step: num_workers, persistent_workers, prefetch_factor and pin_memory "
        "(dataloader_num_workers in Hugging Face's Trainer); tokenize and decode before the run.",
    )
    yield Loss(
        "allocation of device memory",
        allocation,
        "The device is idle while the host is in calls such as cudaMalloc or cudaFree.",
        "Trace steps after the first ones. If it continues, memory is full or fragmented: "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, fixed shapes, and no empty_cache() in the loop.",
    )
    yield Loss(
        "waiting of the host for copies and synchronization",
        blocked,
        "The device is idle while the host is in calls such as cudaMemcpyAsync or cudaStreamSynchronize.",
        "Take .item(), .cpu(), .tolist(), nonzero() and printing of tensors out of the step, or do them every few "
        "steps; copy from pinned memory with non_blocking=True.",
    )
    launches = sum(line.calls for line in report.categories)
    evidence = f"The device waits for the host, which launches {launches:,.0f} kernels and copies a step."
    if report.device == "CPU":
        evidence = "No operator runs: Python is at work."
    elif report.steps == ("all",):
        evidence += " No steps are marked in the trace, so that start-up may be part of it: call profiler.step()."
    yield Loss(
        "host-bound idle time",
        max(0.0, _average_field(ranks, "idle_host_seconds") - loading - allocation - blocked),
        evidence,
        "Launch less: torch.compile, CUDA graphs, fused optimizers, larger micro-batches; and take Python work out of "
        "the loop.",
    )
    yield Loss(
        "queued idle time",
        _average_field(ranks, "idle_waiting_seconds"),
        "Kernels are launched, but wait for another stream.",
        "Look for synchronization between streams: waits for communication that is not needed yet, or for the loader.",
    )


def _get_category(report: TraceReport, name: Category) -> KernelLine | None:
    return next((line for line in report.categories if line.category == name), None)


def _explain_copies(copies: KernelLine | None) -> tuple[str, str]:
    """Return evidence and change by the direction of the copies that take most."""
    name = copies.largest if copies else ""
    evidence = f"Most of {copies.calls:,.0f} copies a step are {name}." if copies and name else ""
    if "DtoD" in name or "Device -> Device" in name:
        return evidence, "Avoid copies within the device: contiguous(), clone(), torch.cat and copies between views."
    if "DtoH" in name or "Device -> Host" in name:
        return evidence, "Copy results to pinned memory with non_blocking=True, less often, or offload less."
    if "Pinned" in name:
        return evidence, "Copy the next batch ahead on a stream of its own, or offload less."
    return evidence, "Copy from pinned memory with non_blocking=True, and load batches ahead."


def _warn_of_missing_ranks(report: TraceReport) -> str:
    """Return the remark that waiting is not known without the traces of all ranks."""
    if len(report.ranks) == report.world:
        return ""
    return " Part of it may be waiting for late ranks, whose traces are missing."


def _name_latest(report: TraceReport) -> str:
    """Return which rank the others wait for the longest."""
    latest = max(report.arrivals, key=lambda rank: rank.others_waited_seconds, default=None)
    if latest is None or not latest.others_waited_seconds:
        return ""
    return (
        f"Rank {latest.rank} is last at {latest.last} of its {latest.matched} messages; the others wait "
        f"{show_seconds(latest.others_waited_seconds)} for it in all."
    )


def _name_longest(report: TraceReport) -> str:
    """Return the collective that takes the longest, and how fast its link is used."""
    longest = max(report.messages, key=lambda line: line.seconds, default=None)
    if longest is None:
        kernels = _get_category(report, "communication")
        return (
            f"It has {kernels.calls:,.0f} kernels a step, most of them {kernels.largest.partition('(')[0]}."
            if kernels
            else ""
        )
    group = f" over {longest.axis}" if longest.axis else f" over {longest.ranks} ranks" if longest.ranks else ""
    used = ""
    if longest.bus_bandwidth and longest.link_bandwidth:
        used = f", at {longest.bus_bandwidth / longest.link_bandwidth:.0%} of the bandwidth of its link"
    return f"The longest is {longest.collective}{group}: {show_seconds(longest.seconds)} a step{used}."
