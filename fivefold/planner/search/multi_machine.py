"""One run on several machines and numbers of ranks: for each the layout that ``search`` proposes, time and cost.

With a deadline it finds the fewest ranks of each machine that meet it, by bisection, since more ranks are faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.where import ANY, Where
from fivefold.machine.catalog import with_ranks
from fivefold.machine.datacenter import Site
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.run_estimate import predict_full_run
from fivefold.planner.search import search
from fivefold.record import StopSignal, UserError
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
    where: Where = ANY,
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

    def meets_deadline(index: int) -> bool | None:
        """Return whether the run keeps the deadline; None if no layout has that many ranks."""
        offered = offers[remaining[index]] = offer(machine, remaining[index])
        return (
            (offered.run is not None and offered.run.seconds <= deadline)
            if offered.run or _has_layouts(offered)
            else None
        )

    while (is_possible := meets_deadline(len(remaining) - 1)) is None and len(remaining) > 1:
        remaining.pop()
    largest = offers[remaining[-1]]
    if not is_possible:
        error = largest.error
        if largest.run is not None:
            error = _describe_miss(largest.run, machine, ranks=largest.ranks, deadline=deadline)
        error = "; ".join(filter(None, (error, _describe_left_out(offers, except_ranks=largest.ranks))))
        return largest.replace(run=None, error=error)
    first, last = 0, len(remaining) - 1
    while first < last:
        middle = (first + last) // 2
        kept = meets_deadline(middle)
        if kept is None:
            del remaining[middle]
            last -= 1
        else:
            first, last = (first, middle) if kept else (middle + 1, last)
    fewest = offers[remaining[last]] if remaining[last] in offers else offer(machine, remaining[last])
    with_layouts = {ranks for ranks, offered in offers.items() if offered.run or _has_layouts(offered)}
    tried = f"tried: {_join_numbers(with_layouts | {fewest.ranks})} GPUs"
    left_out = _describe_left_out(offers, except_ranks=fewest.ranks)
    return fewest.replace(remark="; ".join(filter(None, (fewest.remark, tried, left_out))))


def _describe_left_out(offers: Mapping[int, Offer], *, except_ranks: int) -> str:
    """Return the numbers of ranks over which no layout spreads the batch, and the first one's reason; "" if none."""
    left_out = {ranks: offered.error for ranks, offered in offers.items() if not (offered.run or _has_layouts(offered))}
    left_out.pop(except_ranks, None)
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
