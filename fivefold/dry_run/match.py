"""Checks that the ranks' messages match: sends without a receive, different sizes or dtypes, and deadlocks.

    rank 0   send A · wait A · receive B          rank 0 waits for rank 1 to receive A,
    rank 1   send B · wait B · receive A          which waits for rank 0 to receive B

Each finding is one line: numbers, ranks, operation, place in the code, and how to mend it. Sizes of an all_to_all are
not compared, since ranks may send uneven counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from fivefold.dry_run.record.tape import SCOPE, Message, Tape
from fivefold.dry_run.time.streams import Endpoint, Exchange, Streams

Part = tuple[int, int, Message]  # index of the tape, index of the START event, message


def findings(tapes: Sequence[Tape], *, streams: bool) -> list[str]:
    """Return the findings for one step of some ranks. Members without a tape are taken to do as one that has a tape.

    ``streams``: messages of a communicator run in issue order, as with NCCL; else, as with gloo, in any order.
    """
    played = Streams(tapes, streams=streams)
    return _Mismatches(played).found() or deadlocks(played)


# Mismatched messages


class _Mismatches:
    """Finds the first mismatch of each communicator or (sender, receiver) pair: later ones follow from it."""

    def __init__(self, played: Streams) -> None:
        self.tapes, self.played = played.tapes, played
        self.lines: dict[Hashable, list[Exchange]] = {}
        for exchange in played.exchanges.values():
            self.lines.setdefault(exchange.key, []).append(exchange)

    def found(self) -> list[str]:
        """Return one line per communicator or pair that has a mismatch."""
        lines = (self._line(sorted(line, key=lambda exchange: exchange.number)) for line in self.lines.values())
        return [line for line in lines if line]

    def _line(self, exchanges: list[Exchange]) -> str:
        for exchange in exchanges:
            check = self._pair if exchange.parts[0][2].collective == "p2p" else self._group
            wrong = check(exchange, exchanges)
            if wrong:
                return wrong
        return ""

    def _pair(self, exchange: Exchange, exchanges: list[Exchange]) -> str:
        """Compare a send with its receive; return the finding, or "" if they match."""
        parts = exchange.parts
        place, _, message = parts[0]
        own, other = self.tapes[place].rank, message.peer
        what = f"{_ordinal(exchange.number)} p2p {'from' if message.receives else 'to'} rank {other}"
        if len(parts) < len(message.members[:2]) and other in self.played.places:
            here, there = (sum(len(m.parts) > n for m in exchanges) for n in (0, 1))
            have, lack, mend = ("receives", "sends", "send") if message.receives else ("sends", "receives", "receive")
            return (
                f"rank {own} {have} {self.say(parts[0])} as its {what}, but rank {other} never {lack} it: {here} "
                f"against {there} over {message.axis}; {mend} it on rank {other}, or drop it on rank {own}"
            )
        if len(parts) > 1 and _size(message) != _size(parts[1][2]):
            return (
                f"rank {own}: its {what} is {self.say(parts[0])}, which meets {self.say(parts[1])} on rank {other}; "
                "send and receive the same numel and dtype in the same order"
            )
        return ""

    def _group(self, exchange: Exchange, exchanges: list[Exchange]) -> str:
        """Compare a collective over all its members; return the finding, or "" if they match."""
        parts = exchange.parts
        first = parts[0]
        place, _, message = first
        own = self.tapes[place].rank
        others = [member for member in message.members if member in self.played.places]
        if len(parts) >= len(others) and all(_kind(part[2]) == _kind(message) for part in parts[1:]):
            return ""
        counts = Counter(self.tapes[at].rank for m in exchanges for at, _, _ in m.parts)
        ending = f"; they issue {', '.join(f'{counts[rank]} on rank {rank}' for rank in others)}"
        uneven = ending if len({counts[rank] for rank in others}) > 1 else ""
        mend = "let every rank of the group issue the same collectives in the same order"
        what = f"{_ordinal(exchange.number)} collective over {message.axis} of ranks {_abbreviated(message.members)}"
        for part in parts[1:]:
            if _kind(part[2]) != _kind(message):
                rank = self.tapes[part[0]].rank
                return f"rank {rank}: its {what} is {self.say(part)}, on rank {own} {self.say(first)}{uneven}; {mend}"
        if len(parts) < len(others):
            came = {self.tapes[at].rank for at, _, _ in parts}
            missing = [rank for rank in others if rank not in came]
            return f"rank {own}: the {what}, {self.say(first)}, never comes on {_ranks(missing)}{uneven}; {mend}"
        return ""

    def say(self, part: Part) -> str:
        """Return a message in words, with its scope and site."""
        return _describe(self.tapes[part[0]], part)


def _size(message: Message) -> tuple[str, int]:
    return message.dtype, message.numel


def _kind(message: Message) -> tuple[str, str, int]:
    return message.collective, message.dtype, -1 if message.collective == "all_to_all" else message.numel


# Deadlocks: cycles in the graph of who waits for whom


class _Step(NamedTuple):
    """One link of the wait chain: a rank's endpoint of a message that cannot begin."""

    endpoint: Endpoint
    waits: bool  # the rank is blocked in the WAIT of this message
    queued: bool = False  # the endpoint that the previous step needs is queued behind this one on its stream


