"""A rehearsed step from the tapes: memory by pipeline rank, work, traffic, time, and what would go wrong.

tapes of the ranks → RankSummary of each → Step        a rank that was not rehearsed is as the first of its pipeline
rank
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fivefold.check.dryrun.memory.breakdown import LiveStorage, largest, stage_memory
from fivefold.check.dryrun.memory.reserved import reserved
from fivefold.check.dryrun.record.tape import KERNEL, SCOPE, START, WAIT, Tape
from fivefold.check.dryrun.rehearse import RankTapes
from fivefold.check.dryrun.time.play import Played
from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.plan.count.memory.allocator import room_bytes
from fivefold.plan.count.work import work
from fivefold.plan.predict import predict
from fivefold.record import Mistake
from fivefold.show.rehearsal import Holding, Moment
from fivefold.step import Memory, StageMemory, Step, Traffic, Work, sent_bytes, utilisation
from fivefold.units import show_bytes


class RankSummary(NamedTuple):
    """What one rank takes of a step."""

    rank: int
    first: StageMemory
    steady: StageMemory
    reserved_bytes: int | None  # of the allocator of a GPU
    shortage: str  # where that fails, if it does
    flops: int
    parameters: float

    @property
    def peak_bytes(self) -> int:
        """In whichever step it is fuller."""
        return max(self.first.peak_bytes, self.steady.peak_bytes)


class Rehearsal(NamedTuple):
    """What was rehearsed. ``step`` is None where none could be: then ``findings`` say why."""

    step: Step | None
    findings: tuple[str, ...]
    rank_summaries: tuple[RankSummary, ...] = ()
    tapes: Mapping[int, RankTapes] = {}  # of one rank of each pipeline rank, and of those that were asked for
    played: Played | None = None
    table: Table | None = None  # that the pipeline played
    assumed: tuple[str, ...] = ()  # where the rehearsal is not what will run

    @property
    def first(self) -> dict[int, Tape]:
        """The first step of each rank."""
        return {rank: tapes.first for rank, tapes in self.tapes.items()}

    @property
    def steady(self) -> dict[int, Tape]:
        """Any later step of each rank."""
        return {rank: tapes.steady for rank, tapes in self.tapes.items()}

    @property
    def ranks(self) -> list[int]:
        """The one of each pipeline rank that stands for the others."""
        stages = {each.steady.stage: each.rank for each in reversed(self.rank_summaries)}
        return [stages[stage] for stage in sorted(stages)]

    @property
    def fullest(self) -> RankSummary:
        """The rank with the highest peak of a steady step, of those whose tapes are kept."""
        return max(
            (each for each in self.rank_summaries if each.rank in self.tapes), key=lambda each: each.steady.peak_bytes
        )


def summarise(tapes: RankTapes, *, machine: Machine, layout: Layout, job: Job) -> RankSummary:
    """What of a rank's tapes is left when they are gone."""
    stage = pipeline_rank(tapes.rank, layout)
    held, shortage = None, ""
    if machine.backend == "nccl":
        both, expandable = (tapes.first, tapes.steady), job.stack.expandable_segments
        found = reserved(both, expandable=expandable, capacity_bytes=room_bytes(machine))
        shortage = str(found.shortage or "")
        held = (reserved(both, expandable=expandable) if shortage else found).reserved_bytes
    flops = sum(tapes.steady.kernels[place].flops for kind, place, *_ in tapes.steady if kind == KERNEL)
    first, steady = (stage_memory(tape, stage) for tape in (tapes.first, tapes.steady))
    return RankSummary(tapes.rank, first, steady, held, shortage, flops, tapes.parameters)


def messages_only(tapes: RankTapes) -> RankTapes:
    """What is left of a rank whose messages alone are asked for."""
    return tapes._replace(first=_spoken(tapes.first), steady=_spoken(tapes.steady))


def _spoken(tape: Tape) -> Tape:
    spoken = Tape(tape.rank)
    spoken.sites, spoken.scopes, spoken.messages = tape.sites, tape.scopes, tape.messages
    for event in tape:
        if event[0] in (START, WAIT, SCOPE):
            spoken.add(*event)
    return spoken


