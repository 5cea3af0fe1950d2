"""Bytes of one pipeline stage: its runs of equal units with their profiles and states, and the totals.

Computed once; ranks, schedules and mesh orders share them. ``peak_moments.py`` walks through the runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts, Run, run_part
from fivefold.planner.counts.memory.backward import Sums
from fivefold.planner.counts.memory.liveness import Profile
from fivefold.planner.counts.memory.states import UnitStates
from fivefold.planner.counts.operations.local_shapes import Part, part_of


class RunMemory(NamedTuple):
    """A run with the live bytes of one unit: ``first`` allocates the gradient sums ``born``, ``later`` finds them
    allocated. ``state``: bytes of one unit; ``parts``: the same by what is gathered apart (dense, experts).
    """

    run: Run
    part: Part
    first: Profile
    later: Profile
    state: UnitStates
    parts: tuple[UnitStates, ...]
    born: Sums
    logits: int
    noted: bool = True  # whether a moment of it can be the peak


class Chunk(NamedTuple):
    """One stage, in bytes. ``states``: of all its units; ``kept``: activations of one micro-batch until its backward.
    ``alike``: index of the first stage with equal units.
    """

    runs: tuple[RunMemory, ...]
    states: UnitStates
    kept: int
    alike: int
    shapes: frozenset[tuple[int, int]]  # of weights with fused wgrad accumulation


class Stages(NamedTuple):
    """All stages in model order, and three caches. ``pass_peaks``, peak bytes of a pass and their cause, and ``late``,
    bytes per stage kept between B and W, are filled by ``peak_moments.py``; ``ranks``, the memory of the pipeline ranks
    by schedule, pp and v, the rest of a layout on which it depends, by ``rank_memory.py``.
    """

    chunks: tuple[Chunk, ...]
    pass_peaks: dict[tuple[object, ...], tuple[int, tuple[Any, ...]]]
    late: dict[tuple[int, bool], int]
    ranks: dict[tuple[str, int, int], list[Any]]


def held_bytes(units: Iterable[RunMemory], *, but: str = "") -> int:
    """Bytes of a stage's weights that may stay gathered from an F to a B: all but the embedding's, and ``but``."""
    return sum(unit.run.times * unit.state.whole for unit in units if unit.run.name not in ("embed", but))


def head_bytes(units: Sequence[RunMemory], *, table: int) -> int:
    """Bytes of the head's gathered weights and of a ``table`` that it shares; 0 in a stage without the head."""
    return units[-1].state.whole + table if units[-1].run.name == "head" else 0


def stages_of(counts: Counts, layout: Layout) -> Stages:
    """The stages of a layout, cached in ``counts``."""
    key = part_of(layout), counts.stage_key(layout), counts.states_key(layout)
    found = counts.chunks.get(key)
    if found is None:
        stages = counts.stage_runs(layout)
        kinds = [tuple((run.name, run.times, run.recomputed) for run in runs) for runs in stages]
        chunks: list[Chunk] = []
        for at, (runs, kind) in enumerate(zip(stages, kinds, strict=True)):
            alike = kinds.index(kind)
            chunks.append(_chunk(counts, layout, runs, alike) if alike == at else _same_units(chunks[alike], runs))
        found = counts.chunks[key] = Stages(tuple(chunks), {}, {}, {})
    return cast(Stages, found)


def describe(cause: tuple[Any, ...], chunk: Chunk | None = None) -> str:
    """A cause as text, e.g. ``block 3 backward mlp.act``."""
    if len(cause) == 1 or chunk is None:
        return str(cause[0])
    place, index, *words = cause
    return " ".join((chunk.runs[place].run.called(index), *words)).strip()


def _chunk(counts: Counts, layout: Layout, runs: tuple[Run, ...], alike: int) -> Chunk:
    """One stage. Of equal runs that recur (every second layer recomputed) only the first and last can be the peak."""
    kinds = [(run.name, run.times, run.recomputed) for run in runs]
    made = {kind: _run_memory(counts, layout, run) for kind, run in dict(zip(kinds, runs, strict=True)).items()}
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
        # and the scalars on which backward is called: the losses, or a stand-in for the stage's output
        kept=sum(each.run.times * each.later.kept_bytes for each in held)
        + (4 * (1 + counts.model.predicted) if runs[-1].name == "head" else counts.local(part_of(layout)).width),
        alike=alike,
        shapes=frozenset(shape for run in runs for shape in counts.shapes(part_of(layout), run.name)),
    )


def _same_units(chunk: Chunk, runs: tuple[Run, ...]) -> Chunk:
    """An equal stage of other layers."""
    return chunk._replace(runs=tuple(unit._replace(run=run) for unit, run in zip(chunk.runs, runs, strict=True)))


def _looked_up(counts: Counts, layout: Layout, run: Run, parts: tuple[UnitStates, ...]) -> int:
    """Bytes of the sums of a table of which a head that predicts further makes the first gradient."""
    if run.name != "head" or not counts.model.predicted:
        return 0
    if counts.adds(layout):
        return counts.states(layout, "embed").sums
    copies = parts[1:-1] if counts.routed(run.name) else parts[1:]
    return sum(part.sums for part in copies)


def _run_memory(counts: Counts, layout: Layout, run: Run) -> RunMemory:
    """Live bytes and states of one unit of a run."""
    part, state = run_part(part_of(layout), run), counts.states(layout, run.name)
    parts, dense = counts.parts(layout, run.name), state.sums
    experts = parts[-1].sums if counts.routed(run.name) else 0
    if counts.adds(layout):
        # The head's gradient of a tied table is the first of it, so the head allocates the embedding's sums.
        table = (
            counts.states(layout, "embed").sums if counts.model.tied_embeddings else 0
        )  # else the last of the head's
        dense += {"head": table, "embed": -dense}.get(str(run.name), 0)
    ahead = _looked_up(counts, layout, run, parts)
    tied = counts.model.tied_embeddings
    if tied or not counts.adds(layout):
        dense -= ahead
    born = Sums(dense - experts, experts, table=ahead, tied=tied and ahead > 0)
    profiles = counts.profile(part, run.name, born), counts.profile(part, run.name)
    logits = counts.logits(part) if run.name == "head" else 0
    return RunMemory(run, part, *profiles, state, parts, born, logits)
