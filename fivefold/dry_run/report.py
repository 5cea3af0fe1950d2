"""Builds the step record of a dry run from its tapes: memory by pipeline rank, work, traffic, time, findings.

tapes of the ranks → RankSummary of each → Step
A rank that was not run counts as the first rank of its pipeline rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from fivefold.display import Frame, save
from fivefold.dry_run.fake.world import count_represented_ranks
from fivefold.dry_run.memory.breakdown import LiveStorage, list_events, list_largest, sum_stage_memory
from fivefold.dry_run.memory.reserved import replay_allocator
from fivefold.dry_run.rank_tapes import RankTapes
from fivefold.dry_run.record.tape import KERNEL, SCOPE, START, WAIT, Tape
from fivefold.dry_run.time.simulation import SimulatedTapes
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.layout.remarks import list_remarks
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.flops import work
from fivefold.planner.counts.memory.allocator import AllocatorTotals, count_driver_bytes
from fivefold.planner.predict import predict
from fivefold.planner.time.memory_risk import MemoryRisk
from fivefold.rendering.dry_run import PeakTensors, RankPeak
from fivefold.step import Memory, StageMemory, Step, Traffic, Work, build_step, count_sent_bytes
from fivefold.units import show_bytes


class RankSummary(NamedTuple):
    """The summary of one rank's tapes: memory, FLOPs and parameters."""

    rank: int
    first: StageMemory
    steady: StageMemory
    reserved_bytes: int | None  # by the caching allocator; None on a CPU
    shortage: str  # the finding if the allocator runs out of memory, else ""
    flops: int  # of the steady step
    weights: Mapping[str, int]  # as in RankTapes
    host_bytes: int = 0  # of host memory

    @property
    def peak_bytes(self) -> int:
        """Return the larger peak of the first and the steady step."""
        return max(self.first.peak_bytes, self.steady.peak_bytes)


class DryRun(NamedTuple):
    """The result of a dry run. ``step`` is None if the job would raise or deadlock; then ``findings`` say why."""

    step: Step | None
    findings: tuple[str, ...]
    rank_summaries: tuple[RankSummary, ...] = ()
    tapes: Mapping[int, RankTapes] = {}  # by rank: one rank of each pipeline rank, and the requested ranks
    simulation: SimulatedTapes | None = None
    table: Table | None = None  # the pipeline schedule that was run
    assumed: tuple[str, ...] = ()  # differences from the real run

    def __repr__(self) -> str:
        findings_text = f"; {'; '.join(self.findings)}" if self.findings else ""
        return f"<DryRun {self.step.line() if self.step else 'without a step'}{findings_text}>"

    def _repr_html_(self) -> str:
        from fivefold.rendering import html

        return html.render_dry_run(self.step, self.findings)

    def to_frame(self, kind: Frame = "pandas") -> Any:
        """Return the data frame of the step."""
        return self._get_step().to_frame(kind)

    def plot(self) -> Any:
        """Return the chart of the step."""
        return self._get_step().plot()

    def save(self, path: str | PathLike[str]) -> None:
        """Write the page of the dry run (``.html``), its step (``.json``) or the step's chart (``.svg``, ``.png``)."""
        step = self._get_step()
        save(self, path, title=step.line(), text=step.model_dump_json(indent=2))

    def _get_step(self) -> Step:
        if self.step is None:
            raise UserError(f"the dry run has no step: {'; '.join(self.findings)}")
        return self.step

    @property
    def steady_tapes(self) -> dict[int, Tape]:
        """Return the tape of the steady step, by rank."""
        return {rank: tapes.steady for rank, tapes in self.tapes.items()}

    @property
    def ranks(self) -> list[int]:
        """Return the representative rank of each pipeline rank, in order of pipeline rank."""
        stages = {summary.steady.stage: summary.rank for summary in reversed(self.rank_summaries)}
        return [stages[stage] for stage in sorted(stages)]

    @property
    def peak_rank(self) -> RankSummary:
        """Return the rank with the highest steady peak among those whose tapes are kept."""
        return max(
            (summary for summary in self.rank_summaries if summary.rank in self.tapes),
            key=lambda summary: summary.steady.peak_bytes,
        )


