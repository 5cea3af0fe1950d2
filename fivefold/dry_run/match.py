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

IssuedMessage = tuple[int, int, TapeMessage]  # index of the tape, index of the START event, message


def list_findings(tapes: Sequence[Tape], *, streams: bool) -> list[str]:
    """Return the findings for one step of some ranks. Members without a tape are assumed to act as one that has a tape.

    ``streams``: messages of a communicator run in issue order, as with NCCL; else, as with gloo, in any order.
    """
    simulation = Streams(tapes, streams=streams)
    return _Mismatches(simulation).list_mismatches() or find_deadlocks(simulation)


# Mismatched messages


class _Mismatches:
    """A search for the first mismatch of each communicator or (sender, receiver) pair: later ones follow from it."""

    def __init__(self, simulation: Streams) -> None:
        self.tapes, self.simulation = simulation.tapes, simulation
        self.exchanges_by_key: dict[Hashable, list[MatchedEndpoints]] = {}
        for exchange in simulation.exchanges.values():
            self.exchanges_by_key.setdefault(exchange.key, []).append(exchange)

    def list_mismatches(self) -> list[str]:
        """Return one line per communicator or pair that has a mismatch."""
        findings = (
            self._find_first_mismatch(sorted(exchanges, key=lambda exchange: exchange.number))
            for exchanges in self.exchanges_by_key.values()
        )
        return [finding for finding in findings if finding]

    def _find_first_mismatch(self, exchanges: list[MatchedEndpoints]) -> str:
        for exchange in exchanges:
            check = self._check_p2p if exchange.messages[0][2].collective == "p2p" else self._check_collective
            mismatch = check(exchange, exchanges)
            if mismatch:
                return mismatch
        return ""

    def _check_p2p(self, exchange: MatchedEndpoints, exchanges: list[MatchedEndpoints]) -> str:
        """Compare a send with its receive; return the finding, or "" if they match."""
        messages = exchange.messages
        index, _, message = messages[0]
        rank, peer = self.tapes[index].rank, message.peer
        label = f"{_format_ordinal(exchange.number)} p2p {'from' if message.receives else 'to'} rank {peer}"
        if len(messages) < len(message.members[:2]) and peer in self.simulation.tape_of_rank:
            n_here, n_there = (sum(len(exchange_of_key.messages) > n for exchange_of_key in exchanges) for n in (0, 1))
            has, lacks, fix = ("receives", "sends", "send") if message.receives else ("sends", "receives", "receive")
            return (
                f"rank {rank} {has} {self.describe(messages[0])} as its {label}, but rank {peer} never {lacks} it: "
                f"{n_here} against {n_there} over {message.axis}; {fix} it on rank {peer}, or drop it on rank {rank}"
            )
        if len(messages) > 1 and _get_dtype_and_numel(message) != _get_dtype_and_numel(messages[1][2]):
            return (
                f"rank {rank}: its {label} is {self.describe(messages[0])}, which meets {self.describe(messages[1])} "
                f"on rank {peer}; send and receive the same numel and dtype in the same order"
            )
        return ""

    def _check_collective(self, exchange: MatchedEndpoints, exchanges: list[MatchedEndpoints]) -> str:
        """Compare a collective over all its members; return the finding, or "" if they match."""
        messages = exchange.messages
        first = messages[0]
        index, _, message = first
        first_rank = self.tapes[index].rank
        members = [member for member in message.members if member in self.simulation.tape_of_rank]
        if len(messages) >= len(members) and all(
            _get_signature(issued[2]) == _get_signature(message) for issued in messages[1:]
        ):
            return ""
        counts = Counter(
            self.tapes[tape_index].rank
            for exchange_of_key in exchanges
            for tape_index, _, _ in exchange_of_key.messages
        )
        ending = f"; they issue {', '.join(f'{counts[rank]} on rank {rank}' for rank in members)}"
        uneven = ending if len({counts[rank] for rank in members}) > 1 else ""
        fix = "let every rank of the group issue the same collectives in the same order"
        label = (
            f"{_format_ordinal(exchange.number)} collective over {message.axis} of ranks {_abbreviate(message.members)}"
        )
        for issued in messages[1:]:
            if _get_signature(issued[2]) != _get_signature(message):
                rank = self.tapes[issued[0]].rank
                return (
                    f"rank {rank}: its {label} is {self.describe(issued)}, on rank {first_rank} "
                    f"{self.describe(first)}{uneven}; {fix}"
                )
        if len(messages) < len(members):
            arrived = {self.tapes[tape_index].rank for tape_index, _, _ in messages}
            missing = [rank for rank in members if rank not in arrived]
            return (
                f"rank {first_rank}: the {label}, {self.describe(first)}, never comes on {_format_ranks(missing)}"
                f"{uneven}; {fix}"
            )
        return ""

    def describe(self, issued: IssuedMessage) -> str:
        """Describe a message, with its scope and site."""
        return _describe(self.tapes[issued[0]], issued)


