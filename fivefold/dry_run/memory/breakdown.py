"""Breaks down memory over time from a tape: live bytes by category after every event, the peak and its cause.

    ALLOC, FREE → lifetimes (birth, death, bytes, category) → levels → peak

A storage whose site has no category is classified by its lifetime: allocated in a forward (or split backward) and
freed in a later action, it is an activation; else temporary. A pipeline receive is temporary until it has arrived;
from then on it is classified as if allocated at that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.dry_run.record.tape import ALLOC, FREE, SCOPE, START, WAIT, CodeSite, Scope, Tape
from fivefold.results.spans import Level
from fivefold.step import StageMemory

Ints = NDArray[np.int64]

# In the order of a Level's fields, whose ``states`` are the sum of the first four. "fp8 scales" are those of gathers.
CATEGORIES = (
    "parameters",
    "optimizer",
    "inputs",
    "fp8 scales",
    "gradients",
    "activations",
    "gathers",
    "logits",
    "temporary",
)
PARAMETERS, OPTIMIZER, INPUTS, SCALES, GRADIENTS, ACTIVATIONS, GATHERS, LOGITS, TEMPORARY = range(len(CATEGORIES))
CATEGORY_INDEX = {name: place for place, name in enumerate(CATEGORIES)} | {"pipeline": TEMPORARY, "widened": TEMPORARY}
BY_LIFETIME = -1
ACTIVATION_PHASES = ("forward", "backward", "pair")  # phases in which activations are allocated
MAX_LEVELS = 20_000


class LiveStorage(NamedTuple):
    """A storage that is live at the peak."""

    bytes: int
    category: str  # one of CATEGORIES
    site: CodeSite
    scope: Scope  # in which it was allocated


class Lifetimes(NamedTuple):
    """The lifetimes of a tape's storages, one row each; a pipeline receive has two rows, before and after arrival."""

    birth: Ints  # index of the ALLOC event
    death: Ints  # index of the FREE event; the number of events if it is never freed
    size: Ints
    site: Ints
    category: Ints


def list_levels(tape: Tape, seconds: Sequence[float] | NDArray[np.float64] | None = None) -> list[Level]:
    """Return live bytes after each event that changes them; thinned to some 20,000 events, the peak among them.

    ``seconds``: the time of each event; by default its index.
    """
    events, lives = list_events(tape), list_lifetimes(tape)
    live_bytes = _sum_live_bytes(lives, len(events))
    total = live_bytes.sum(axis=0)
    changed = np.flatnonzero(np.diff(total, prepend=-1))
    changed = changed[changed >= _find_last_initial_event(events)]
    kept_events = _thin_events(changed, total)
    times = kept_events if seconds is None else np.asarray(seconds)[kept_events]
    states = live_bytes[:GRADIENTS].sum(axis=0)
    rows = np.stack([states, *live_bytes[GRADIENTS:]])[:, kept_events].T.tolist()
    causes = _describe_causes(tape, events, kept_events)
    return [Level._make((time, *row, cause)) for time, row, cause in zip(times.tolist(), rows, causes, strict=True)]


def sum_stage_memory(tape: Tape, stage: int) -> StageMemory:
    """Return the peak of a tape, as pipeline rank ``stage``.

    ``activations_bytes`` as the planner counts them: the maximum that is live between two actions, of all micro-batches
    in flight.
    """
    events, lives = list_events(tape), list_lifetimes(tape)
    live_bytes = _sum_live_bytes(lives, len(events))
    total, begin = live_bytes.sum(axis=0), _find_last_initial_event(events)
    peak = begin + int(np.argmax(total[begin:]))
    ends = np.append(_find_scope_events(events)[1:] - 1, len(events) - 1)
    gradients = int(live_bytes[GRADIENTS, ends[_find_update_scope(tape, events) - 1]])
    parameters = int(live_bytes[PARAMETERS, begin])
    optimizer = int(live_bytes[OPTIMIZER, ends[-1]])
    activations = int(
        (live_bytes[ACTIVATIONS] + live_bytes[LOGITS])[np.append(ends, _select_paired_events(tape, events))].max()
    )
    temporary = int(total[peak]) - parameters - optimizer - gradients - activations
    (cause,) = _describe_causes(tape, events, np.array([peak]))
    return StageMemory(
        stage=stage,
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        temporary_bytes=max(0, temporary),
        peak_bytes=int(total[peak]),
        peak_cause=cause,
    )


