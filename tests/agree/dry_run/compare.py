"""Compare planner and dry run: counts must be equal, peaks must be near.

states, kept activations, FLOPs, messages and their bytes  ==        peak  |planned / dry run − 1|

Where a forward and a backward interleave at their messages, the planner counts the activations of a forward that has
ended before the backward begins: the dry run keeps no more.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Protocol

import numpy as np

from fivefold.dry_run.fake.world import has_uneven_cp_work, list_representatives
from fivefold.dry_run.memory.breakdown import INPUTS, SCALES, list_events, list_lifetimes, sum_stage_memory
from fivefold.dry_run.rank_tapes import RankTapes, run_rank
from fivefold.dry_run.record.tape import ALLOC, KERNEL, START, Tape
from fivefold.dry_run.report import find_pipeline_rank
from fivefold.job import Job
from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.schedule import schedule
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts, get_group_degrees
from fivefold.planner.counts.memory.stages import count_expert_table_bytes, count_input_bytes, scale_index_bytes
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.predict import Planner
from fivefold.step import StageMemory, count_sent_bytes
from tests.agree.said import Compared, Said, add_up, count_planned

EXACT = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")
LOW_PRECISION = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "uint8")  # uint8: two numbers of fp4
SCALARS = 64  # bytes of the losses and counters that a rank holds


class ComparedOnMachine(Compared, Protocol):
    """A model, a layout and a job on a machine."""

    @property
    def machine(self) -> Machine: ...

    @property
    def streams(self) -> bool: ...


class Stage(NamedTuple):
    """Peaks of one pipeline rank in bytes, with what each says is the cause."""

    planned: int
    dry_run: int
    planned_cause: str
    dry_run_cause: str

    @property
    def error(self) -> float:
        return self.planned / self.dry_run - 1


class Verdict(NamedTuple):
    """``unequal``: one line for each count that differs; ``stages``: the peaks of all pipeline ranks."""

    unequal: tuple[str, ...]
    stages: tuple[Stage, ...]

    @property
    def error(self) -> float:
        """Of the rank with the highest peak."""
        return max(stage.planned for stage in self.stages) / max(stage.dry_run for stage in self.stages) - 1

    @property
    def worst_stage(self) -> float:
        """Of the rank that is farthest off."""
        return max((stage.error for stage in self.stages), key=abs)


def run(case: ComparedOnMachine) -> Verdict:
    """Dry-run the ranks that differ, predict, and compare."""
    model, layout, job = case.model, case.layout, case.job
    planner = Planner(model=model, machine=case.machine, job=job)
    step = planner.step(layout)
    tapes = [
        run_rank(model=model, layout=layout, job=job, rank=rank, streams=case.streams)
        for rank in list_representatives(layout, by_cp=has_uneven_cp_work(model, layout=layout, job=job))
    ]
    stages_of = [find_pipeline_rank(tape.rank, layout) for tape in tapes]
    first = [tapes[stages_of.index(stage)] for stage in range(layout.pp)]
    memories = [sum_stage_memory(item.steady, stage) for stage, item in enumerate(first)]
    by_stage = stages_held(layout, micro_batches=layout.micro_batches(job))
    held = [by_stage[stage] for stage in stages_of]
    unequal = [
        *(
            line
            for ours, plan in zip(memories, step.memory.stages, strict=True)
            for line in _bytes(ours, plan, interleaves=job.stack.pairs)
        ),
        *(
            line
            for item, stages in zip(first, by_stage, strict=True)
            if (line := _inputs(item.steady, case, planner.counts, stages=stages))
        ),
        *_host(tapes, case, planned=step.memory.host_bytes or 0),
        *_totals(tapes, model, layout, job, flops=step.work.hardware_flops),
        *_low_precision(tapes, planner.counts, layout),
        *(
            f"rank {tape.rank} {line}"
            for tape, stages in zip(tapes, held, strict=True)
            for line in differences(sum_traffic(tape.steady), count_expected(planner.counts, layout, stages=stages))
        ),
    ]
    stages = tuple(
        Stage(plan.peak_bytes, ours.peak_bytes, plan.peak_cause, ours.peak_cause)
        for ours, plan in zip(memories, step.memory.stages, strict=True)
    )
    return Verdict(tuple(unequal), stages)


def stages_held(layout: Layout, *, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Per pipeline rank."""
    if layout.pp == 1:
        return ((0,),)
    return schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=micro_batches).rank_stages


def _bytes(ours: StageMemory, plan: StageMemory, *, interleaves: bool) -> list[str]:
    pairs = [(name.removesuffix("_bytes"), getattr(ours, name), getattr(plan, name)) for name in EXACT]
    return [
        f"stage {ours.stage} {name}: {there} dry-run, {here} planned"
        for name, there, here in pairs
        if there != here and not (interleaves and name == "activations" and there < here)
    ]


