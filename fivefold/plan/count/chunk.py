"""What one pipeline stage holds and keeps, added up once: its runs of equal units with their numbers, and the totals.

A walk through a step (``memory.py``) visits the runs; ranks, schedules and placements share these sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from fivefold.layout.spec import Layout
from fivefold.plan.count.counts import Counts, Run, run_part
from fivefold.plan.count.part import part_of
from fivefold.plan.count.states import UnitStates
from fivefold.plan.count.tape import Profile


class Held(NamedTuple):
    """A run with its numbers: ``first`` while its gradients are born, ``later`` when they live."""

    run: Run
    first: Profile
    later: Profile
    state: UnitStates
    logits: int
    noted: bool = True  # whether a moment of it can be the fullest


class Chunk(NamedTuple):
    """One stage. ``states`` are those of all its units; ``kept`` and ``late``: of one micro-batch, until its backward
    and until its weights' gradients.
    """

    runs: tuple[Held, ...]
    states: UnitStates
    kept: int
    late: int
    shapes: frozenset[tuple[int, int]]  # of its weights


class Stages(NamedTuple):
    """All stages in the order of the model. ``walks``: of a stage, by its place, the fullest moment of one micro-batch
    above what lives anyway, with its cause; ``memory.py`` fills it.
    """

    chunks: tuple[Chunk, ...]
    walks: dict[int, tuple[int, tuple[Any, ...]]]


def stages_of(counts: Counts, layout: Layout) -> Stages:
    """The stages of a layout, from the cache of ``counts``: ranks, schedules and placements share them."""
    key = part_of(layout), counts.stage_key(layout), counts.states_key(layout)
    found = counts.chunks.get(key)
    if found is None:
        chunks = tuple(_chunk(counts, layout, runs) for runs in counts.stage_runs(layout))
        found = counts.chunks[key] = Stages(chunks, {})
    return cast(Stages, found)


def _chunk(counts: Counts, layout: Layout, runs: tuple[Run, ...]) -> Chunk:
    """Of runs that recur (every second layer recomputed) only the first and the last can be the fullest."""
    kinds = [(run.name, run.times, run.recomputed) for run in runs]
    made = {kind: _held(counts, layout, run) for kind, run in zip(kinds, runs, strict=True)}
    ends = {kinds.index(kind) for kind in made} | {len(kinds) - 1 - kinds[::-1].index(kind) for kind in made}
    held = [
        made[kind]._replace(run=run, noted=at in ends) for at, (kind, run) in enumerate(zip(kinds, runs, strict=True))
    ]
    total = UnitStates()
    for each in held:
        total += UnitStates._make([*(each.run.times * size for size in each.state[:-1]), each.state.largest])
    return Chunk(
        runs=tuple(held),
        states=total,
        kept=sum(each.run.times * each.later.kept_bytes for each in held),
        late=sum(each.run.times * each.later.weight_bytes for each in held),
        shapes=frozenset(shape for run in runs for shape in counts.shapes(part_of(layout), run.name)),
    )


def _held(counts: Counts, layout: Layout, run: Run) -> Held:
    part, state = run_part(part_of(layout), run), counts.states(layout, run.name)
    born = state.sums
    if run.name == "head" and counts.model.tied_embeddings and layout.pp == 1 and counts.job.linears == "fanned":
        born += counts.states(layout, "embed").sums  # to which the gradient of the tied table is added
    profiles = counts.profile(part, run.name, born), counts.profile(part, run.name)
    return Held(run, *profiles, state, counts.logits(part) if run.name == "head" else 0)