def summarize_rank(tapes: RankTapes, *, machine: Machine, layout: Layout, job: Job) -> RankSummary:
    """Reduce a rank's tapes to a ``RankSummary``, so that the tapes can be freed."""
    stage = find_pipeline_rank(tapes.rank, layout)
    reserved_bytes, shortage = None, ""
    if machine.has_gpus:
        tapes_of_rank, expandable = (tapes.first, tapes.steady), job.stack.expandable_segments
        replayed = replay_allocator(
            tapes_of_rank, expandable=expandable, capacity_bytes=count_available_bytes(machine, layout, job)
        )
        shortage = str(replayed.shortage or "")
        reserved_bytes = (
            replay_allocator(tapes_of_rank, expandable=expandable) if shortage else replayed
        ).reserved_bytes
    events = list_events(tapes.steady)
    counts = np.bincount(events[events[:, 0] == KERNEL, 1]).tolist()
    flops = sum(count * kernel.flops for count, kernel in zip(counts, tapes.steady.kernels, strict=False))
    first, steady = (sum_stage_memory(tape, stage) for tape in (tapes.first, tapes.steady))
    host_bytes = tapes.steady.host_bytes
    return RankSummary(tapes.rank, first, steady, reserved_bytes, shortage, flops, tapes.weights, host_bytes)


def keep_messages(tapes: RankTapes) -> RankTapes:
    """Drop allocations and kernels from a rank's tapes: only messages, waits and scopes remain."""
    return tapes._replace(first=_select_messages(tapes.first), steady=_select_messages(tapes.steady))


def _select_messages(tape: Tape) -> Tape:
    messages_tape = Tape(tape.rank)
    messages_tape.sites, messages_tape.scopes, messages_tape.messages = tape.sites, tape.scopes, tape.messages
    for event in tape:
        if event[0] in (START, WAIT, SCOPE):
            messages_tape.add(*event)
    return messages_tape


def find_pipeline_rank(rank: int, layout: Layout) -> int:
    """Return the pipeline rank (0 to pp − 1) of a rank of the world."""
    return group(layout, "pp").place(rank)


def build_dry_run_step(
    rank_summaries: Sequence[RankSummary],
    tape: Tape,
    simulation: SimulatedTapes,
    *,
    model: Model,
    machine: Machine,
    layout: Layout,
    job: Job,
) -> Step:
    """Build the step record. ``tape``: the steady tape of the first representative, whose traffic is reported."""
    stages = _list_stage_memory(rank_summaries, layout)
    reserved_bytes = [summary.reserved_bytes for summary in rank_summaries if summary.reserved_bytes is not None]
    return build_step(
        "dry run",
        model=model,
        machine=machine,
        layout=layout,
        job=job,
        memory=Memory(
            peak_bytes=max(stage.peak_bytes for stage in stages),
            reserved_bytes=max(reserved_bytes, default=None),
            capacity_bytes=machine.chip.memory_bytes,
            host_bytes=max(summary.host_bytes for summary in rank_summaries) * min(machine.ranks_per_node, layout.world)
            if layout.list_offloaded(job)
            else None,
            risk=max(
                _estimate_risk(summary, model=model, machine=machine, layout=layout, job=job)
                for summary in rank_summaries
            ),
            stages=stages,
        ),
        work=_count_work(rank_summaries, work(model, layout=layout, job=job), layout),
        traffic=sum_traffic(tape),
        time=simulation.time(),
        remarks=list_remarks(model, machine, job, layout),
    )


def sum_traffic(tape: Tape) -> tuple[Traffic, ...]:
    """Return the messages and bytes that the rank of ``tape`` sends, by axis and collective."""
    messages = Counter[tuple[str, str]]()
    bytes_sent = Counter[tuple[str, str]]()
    for kind, _, index, _ in tape:
        if kind == START and not (message := tape.messages[index]).receives:
            key = message.axis, message.collective
            messages[key] += 1
            bytes_sent[key] += count_sent_bytes(message.collective, payload=message.payload, ranks=len(message.members))
    return tuple(
        Traffic(axis=axis, collective=collective, calls=messages[axis, collective], bytes=bytes_sent[axis, collective])
        for axis, collective in sorted(messages)
    )


