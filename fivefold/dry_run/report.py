"""Builds the step record of a rehearsal from its tapes: memory by pipeline rank, work, traffic, time, findings.

tapes of the ranks → RankSummary of each → Step
A rank that was not rehearsed counts as the first rank of its pipeline rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fivefold.dry_run.fake.world import stands_for
from fivefold.dry_run.memory.breakdown import LiveStorage, largest, stage_memory
from fivefold.dry_run.memory.reserved import reserved
from fivefold.dry_run.record.tape import KERNEL, SCOPE, START, WAIT, Tape
from fivefold.dry_run.rehearse import RankTapes
from fivefold.dry_run.time.play import Played
from fivefold.job import Job
from fivefold.layout.legal import describe_idle
from fivefold.layout.mesh import group
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.flops import work
from fivefold.planner.counts.memory.allocator import AllocatorTotals, driver_bytes
from fivefold.planner.predict import predict
from fivefold.planner.time.memory_risk import MemoryRisk
from fivefold.record import Mistake
from fivefold.rendering.rehearsal import Holding, Moment
from fivefold.step import Memory, StageMemory, Step, Traffic, Work, build_step, sent_bytes
from fivefold.units import show_bytes


class RankSummary(NamedTuple):
    """Memory, FLOPs and parameters of one rank: what is kept of its tapes."""

    rank: int
    first: StageMemory
    steady: StageMemory
    reserved_bytes: int | None  # by the caching allocator; None on a CPU
    shortage: str  # the finding if the allocator runs out of memory, else ""
    flops: int  # of the steady step
    weights: Mapping[str, int]  # as in RankTapes

    @property
    def peak_bytes(self) -> int:
        """The larger peak of the first and the steady step."""
        return max(self.first.peak_bytes, self.steady.peak_bytes)


class Rehearsal(NamedTuple):
    """The result of a dry run. ``step`` is None if the job would raise or deadlock; then ``findings`` say why."""

    step: Step | None
    findings: tuple[str, ...]
    rank_summaries: tuple[RankSummary, ...] = ()
    tapes: Mapping[int, RankTapes] = {}  # by rank: one rank of each pipeline rank, and those that were asked for
    played: Played | None = None
    table: Table | None = None  # the pipeline schedule that was run
    assumed: tuple[str, ...] = ()  # where the rehearsal differs from the real run

    def __repr__(self) -> str:
        wrong = f"; {'; '.join(self.findings)}" if self.findings else ""
        return f"<Rehearsal {self.step.line() if self.step else 'without a step'}{wrong}>"

    def _repr_html_(self) -> str:
        from fivefold.rendering import html

        return html.rehearsal(self.step, self.findings)

    @property
    def first(self) -> dict[int, Tape]:
        """The tape of the first step, by rank."""
        return {rank: tapes.first for rank, tapes in self.tapes.items()}

    @property
    def steady(self) -> dict[int, Tape]:
        """The tape of the steady step, by rank."""
        return {rank: tapes.steady for rank, tapes in self.tapes.items()}

    @property
    def ranks(self) -> list[int]:
        """The representative rank of each pipeline rank, in order of pipeline rank."""
        stages = {each.steady.stage: each.rank for each in reversed(self.rank_summaries)}
        return [stages[stage] for stage in sorted(stages)]

    @property
    def fullest(self) -> RankSummary:
        """The rank with the highest steady peak among those whose tapes are kept."""
        return max(
            (each for each in self.rank_summaries if each.rank in self.tapes), key=lambda each: each.steady.peak_bytes
        )


def summarise(tapes: RankTapes, *, machine: Machine, layout: Layout, job: Job) -> RankSummary:
    """Reduce a rank's tapes to a ``RankSummary``, so that the tapes can be freed."""
    stage = pipeline_rank(tapes.rank, layout)
    held, shortage = None, ""
    if machine.backend == "nccl":
        both, expandable = (tapes.first, tapes.steady), job.stack.expandable_segments
        found = reserved(both, expandable=expandable, capacity_bytes=room_bytes(machine, layout))
        shortage = str(found.shortage or "")
        held = (reserved(both, expandable=expandable) if shortage else found).reserved_bytes
    flops = sum(tapes.steady.kernels[place].flops for kind, place, *_ in tapes.steady if kind == KERNEL)
    first, steady = (stage_memory(tape, stage) for tape in (tapes.first, tapes.steady))
    return RankSummary(tapes.rank, first, steady, held, shortage, flops, tapes.weights)


