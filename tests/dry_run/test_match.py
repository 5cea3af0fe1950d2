from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from fivefold.dry_run.match import list_findings
from fivefold.dry_run.record.tape import START, WAIT, CodeSite, Event, Scope, Tape, TapeMessage
from fivefold.model.catalog import resolve
from tests.selection import mark_share

pytestmark = pytest.mark.slow

MakeTapes = Callable[..., list[Tape]]
MIXTURE = resolve(str(Path(__file__).parents[2] / "examples" / "models" / "mixture.toml")).replace(layers=3)
DENSE = (
    "tp2 pp2",  # whose tapes other tests read, too
    "dp2 tp2 zero3",
    "tp2 nosp mbs2",
    "dp2 cp2 zero2",
    "cp3",
    "cp2 cp=ulysses",
    "pp2 gpipe",
    "pp2 v2",
    "pp2 zb1p",
    "pp2 zb2p",
    "pp2 zbv",
    "pp2 dualpipe",
    "pp2 dualpipev",
    "pp4",
)
EXPERTS = ("dp2 ep2", "dp2 tp2 ep2 etp2 zero1", "dp2 pp2 ep2 dualpipe zero2")


def copy_tape(tape: Tape, events: list[Event], messages: list[TapeMessage] | None = None) -> Tape:
    result = Tape(tape.rank)
    result.sites, result.scopes, result.kernels = tape.sites, tape.scopes, tape.kernels
    result.messages = tape.messages if messages is None else messages
    for event in events:
        result.add(*event)
    return result


def starts(tape: Tape) -> list[int]:
    return [at for at, event in enumerate(tape) if event[0] == START]


@pytest.mark.parametrize("layout", mark_share(14, DENSE))
def test_messages_of_a_dry_run_step_match(layout: str, make_tapes: MakeTapes) -> None:
    tapes = make_tapes(layout)
    assert sum(len(starts(tape)) for tape in tapes) > len(tapes)
    for streams in (True, False):  # the planner's second order holds with each other's rules too
        assert list_findings(tapes, streams=streams) == []
    assert list_findings(tapes[:1], streams=True) == []  # a rank whose replicas are not given does not wait for them


@pytest.mark.parametrize("layout", mark_share(3, EXPERTS))
def test_messages_of_expert_parallelism_match(layout: str, make_tapes: MakeTapes) -> None:
    assert list_findings(make_tapes(layout, MIXTURE), streams=True) == []


@pytest.mark.parametrize("layout", mark_share(4, ["dp2 tp2", "pp2 zbv", "tp2 pp2", "cp2"]))
def test_every_dropped_message_is_detected(layout: str, make_tapes: MakeTapes) -> None:
    tapes = make_tapes(layout)
    tape = tapes[1]
    events = list(tape)
    for at in starts(tape)[::24]:
        handle, message = events[at][1], tape.messages[events[at][2]]
        left = [e for i, e in enumerate(events) if i != at and (e[0], e[1]) != (WAIT, handle)]
        result = list_findings([copy_tape(tape, left) if item is tape else item for item in tapes], streams=True)
        assert result, message
        assert any(f"over {message.axis}" in line and "rank 1" in line for line in result), (message, result)


@pytest.mark.parametrize("layout", mark_share(3, ["tp2 pp2", "dp2 tp2", "cp2"]))
def test_every_message_of_another_size_is_detected_and_named(layout: str, make_tapes: MakeTapes) -> None:
    tapes = make_tapes(layout)
    tape = tapes[0]
    events = list(tape)
    for at in starts(tape)[::24]:
        message = tape.messages[events[at][2]]
        other = message._replace(numel=message.numel + 8)
        changed = [(START, e[1], len(tape.messages), e[3]) if i == at else e for i, e in enumerate(events)]
        result = list_findings([copy_tape(tape, changed, [*tape.messages, other]), *tapes[1:]], streams=True)
        assert len(result) == 1
        assert f"of {other.numel} {other.dtype}" in result[0]
        assert f"of {message.numel} {message.dtype}" in result[0]
        assert tape.sites[message.site].line in result[0]


def test_swapped_messages_are_detected(make_tapes: MakeTapes) -> None:
    tapes = make_tapes("dp2 tp2")
    tape = tapes[0]
    events = list(tape)
    at = starts(tape)
    swapped = 0
    for one, two in pairwise(at):
        first, second = (tape.messages[events[i][2]] for i in (one, two))
        if first.group != second.group or first[3:6] == second[3:6]:
            continue
        mixed = list(events)
        mixed[one], mixed[two] = ((START, events[i][1], events[j][2], 0) for i, j in ((one, two), (two, one)))
        (result,) = list_findings([copy_tape(tape, mixed), *tapes[1:]], streams=True)
        assert first.collective in result
        assert second.collective in result
        swapped += 1
        if swapped == 6:
            return
    pytest.fail(f"only {swapped} pairs differ")