def describe_peak(tapes: RankTapes, *, rows: int = 16) -> RankPeak:
    """Return the live bytes at the steady step's peak by category, and the ``rows`` largest groups of tensors."""
    storages = list_largest(tapes.steady, len(tapes.steady))
    bytes_by_category = Counter[str]()
    groups: dict[tuple[str, str, str], list[LiveStorage]] = {}
    for storage in storages:
        bytes_by_category[storage.category] += storage.bytes
        parts = ["*" if part.isdigit() else part for part in storage.site.module.split(".")]
        # one message gathers or reduces a block, in whichever of its modules the block begins or ends
        module = ".".join(parts[:2] if storage.category in ("gathers", "gradients") else parts)
        groups.setdefault((storage.category, module, storage.site.line), []).append(storage)
    tensor_groups = [_summarize_group(group, *key) for key, group in groups.items()]
    tensor_groups.sort(key=lambda tensors: -tensors.bytes)
    return RankPeak(tapes.rank, dict(bytes_by_category.most_common()), tensor_groups[:rows])


def _summarize_group(storages: Sequence[LiveStorage], category: str, module: str, line: str) -> PeakTensors:
    sizes_bytes = [storage.bytes for storage in storages]
    scopes, phases = ({name(storage.scope) for storage in storages} for name in (str, lambda scope: scope.phase))
    allocated_in = next((min(names) for names in (scopes, phases) if len(names) == 1), "")
    allocated_in = "" if allocated_in == "start" else allocated_in  # live before the step
    return PeakTensors(sum(sizes_bytes), len(sizes_bytes), max(sizes_bytes), category, allocated_in, module, line)


def count_available_bytes(machine: Machine, layout: Layout, job: Job) -> int:
    """Return the bytes of a rank that PyTorch can reserve: its memory less the driver's share."""
    return machine.chip.memory_bytes - count_driver_bytes(machine, layout, job.stack)


def is_out_of_memory(summary: RankSummary, machine: Machine, layout: Layout, job: Job) -> bool:
    """Return whether a rank runs out of memory, by size or by fragmentation."""
    return bool(summary.shortage) or summary.peak_bytes > count_available_bytes(machine, layout, job)


def _estimate_risk(summary: RankSummary, *, model: Model, machine: Machine, layout: Layout, job: Job) -> float:
    """Return the probability that a rank runs out of memory in a real run, given the error of predicted peaks.

    Fragmentation is that of the replayed allocator; all of it counts as lost.
    """
    if is_out_of_memory(summary, machine, layout, job):
        return 1.0
    peak, reserved_bytes = summary.peak_bytes, summary.reserved_bytes
    totals = (
        None
        if reserved_bytes is None
        else AllocatorTotals(reserved_bytes, reserved_bytes + count_driver_bytes(machine, layout, job.stack))
    )
    risk = MemoryRisk(model=model, machine=machine, job=job)
    return risk.probability(layout, peak_bytes=peak, totals=totals, lost=1.0)


def find_out_of_memory(
    rank_summaries: Sequence[RankSummary], *, model: Model, machine: Machine, layout: Layout, job: Job
) -> tuple[str, ...]:
    """Return one finding if any rank runs out of memory: the rank with the highest peak, its peak, a layout to try."""
    failing = [summary for summary in rank_summaries if is_out_of_memory(summary, machine, layout, job)]
    if not failing:
        return ()
    available = count_available_bytes(machine, layout, job)
    worst = max(failing, key=lambda summary: summary.peak_bytes)
    if worst.peak_bytes <= available:
        return (worst.shortage,)
    stage = max(worst.first, worst.steady, key=lambda memory: memory.peak_bytes)
    driver = machine.chip.memory_bytes - available
    driver_text = f", of which the driver takes {show_bytes(driver)}" if driver else ""
    more_text = (
        f", and so do {len(failing) - 1} more of the {len(rank_summaries)} ranks of the dry run"
        if len(failing) > 1
        else ""
    )
    advice = _suggest_layout(model=model, machine=machine, layout=layout, job=job)
    return (
        f"rank {worst.rank} needs {show_bytes(stage.peak_bytes)} at its peak, {stage.peak_cause}, but {machine.name} "
        f"has {show_bytes(machine.chip.memory_bytes)}{driver_text}{more_text}; {advice}",
    )