def _get_dtype_and_numel(message: TapeMessage) -> tuple[str, int]:
    return message.dtype, message.numel


def _get_signature(message: TapeMessage) -> tuple[str, str, int]:
    return message.collective, message.dtype, -1 if message.collective == "all_to_all" else message.numel


# Deadlocks: cycles in the graph of waiting ranks


class _WaitLink(NamedTuple):
    """A link of the wait chain: a rank's endpoint of a message that cannot begin."""

    endpoint: Endpoint
    waits: bool  # the rank is blocked in the WAIT of this message
    queued: bool = False  # the endpoint that the previous step needs is queued behind this one on its stream


def find_deadlocks(simulation: Streams) -> list[str]:
    """Simulate the tapes; return a line for the cycle of waiting ranks, then one per rank blocked behind it."""
    if simulation.run():
        return []
    blocked = {index: blocked.endpoint for index, blocked in simulation.blocked.items()}
    path: list[_WaitLink] = []
    step: _WaitLink | None = _WaitLink(next(iter(blocked.values())), waits=True)
    while step is not None and step.endpoint not in [link.endpoint for link in path]:
        path.append(step)
        step = _find_predecessor(step.endpoint, blocked)
    if step is not None:
        cycle_begin = next(i for i, link in enumerate(path) if link.endpoint is step.endpoint)
        path = [
            step,
            *path[cycle_begin + 1 :],
        ]  # the repeated step, as reached from the last one: it has ``queued`` set
    ranks = sorted({simulation.tapes[link.endpoint.rank].rank for link in path})
    fix = (
        "issue them in the same order on both ranks, as one batch, or over groups of their own"
        if any(link.queued for link in path)
        else "start what the other waits for before waiting"
    )
    findings = [
        f"deadlock of {_format_ranks(ranks)}: {'; '.join(_describe_step(link, simulation) for link in path)}; {fix}"
    ]
    for index, endpoint in sorted(blocked.items()):
        if not any(link.endpoint.rank == index for link in path):
            findings.append(
                f"behind a deadlock, {_describe_step(_WaitLink(endpoint, waits=True), simulation)}; fix that"
            )
    return findings


def _describe_step(step: _WaitLink, simulation: Streams) -> str:
    """Describe what a rank waits for, or which message blocks its stream."""
    tape = simulation.tapes[step.endpoint.rank]
    message = _describe(
        tape, _find_unstarted(step.endpoint).messages[_find_unstarted(step.endpoint).endpoints.index(step.endpoint)]
    )
    scope_name = describe_scope(tape, simulation.blocked[step.endpoint.rank].event) if step.waits else ""
    if step.queued:
        waits_for = f"what it waits for in {scope_name}, " if step.waits else ""
        return f"rank {tape.rank} has its part of that on one stream behind {waits_for}{message}"
    return f"rank {tape.rank} waits in {scope_name} for {message}"


def _find_predecessor(endpoint: Endpoint, blocked: dict[int, Endpoint]) -> _WaitLink | None:
    """Return what must end before this endpoint's message can begin.

    It is the WAIT that keeps another member from issuing its part, or the message before that part on its stream; None
    if there is no such rank.
    """
    for other in _find_unstarted(endpoint).endpoints:
        if other.posted < 0:
            blocked_endpoint = blocked.get(other.rank)
            return _WaitLink(blocked_endpoint, waits=True) if blocked_endpoint is not None else None
        if other.n_pending and other.previous is not None:
            return _WaitLink(other.previous, waits=blocked.get(other.rank) is other.previous, queued=True)
    return None


def _find_unstarted(endpoint: Endpoint) -> MatchedEndpoints:
    """Return the first message of an endpoint that has not begun."""
    return next(exchange for exchange in endpoint.exchanges if exchange.n_pending)


# Descriptions


def describe_scope(tape: Tape, event: int) -> str:
    """Describe the scope of event ``event``."""
    for earlier in range(event, -1, -1):
        if tape.events[4 * earlier] == SCOPE:
            return str(tape.scopes[tape.events[4 * earlier + 1]])
    return "start"


def _describe(tape: Tape, issued: IssuedMessage) -> str:
    _, event, message = issued
    return f"{_describe_message(message)} in {describe_scope(tape, event)} ({tape.sites[message.site]})"


def _describe_message(message: TapeMessage) -> str:
    direction = (
        (" from " if message.receives else " to ") + f"rank {message.peer}" if message.collective == "p2p" else ""
    )
    return f"{message.collective} of {message.numel} {message.dtype} over {message.axis}{direction}"


def _format_ordinal(number: int) -> str:
    number += 1
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _abbreviate(members: Sequence[int]) -> str:
    names = [str(member) for member in members]
    return ", ".join(names if len(names) <= 8 else [*names[:4], "…", *names[-2:]])


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_abbreviate(ranks)}"