def messages_only(tapes: RankTapes) -> RankTapes:
    """Drop allocations and kernels from a rank's tapes: only messages, waits and scopes stay."""
    return tapes._replace(first=_only_messages(tapes.first), steady=_only_messages(tapes.steady))


def _only_messages(tape: Tape) -> Tape:
    spoken = Tape(tape.rank)
    spoken.sites, spoken.scopes, spoken.messages = tape.sites, tape.scopes, tape.messages
    for event in tape:
        if event[0] in (START, WAIT, SCOPE):
            spoken.add(*event)
    return spoken


def pipeline_rank(rank: int, layout: Layout) -> int:
    """Return the pipeline rank (0 to pp − 1) of a rank of the world."""
    return group(layout, "pp").place(rank)


def step(
    rank_summaries: Sequence[RankSummary],
    tape: Tape,
    played: Played,
    *,
    model: Model,
    machine: Machine,
    layout: Layout,
    job: Job,
) -> Step:
    """Build the step record. ``tape``: the steady tape of the first representative, whose traffic is reported."""
    stages = _stages(rank_summaries, layout)
    held = [share.reserved_bytes for share in rank_summaries if share.reserved_bytes is not None]
    return build_step(
        "rehearsed",
        model=model,
        machine=machine,
        layout=layout,
        job=job,
        memory=Memory(
            peak_bytes=max(stage.peak_bytes for stage in stages),
            reserved_bytes=max(held, default=None),
            capacity_bytes=machine.chip.memory_bytes,
            risk=max(_risk(share, model=model, machine=machine, layout=layout, job=job) for share in rank_summaries),
            stages=stages,
        ),
        work=_work(rank_summaries, work(model, layout=layout, job=job), layout),
        traffic=traffic(tape),
        time=played.time(),
        remarks=describe_idle(layout, machine),
    )


def traffic(tape: Tape) -> tuple[Traffic, ...]:
    """Return the messages and bytes that the rank of ``tape`` sends, by axis and collective."""
    messages, sent = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for kind, _, place, _ in tape:
        if kind == START and not (message := tape.messages[place]).receives:
            key = message.axis, message.collective
            messages[key] += 1
            sent[key] += sent_bytes(message.collective, payload=message.payload, ranks=len(message.members))
    return tuple(
        Traffic(axis=axis, collective=collective, messages=messages[axis, collective], bytes=sent[axis, collective])
        for axis, collective in sorted(messages)
    )


def moment(tapes: RankTapes, *, rows: int = 16) -> Moment:
    """Return what is live at the steady step's peak: bytes by category, and the ``rows`` largest groups of tensors."""
    living = largest(tapes.steady, len(tapes.steady))
    parts = Counter[str]()
    alike: dict[tuple[str, str, str], list[LiveStorage]] = {}
    for each in living:
        parts[each.category] += each.bytes
        module = ".".join("*" if word.isdigit() else word for word in each.site.module.split("."))
        alike.setdefault((each.category, module, each.site.line), []).append(each)
    held = [_holding(together, *key) for key, together in alike.items()]
    held.sort(key=lambda each: -each.bytes)
    return Moment(tapes.rank, dict(parts.most_common()), held[:rows])


def _holding(together: Sequence[LiveStorage], category: str, module: str, line: str) -> Holding:
    sizes = [each.bytes for each in together]
    scopes, phases = ({name(each.scope) for each in together} for name in (str, lambda scope: scope.phase))
    since = next((min(names) for names in (scopes, phases) if len(names) == 1), "")
    since = "" if since == "start" else since  # live before the step
    return Holding(sum(sizes), len(sizes), max(sizes), category, since, module, line)


def room_bytes(machine: Machine, layout: Layout) -> int:
    """Return the bytes of a rank that PyTorch can reserve: its memory less what the driver takes."""
    return machine.chip.memory_bytes - driver_bytes(machine, layout)


def out_of_memory(share: RankSummary, machine: Machine, layout: Layout) -> bool:
    """Return whether a rank runs out of memory, by size or by fragmentation."""
    return bool(share.shortage) or share.peak_bytes > room_bytes(machine, layout)


def _risk(share: RankSummary, *, model: Model, machine: Machine, layout: Layout, job: Job) -> float:
    """Return the probability that a rank runs out of memory in a real run, which errs as predictions of a peak do.

    The fragmentation is that of the replayed allocator, all of which is lost.
    """
    if out_of_memory(share, machine, layout):
        return 1.0
    peak, held = share.peak_bytes, share.reserved_bytes
    totals = None if held is None else AllocatorTotals(held, held + driver_bytes(machine, layout))
    risk = MemoryRisk(model=model, machine=machine, job=job)
    return risk.probability(layout, peak_bytes=peak, totals=totals, lost=1.0)