def list_largest(tape: Tape, n: int) -> list[LiveStorage]:
    """Return the ``n`` largest storages that are live at the peak."""
    events, lives = list_events(tape), list_lifetimes(tape)
    begin = _find_last_initial_event(events)
    peak = begin + int(np.argmax(_sum_live_bytes(lives, len(events)).sum(axis=0)[begin:]))
    live_rows = np.flatnonzero((lives.birth <= peak) & (lives.death > peak))
    chosen = live_rows[np.argsort(-lives.size[live_rows], kind="stable")[:n]]
    scopes = events[_find_scope_events(events)[_number_scopes(events, lives.birth[chosen])], 1]
    return [
        LiveStorage(
            int(lives.size[row]), CATEGORIES[lives.category[row]], tape.sites[lives.site[row]], tape.scopes[scope]
        )
        for row, scope in zip(chosen, scopes, strict=True)
    ]


def classify_storages(tape: Tape) -> dict[int, str]:
    """Return the category of each storage that is not temporary, by the event that allocates it."""
    lives = list_lifetimes(tape)
    births_and_categories = zip(lives.birth.tolist(), lives.category.tolist(), strict=True)
    return {birth: CATEGORIES[category] for birth, category in births_and_categories if category != TEMPORARY}


# Lifetimes


def list_events(tape: Tape) -> Ints:
    """Return the tape's events as rows of four."""
    return np.frombuffer(tape.events, dtype=np.int64).reshape(-1, 4) if len(tape) else np.zeros((0, 4), np.int64)


def list_lifetimes(tape: Tape) -> Lifetimes:
    """Return the events, site and category of each storage's allocation and free."""
    events = list_events(tape)
    lives = _pair_allocations(events)
    category = _classify_sites(tape)[lives.site]
    lives = _split_pipeline_receives(tape, events, lives._replace(category=category))
    return lives._replace(category=_classify_by_lifetime(tape, events, lives))


def _pair_allocations(events: Ints) -> Lifetimes:
    """Pair every ALLOC with its FREE: the next event of the same storage."""
    positions = np.flatnonzero(events[:, 0] <= FREE)
    positions = positions[np.lexsort((positions, events[positions, 1]))]
    births = np.flatnonzero(events[positions, 0] == ALLOC)
    next_positions = np.minimum(births + 1, len(positions) - 1)
    is_freed = (events[positions[next_positions], 0] == FREE) & (
        events[positions[next_positions], 1] == events[positions[births], 1]
    )
    birth = positions[births]
    death = np.where(is_freed, positions[next_positions], len(events))
    return Lifetimes(birth, death, events[birth, 2], events[birth, 3], np.zeros_like(birth))


def _classify_sites(tape: Tape) -> Ints:
    """Return the category of each site of the tape; ``BY_LIFETIME`` if it has none."""
    return np.array(
        [CATEGORY_INDEX.get(site.category, BY_LIFETIME) for site in tape.sites] or [BY_LIFETIME], dtype=np.int64
    )


