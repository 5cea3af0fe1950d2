"""Will the ranks' messages meet? What is sent and never taken, sizes that differ, and ranks that wait in a circle.

    rank 0   send A · wait A · receive B          rank 0 waits for rank 1 to receive A,
    rank 1   send B · wait B · receive A          which waits for rank 0 to receive B

Each finding is one line: numbers, ranks, operation and place, and how to mend it. Of an all_to_all the sizes are not
compared, since ranks may send unevenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from fivefold.check.dryrun.record.tape import SCOPE, Message, Tape
from fivefold.check.dryrun.time.streams import Endpoint, Exchange, Streams

Part = tuple[int, int, Message]  # place among the tapes, event, message


def findings(tapes: Sequence[Tape], *, streams: bool) -> list[str]:
    """Of one step of some ranks; members of a group that are not among them do as one that is.

    ``streams``: messages of a communicator run in the order of issue, as NCCL's; else (gloo) any that have met.
    """
    played = Streams(tapes, streams=streams)
    return _Mismatches(played).found() or deadlocks(played)


# Messages that do not fit


class _Mismatches:
    """The first of every communicator, or pair of sender and receiver: what follows is out of step by it."""

    def __init__(self, played: Streams) -> None:
        self.tapes, self.played = played.tapes, played
        self.lines: dict[Hashable, list[Exchange]] = {}
        for exchange in played.exchanges.values():
            self.lines.setdefault(exchange.key, []).append(exchange)

    def found(self) -> list[str]:
        """One line each."""
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
        """A send and its receive."""
        parts = exchange.parts
        place, _, message = parts[0]
        own, other = self.tapes[place].rank, message.peer
        what = f"{_nth(exchange.number)} p2p {'from' if message.receives else 'to'} rank {other}"
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
        """A collective on all its members."""
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
        what = f"{_nth(exchange.number)} collective over {message.axis} of ranks {_few(message.members)}"
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
        """A message in words, with its place."""
        return _said(self.tapes[part[0]], part)


def _size(message: Message) -> tuple[str, int]:
    return message.dtype, message.numel


def _kind(message: Message) -> tuple[str, str, int]:
    return message.collective, message.dtype, -1 if message.collective == "all_to_all" else message.numel


# Ranks that wait in a circle


class _Step(NamedTuple):
    """A rank's part in a message that cannot begin."""

    endpoint: Endpoint
    waits: bool  # the rank waits for it
    queued: bool = False  # what the step before needs of this rank stands behind it on a stream


def deadlocks(played: Streams) -> list[str]:
    """After who waits for whom: the circle, then all who wait behind it. None, if every rank comes to its end."""
    if played.run():
        return []
    blocked = {place: blocked.endpoint for place, blocked in played.blocked.items()}
    path: list[_Step] = []
    step: _Step | None = _Step(next(iter(blocked.values())), waits=True)
    while step is not None and step.endpoint not in [each.endpoint for each in path]:
        path.append(step)
        step = _next(step.endpoint, blocked)
    if step is not None:
        begin = next(i for i, each in enumerate(path) if each.endpoint is step.endpoint)
        path = [step, *path[begin + 1 :]]  # as it is reached from the last
    ranks = sorted({played.tapes[each.endpoint.rank].rank for each in path})
    mend = ("issue them in the same order on both ranks, as one batch, or over groups of their own"
            if any(each.queued for each in path) else "start what the other waits for before waiting")  # fmt: skip
    lines = [f"deadlock of {_ranks(ranks)}: {'; '.join(_words(each, played) for each in path)}; {mend}"]
    for place, endpoint in sorted(blocked.items()):
        if not any(each.endpoint.rank == place for each in path):
            lines.append(f"behind a deadlock, {_words(_Step(endpoint, waits=True), played)}; mend that")
    return lines


def _words(step: _Step, played: Streams) -> str:
    """What a rank waits for, or has on a stream."""
    tape = played.tapes[step.endpoint.rank]
    message = _said(tape, _open(step.endpoint).parts[_open(step.endpoint).endpoints.index(step.endpoint)])
    place = scope(tape, played.blocked[step.endpoint.rank].at) if step.waits else ""
    if step.queued:
        waited = f"what it waits for in {place}, " if step.waits else ""
        return f"rank {tape.rank} has its part of that on one stream behind {waited}{message}"
    return f"rank {tape.rank} waits in {place} for {message}"


def _next(endpoint: Endpoint, blocked: dict[int, Endpoint]) -> _Step | None:
    """What must come first: what a rank waits for instead of issuing its part, or what lies before it on a stream."""
    for other in _open(endpoint).endpoints:
        if other.posted < 0:
            found = blocked.get(other.rank)
            return _Step(found, waits=True) if found is not None else None
        if other.missing and other.before is not None:
            return _Step(other.before, waits=blocked.get(other.rank) is other.before, queued=True)
    return None


def _open(endpoint: Endpoint) -> Exchange:
    """A message of the side that has not begun."""
    return next(exchange for exchange in endpoint.exchanges if exchange.missing)


# Words


def scope(tape: Tape, at: int) -> str:
    """Of the event at that place."""
    for event in range(at, -1, -1):
        if tape.events[4 * event] == SCOPE:
            return str(tape.scopes[tape.events[4 * event + 1]])
    return "start"


def _said(tape: Tape, part: Part) -> str:
    _, at, message = part
    return f"{_named(message)} in {scope(tape, at)} ({tape.sites[message.site]})"


def _named(message: Message) -> str:
    way = (" from " if message.receives else " to ") + f"rank {message.peer}" if message.collective == "p2p" else ""
    return f"{message.collective} of {message.numel} {message.dtype} over {message.axis}{way}"


def _nth(number: int) -> str:
    number += 1
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _few(members: Sequence[int]) -> str:
    shown = [str(member) for member in members]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "…", *shown[-2:]])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_few(ranks)}"
