"""Checks that the ranks' messages match: sends without a receive, different sizes or dtypes, and deadlocks.

    rank 0   send A · wait A · receive B          rank 0 waits for rank 1 to receive A,
    rank 1   send B · wait B · receive A          which waits for rank 0 to receive B

Each finding is one line: numbers, ranks, operation, place in the code, and how to fix it. Sizes of an all_to_all are
not compared, since ranks may send uneven counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from fivefold.dry_run.record.tape import SCOPE, Tape, TapeMessage
from fivefold.dry_run.time.streams import Endpoint, MatchedEndpoints, Streams

Part = tuple[int, int, TapeMessage]  # index of the tape, index of the START event, message


def findings(tapes: Sequence[Tape], *, streams: bool) -> list[str]:
    """Return the findings for one step of some ranks. Members without a tape are assumed to act as one that has a tape.

    ``streams``: messages of a communicator run in issue order, as with NCCL; else, as with gloo, in any order.
    """
    played = Streams(tapes, streams=streams)
    return _Mismatches(played).list_mismatches() or deadlocks(played)


# Mismatched messages


class _Mismatches:
    """A search for the first mismatch of each communicator or (sender, receiver) pair: later ones follow from it."""

    def __init__(self, played: Streams) -> None:
        self.tapes, self.played = played.tapes, played
        self.lines: dict[Hashable, list[MatchedEndpoints]] = {}
        for exchange in played.exchanges.values():
            self.lines.setdefault(exchange.key, []).append(exchange)

    def list_mismatches(self) -> list[str]:
        """Return one line per communicator or pair that has a mismatch."""
        lines = (self._line(sorted(line, key=lambda exchange: exchange.number)) for line in self.lines.values())
        return [line for line in lines if line]

    def _line(self, exchanges: list[MatchedEndpoints]) -> str:
        for exchange in exchanges:
            check = self._pair if exchange.parts[0][2].collective == "p2p" else self._group
            mismatch = check(exchange, exchanges)
            if mismatch:
                return mismatch
        return ""

    def _pair(self, exchange: MatchedEndpoints, exchanges: list[MatchedEndpoints]) -> str:
        """Compare a send with its receive; return the finding, or "" if they match."""
        parts = exchange.parts
        index, _, message = parts[0]
        rank, peer = self.tapes[index].rank, message.peer
        what = f"{_ordinal(exchange.number)} p2p {'from' if message.receives else 'to'} rank {peer}"
        if len(parts) < len(message.members[:2]) and peer in self.played.places:
            n_here, n_there = (sum(len(m.parts) > n for m in exchanges) for n in (0, 1))
            have, lack, fix = ("receives", "sends", "send") if message.receives else ("sends", "receives", "receive")
            return (
                f"rank {rank} {have} {self.say(parts[0])} as its {what}, but rank {peer} never {lack} it: {n_here} "
                f"against {n_there} over {message.axis}; {fix} it on rank {peer}, or drop it on rank {rank}"
            )
        if len(parts) > 1 and _size(message) != _size(parts[1][2]):
            return (
                f"rank {rank}: its {what} is {self.say(parts[0])}, which meets {self.say(parts[1])} on rank {peer}; "
                "send and receive the same numel and dtype in the same order"
            )
        return ""

    def _group(self, exchange: MatchedEndpoints, exchanges: list[MatchedEndpoints]) -> str:
        """Compare a collective over all its members; return the finding, or "" if they match."""
        parts = exchange.parts
        first = parts[0]
        index, _, message = first
        own = self.tapes[index].rank
        members = [member for member in message.members if member in self.played.places]
        if len(parts) >= len(members) and all(_kind(part[2]) == _kind(message) for part in parts[1:]):
            return ""
        counts = Counter(self.tapes[at].rank for m in exchanges for at, _, _ in m.parts)
        ending = f"; they issue {', '.join(f'{counts[rank]} on rank {rank}' for rank in members)}"
        uneven = ending if len({counts[rank] for rank in members}) > 1 else ""
        fix = "let every rank of the group issue the same collectives in the same order"
        what = f"{_ordinal(exchange.number)} collective over {message.axis} of ranks {_abbreviate(message.members)}"
        for part in parts[1:]:
            if _kind(part[2]) != _kind(message):
                rank = self.tapes[part[0]].rank
                return f"rank {rank}: its {what} is {self.say(part)}, on rank {own} {self.say(first)}{uneven}; {fix}"
        if len(parts) < len(members):
            arrived = {self.tapes[at].rank for at, _, _ in parts}
            missing = [rank for rank in members if rank not in arrived]
            return f"rank {own}: the {what}, {self.say(first)}, never comes on {_ranks(missing)}{uneven}; {fix}"
        return ""

    def say(self, part: Part) -> str:
        """Describe a message, with its scope and site."""
        return _describe(self.tapes[part[0]], part)


def _size(message: TapeMessage) -> tuple[str, int]:
    return message.dtype, message.numel


def _kind(message: TapeMessage) -> tuple[str, str, int]:
    return message.collective, message.dtype, -1 if message.collective == "all_to_all" else message.numel


# Deadlocks: cycles in the graph of waiting ranks


class _Step(NamedTuple):
    """A link of the wait chain: a rank's endpoint of a message that cannot begin."""

    endpoint: Endpoint
    waits: bool  # the rank is blocked in the WAIT of this message
    queued: bool = False  # the endpoint that the previous step needs is queued behind this one on its stream


