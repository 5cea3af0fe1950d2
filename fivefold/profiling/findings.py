"""Report problems of a traced step in one line each: a stalled loader, a straggler, a slow link, a bubble."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, median

from fivefold.profiling.attribution import MatchedMessage, RankBreakdown
from fivefold.results.spans import TracedMessage
from fivefold.step import Time
from fivefold.units import show_bytes, show_seconds

SHARE = 0.05  # fraction of the step: what takes less is not reported
SLOWER = 1.25  # a straggler works more than this many times the median of its peers
LINK = 3.0  # a link is slow from this many times the seconds of the machine, or of another group of the axis


def list_findings(
    times: Sequence[RankBreakdown], *, predicted: Time, expected: Callable[[TracedMessage], float] | None = None
) -> list[str]:
    """Return one line for each problem. ``expected``: seconds of a message on the machine."""
    stalls = [*_find_slow_loader(times)]
    stalled = {rank for rank, _ in stalls}
    lines = [line for _, line in stalls]
    slow_links = list(_find_slow_links(times, expected))
    lines += slow_links
    stragglers = (
        []
        if slow_links
        else list(_find_stragglers([rank_time for rank_time in times if rank_time.rank not in stalled]))
    )
    lines += stragglers
    if not stalls and not slow_links and not stragglers:
        lines += _find_large_bubble(times, predicted)
    return lines


def sum_busy_seconds(one: RankBreakdown) -> float:
    """Return the seconds of a rank's own work."""
    return one.get_seconds("compute") + one.get_seconds("host") + one.get_seconds("optimizer")


def _find_slow_loader(times: Sequence[RankBreakdown]) -> Iterator[tuple[int, str]]:
    """Yield the rank that waits longest for its batch, with the line that reports it."""
    worst = max(times, key=lambda rank_time: rank_time.get_seconds("data"))
    seconds = worst.get_seconds("data")
    if seconds > SHARE * worst.step:
        other_count = sum(rank_time.get_seconds("data") > SHARE * rank_time.step for rank_time in times) - 1
        others_text = f", {other_count} more ranks likewise" if other_count else ""
        share = f"{show_seconds(seconds)} ({seconds / worst.step:.0%})"
        yield worst.rank, f"stalled loader: rank {worst.rank} waits {share} of each step for its batch{others_text}"


def _find_stragglers(times: Sequence[RankBreakdown]) -> Iterator[str]:
    """Yield a line for each rank that takes longer than its peers, which wait for it."""
    for stage in sorted({rank_time.stage for rank_time in times}):
        peers = [rank_time for rank_time in times if rank_time.stage == stage]
        if len(peers) < 2:
            continue
        slowest = max(peers, key=sum_busy_seconds)
        other_ranks = [rank_time for rank_time in peers if rank_time is not slowest]
        usual = median(map(sum_busy_seconds, other_ranks))
        waited_seconds = mean(_sum_waited_seconds(rank_time, slowest.rank) for rank_time in other_ranks)
        if sum_busy_seconds(slowest) > SLOWER * usual and waited_seconds > SHARE * slowest.step:
            yield (
                f"straggler: rank {slowest.rank} works {show_seconds(sum_busy_seconds(slowest))} a step, its peers "
                f"{show_seconds(usual)}; they wait {show_seconds(waited_seconds)} for it; "
                f"most is in {_name_excess(slowest, other_ranks)}"
            )


def _sum_waited_seconds(one: RankBreakdown, other: int) -> float:
    return sum(exchange.idle for exchange in one.exchanges if exchange.late == other) / one.steps


def _name_excess(slowest: RankBreakdown, other_ranks: Sequence[RankBreakdown]) -> str:
    """Name the work of ``slowest`` that exceeds that of ``other_ranks`` most."""
    usual: dict[tuple[str, str], list[float]] = defaultdict(list)
    for item in (item for rank_time in other_ranks for item in rank_time.items):
        usual[item.action, item.name].append(item.seconds)
    excess_seconds = {
        (item.action, item.name): item.seconds - sum(usual[item.action, item.name]) / len(other_ranks)
        for item in slowest.items
    }
    action, name = max(excess_seconds, key=lambda key: excess_seconds[key])
    return f"{name} of {action}" if action and not name.startswith("host") else name


