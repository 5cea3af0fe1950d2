"""One run on several machines or numbers of ranks, from text: prices, a range of ranks, a deadline, assumptions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fivefold.errors import UserError
from fivefold.requests.commands import DEFAULT_TOKENS, SearchRequest
from fivefold.requests.search import limit_memory, resolve_tolerance

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.results.run_estimate import Offers
    from fivefold.results.search_result import Goal


def _refuse_single_machine_options(request: SearchRequest) -> None:
    """Raise ``UserError`` naming the options that are for layouts of one machine, if a run on several is asked."""
    words = {"keep": request.keep, "also": request.also, "front": request.front > 1}
    words["top"] = request.top != type(request).model_fields["top"].default
    words |= {name: getattr(request, name, None) for name in ("chart", "measure", "write")} | {"2d": request.two}
    if given_options := ["--" + name for name, value in words.items() if value]:
        pronoun = "it" if len(given_options) == 1 else "them"
        raise UserError(
            f"{', '.join(given_options)}: valid for a search of one machine only; drop {pronoun}, "
            "or search one machine without --tokens, --deadline, --gpu-counts, --assume and --by energy"
        )


def list_offers(
    request: SearchRequest,
    model: Model,
    machines: Sequence[Machine],
    job: Job,
    *,
    done: Callable[[str], None] = lambda _: None,
) -> Offers:
    """Return the run of a request on each machine; ``done`` is called with each machine that is searched.

    Raises ``UserError`` for options that are for layouts of one machine.
    """
    from fivefold.layout.where import Where
    from fivefold.machine.datacenter import apply_assumptions
    from fivefold.planner.search.multi_machine import MachineChoice, list_sizes, search_machines

    _refuse_single_machine_options(request)
    machines = apply_prices([limit_memory(machine, request.memory) for machine in machines], request.price)
    goal: dict[str, Goal] = {"time": "time", "cost": "cost", "energy": "energy"}
    if request.by not in goal:
        raise UserError(
            f"--by {request.by} ranks layouts of one machine; rank several machines by time, cost or energy"
        )
    counts, deadline = request.tried_gpu_counts, request.deadline
    rank_range = None if counts is None else _parse_range(counts)
    choices = []
    for machine in machines:
        low, high = rank_range or (
            min(machine.ranks_per_node, machine.ranks) if deadline else machine.ranks,
            machine.ranks,
        )
        choices.append(MachineChoice(machine, list_sizes(low, high, node=machine.ranks_per_node)))
    return search_machines(
        model=model,
        choices=choices,
        job=job,
        tokens=DEFAULT_TOKENS if request.tokens is None else request.tokens,
        site=apply_assumptions(request.assume),
        by=goal[request.by],
        within=resolve_tolerance(request) or 0.0,
        where=Where.parse(request.where),
        deadline=None if deadline is None else parse_deadline(deadline),
        risk=request.risk,
        done=done,
    )


def price_and_limit(request: SearchRequest, machine: Machine) -> Machine:
    """Return the machine of a request with its price and its limit of memory."""
    return limit_memory(apply_prices([machine], request.price)[0], request.memory)


def apply_prices(machines: Sequence[Machine], prices: str | float | Sequence[str]) -> list[Machine]:
    """Return the machines with the prices of ``--price``; raises ``UserError`` if a price names no given machine."""
    priced_machines = list(machines)
    for word in map(str, [prices] if isinstance(prices, str | int | float) else prices):
        name, equals, price = word.rpartition("=")
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", price.removesuffix("/h")):
            raise UserError(f"--price {word!r} is not a price; write h100=2.2/h, or 2.2 for all machines")
        matching = [
            index for index, machine in enumerate(priced_machines) if not equals or machine.name.split()[0] == name
        ]
        if not matching:
            names = ", ".join(dict.fromkeys(machine.name.split()[0] for machine in priced_machines))
            options = " ".join(f"--price {part}" for part in word.split(","))
            fix = f"give --price once for each machine: {options}" if "," in name else f"there is {names}"
            raise UserError(f"--price {word!r}: no machine is called {name!r}; {fix}")
        for index in matching:
            priced_machines[index] = priced_machines[index].replace(
                dollars_per_rank_hour=float(price.removesuffix("/h"))
            )
    return priced_machines


def _parse_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,7})-([0-9]{1,7})", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]):
        raise UserError(f"--gpu-counts {text!r} is not a range of numbers of GPUs; write for example 64-512")
    return int(match[1]), int(match[2])


def parse_deadline(text: str) -> float:
    """Return the seconds of ``--deadline``."""
    from fivefold.machine.datacenter import parse_seconds

    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise UserError(f"--deadline {text!r} {error}") from None
    if not seconds:
        raise UserError(f"--deadline {text!r} is not a time; write for example 30d")
    return seconds