# Small tapes by hand


def message(collective: str = "all_reduce", *, peer: int = -1, receives: bool = False, group: str = "g") -> TapeMessage:
    return TapeMessage("pp", group, (0, 1), collective, "bfloat16", 4, 8, peer, receives, 0)


def write_tape(rank: int, write: Callable[[Tape], None]) -> Tape:
    tape = Tape(rank)
    tape.site(CodeSite("blocks.0", "own.py:7 speak", "c10d::send"))
    tape.add(5, tape.scope(Scope("forward", 0, rank)))
    write(tape)
    return tape


def say(*steps: tuple[str, int, TapeMessage | None]) -> Callable[[Tape], None]:
    """("start" or "wait", handle, message)."""

    def write(tape: Tape) -> None:
        for step, handle, said in steps:
            if said is not None:
                tape.add(START, handle, tape.message(said), -1)
            else:
                assert step == "wait"
                tape.add(WAIT, handle)

    return write


def test_mutual_waits_are_a_deadlock() -> None:
    one, two = message(), message(group="h")
    tapes = [
        write_tape(0, say(("start", 0, one), ("wait", 0, None), ("start", 1, two), ("wait", 1, None))),
        write_tape(1, say(("start", 0, two), ("wait", 0, None), ("start", 1, one), ("wait", 1, None))),
    ]
    for streams in (True, False):
        (result,) = list_findings(tapes, streams=streams)
        assert result == (
            "deadlock of ranks 0, 1: rank 0 waits in forward of micro-batch 0 for all_reduce of 4 bfloat16 over pp in "
            "forward of micro-batch 0 (blocks.0 send (own.py:7 speak)); rank 1 waits in forward of micro-batch 1 for "
            "all_reduce of 4 bfloat16 over pp in forward of micro-batch 1 (blocks.0 send (own.py:7 speak)); start what "
            "the other waits for before waiting"
        )


def test_exchanged_waits_of_a_dry_run_are_a_deadlock(make_tapes: MakeTapes) -> None:
    tapes = make_tapes("pp2 zbv")
    tape = tapes[0]
    events = list(tape)
    sends = {e[1] for e in events if e[0] == START and not tape.messages[e[2]].receives}
    (send,) = [at for at, e in enumerate(events) if e[0] == WAIT and e[1] in sends][:1]
    receives = {e[1]: tape.messages[e[2]] for e in events if e[0] == START and tape.messages[e[2]].receives}
    last = max(at for at, e in enumerate(events) if e[0] == WAIT and e[1] in receives)
    begun = next(at for at, e in enumerate(events) if e[0] == START and e[1] == events[last][1])
    # what comes last from the other is received at once, and waited for before anything is sent
    early = [events[begun], events[last]]
    rest = [e for at, e in enumerate(events) if at not in (begun, last)]
    result = list_findings([copy_tape(tape, [*events[:1], *early, *rest[1:]]), *tapes[1:]], streams=False)
    assert result
    assert result[0].startswith("deadlock of ranks 0, 1: ")
    assert send


def test_on_one_stream_sends_and_receives_wait_for_one_another() -> None:
    tapes = [
        write_tape(
            rank,
            say(
                ("start", 0, message("p2p", peer=1 - rank)),
                ("start", 1, message("p2p", peer=1 - rank, receives=True)),
                ("wait", 0, None),
                ("wait", 1, None),
            ),
        )
        for rank in (0, 1)
    ]
    assert list_findings(tapes, streams=False) == []
    (result,) = list_findings(tapes, streams=True)
    assert "rank 1 has its part of that on one stream behind what it waits for" in result
    assert "as one batch" in result
    for tape in tapes:  # so it is with batch_isend_irecv
        tape.messages[1] = tape.messages[1]._replace(joins=True)
    assert list_findings(tapes, streams=True) == []


def test_ranks_blocked_by_a_deadlock_are_reported() -> None:
    end = message("barrier", group="all")._replace(members=(0, 1, 2), axis="world")
    one, two = message(), message(group="h")
    tapes = [
        write_tape(0, say(("start", 0, one), ("wait", 0, None), ("start", 1, two), ("start", 2, end))),
        write_tape(1, say(("start", 0, two), ("wait", 0, None), ("start", 1, one), ("start", 2, end))),
        write_tape(2, say(("start", 0, end), ("wait", 0, None))),
    ]
    first, second = list_findings(tapes, streams=True)
    assert first.startswith("deadlock of ranks 0, 1: ")
    assert second.startswith("behind a deadlock, rank 2 waits in forward of micro-batch 2 for barrier")


def test_a_rank_that_is_given_twice_is_an_error() -> None:
    tape = write_tape(0, say())
    with pytest.raises(ValueError, match="each must be given once"):
        list_findings([tape, tape], streams=True)
