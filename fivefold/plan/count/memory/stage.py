"""What one pipeline stage holds and keeps, added up once: its runs of equal units with their numbers, and the totals.

A walk through a step (``rank_memory.py``) visits the runs; ranks, schedules and placements share these sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from fivefold.layout.spec import Layout
from fivefold.plan.count.counts import Counts, Run, run_part
from fivefold.plan.count.memory.liveness import Profile, Sums
from fivefold.plan.count.memory.states import UnitStates
from fivefold.plan.count.operations.layer import Kind
from fivefold.plan.count.operations.part import Part, part_of


class RunMemory(NamedTuple):
    """A run with its numbers: ``first`` while its gradients are born, ``later`` when they live. ``born``: the sums that
    its first gradient brings to life; ``parts`` of the states travel apart.
    """

    run: Run
    part: Part
    first: Profile
    later: Profile
    state: UnitStates
    parts: tuple[UnitStates, ...]
    born: Sums
    logits: int
    noted: bool = True  # whether a moment of it can be the fullest


class Chunk(NamedTuple):
    """One stage. ``states`` are those of all its units, ``experts`` the sums of theirs; ``kept``: of one micro-batch,
    until its backward; ``alike``: the place of the first stage with the same units.
    """

    runs: tuple[RunMemory, ...]
    states: UnitStates
    experts: int
    kept: int
    alike: int
    shapes: frozenset[tuple[int, int]]  # of its weights


class Stages(NamedTuple):
    """All stages in the order of the model. ``pass_peaks``: of a pass through a stage the fullest moment above what
    lives anyway, with its cause; ``late``: of a stage what is kept for weights' gradients. ``peak_moments.py`` fills
    them.
    """

    chunks: tuple[Chunk, ...]
    pass_peaks: dict[tuple[object, ...], tuple[int, tuple[Any, ...]]]
    late: dict[int, int]


def stages_of(counts: Counts, layout: Layout) -> Stages:
    """The stages of a layout, from the cache of ``counts``: ranks, schedules and placements share them."""
    key = part_of(layout), counts.stage_key(layout), counts.states_key(layout)
    found = counts.chunks.get(key)
    if found is None:
        stages = counts.stage_runs(layout)
        kinds = [tuple((run.name, run.times, run.recomputed) for run in runs) for runs in stages]
        chunks: list[Chunk] = []
        for at, (runs, kind) in enumerate(zip(stages, kinds, strict=True)):
            alike = kinds.index(kind)
            chunks.append(_chunk(counts, layout, runs, alike) if alike == at else _again(chunks[alike], runs))
        found = counts.chunks[key] = Stages(tuple(chunks), {}, {})
    return cast(Stages, found)


def _chunk(counts: Counts, layout: Layout, runs: tuple[Run, ...], alike: int) -> Chunk:
    """Of runs that recur (every second layer recomputed) only the first and the last can be the fullest."""
    kinds = [(run.name, run.times, run.recomputed) for run in runs]
    made = {kind: _held(counts, layout, run) for kind, run in dict(zip(kinds, runs, strict=True)).items()}
    ends = {kinds.index(kind) for kind in made} | {len(kinds) - 1 - kinds[::-1].index(kind) for kind in made}
    held = [
        made[kind]._replace(run=run, noted=at in ends) for at, (kind, run) in enumerate(zip(kinds, runs, strict=True))
    ]
    total = UnitStates()
    for each in held:
        total += UnitStates._make(each.run.times * size for size in each.state)
    return Chunk(
        runs=tuple(held),
        states=total,
        experts=sum(each.run.times * each.born.experts for each in held),
        # and the scalar in which the stage ends: the loss, or what stands for its output
        kept=sum(each.run.times * each.later.kept_bytes for each in held)
        + (4 if runs[-1].name == "head" else counts.local(part_of(layout)).width),
        alike=alike,
        shapes=frozenset(shape for run in runs for shape in counts.shapes(part_of(layout), run.name)),
    )


def _again(chunk: Chunk, runs: tuple[Run, ...]) -> Chunk:
    """The same of other layers."""
    return chunk._replace(runs=tuple(unit._replace(run=run) for unit, run in zip(chunk.runs, runs, strict=True)))


def _held(counts: Counts, layout: Layout, run: Run) -> RunMemory:
    part, state = run_part(part_of(layout), run), counts.states(layout, run.name)
    parts, dense = counts.parts(layout, run.name), state.sums
    experts = parts[-1].sums if isinstance(run.name, Kind) and run.name.moe else 0
    if counts.adds(layout):
        # To the sums of the embedding the head's gradient of the tied table is added before there is another.
        dense += {"head": counts.states(layout, "embed").sums, "embed": -dense}.get(str(run.name), 0)
    born = Sums(dense - experts, experts)
    profiles = counts.profile(part, run.name, born), counts.profile(part, run.name)
    logits = counts.logits(part) if run.name == "head" else 0
    return RunMemory(run, part, *profiles, state, parts, born, logits)
