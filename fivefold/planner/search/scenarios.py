"""Scenarios of a robust search: network, kernels, experts or ranks differ from the prediction, one at a time.

The size of each difference is within what was published.
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.job import Job
from fivefold.machine.perturbation import with_kernels, with_network
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model

CONGESTED = 1.4  # of all-reduces over Ethernet: what a better spread of flows gained
SLOW_STEPS = 2.0  # far latency: 3 to 8 us by what is known, of which 4 are taken
KERNELS = 1.1  # matmuls of Hopper: 0.85 to 1.06 FLOP/pJ, of which 0.91 are taken; memory likewise
UNEVEN = 1.3  # the least of the imbalances measured without a balancer that moves experts
STRAGGLES = 1.08  # between GPUs of one kind, on average

META = "flows that collide in Ethernet: better spread, all-reduces gained up to 40 % (Meta, SIGCOMM 2024)"
BOUNDS = "the published range: docs/explanation/how-a-step-costs/constants.md"
ULTRA_EP = "most loaded rank over the mean: 1.30 to 4.01 in models of 106B to 671B (arXiv:2606.04101)"
VARIED = "GPUs of one kind differ by 8 % on average, the worst by half (arXiv:2208.11035)"


class Scenario(NamedTuple):
    """A machine and job other than predicted; ``straggler``: how many times slower one rank is; ``source``: why so."""

    name: str
    source: str
    machine: Machine
    job: Job
    straggler: float = 1.0


def list_scenarios(*, model: Model, machine: Machine, job: Job) -> list[Scenario]:
    """Return the predicted scenario first, then each scenario that changes anything."""
    uneven = job.replace(imbalance=job.imbalance * UNEVEN) if model.moe else job
    candidates = [
        Scenario("as predicted", "", machine, job),
        Scenario("network 1.4 times slower", META, with_network(machine, bandwidth=1 / CONGESTED), job),
        Scenario("twice the latency between nodes", BOUNDS, with_network(machine, latency=SLOW_STEPS), job),
        Scenario("kernels 1.1 times slower", BOUNDS, with_kernels(machine, speed=1 / KERNELS), job),
        Scenario("kernels 1.1 times faster", BOUNDS, with_kernels(machine, speed=KERNELS), job),
        Scenario("one rank 8 % slower", VARIED, machine, job, STRAGGLES),
        Scenario("most loaded expert rank 30 % over the mean", ULTRA_EP, machine, uneven),
    ]
    has_network = machine.nodes > 1 and any(link.span > machine.ranks_per_node for link in machine.links)
    return [
        scenario
        for index, scenario in enumerate(candidates)
        if index == 0
        or scenario.straggler > 1
        or scenario.job != job
        or (scenario.machine != machine and (has_network or index > 2))
    ]