def _split_pipeline_receives(tape: Tape, events: Ints, lives: Lifetimes) -> Lifetimes:
    """Count pipeline messages as temporary; count a received tensor from its WAIT on in a row of its own."""
    is_pipeline_message = np.array(
        [message.collective == "p2p" and message.axis == "pp" for message in tape.messages] or [False]
    )
    starts = np.flatnonzero(events[:, 0] == START)
    starts = starts[is_pipeline_message[events[starts, 2]] & (events[starts, 3] >= 0)]
    if not len(starts):
        return lives
    order = np.lexsort((lives.birth, events[lives.birth, 1]))  # by storage
    keys = events[lives.birth[order], 1] * len(events) + lives.birth[order]
    rows = order[np.searchsorted(keys, events[starts, 3] * len(events) + starts) - 1]
    category, death = lives.category.copy(), lives.death.copy()
    category[rows] = TEMPORARY
    receives = np.array([message.receives for message in tape.messages])[events[starts, 2]]
    handles = dict(zip(events[starts[receives], 1].tolist(), rows[receives].tolist(), strict=True))
    waits = np.flatnonzero(events[:, 0] == WAIT).tolist()
    arrivals = [
        (event, handles[handle])
        for event, handle in zip(waits, events[waits, 1].tolist(), strict=True)
        if handle in handles
    ]
    arrival_events, arrived_rows = np.array(arrivals, dtype=np.int64).reshape(-1, 2).T
    death[arrived_rows] = arrival_events
    new_rows = (
        arrival_events,
        lives.death[arrived_rows],
        lives.size[arrived_rows],
        lives.site[arrived_rows],
        np.full_like(arrived_rows, BY_LIFETIME),
    )
    old_rows = lives._replace(category=category, death=death)
    return Lifetimes._make(
        np.append(old_column, new_column) for old_column, new_column in zip(old_rows, new_rows, strict=True)
    )


def _classify_by_lifetime(tape: Tape, events: Ints, lives: Lifetimes) -> Ints:
    """Fill in the categories that are ``BY_LIFETIME``, by the phases of ALLOC and FREE."""
    first = _number_scopes(events, lives.birth)
    last = _number_scopes(events, lives.death)
    phase = np.array([scope.phase for scope in tape.scopes] or [""])
    scope_of_number = events[_find_scope_events(events), 1]
    birth_phase = phase[scope_of_number[first]]
    death_phase = phase[scope_of_number[last]]
    is_logits = np.array([_is_logits(site) for site in tape.sites] or [False])[lives.site]
    is_activation = (
        np.isin(birth_phase, ACTIVATION_PHASES)
        & (last > first)
        & (death_phase != "update")
        & (lives.death < len(events))
    )
    by_lifetime = np.where(is_activation, np.where(is_logits, LOGITS, ACTIVATIONS), TEMPORARY)
    by_lifetime = np.where(is_logits & np.isin(birth_phase, ("forward", "pair")), LOGITS, by_lifetime)
    by_lifetime = np.where(birth_phase == "start", INPUTS, by_lifetime)
    return np.where(lives.category == BY_LIFETIME, by_lifetime, lives.category)


def _is_logits(site: CodeSite) -> bool:
    """Return whether a site is the head's forward matmul with the vocabulary."""
    is_product = site.operation.removeprefix("aten::").startswith(("mm", "addmm"))
    is_gradient = site.line.endswith(("backward", "LinearGemms.dgrad", "LinearGemms.wgrad"))
    return is_product and site.module.startswith("head") and not is_gradient


# Scopes and events


def _find_scope_events(events: Ints) -> Ints:
    return np.flatnonzero(events[:, 0] == SCOPE)


def _number_scopes(events: Ints, event_indices: Ints) -> Ints:
    """Return for each event the number of its scope, counted over the SCOPE events; a tape begins with one."""
    return np.searchsorted(_find_scope_events(events), event_indices, side="right") - 1


def _find_update_scope(tape: Tape, events: Ints) -> int:
    """Return the number of the scope in which the optimizer runs, or one after the last."""
    scopes = events[_find_scope_events(events), 1].tolist()
    return next((number for number, scope in enumerate(scopes) if tape.scopes[scope].phase == "update"), len(scopes))


