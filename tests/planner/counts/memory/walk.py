"""What lives on a pipeline rank during each pass, one pass after another: the reference for ``in_flight.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fivefold.layout.schedule.action import Action, list_parts
from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.simulation import simulate_schedule
from fivefold.layout.schedule.table import Table
from fivefold.planner.counts.memory.in_flight import Kind, LivePass, PassKind, PassOptions, PreviousPass

Pass = tuple[Kind, int, int]  # stage, micro-batch
PARTS = {"F": "", "B": "B", "BW": "BW", "W": "W"}


def walk(table: Table, rank: int, rules: PassOptions) -> Iterator[LivePass]:
    """Every pass of a rank in time order."""
    row = _row(table, rank, list(_count_sent(table))[rank], rules)
    before: PreviousPass | None = None
    for live_pass in _inputs_kept(row, table, rank) if rules.has_recv_buffers else row:
        yield live_pass._replace(pass_kind=live_pass.pass_kind._replace(previous=before))
        kind, stage, _, last, *_ = live_pass.pass_kind
        leaves = kind != "F" and (rules.pending_reductions == "each" or (rules.pending_reductions == "last" and last))
        before = PreviousPass(kind, stage, last) if leaves else None


def _row(table: Table, rank: int, sent: Sequence[int], rules: PassOptions) -> Iterator[LivePass]:
    """``sent``: the rank's sent messages that still live at each action."""
    held, row = table.rank_stages[rank], [_list_passes(action) for action in table.rows[rank]]
    place = {stage: at for at, stage in enumerate(held)}
    passes = [(kind, stage) for action in row for kind, stage, _ in action]
    left = Counter((part, stage) for kind, stage in passes for part in PARTS[kind])  # gradients to come
    until_b, until_w, born, made, reduced_in_b, reduced, begun, whole = ([0] * len(held) for _ in range(8))
    here = 0  # streams from a stage of this rank to another
    for at, action in enumerate(row):
        ahead = sum(_entry(table, item) not in (None, rank) for item in (row[at + 1] if at + 1 < len(row) else ()))
        gone = 0
        for number, (kind, stage, i) in enumerate(action):
            mine, entry, target = place[stage], _entry(table, (kind, stage, i)), _exit(table, (kind, stage, i))
            here -= entry == rank
            until_b[mine] -= kind in ("B", "BW")
            until_w[mine] -= kind == "W"
            left.subtract((part, stage) for part in PARTS[kind])
            waits = sum(_entry(table, item) not in (None, rank) for item in action[number + 1 :])
            first = not {"F": begun, "W": made}.get(kind, born)[mine]
            messages, stays = ahead + waits + sent[at] + gone + here, here + (target == rank)
            last = kind != "F" and not left["B" if kind == "B" else "W", stage]
            others = whole if kind == "W" else [int(index != mine and some) for index, some in enumerate(whole)]
            if rules.gathered_heads == "tied" and (kind, stage) == ("F", 0) and not rules.keeps_gathered:
                others = [0] * len(held)  # the table, which it gathers itself
            counts = (*until_b, *until_w, *born, *made, *reduced_in_b, *reduced, *others, stays, messages)
            there = kind != "W" if rules.keeps_gathered else kind == "F"
            yield LivePass(PassKind(kind, stage, first, last, None, there and bool(whole[mine])), counts)
            begun[mine] = 1
            stays_whole = rules.keeps_gathered or (rules.gathered_heads != "" and stage == table.stages - 1)
            whole[mine] = int(stays_whole and kind == "F") if kind != "W" else whole[mine]
            until_b[mine] += kind == "F"
            until_w[mine] += kind == "B"
            born[mine] |= kind != "F"
            made[mine] |= kind in ("W", "BW")
            (reduced_in_b if kind == "B" else reduced)[mine] |= last
            here = stays
            gone += target not in (None, rank)


def _inputs_kept(found: Iterable[LivePass], table: Table, rank: int) -> Iterator[LivePass]:
    """With buffers in place of messages: gradients of inputs made, and outputs sent, less those of a pass itself."""
    made, several = 0, len(table.rank_stages[rank]) > 1
    sends = [several and _exit(table, ("F", stage, 0)) not in (None, rank) for stage in range(table.stages)]
    for live_pass in found:
        kind, stage = live_pass.pass_kind[:2]
        own = (kind != "W" and stage > 0) + (kind in ("B", "BW") and stage < table.stages - 1)
        yield live_pass._replace(counts=(*live_pass.counts[:-2], 0, made - own))
        made += ((stage > 0) + sends[stage]) * (kind in ("B", "BW"))


def _list_passes(action: Action) -> tuple[Pass, ...]:
    kind, stage, i, backward_stage, backward_i = action
    return (("F", stage, i), ("BW", backward_stage, backward_i)) if kind == "FB" else ((kind, stage, i),)


def _entry(table: Table, each: Pass) -> int | None:
    """The rank that sends a pass its input stream, or its output's gradient; None: none does."""
    kind, stage, i = each
    return _rank(table, i, {"F": stage - 1, "W": -1}.get(kind, stage + 1))


def _exit(table: Table, each: Pass) -> int | None:
    """The rank that receives a pass's result; None: none does."""
    kind, stage, i = each
    return _rank(table, i, {"F": stage + 1, "W": -1}.get(kind, stage - 1))


def _rank(table: Table, micro_batch: int, stage: int) -> int | None:
    return table.paths[micro_batch][stage] if 0 <= stage < table.stages else None


def _count_sent(table: Table) -> Iterator[list[int]]:
    """Per rank, for each action, its sent messages that receivers still need; F, B and W take one unit of time."""
    spans = simulate_schedule(table, seconds=_units).spans
    ends = {part: span.end for row in spans for span in row for part in list_parts(span.action)}
    for rank, row in enumerate(spans):
        under_way: list[float] = []
        counts = []
        for span in row:
            under_way = [end for end in under_way if end > span.start]
            counts.append(len(under_way))
            for kind, stage, i in _list_passes(span.action):
                if _exit(table, (kind, stage, i)) not in (None, rank):
                    under_way.append(ends["F", stage + 1, i] if kind == "F" else ends["B", stage - 1, i])
        yield counts


def _units(task: Task) -> float:
    return {"BW": 2.0, "FB": 3.0}.get(task.kind, 1.0)