def _suggest_layout(*, model: Model, machine: Machine, layout: Layout, job: Job) -> str:
    """Suggest the nearest layout that fits according to the planner: more sharding, then recomputation, then mbs 1."""
    sharded = range(layout.zero + 1, 4) if layout.dp * layout.cp > 1 else ()
    changes: list[dict[str, object]] = [{"zero": stage} for stage in sharded if stage > 1]
    kinds = ("selective", "full") if layout.ac == "none" else () if layout.ac == "full" else ("full",)
    changes += [{"ac": kind} for kind in kinds]
    changes += [{"mbs": 1}] if layout.mbs > 1 else []
    candidate = layout
    for change in changes:
        candidate = candidate.replace(**change)
        memory = _predict_memory(candidate, model=model, machine=machine, job=job)
        if memory is not None and memory.fits:
            return f"try {str(candidate)!r}, of which the planner says {show_bytes(memory.peak_bytes)}"
    return "cut the model more (tp, pp, cp): fivefold search finds the layouts that fit, fivefold ask gpus on how many"


def _predict_memory(layout: Layout, *, model: Model, machine: Machine, job: Job) -> Memory | None:
    try:
        return predict(model=model, machine=machine, layout=layout, job=job).memory
    except UserError:
        return None


def _list_stage_memory(rank_summaries: Sequence[RankSummary], layout: Layout) -> tuple[StageMemory, ...]:
    """Return, for each pipeline rank, the memory of the simulated rank with the highest peak."""
    fullest_of_stage: dict[int, StageMemory] = {}
    for summary in rank_summaries:
        stage = find_pipeline_rank(summary.rank, layout)
        if stage not in fullest_of_stage or summary.steady.peak_bytes > fullest_of_stage[stage].peak_bytes:
            fullest_of_stage[stage] = summary.steady
    return tuple(fullest_of_stage[stage] for stage in sorted(fullest_of_stage))


def _count_work(rank_summaries: Sequence[RankSummary], planned: Work, layout: Layout) -> Work:
    """Sum the hardware FLOPs of all ranks, and the parameters of all weights, whose shards may be uneven across ranks.

    Model FLOPs and active parameters stay as ``planned``.
    """
    ranks_represented = count_represented_ranks([summary.rank for summary in rank_summaries], layout=layout)
    weights = {name: size for summary in rank_summaries for name, size in summary.weights.items()}
    flops = sum(ranks_represented[summary.rank] * summary.flops for summary in rank_summaries)
    return planned.replace(parameters=sum(weights.values()), hardware_flops=flops)


def dump_dry_run(dry_run: DryRun, predicted: Step | None) -> dict[str, object]:
    """Return the result as JSON: both steps, memory of the first one, the live bytes at the peak, and the findings."""
    if dry_run.step is None:
        return {"findings": dry_run.findings}
    peak = describe_peak(dry_run.tapes[dry_run.peak_rank.rank])
    return {
        "predicted": predicted.model_dump(mode="json") if predicted else None,
        "dry_run": dry_run.step.model_dump(mode="json"),
        "first_step": [
            summary.first.model_dump(mode="json") for summary in dry_run.rank_summaries if summary.rank in dry_run.ranks
        ],
        "peak": {"rank": peak.rank, "bytes": peak.parts, "largest": [tensors._asdict() for tensors in peak.largest]},
        "findings": dry_run.findings,
        "assumed": dry_run.assumed,
    }