def _select_paired_events(tape: Tape, events: Ints) -> Ints:
    """Return the events within FB pairs: with two passes in one action, the peak is between them, not after."""
    pairs = np.array([scope.phase == "pair" for scope in tape.scopes])
    return np.flatnonzero(pairs[events[_find_scope_events(events), 1]][_number_scopes(events, np.arange(len(events)))])


def _find_last_initial_event(events: Ints) -> int:
    """Return the last of the initial ALLOC events, which list the storages that were live before the step."""
    other_events = np.flatnonzero(events[1:, 0] != ALLOC)
    return int(other_events[0]) if len(other_events) else len(events) - 1


def _sum_live_bytes(lives: Lifetimes, count: int) -> Ints:
    """Return live bytes of each category after each event, [categories, events]."""
    change = np.zeros((len(CATEGORIES), count + 1), dtype=np.int64)
    np.add.at(change, (lives.category, lives.birth), lives.size)
    np.subtract.at(change, (lives.category, lives.death), lives.size)
    return change[:, :count].cumsum(axis=1)


def _thin_events(changed: Ints, total: Ints) -> Ints:
    """Thin ``changed`` to ``MAX_LEVELS``: in equal stretches the events with most and least memory, first and last."""
    if len(changed) <= MAX_LEVELS:
        return changed
    stretches = np.array_split(changed, MAX_LEVELS // 2)
    extremes = {
        int(pick(total[stretch])) + offset
        for offset, stretch in _list_offsets(stretches)
        for pick in (np.argmax, np.argmin)
    }
    return changed[sorted(extremes | {0, len(changed) - 1})]


def _list_offsets(stretches: Sequence[Ints]) -> list[tuple[int, Ints]]:
    starts = np.cumsum([0, *(len(stretch) for stretch in stretches[:-1])])
    return list(zip(starts.tolist(), stretches, strict=True))


def _describe_causes(tape: Tape, events: Ints, event_indices: Ints) -> list[str]:
    """Describe each event: "phase of micro-batch, module operation (file:line)"; a FREE only by its phase."""
    scope_numbers = events[_find_scope_events(events), 1][_number_scopes(events, event_indices)].tolist()
    scopes = [str(scope) for scope in tape.scopes]
    sites = [str(site) for site in tape.sites]
    births = zip(events[event_indices, 0].tolist(), events[event_indices, 3].tolist(), scope_numbers, strict=True)
    return [f"{scopes[scope]}, {sites[site]}" if kind == ALLOC else scopes[scope] for kind, site, scope in births]


class LiveGroup(NamedTuple):
    """A group of live storages that one line of code has allocated in modules of one kind (``blocks.*.mlp``)."""

    bytes: int  # sum over the group
    number: int
    category: str
    module: str
    line: str  # file:line function


def list_live_groups(tape: Tape, event_indices: Sequence[int], *, n: int = 5) -> list[list[LiveGroup]]:
    """Return the ``n`` largest groups that are live after each of the events at ``event_indices``."""
    lives = list_lifetimes(tape)
    names = [
        (".".join("*" if part.isdigit() else part for part in site.module.split(".")), site.line) for site in tape.sites
    ]
    group_numbers: dict[tuple[int, str, str], int] = {}
    keys = (
        (category, *names[site]) for category, site in zip(lives.category.tolist(), lives.site.tolist(), strict=True)
    )
    group = np.array([group_numbers.setdefault(key, len(group_numbers)) for key in keys], dtype=np.int64)
    groups = list(group_numbers)
    groups_by_event = []
    for event in event_indices:
        is_live = (lives.birth <= event) & (lives.death > event)
        sizes = np.bincount(group[is_live], weights=lives.size[is_live], minlength=len(groups))
        counts = np.bincount(group[is_live], minlength=len(groups))
        largest = [i for i in np.argsort(-sizes, kind="stable")[:n].tolist() if sizes[i]]
        groups_by_event.append(
            [LiveGroup(int(sizes[i]), int(counts[i]), CATEGORIES[groups[i][0]], *groups[i][1:]) for i in largest]
        )
    return groups_by_event
