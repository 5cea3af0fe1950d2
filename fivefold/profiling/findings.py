"""What is wrong with a traced step, in one line each: a stalled loader, a rank or a stage that is slower than its
peers, a slow link, a bubble that no schedule asks for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, median

from fivefold.profiling.attribution import Exchange, RankTime
from fivefold.results.spans import Message
from fivefold.step import Time
from fivefold.units import show_bytes, show_seconds

SHARE = 0.05  # of the step: what takes less is not told
SLOWER = 1.25  # than the median of its peers
LINK = 3.0  # times what the machine, or another group of the same axis, takes for the same message


def findings(
    times: Sequence[RankTime], *, predicted: Time, expected: Callable[[Message], float] | None = None
) -> list[str]:  # fmt: skip
    """One line for each of them. ``expected``: seconds of a message on the machine."""
    told = [*_loader(times)]
    stalled = {rank for rank, _ in told}
    lines = [line for _, line in told]
    slow = list(_links(times, expected))
    lines += slow
    ranks = [] if slow else list(_stragglers([each for each in times if each.rank not in stalled]))
    lines += ranks
    if not told and not slow and not ranks:
        lines += _bubble(times, predicted)
    return lines


def busy(one: RankTime) -> float:
    """Seconds of a rank's own work."""
    return one.of("compute") + one.of("host") + one.of("optimizer")


def _loader(times: Sequence[RankTime]) -> Iterator[tuple[int, str]]:
    """The rank that waits longest for its batch."""
    worst = max(times, key=lambda each: each.of("data"))
    seconds = worst.of("data")
    if seconds > SHARE * worst.step:
        also = sum(each.of("data") > SHARE * each.step for each in times) - 1
        others = f", {also} more ranks likewise" if also else ""
        share = f"{show_seconds(seconds)} ({seconds / worst.step:.0%})"
        yield worst.rank, f"stalled loader: rank {worst.rank} waits {share} of each step for its batch{others}"


def _stragglers(times: Sequence[RankTime]) -> Iterator[str]:
    """A rank that takes longer than those that do the same work, and for which they wait."""
    for stage in sorted({each.stage for each in times}):
        peers = [each for each in times if each.stage == stage]
        if len(peers) < 2:
            continue
        slowest = max(peers, key=busy)
        others = [each for each in peers if each is not slowest]
        usual, waited = median(map(busy, others)), mean(_waited_for(each, slowest.rank) for each in others)
        if busy(slowest) > SLOWER * usual and waited > SHARE * slowest.step:
            yield (
                f"straggler: rank {slowest.rank} works {show_seconds(busy(slowest))} a step, its peers "
                f"{show_seconds(usual)}; they wait {show_seconds(waited)} for it; most is in {_excess(slowest, others)}"
            )


def _waited_for(one: RankTime, other: int) -> float:
    return sum(each.idle for each in one.exchanges if each.late == other) / one.steps


def _excess(slowest: RankTime, others: Sequence[RankTime]) -> str:
    """The work of ``slowest`` that exceeds that of ``others`` most."""
    usual: dict[tuple[str, str], list[float]] = defaultdict(list)
    for item in (item for each in others for item in each.items):
        usual[item.action, item.name].append(item.seconds)
    more = {(item.action, item.name): item.seconds - sum(usual[item.action, item.name]) / len(others)
            for item in slowest.items}  # fmt: skip
    action, name = max(more, key=lambda key: more[key])
    return f"{name} of {action}" if action and not name.startswith("host") else name


def _links(times: Sequence[RankTime], expected: Callable[[Message], float] | None) -> Iterator[str]:
    """The messages of one group that take much longer than they should, if that costs something: the worst group."""
    travels: dict[tuple[str, int, tuple[int, ...]], list[Exchange]] = defaultdict(list)
    for each in (each for one in times for each in one.exchanges if each.message.number):
        message = each.message
        travels[message.name, message.payload, _members(message, each)].append(each)
    found = []
    for (name, payload, members), exchanges in travels.items():
        seconds = median(each.travel for each in exchanges)
        alike = [median(each.travel for each in other) for (n, size, who), other in travels.items()
                 if (n, size) == (name, payload) and who != members]  # fmt: skip
        machine = expected(exchanges[0].message) if expected is not None else 0.0
        usual, whose = (median(alike), "other groups take") if alike else (machine, "the machine takes")
        cost = sum(each.exposed for each in exchanges) / times[0].steps / len(members)
        if usual and seconds > LINK * usual and cost > SHARE * times[0].step:
            found.append((cost, f"slow link: {name} of {show_bytes(payload)} among ranks {_listed(members)} travels "
                          f"{show_seconds(seconds)}, {whose} {show_seconds(usual)}; it costs {show_seconds(cost)} a "
                          "step"))  # fmt: skip
    yield from (line for _, line in sorted(found, reverse=True)[:1])


def _members(message: Message, each: Exchange) -> tuple[int, ...]:
    """Ranks that a message joins."""
    return message.ranks if message.collective != "p2p" else tuple(sorted({*message.to, *message.source, each.rank}))


def _listed(members: tuple[int, ...]) -> str:
    ranks = [str(rank) for rank in members]
    return ", ".join(ranks if len(ranks) <= 6 else [*ranks[:3], "…", *ranks[-2:]])


def _bubble(times: Sequence[RankTime], predicted: Time) -> Iterator[str]:
    """A bubble beyond the planned one: the stage that is slower than the others, or the rank that is waited for."""
    worst = max(times, key=lambda each: each.bubble)
    extra = worst.bubble - predicted.bubble_seconds
    if extra <= 2 * SHARE * worst.step:
        return
    opening = (
        f"bubble: rank {worst.rank} waits {show_seconds(worst.bubble)} ({worst.bubble / worst.step:.0%}) of each step, "
        f"planned {show_seconds(predicted.bubble_seconds)}"
    )
    stages = {stage: mean(busy(each) for each in times if each.stage == stage) for stage in {t.stage for t in times}}
    slowest = max(stages, key=lambda stage: stages[stage])
    others = [seconds for stage, seconds in stages.items() if stage != slowest]
    if others and stages[slowest] > SLOWER * mean(others):
        slow, rest = ([each for each in times if (each.stage == slowest) is same] for same in (True, False))
        yield (
            f"{opening}: stage {slowest} works {show_seconds(stages[slowest])}, the others "
            f"{show_seconds(mean(others))}; most of it is in {_excess(slow[0], rest)}; give it fewer layers"
        )
        return
    waited: dict[tuple[int, str], float] = defaultdict(float)
    for each in worst.exchanges:
        waited[each.late, each.place] += each.idle / worst.steps
    late, place = max(waited, key=lambda key: waited[key])
    where = f" in {place}" if place else ""
    yield f"{opening}: most of it for rank {late}{where}, {show_seconds(waited[late, place])}"