def _host(tapes: list[RankTapes], case: ComparedOnMachine, *, planned: int) -> list[str]:
    """Host memory of a node, each of whose ranks counts as the fullest."""
    ours = max(tape.steady.host_bytes for tape in tapes) * min(case.machine.ranks_per_node, case.layout.world)
    return [f"host memory: {ours} dry-run, {planned} planned"] if ours != planned else []


def count_initial_bytes(tape: Tape, category: int) -> int:
    """Return the bytes of one category that are live before the step, which are listed first.

    INPUTS: tokens, position tables, buffers of modules; SCALES: the scales that fp8 gathers need.
    """
    events, lives = list_events(tape), list_lifetimes(tape)
    step_events = np.flatnonzero(events[1:, 0] != ALLOC)
    first = int(step_events[0]) if len(step_events) else len(events) - 1
    return int(lives.size[(lives.category == category) & (lives.birth <= first)].sum())


def _inputs(tape: Tape, case: ComparedOnMachine, counts: Counts, *, stages: tuple[int, ...]) -> str:
    """Return a line if the inputs of a rank differ by more than scalars, dropout's keys and the buffers of experts."""
    model, layout, job = case.model, case.layout, case.job
    planned_scales, recorded_scales = (
        scale_index_bytes(counts, layout, stages=stages),
        count_initial_bytes(tape, SCALES),
    )
    if planned_scales != recorded_scales:
        return f"fp8 scales: {recorded_scales} dry-run, {planned_scales} planned"
    planned_bytes = count_input_bytes(model, job, layout=layout)
    planned_bytes += count_expert_table_bytes(model, layout, stages=stages)
    more = count_initial_bytes(tape, INPUTS) - planned_bytes
    sequences = layout.micro_batches(job) * layout.mbs
    small = SCALARS + 32 * sequences + 28 * (model.moe.choices if model.moe else 0) * (model.layers + model.mtp_depth)
    return "" if 0 <= more <= small else f"inputs: {planned_bytes + more} dry-run, {planned_bytes} planned"


def _totals(tapes: list[RankTapes], model: Model, layout: Layout, job: Job, *, flops: int) -> list[str]:
    """Of all ranks: the representatives stand for equally many."""
    ranks_per_tape = layout.world // len(tapes)
    done = sum(ranks_per_tape * work(tape.steady) for tape in tapes)
    lines = [f"flops: {done} dry-run, {flops} planned"] if done != flops else []
    parameters = round(ranks_per_tape * sum(tape.parameters for tape in tapes))
    padded = pad_vocab(model, job, tp=layout.tp) != model.vocab  # the last tp rank holds fewer rows than the first
    if not padded and layout.shards == 1 and layout.expert_shards == 1 and parameters != model.parameters:
        lines.append(f"parameters: {parameters} dry-run, {model.parameters} planned")
    return lines


def _low_precision(tapes: list[RankTapes], counts: Counts, layout: Layout) -> list[str]:
    """Of all ranks, the FLOPs of products of fp8 or fp4: one line if the planner's operations say otherwise."""
    job, part = counts.job, get_local_degrees(layout)
    planned = 0
    for unit, times in counts.tally_units(layout).items():
        for op in counts.unit(get_group_degrees(part, unit), unit.name).ops:
            wide = job.precision.wide_gradients and op.backward_products > (op.differentiates != ())
            products = 1 + op.recomputed + op.backward_products - wide
            planned += op.low_precision * times * products * op.flops
    planned *= layout.cp * layout.dp * layout.tp * layout.micro_batches(job)
    done = layout.world // len(tapes) * sum(work(tape.steady, dtypes=LOW_PRECISION) for tape in tapes)
    return [f"flops in fp8 or fp4: {done} dry-run, {planned} planned"] if done != planned else []


def work(tape: Tape, *, dtypes: tuple[str, ...] = ()) -> int:
    """FLOPs of one rank's step, or those of products of ``dtypes``."""
    flops = [kernel.flops if not dtypes or kernel.dtype in dtypes else 0 for kernel in tape.kernels]
    return sum(flops[first] for kind, first, _, _ in tape if kind == KERNEL)


def sum_traffic(tape: Tape) -> Said:
    """What one rank sends."""
    starts = Counter(second for kind, _, second, _ in tape if kind == START)
    sending = [(tape.messages[place], times) for place, times in starts.items() if not tape.messages[place].receives]
    return add_up(
        (
            message.axis,
            message.collective,
            times,
            times * count_sent_bytes(message.collective, payload=message.payload, ranks=len(message.members)),
        )
        for message, times in sending
    )


def count_expected(counts: Counts, layout: Layout, *, stages: tuple[int, ...]) -> Said:
    """What the planner expects of a rank that holds ``stages``."""
    return count_planned(counts, layout, [stages])


def differences(ours: Said, plan: Said) -> list[str]:
    """One line for each axis and collective that differ."""
    return [
        f"{' '.join(key)}: {ours.get(key, (0, 0))} dry-run, {plan.get(key, (0, 0))} planned"
        for key in sorted({*ours, *plan})
        if ours.get(key) != plan.get(key)
    ]
