"""The passes of a pipeline from its schedule, those of all ranks as columns; without those that cannot be the peak.

Passes whose counts are exceeded everywhere by another pass of the same kind are left out. An action of a schedule may
be two passes, and streams between stages are allocated during each:

    action   F0.2   F0.3+BW1.1   BW0.0        passes   F0.2   F0.3   BW1.1   BW0.0

Receives are posted one action ahead; a sent tensor is freed when its receiver is done with it, where F, B and W take
one unit of time each (``schedule/p2p.py``). Commands that predict one layout without a pipeline do not import numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.columns import BW, FB, KINDS, B, F, W, build_dependencies
from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.pipeline_schedule import ScheduleName
from fivefold.layout.schedule.simulation import simulate_schedule
from fivefold.layout.schedule.table import Table
from fivefold.planner.counts.memory.in_flight import Kind, LivePass, PassKind, PassOptions, PreviousPass

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

GROUPS = 7  # counts of each stage
COUNTED_AT_ONCE = 2**19  # elements of a counts column; ranks are counted together up to this size


class PassStreams(NamedTuple):
    """The passes of a table as columns, rank by rank in time order.

    An FB is F, then BW, which hold no less than the two if they interleave at their messages.

    ``kind``: an index into ``columns.KINDS``. ``held_streams``: streams from a stage of the rank to another after the
    pass; ``messages``: all streams allocated during it.
    """

    rank: Ints
    kind: Ints
    stage: Ints
    held_streams: Ints
    messages: Ints


def pass_streams(table: Table) -> PassStreams:
    """Return all passes of a table."""
    columns, stages = table.columns, table.stages
    is_fb = columns.kind == FB
    action = np.repeat(np.arange(len(is_fb)), 1 + is_fb)
    is_second = np.zeros(len(action), bool)  # the second pass of its action
    is_second[1:] = action[1:] == action[:-1]
    kind = np.where(is_fb[action], np.where(is_second, BW, F), columns.kind[action])
    stage = np.where(is_second, columns.backward_stage[action], columns.stage[action])
    micro_batch = np.where(is_second, columns.backward_micro_batch[action], columns.micro_batch[action])
    rank, is_forward = columns.rank[action], kind == F
    paths = np.full((table.micro_batches, stages + 2), -1)  # none before the first stage and after the last
    paths[:, 1:-1] = table.paths
    stays_below = ~is_forward & (stage < table.first_backward)  # a B that does nothing
    ends_here = ~is_forward & (stage <= table.first_backward)
    source = np.where((kind == W) | stays_below, -1, paths[micro_batch, stage + np.where(is_forward, 0, 2)])
    target = np.where((kind == W) | ends_here, -1, paths[micro_batch, stage + np.where(is_forward, 2, 0)])
    receives = (source >= 0) & (source != rank)
    sends = (target >= 0) & (target != rank)
    produced_part = 2 * (micro_batch * stages + stage) + np.where(is_forward, 2, -1)
    in_flight = _count_messages_in_flight(table, action[sends], produced_part[sends])
    # receives of the rank's next action, and of a later pass of the same action
    receives_by_action = np.append(np.bincount(action, weights=receives, minlength=len(is_fb)).astype(np.int64), 0)
    same_rank = np.append(columns.rank[1:] == columns.rank[:-1], False)
    posted_receives = np.where(same_rank, receives_by_action[1:], 0)[action] + np.append(
        receives[1:] & is_second[1:], False
    )
    just_sent = np.append(False, sends[:-1]) & is_second  # sent by the previous pass of the same action
    change = (target == rank).astype(np.int64) - (source == rank)
    held_streams = np.cumsum(change)
    first_of_rank = np.searchsorted(rank, rank)  # index of the first pass of its rank
    held_streams -= (held_streams - change)[first_of_rank]
    local_streams = held_streams - (target == rank)
    return PassStreams(rank, kind, stage, held_streams, posted_receives + in_flight[action] + just_sent + local_streams)


def _count_messages_in_flight(table: Table, action: Ints, part: Ints) -> Ints:
    """Return, for each action of a table, the messages that its rank has sent before and that receivers still need.

    ``action`` sends a message to the action that makes ``part``.
    """
    columns, order = table.columns, table.order
    kind_seconds = np.array([_get_units(Task(kind, 0, 0)) for kind in KINDS])
    ends = np.array(simulate_schedule(table, seconds=_get_units).ends)[order.places]
    end = float(ends.max(initial=0.0)) + 1
    starts = ends - kind_seconds[columns.kind] + columns.rank * end
    receiver = build_dependencies(columns, stages=table.stages).maker[part]
    end_places = np.searchsorted(starts, ends[receiver] + columns.rank[action] * end)
    begin_counts, stop_counts = (
        np.bincount(places, minlength=len(ends) + 1) for places in (action + 1, np.maximum(end_places, action + 1))
    )
    return np.asarray(np.cumsum(begin_counts - stop_counts)[:-1])


def _get_units(task: Task) -> float:
    return {"BW": 2.0, "FB": 3.0}.get(task.kind, 1.0)


class LivePasses(NamedTuple):
    """The passes of every rank as columns: their counts, their rank (in order), and their index into ``distinct``."""

    counts: Ints
    rank: Ints
    distinct: tuple[PassKind, ...]
    kind_index: Ints

    def iterate_rank(self, rank: int) -> Iterator[LivePass]:
        """Yield the passes of one rank; they are in time order without a pipeline, or if no pass was left out."""
        first, end = np.searchsorted(self.rank, (rank, rank + 1)).tolist()
        for counts, kind_index in zip(
            self.counts[first:end].tolist(), self.kind_index[first:end].tolist(), strict=True
        ):
            yield LivePass(self.distinct[kind_index], tuple(counts))


def iterate_passes(table: Table, rank: int, options: PassOptions) -> Iterator[LivePass]:
    """Yield every pass of one pipeline rank, in time order."""
    return next(_count_ranks(table, options, range(rank, rank + 1))).to_live_passes(table.stages).iterate_rank(rank)


@lru_cache(maxsize=1024)
def list_live_passes(name: ScheduleName, pp: int, v: int, micro_batches: int, options: PassOptions) -> LivePasses:
    """Return the passes of a schedule that can be the peak of a rank."""
    table = schedule(name, pp=pp, v=v, micro_batches=micro_batches, first_backward=options.first_backward)
    passes_by_ranks = [counted.select_undominated() for counted in _count_ranks(table, options, range(pp))]
    columns = (np.concatenate(column) for column in zip(*passes_by_ranks, strict=True))
    return PassColumns._make(columns).to_live_passes(table.stages)


@lru_cache(maxsize=1024)
def group_equal_passes(
    name: ScheduleName, pp: int, v: int, micro_batches: int, options: PassOptions, kinds: tuple[int, ...]
) -> tuple[list[int], Ints]:
    """Return one kind of each group of equivalent kinds of ``list_live_passes``, and the group of every pass.

    Kinds are equivalent if they differ only in stages that are equal (``kinds``). The first result holds indices into
    ``distinct``, the second for every pass its index among these.
    """
    passes_of_ranks = list_live_passes(name, pp, v, micro_batches, options)
    number_of_group: dict[object, int] = {}
    group_numbers = []
    for kind, stage, first, last, previous, is_gathered in passes_of_ranks.distinct:
        previous_key = previous and (previous.kind, kinds[previous.stage], previous.last, previous.stage == stage)
        group_numbers.append(
            number_of_group.setdefault(
                (kind, kinds[stage], first, last, previous_key, is_gathered), len(number_of_group)
            )
        )
    return [group_numbers.index(number) for number in range(len(number_of_group))], np.array(group_numbers)[
        passes_of_ranks.kind_index
    ]


class PassColumns(NamedTuple):
    """Passes as columns, rank by rank in time order; ``previous``: 0 for None, else one more than its number."""

    rank: Ints
    kind: Ints
    stage: Ints
    first: Bools
    last: Bools
    previous: Ints
    is_gathered: Bools
    counts: Ints

    def select_undominated(self) -> PassColumns:
        """Return the passes that no other of their rank, stage and kind exceeds, ordered by these.

        Reduced gradients are compared with the opposite sign, because the sums that they replace are larger. A first
        backward, which allocates its sums, is dropped if a later one of its kind has them already.
        """
        n_stages = self.counts.shape[1] // GROUPS
        state_code = self.previous * 2 + self.is_gathered
        counts = self.counts.astype(np.int32)  # of micro-batches and tensors; half the memory to compare
        counts[:, 4 * n_stages : 6 * n_stages] *= -1
        group = ((self.rank * (self.stage.max() + 1) + self.stage) * len(KINDS) + self.kind) * (
            state_code.max() + 1
        ) + state_code
        is_plain = ~(self.first | self.last) & (self.kind != F)
        end_code = self.first * 2 + self.last
        candidates = np.lexsort((~is_plain, -counts.sum(axis=1), group))  # none exceeds an earlier one
        kept_passes = []
        while len(candidates):
            starts = np.flatnonzero(np.append(True, group[candidates[1:]] != group[candidates[:-1]]))
            best = candidates[starts]
            kept_passes.append(best)
            best_of_candidate = np.repeat(best, np.diff(np.append(starts, len(candidates))))
            is_comparable = (end_code[candidates] == end_code[best_of_candidate]) | (
                is_plain[best_of_candidate] & ~self.last[candidates]
            )
            candidates = candidates[~(is_comparable & (counts[candidates] <= counts[best_of_candidate]).all(axis=1))]
        all_kept = np.concatenate(kept_passes)
        order = all_kept[np.lexsort((all_kept, self.kind[all_kept], self.stage[all_kept], self.rank[all_kept]))]
        return PassColumns._make(column[order] for column in self)

    def to_live_passes(self, stages: int) -> LivePasses:
        """Return the same passes with the list of their distinct kinds."""
        code = self.kind * stages + self.stage
        code = ((code * 2 + self.first) * 2 + self.last) * 2 + self.is_gathered
        code = code * (int(self.previous.max()) + 1) + self.previous
        _, first_index, place = np.unique(code, return_index=True, return_inverse=True)
        columns = (column[first_index].tolist() for column in self[1:7])
        distinct = tuple(
            PassKind(_get_kind(kind), stage, first, last, _find_previous(previous, stages), is_gathered)
            for kind, stage, first, last, previous, is_gathered in zip(*columns, strict=True)
        )
        return LivePasses(self.counts, self.rank, distinct, place)


def _get_kind(kind: int) -> Kind:
    return ("B", "BW", "F", "W")[kind]


def _find_previous(number: int, stages: int) -> PreviousPass | None:
    kind_and_stage, last = divmod(number - 1, 2)
    return PreviousPass(_get_kind(kind_and_stage // stages), kind_and_stage % stages, bool(last)) if number else None


def _count_ranks(table: Table, options: PassOptions, ranks: range) -> Iterator[PassColumns]:
    """Yield the passes of ``ranks``, several ranks at a time."""
    streams, width = pass_streams(table), len(table.rank_stages[0])
    starts = np.searchsorted(streams.rank, np.arange(table.pp + 1)).tolist()
    begin = ranks.start
    for rank in ranks:
        if rank + 1 == ranks.stop or (starts[rank + 2] - starts[begin]) * width > COUNTED_AT_ONCE:
            rank_slice = slice(starts[begin], starts[rank + 1])
            yield _count(table, options, PassStreams._make(column[rank_slice] for column in streams))
            begin = rank + 1


def _count(table: Table, options: PassOptions, passes: PassStreams) -> PassColumns:
    """Return the passes of some ranks."""
    rank, kind, stage, held_streams, messages = passes
    rank_stages = np.array(table.rank_stages)
    is_own_stage = rank_stages[rank] == stage[:, None]  # the pass's own stage among those of its rank
    start = np.searchsorted(rank, rank)  # the first pass of its rank
    end = np.searchsorted(rank, rank, side="right") - 1

    def count_previous(selected: Bools) -> Ints:
        """Return, by stage of the rank, how many passes of ``selected`` precede each pass."""
        is_selected_here = is_own_stage & selected[:, None]
        count = np.cumsum(is_selected_here, axis=0, dtype=np.int32) - is_selected_here
        return np.asarray(count - count[start])

    forward, backward, is_w = kind == F, (kind == B) | (kind == BW), kind == W
    split_before = count_previous(kind == B)
    w_grads_before = count_previous(is_w | (kind == BW))  # sums: that W, or BW, makes
    forwards_before = count_previous(forward)
    backwards_before = count_previous(backward)
    w_before = count_previous(is_w)
    own_backward = is_own_stage & backward[:, None]
    own_w = is_own_stage & is_w[:, None]
    between_f_and_b = forwards_before - backwards_before - own_backward
    between_b_and_w = split_before - w_before - own_w
    has_sums = (backwards_before + w_before) > 0
    has_w_sums = w_grads_before > 0
    backwards_until_now = backwards_before + own_backward
    w_until_now = w_grads_before + (is_own_stage & (is_w | (kind == BW))[:, None])
    remaining = np.where(
        (kind == B)[:, None], backwards_until_now[end] - backwards_until_now, w_until_now[end] - w_until_now
    )
    last = ~forward & (remaining[is_own_stage] == 0)
    is_reduced_in_b = count_previous(last & (kind == B)) > 0
    is_reduced = count_previous(last & (kind != B)) > 0
    has_begun = (forwards_before + backwards_before + w_before) > 0
    first = ~np.where(
        forward, has_begun[is_own_stage], np.where(is_w, has_w_sums[is_own_stage], has_sums[is_own_stage])
    )
    gathered = _find_gathered(table, options, passes, is_own_stage, rank_stages[rank], start)
    gathered_by_others = gathered & ~(is_own_stage & ~is_w[:, None])
    if options.gathered_heads == "tied" and not options.keeps_gathered:
        gathered_by_others[forward & (stage == 0)] = False  # the table, which it gathers itself
    if options.has_recv_buffers:
        held_streams = np.zeros_like(held_streams)
        messages = _count_inputs_kept(table, passes, start)
    pending = {"never": np.zeros_like(last), "last": last, "each": np.ones_like(last)}[options.pending_reductions]
    leaves_reduction = ~forward & pending
    activations, gradients = (between_f_and_b, between_b_and_w), (has_sums, has_w_sums, is_reduced_in_b, is_reduced)
    number = np.where(leaves_reduction, 1 + (kind * table.stages + stage) * 2 + last, 0)
    return PassColumns(
        rank,
        kind,
        stage,
        first,
        last,
        np.where(start == np.arange(len(rank)), 0, np.append(0, number[:-1])),
        gathered[is_own_stage] & (~is_w if options.keeps_gathered else forward),
        np.column_stack([*activations, *gradients, gathered_by_others, held_streams, messages]).astype(np.int64),
    )


def _find_gathered(
    table: Table, options: PassOptions, passes: PassStreams, is_own_stage: Bools, stages_of_rank: Ints, start: Ints
) -> Bools:
    """Return, by stage of the rank, True if an F left its weights gathered: the last of its F, B and BW was an F."""
    if not options.keeps_gathered and not options.gathered_heads:
        return np.zeros_like(is_own_stage)
    changes = np.where(passes.kind == W, 0, 2 * np.arange(1, len(is_own_stage) + 1) + (passes.kind == F))
    latest = np.maximum.accumulate(is_own_stage * changes[:, None], axis=0)
    latest = np.concatenate([np.zeros_like(latest[:1]), latest[:-1]])
    has_gathered = (latest % 2 == 1) & (latest // 2 > start[:, None])
    return np.asarray(has_gathered if options.keeps_gathered else has_gathered & (stages_of_rank == table.stages - 1))


def _count_inputs_kept(table: Table, passes: PassStreams, start: Ints) -> Ints:
    """Return the number of sent tensors that earlier backwards keep, because the step waits for them only at its end.

    These are gradients of inputs and, on a rank of several stages, sent outputs. The buffers that a pass itself counts
    are subtracted: its input and, in a backward, the gradient of its output.
    """
    rank, kind, stage, *_ = passes
    backward = (kind == B) | (kind == BW)
    path = np.array([*table.paths[0], -1])
    sends = (path[stage + 1] != rank) & (stage + 1 < table.stages) & (len(table.rank_stages[0]) > 1)
    own_buffers = ((kind != W) & (stage > 0)).astype(np.int64) + (backward & (stage < table.stages - 1))
    left_by_pass = ((stage > 0).astype(np.int64) + sends) * backward
    left_before = np.cumsum(left_by_pass) - left_by_pass
    return np.asarray(left_before - left_before[start] - own_buffers)