def _find_slow_links(
    times: Sequence[RankBreakdown], expected: Callable[[TracedMessage], float] | None
) -> Iterator[str]:
    """Report the group whose messages take much longer than they should, if that costs time: only the worst one."""
    travels: dict[tuple[str, int, tuple[int, ...]], list[MatchedMessage]] = defaultdict(list)
    for exchange in (exchange for rank_time in times for exchange in rank_time.exchanges if exchange.message.number):
        message = exchange.message
        travels[message.name, message.payload, _list_members(message, exchange)].append(exchange)
    slow_links = []
    for (name, payload, members), exchanges in travels.items():
        seconds = median(exchange.transfer_seconds for exchange in exchanges)
        seconds_elsewhere = [
            median(exchange.transfer_seconds for exchange in other_exchanges)
            for (n, size, other_members), other_exchanges in travels.items()
            if (n, size) == (name, payload) and other_members != members
        ]
        machine = expected(exchanges[0].message) if expected is not None else 0.0
        usual, whose = (
            (median(seconds_elsewhere), "other groups take") if seconds_elsewhere else (machine, "the machine takes")
        )
        cost = sum(exchange.exposed for exchange in exchanges) / times[0].steps / len(members)
        if usual and seconds > LINK * usual and cost > SHARE * times[0].step:
            slow_links.append(
                (
                    cost,
                    f"slow link: {name} of {show_bytes(payload)} among ranks {_format_ranks(members)} "
                    f"travels {show_seconds(seconds)}, {whose} {show_seconds(usual)}; "
                    f"it costs {show_seconds(cost)} a step",
                )
            )
    yield from (line for _, line in sorted(slow_links, reverse=True)[:1])


def _list_members(message: TracedMessage, exchange: MatchedMessage) -> tuple[int, ...]:
    """Return the ranks that exchange a message."""
    return (
        message.ranks if message.collective != "p2p" else tuple(sorted({*message.to, *message.source, exchange.rank}))
    )


def _format_ranks(members: tuple[int, ...]) -> str:
    ranks = [str(rank) for rank in members]
    return ", ".join(ranks if len(ranks) <= 6 else [*ranks[:3], "…", *ranks[-2:]])


def _find_large_bubble(times: Sequence[RankBreakdown], predicted: Time) -> Iterator[str]:
    """Report a bubble larger than planned, with the slow stage, or the rank that is waited for."""
    worst = max(times, key=lambda rank_time: rank_time.bubble)
    extra = worst.bubble - predicted.bubble_seconds
    if extra <= 2 * SHARE * worst.step:
        return
    opening = (
        f"bubble: rank {worst.rank} waits {show_seconds(worst.bubble)} ({worst.bubble / worst.step:.0%}) of each step, "
        f"planned {show_seconds(predicted.bubble_seconds)}"
    )
    stages = {
        stage: mean(sum_busy_seconds(rank_time) for rank_time in times if rank_time.stage == stage)
        for stage in {rank_time.stage for rank_time in times}
    }
    slowest = max(stages, key=lambda stage: stages[stage])
    other_seconds = [seconds for stage, seconds in stages.items() if stage != slowest]
    if other_seconds and stages[slowest] > SLOWER * mean(other_seconds):
        slow, rest = (
            [rank_time for rank_time in times if (rank_time.stage == slowest) is is_slowest]
            for is_slowest in (True, False)
        )
        yield (
            f"{opening}: stage {slowest} works {show_seconds(stages[slowest])}, the others "
            f"{show_seconds(mean(other_seconds))}; most of it is in {_name_excess(slow[0], rest)}; give it fewer layers"
        )
        return
    waited: dict[tuple[int, str], float] = defaultdict(float)
    for exchange in worst.exchanges:
        waited[exchange.late, exchange.place] += exchange.idle / worst.steps
    late_rank, where_waited = max(waited, key=lambda key: waited[key])
    where = f" in {where_waited}" if where_waited else ""
    yield f"{opening}: most of it for rank {late_rank}{where}, {show_seconds(waited[late_rank, where_waited])}"