def deadlocks(played: Streams) -> list[str]:
    """Simulate the tapes; return a line for the cycle of waiting ranks, then one per rank blocked behind it."""
    if played.run():
        return []
    blocked = {index: blocked.endpoint for index, blocked in played.blocked.items()}
    path: list[_Step] = []
    step: _Step | None = _Step(next(iter(blocked.values())), waits=True)
    while step is not None and step.endpoint not in [link.endpoint for link in path]:
        path.append(step)
        step = _predecessor(step.endpoint, blocked)
    if step is not None:
        begin = next(i for i, link in enumerate(path) if link.endpoint is step.endpoint)
        path = [step, *path[begin + 1 :]]  # the repeated step, as reached from the last one: it has ``queued`` set
    ranks = sorted({played.tapes[link.endpoint.rank].rank for link in path})
    fix = (
        "issue them in the same order on both ranks, as one batch, or over groups of their own"
        if any(link.queued for link in path)
        else "start what the other waits for before waiting"
    )
    lines = [f"deadlock of {_ranks(ranks)}: {'; '.join(_describe_step(link, played) for link in path)}; {fix}"]
    for index, endpoint in sorted(blocked.items()):
        if not any(link.endpoint.rank == index for link in path):
            lines.append(f"behind a deadlock, {_describe_step(_Step(endpoint, waits=True), played)}; fix that")
    return lines


def _describe_step(step: _Step, played: Streams) -> str:
    """Describe what a rank waits for, or which message blocks its stream."""
    tape = played.tapes[step.endpoint.rank]
    message = _describe(
        tape, _find_unstarted(step.endpoint).parts[_find_unstarted(step.endpoint).endpoints.index(step.endpoint)]
    )
    scope_name = scope(tape, played.blocked[step.endpoint.rank].at) if step.waits else ""
    if step.queued:
        waits_for = f"what it waits for in {scope_name}, " if step.waits else ""
        return f"rank {tape.rank} has its part of that on one stream behind {waits_for}{message}"
    return f"rank {tape.rank} waits in {scope_name} for {message}"


def _predecessor(endpoint: Endpoint, blocked: dict[int, Endpoint]) -> _Step | None:
    """Return what must end before this endpoint's message can begin.

    It is the WAIT that keeps another member from issuing its part, or the message before that part on its stream; None
    if there is no such rank.
    """
    for other in _find_unstarted(endpoint).endpoints:
        if other.posted < 0:
            blocked_endpoint = blocked.get(other.rank)
            return _Step(blocked_endpoint, waits=True) if blocked_endpoint is not None else None
        if other.missing and other.before is not None:
            return _Step(other.before, waits=blocked.get(other.rank) is other.before, queued=True)
    return None


def _find_unstarted(endpoint: Endpoint) -> MatchedEndpoints:
    """Return the first message of an endpoint that has not begun."""
    return next(exchange for exchange in endpoint.exchanges if exchange.missing)


# Descriptions


def scope(tape: Tape, at: int) -> str:
    """Describe the scope of event ``at``."""
    for event in range(at, -1, -1):
        if tape.events[4 * event] == SCOPE:
            return str(tape.scopes[tape.events[4 * event + 1]])
    return "start"


def _describe(tape: Tape, part: Part) -> str:
    _, at, message = part
    return f"{_describe_message(message)} in {scope(tape, at)} ({tape.sites[message.site]})"


def _describe_message(message: TapeMessage) -> str:
    direction = (
        (" from " if message.receives else " to ") + f"rank {message.peer}" if message.collective == "p2p" else ""
    )
    return f"{message.collective} of {message.numel} {message.dtype} over {message.axis}{direction}"


def _ordinal(number: int) -> str:
    number += 1
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _abbreviate(members: Sequence[int]) -> str:
    names = [str(member) for member in members]
    return ", ".join(names if len(names) <= 8 else [*names[:4], "…", *names[-2:]])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_abbreviate(ranks)}"