def pipeline_rank(rank: int, layout: Layout) -> int:
    """Place of a rank of the world in its pipeline."""
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
    """The record. ``tape``: the steady one of the first representative, whose traffic is told."""
    seconds = played.step_seconds
    stages = _stages(rank_summaries, layout)
    done = _work(rank_summaries, work(model, layout=layout, job=job), layout)
    held = [share.reserved_bytes for share in rank_summaries if share.reserved_bytes is not None]
    return Step(
        kind="rehearsed",
        model=model.name,
        machine=machine.name,
        layout=str(layout),
        job=job.model_dump(mode="json"),
        stack=job.stack.name,
        world=layout.world,
        memory=Memory(
            peak_bytes=max(stage.peak_bytes for stage in stages),
            reserved_bytes=max(held, default=None),
            fits=not any(out_of_memory(share, machine) for share in rank_summaries),
            stages=stages,
        ),
        work=done,
        traffic=traffic(tape),
        time=played.time(),
        tokens_per_second_per_gpu=job.tokens_per_step / seconds / layout.world,
        mfu=utilisation(done, seconds=seconds, world=layout.world, peak_flops=machine.chip.peak(job.precision.compute)),
    )


def traffic(tape: Tape) -> tuple[Traffic, ...]:
    """What the rank of ``tape`` sends, by axis and collective."""
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
    """All that lives at the peak of a steady step: by category, and the most of like tensors."""
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
    since = "" if since == "start" else since  # what lives from step to step
    return Holding(sum(sizes), len(sizes), max(sizes), category, since, module, line)


def out_of_memory(share: RankSummary, machine: Machine) -> bool:
    """Whether a rank runs out of memory, if only because what is free lies in pieces."""
    return bool(share.shortage) or share.peak_bytes > room_bytes(machine)


def too_large(
    rank_summaries: Sequence[RankSummary], *, model: Model, machine: Machine, layout: Layout, job: Job
) -> tuple[str, ...]:
    """The finding of a job whose tensors have no room, if it is one."""
    short = [share for share in rank_summaries if out_of_memory(share, machine)]
    if not short:
        return ()
    room, fullest = room_bytes(machine), max(short, key=lambda share: share.peak_bytes)
    if fullest.peak_bytes <= room:
        return (fullest.shortage,)
    stage = max(fullest.first, fullest.steady, key=lambda memory: memory.peak_bytes)
    more = f", and so do {len(short) - 1} more of the {len(rank_summaries)} ranks rehearsed" if len(short) > 1 else ""
    return (
        f"rank {fullest.rank} needs {show_bytes(stage.peak_bytes)} at its peak, {stage.peak_cause}, but {machine.name} "
        f"has {show_bytes(room)} for tensors{more}; {_mend(model=model, machine=machine, layout=layout, job=job)}",
    )


def _mend(*, model: Model, machine: Machine, layout: Layout, job: Job) -> str:
    """The nearest layout that the planner finds room for: sharded more, then recomputed, then in smaller batches."""
    sharded = range(layout.zero + 1, 4) if layout.dp * layout.cp > 1 else ()
    changes: list[dict[str, object]] = [{"zero": stage} for stage in sharded if stage > 1]
    changes += [{"ac": "selective"}, {"ac": "full"}, {"mbs": 1}]
    nearest = layout
    for change in changes:
        nearest = nearest.replace(**change)
        memory = _planned(nearest, model=model, machine=machine, job=job)
        if memory is not None and memory.fits:
            return f"try {str(nearest)!r}, of which the planner says {show_bytes(memory.peak_bytes)}"
    return "cut the model more (tp, pp, cp): fivefold search finds the layouts that fit, fivefold ask gpus on how many"


def _planned(layout: Layout, *, model: Model, machine: Machine, job: Job) -> Memory | None:
    try:
        return predict(model=model, machine=machine, layout=layout, job=job).memory
    except Mistake:
        return None


def _stages(rank_summaries: Sequence[RankSummary], layout: Layout) -> tuple[StageMemory, ...]:
    """Of each pipeline rank the fullest of its ranks."""
    fullest: dict[int, StageMemory] = {}
    for each in rank_summaries:
        stage = pipeline_rank(each.rank, layout)
        if stage not in fullest or each.steady.peak_bytes > fullest[stage].peak_bytes:
            fullest[stage] = each.steady
    return tuple(fullest[stage] for stage in sorted(fullest))


def _work(rank_summaries: Sequence[RankSummary], counted: Work, layout: Layout) -> Work:
    """What all ranks do and hold; the model FLOPs, and which parameters are active, are definitions."""
    rehearsed = Counter(pipeline_rank(each.rank, layout) for each in rank_summaries)
    alike = layout.world // layout.pp
    parameters, flops = 0.0, 0
    seen: set[int] = set()
    for each in rank_summaries:
        stage = pipeline_rank(each.rank, layout)
        times = 1 if stage in seen else alike - rehearsed[stage] + 1  # the first stands for those left out
        seen.add(stage)
        parameters += times * each.parameters
        flops += times * each.flops
    return counted.replace(parameters=round(parameters), hardware_flops=flops)
