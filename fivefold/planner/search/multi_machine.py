"""One run on several machines and numbers of ranks: for each the layout that ``search`` proposes, time and cost.

With a deadline it finds the fewest ranks of each machine that meet it, by interpolation, since more ranks are faster.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from fivefold.errors import StopSignal, UserError
from fivefold.job import Job
from fivefold.layout.where import ANY_LAYOUT, Where
from fivefold.machine.catalog import with_ranks
from fivefold.machine.datacenter import Site
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.run_estimate import predict_full_run
from fivefold.planner.search import search
from fivefold.results.run_estimate import Offer, Offers, RunEstimate
from fivefold.results.search_result import Goal
from fivefold.step import FITS_RISK
from fivefold.units import show_bytes

OnSearch = Callable[[str], None]  # is called with the machine of each search
DAY = 86400.0
NOTHING = "nothing"


class MachineChoice(NamedTuple):
    """A machine and the numbers of ranks that it may have, from few to many."""

    machine: Machine
    sizes: tuple[int, ...]


def list_sizes(low: int, high: int, *, node: int) -> tuple[int, ...]:
    """Return numbers of ranks from ``low`` to ``high``.

    They are both ends and, between them, powers of two nodes, three times those, and halves of a node.
    """
    steps = {node * factor * 2**power for factor in (1, 3) for power in range(24)}
    steps |= {node >> halvings for halvings in range(node.bit_length())}
    return tuple(sorted({low, high, *(size for size in steps if low < size < high)}))


def search_machines(
    *,
    model: Model,
    choices: Sequence[MachineChoice],
    job: Job,
    tokens: float,
    site: Site,
    by: Goal,
    within: float,
    where: Where = ANY_LAYOUT,
    deadline: float | None = None,
    risk: float = FITS_RISK,
    done: OnSearch = lambda _: None,
) -> Offers:
    """Return every choice and size as an offer, the best first.

    Raises ``UserError`` if machines have no price, or no power in watts.
    """
    _check([choice.machine for choice in choices], by)

    def offer(machine: Machine, ranks: int) -> Offer:
        done(f"{machine.name}:{ranks}")
        chosen = with_ranks(machine, ranks)
        return _offer(model, chosen, job, tokens=tokens, site=site, within=within, where=where, risk=risk)

    offers: list[Offer] = []
    stopped = False
    try:
        for machine, sizes in choices:
            if deadline is None:
                offers.extend(offer(machine, ranks) for ranks in sizes)  # keeps those before one that is stopped
            else:
                offers.append(_find_fewest_ranks(machine, sizes, offer, deadline=deadline))
    except (KeyboardInterrupt, StopSignal):
        if not offers:
            raise
        stopped = True
    best = tuple(sorted(offers, key=lambda other: (other.run is None, _score(other, by))))
    return Offers(model=model.name, by=by, tokens=tokens, deadline_seconds=deadline, offers=best, stopped=stopped)


def _check(machines: Sequence[Machine], by: Goal) -> None:
    """Raise ``UserError`` if a machine has no price or power, by which the runs are to be ranked."""
    without_price = list(
        dict.fromkeys(machine.name for machine in machines if by == "cost" and machine.dollars_per_rank_hour is None)
    )
    if without_price:
        options = " ".join(f"--price {name.split()[0]}=2.2/h" for name in without_price)
        raise UserError(
            f"--by cost: {', '.join(without_price)} {'has' if len(without_price) == 1 else 'have'} no price; "
            f"give {options}"
        )
    without_power = list(
        dict.fromkeys(machine.name for machine in machines if by == "energy" and machine.chip.power_watts is None)
    )
    if without_power:
        raise UserError(
            f"--by energy: the watts of {', '.join(without_power)} are not known; "
            f"write for example '{without_power[0]}:8 watts=300'"
        )


def _offer(
    model: Model, machine: Machine, job: Job, *, tokens: float, site: Site, within: float, where: Where, risk: float
) -> Offer:
    """Search one machine, and return the complete run of its proposal, or why there is none."""
    try:
        result = search(model=model, machine=machine, job=job, top=1, within=within, where=where, risk=risk)
    except UserError as mistake:
        return Offer(machine=machine.name, ranks=machine.ranks, error=str(mistake))
    if result.stopped:  # of one machine: then the others are not searched either
        raise StopSignal("SIGINT")
    if result.proposal is None:
        miss = result.misses[0] if result.misses else None
        needs = f": {miss.layout} needs {show_bytes(miss.needs_bytes)} of {show_bytes(miss.has_bytes)}" if miss else ""
        return Offer(machine=machine.name, ranks=machine.ranks, error=f"{result.describe_unfit(NOTHING)}{needs}")
    step = result.proposal.choice.step
    run = predict_full_run(step=step, model=model, machine=machine, job=job, tokens=tokens, site=site)
    return Offer(
        machine=machine.name,
        ranks=machine.ranks,
        layout=step.layout,
        mfu=step.mfu.causal,
        run=run,
        remark=result.gap_remark(),
    )


def _find_fewest_ranks(
    machine: Machine, sizes: Sequence[int], offer: Callable[[Machine, int], Offer], *, deadline: float
) -> Offer:
    """Return the offer with the fewest ranks whose run keeps the deadline.

    If none does, the offer with the most ranks is returned as not possible.
    """
    remaining, offers = list(sizes), dict[int, Offer]()
    first, last = 0, len(remaining)  # the fewest are at one of these places; at the end, none meets the deadline
    middle = last // 2
    while first < last:
        ranks = remaining[middle]
        offered = offers[ranks] = offer(machine, ranks)
        if not (offered.run or _has_layouts(offered)):
            del remaining[middle]
            last -= 1
        elif offered.run is not None and offered.run.seconds <= deadline:
            last = middle
        else:
            first = middle + 1
        middle = (first + last) // 2
        if offered.run is not None:  # at this speed of a rank
            needed = bisect_left(remaining, ranks * offered.run.seconds / deadline)
            middle = min(max(first, needed), last - 1)
    if last == len(remaining):
        largest = offers[max(remaining or offers)]
        error = largest.error
        if largest.run is not None:
            error = _describe_miss(largest.run, machine, ranks=largest.ranks, deadline=deadline)
        others = {ranks: offers[ranks] for ranks in offers if ranks != largest.ranks}
        error = "; ".join(filter(None, (error, _describe_left_out(others))))
        return largest.replace(run=None, error=error)
    fewest = offers[remaining[last]]
    with_layouts = {ranks for ranks, offered in offers.items() if offered.run or _has_layouts(offered)}
    tried = f"tried: {_join_numbers(with_layouts)} GPUs"
    fewer = {ranks: offers[ranks] for ranks in offers if ranks < fewest.ranks}
    left_out = _describe_left_out(fewer)
    return fewest.replace(remark="; ".join(filter(None, (fewest.remark, tried, left_out))))


def _describe_left_out(offers: Mapping[int, Offer]) -> str:
    """Return the numbers of ranks over which no layout spreads the batch, and the first one's reason; "" if none."""
    left_out = {ranks: offered.error for ranks, offered in offers.items() if not (offered.run or _has_layouts(offered))}
    return f"left out: {_join_numbers(left_out)} GPUs: {left_out[min(left_out)]}" if left_out else ""


def _join_numbers(numbers: Iterable[int]) -> str:
    return ", ".join(f"{number:,}" for number in sorted(numbers))


def _describe_miss(run: RunEstimate, machine: Machine, *, ranks: int, deadline: float) -> str:
    """Describe by how much a run misses the deadline, and which number of ranks would meet it at which cost."""
    factor = run.seconds / deadline
    needs = ceil(ranks * factor / machine.ranks_per_node) * machine.ranks_per_node
    cost = "" if run.dollars is None else f" for the same ${run.dollars:,.0f}"
    return (
        f"takes {run.seconds / DAY:,.1f} days, {factor:,.1f} times the deadline; at this speed of a rank, "
        f"{needs:,} ranks would meet it{cost}; try --gpu-counts {needs}-{2 * needs}"
    )


def _has_layouts(offer: Offer) -> bool:
    """Return whether any legal layout has this number of ranks, even if none fits."""
    return offer.error.startswith(NOTHING)


def _score(offer: Offer, by: Goal) -> float:
    if offer.run is None:
        return offer.ranks
    value = {"time": offer.run.seconds, "cost": offer.run.dollars, "energy": offer.run.kwh}[by]
    return value or 0.0