def deadlocks(played: Streams) -> list[str]:
    """Play the tapes; return a line for the cycle of waiting ranks, then one per rank blocked behind it; [] if none."""
    if played.run():
        return []
    blocked = {place: blocked.endpoint for place, blocked in played.blocked.items()}
    path: list[_Step] = []
    step: _Step | None = _Step(next(iter(blocked.values())), waits=True)
    while step is not None and step.endpoint not in [each.endpoint for each in path]:
        path.append(step)
        step = _predecessor(step.endpoint, blocked)
    if step is not None:
        begin = next(i for i, each in enumerate(path) if each.endpoint is step.endpoint)
        path = [step, *path[begin + 1 :]]  # the repeated step, as it is reached from the last: it knows ``queued``
    ranks = sorted({played.tapes[each.endpoint.rank].rank for each in path})
    mend = ("issue them in the same order on both ranks, as one batch, or over groups of their own"
            if any(each.queued for each in path) else "start what the other waits for before waiting")  # fmt: skip
    lines = [f"deadlock of {_ranks(ranks)}: {'; '.join(_describe_step(each, played) for each in path)}; {mend}"]
    for place, endpoint in sorted(blocked.items()):
        if not any(each.endpoint.rank == place for each in path):
            lines.append(f"behind a deadlock, {_describe_step(_Step(endpoint, waits=True), played)}; mend that")
    return lines


def _describe_step(step: _Step, played: Streams) -> str:
    """Say what a rank waits for, or which message blocks its stream."""
    tape = played.tapes[step.endpoint.rank]
    message = _describe(tape, _unstarted(step.endpoint).parts[_unstarted(step.endpoint).endpoints.index(step.endpoint)])
    place = scope(tape, played.blocked[step.endpoint.rank].at) if step.waits else ""
    if step.queued:
        waited = f"what it waits for in {place}, " if step.waits else ""
        return f"rank {tape.rank} has its part of that on one stream behind {waited}{message}"
    return f"rank {tape.rank} waits in {place} for {message}"


def _predecessor(endpoint: Endpoint, blocked: dict[int, Endpoint]) -> _Step | None:
    """Return what must end before this endpoint's message can begin: the WAIT that keeps another member from issuing
    its part, or the message before that part on its stream; None if no rank is to blame.
    """
    for other in _unstarted(endpoint).endpoints:
        if other.posted < 0:
            found = blocked.get(other.rank)
            return _Step(found, waits=True) if found is not None else None
        if other.missing and other.before is not None:
            return _Step(other.before, waits=blocked.get(other.rank) is other.before, queued=True)
    return None


def _unstarted(endpoint: Endpoint) -> Exchange:
    """Return the first message of an endpoint that has not begun."""
    return next(exchange for exchange in endpoint.exchanges if exchange.missing)


# Words


def scope(tape: Tape, at: int) -> str:
    """Return the scope, in words, of event ``at``."""
    for event in range(at, -1, -1):
        if tape.events[4 * event] == SCOPE:
            return str(tape.scopes[tape.events[4 * event + 1]])
    return "start"


def _describe(tape: Tape, part: Part) -> str:
    _, at, message = part
    return f"{_describe_message(message)} in {scope(tape, at)} ({tape.sites[message.site]})"


def _describe_message(message: Message) -> str:
    way = (" from " if message.receives else " to ") + f"rank {message.peer}" if message.collective == "p2p" else ""
    return f"{message.collective} of {message.numel} {message.dtype} over {message.axis}{way}"


def _ordinal(number: int) -> str:
    number += 1
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _abbreviated(members: Sequence[int]) -> str:
    shown = [str(member) for member in members]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "…", *shown[-2:]])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_abbreviated(ranks)}"