def too_large(
    rank_summaries: Sequence[RankSummary], *, model: Model, machine: Machine, layout: Layout, job: Job
) -> tuple[str, ...]:
    """Return one finding if any rank runs out of memory: the fullest rank, its peak and a layout to try."""
    short = [share for share in rank_summaries if out_of_memory(share, machine, layout)]
    if not short:
        return ()
    room, fullest = room_bytes(machine, layout), max(short, key=lambda share: share.peak_bytes)
    if fullest.peak_bytes <= room:
        return (fullest.shortage,)
    stage = max(fullest.first, fullest.steady, key=lambda memory: memory.peak_bytes)
    taken = machine.chip.memory_bytes - room
    beside = f", of which the driver takes {show_bytes(taken)}" if taken else ""
    more = f", and so do {len(short) - 1} more of the {len(rank_summaries)} ranks rehearsed" if len(short) > 1 else ""
    advice = _advice(model=model, machine=machine, layout=layout, job=job)
    return (
        f"rank {fullest.rank} needs {show_bytes(stage.peak_bytes)} at its peak, {stage.peak_cause}, but {machine.name} "
        f"has {show_bytes(machine.chip.memory_bytes)}{beside}{more}; {advice}",
    )


def _advice(*, model: Model, machine: Machine, layout: Layout, job: Job) -> str:
    """Suggest the nearest layout that fits by the planner: more sharding, then recomputation, then mbs 1."""
    sharded = range(layout.zero + 1, 4) if layout.dp * layout.cp > 1 else ()
    changes: list[dict[str, object]] = [{"zero": stage} for stage in sharded if stage > 1]
    changes += [{"ac": "selective"}, {"ac": "full"}, {"mbs": 1}]
    nearest = layout
    for change in changes:
        nearest = nearest.replace(**change)
        memory = _predicted_memory(nearest, model=model, machine=machine, job=job)
        if memory is not None and memory.fits:
            return f"try {str(nearest)!r}, of which the planner says {show_bytes(memory.peak_bytes)}"
    return "cut the model more (tp, pp, cp): fivefold search finds the layouts that fit, fivefold ask gpus on how many"


def _predicted_memory(layout: Layout, *, model: Model, machine: Machine, job: Job) -> Memory | None:
    try:
        return predict(model=model, machine=machine, layout=layout, job=job).memory
    except Mistake:
        return None


def _stages(rank_summaries: Sequence[RankSummary], layout: Layout) -> tuple[StageMemory, ...]:
    """Return the memory of the fullest rehearsed rank of each pipeline rank."""
    fullest: dict[int, StageMemory] = {}
    for each in rank_summaries:
        stage = pipeline_rank(each.rank, layout)
        if stage not in fullest or each.steady.peak_bytes > fullest[stage].peak_bytes:
            fullest[stage] = each.steady
    return tuple(fullest[stage] for stage in sorted(fullest))


def _work(rank_summaries: Sequence[RankSummary], counted: Work, layout: Layout) -> Work:
    """Sum the hardware FLOPs of all ranks, and the parameters of all weights, of which ranks may hold uneven shards;
    model FLOPs and active parameters stay as ``counted``.
    """
    times = stands_for([each.rank for each in rank_summaries], layout=layout)
    weights = {name: size for each in rank_summaries for name, size in each.weights.items()}
    flops = sum(times[each.rank] * each.flops for each in rank_summaries)
    return counted.replace(parameters=sum(weights.values()), hardware_flops=flops)


def data(found: Rehearsal, predicted: Step | None) -> dict[str, object]:
    """As JSON: both steps, memory of the first one, what lives at the peak, and what would go wrong."""
    if found.step is None:
        return {"findings": found.findings}
    full = moment(found.tapes[found.fullest.rank])
    return {
        "predicted": predicted.model_dump(mode="json") if predicted else None,
        "rehearsed": found.step.model_dump(mode="json"),
        "first_step": [
            share.first.model_dump(mode="json") for share in found.rank_summaries if share.rank in found.ranks
        ],
        "peak": {"rank": full.rank, "bytes": full.parts, "largest": [each._asdict() for each in full.largest]},
        "findings": found.findings,
        "assumed": found.assumed,
    }
