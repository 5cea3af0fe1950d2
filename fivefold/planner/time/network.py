"""Seconds of one collective, by the placement of its ranks on the machine's links.

    a group of n ranks = l ranks per node (joined by the near link) x N nodes (joined by a NIC per rank)
    seconds = launch + min over algorithms and protocols of (latency + payload · seconds per byte)

NCCL: ring, double binary tree, reduction in the switch (NVLink SHARP); protocol LL (small messages) with short steps at
half the rate in a node and at most a quarter between nodes, Simple (large messages) with long steps at the full rate
(NVIDIA/nccl:src/graph/tuning.cc). Gloo between hosts: ``_price_gloo``. A calibrated machine uses its own measured curve
instead, linear between two sizes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple, final, get_args

from fivefold.layout.mesh import RankGroup
from fivefold.machine.spec import NCCL_STEP_SECONDS, Collective, Machine
from fivefold.planner.time.constants import PUBLISHED, Constants
from fivefold.spelling import make_unknown_name_error


class AlphaBetaCost(NamedTuple):
    """The cost of an algorithm under a protocol: ``latency + per_byte · payload / filled`` seconds.

    ``filled``: the share of the rate by powers of two from 64 bytes on; empty: the full rate.
    """

    latency: float
    per_byte: float
    filled: tuple[float, ...] = ()

    def seconds(self, payload: int) -> float:
        """Return the seconds of a message of ``payload`` bytes."""
        octave = payload.bit_length() - 7
        if not 0 <= octave < len(self.filled) - 1:
            return self.latency + self.per_byte * payload
        low, high = self.filled[octave : octave + 2]
        return self.latency + self.per_byte * payload / (low + (high - low) * (payload / (64 << octave) - 1))


class LinkModel(NamedTuple):
    """A link: sustained bytes/s, seconds per step of the LL and Simple protocols, bytes/s of in-switch reduction.

    ``start_seconds``: of a message while one to another rank is on its way.
    """

    rate: float
    ll_step_seconds: float
    simple_step_seconds: float
    start_seconds: float
    reduction: float | None


class GroupPlacement(NamedTuple):
    """The placement of a group over nodes, and its two links.

    It has ``ranks`` in ``nodes`` nodes of ``local`` each (the last maybe fewer).
    """

    ranks: int
    local: int
    nodes: int
    near: LinkModel
    far: LinkModel

    @property
    def ring_per_byte(self) -> float:
        """Return the seconds per byte of the slowest hop. Rings leave a node by all NICs of the group at once."""
        near = 1 / self.near.rate if self.local > 1 else 0.0
        return max(near, 1 / (self.local * self.far.rate)) if self.nodes > 1 else near


class MessageTime(NamedTuple):
    """Seconds of messages, and the part in which they keep a core busy, so that concurrent compute waits."""

    seconds: float
    busy: float

    @property
    def overlappable_seconds(self) -> float:
        """Return the seconds that compute can overlap."""
        return self.seconds - self.busy


class MeasuredMessage(NamedTuple):
    """A measured collective of ``bytes``: its seconds, and those in which it keeps a core busy."""

    bytes: int
    seconds: float
    busy: float


@final
class TokenCopies(NamedTuple):
    """The number of experts that a token is sent to, and of the groups that they are chosen from.

    Groups are of consecutive experts, and so on as few ranks and nodes as possible (arXiv:2412.19437 §2.1.2 limits the
    nodes of a token by them).
    """

    number: int
    groups: int = 1
    chosen_groups: int = 1


ONE_COPY = TokenCopies(1)


class Network:
    """The collectives of one machine; costs are cached by collective and group, because a search needs millions."""

    def __init__(self, machine: Machine, constants: Constants = PUBLISHED) -> None:
        self._machine, self._constants = machine, constants
        self._nccl = nccl = machine.has_gpus
        self._launch = (
            constants.collective_launch_seconds if nccl else 0.0
        )  # the measured latency of a gloo link includes it
        self._tiers = [
            LinkModel(
                rate=link.bandwidth * link.sustained,
                ll_step_seconds=link.latency_seconds,
                simple_step_seconds=max(constants.simple_step_seconds, link.latency_seconds)
                if nccl
                else link.latency_seconds,
                start_seconds=min(NCCL_STEP_SECONDS, link.latency_seconds) if nccl else link.latency_seconds,
                reduction=link.reduction_bandwidth,
            )
            for link in machine.links
        ]
        measured = machine.calibration.collectives if machine.calibration else ()
        self._curves: dict[tuple[str, int, int], list[MeasuredMessage]] = {}
        for point in sorted(measured, key=lambda point: point.bytes):
            busy = point.seconds if point.busy_seconds is None else min(point.busy_seconds, point.seconds)
            measured_message = MeasuredMessage(point.bytes, point.seconds, busy)
            self._curves.setdefault((point.collective, point.ranks, point.nodes), []).append(measured_message)
        self._lines: dict[tuple[str, RankGroup, TokenCopies], list[AlphaBetaCost]] = {}

    def seconds(self, collective: str, payload: int, group: RankGroup, *, copies: TokenCopies = ONE_COPY) -> float:
        """Return the seconds of a collective on a full tensor of ``payload`` bytes (docs/notation.md §5).

        0 for one rank.

        ``copies``: how often an all_to_all's payload has each token, of which a rank needs one copy.
        """
        if group.ranks == 1:
            return 0.0
        if self._curves and (curve := self._curves.get((collective, group.ranks, self.nodes(group)))):
            return _interpolate([(point.bytes, point.seconds) for point in curve], payload)
        lines = self._lines.get((collective, group, copies))
        if lines is None:
            lines = self._lines[collective, group, copies] = self._list_costs(
                collective, self._find_placement(group), copies
            )
        return self._launch + min([line.seconds(payload) for line in lines])

    def busy_seconds(self, collective: str, payload: int, group: RankGroup) -> float:
        """Return the part of ``seconds`` in which sockets and copies keep a core busy, so that compute waits.

        0 with NCCL.

        Between hosts that were not measured together: the seconds of the message within one of them.
        """
        if self._nccl or group.ranks == 1:
            return 0.0
        if curve := self._curves.get((collective, group.ranks, self.nodes(group))):
            return _interpolate([(point.bytes, point.busy) for point in curve], payload)
        near_link = self._find_intra_node_link(group.ranks)
        lines = self._list_costs(collective, GroupPlacement(group.ranks, group.ranks, 1, near_link, near_link))
        return min(self.seconds(collective, payload, group), *(line.seconds(payload) for line in lines))

    def nodes(self, group: RankGroup) -> int:
        """Return the number of nodes that the ranks of a group are on."""
        reach = (group.ranks - 1) * group.stride + 1
        span = self._machine.links[0].span
        return 1 if reach <= span else -(-group.ranks // max(1, min(group.ranks, span // group.stride)))

    def _list_costs(
        self, collective: str, place: GroupPlacement, copies: TokenCopies = ONE_COPY
    ) -> list[AlphaBetaCost]:
        """Return one cost per algorithm and protocol; raise for an unknown collective."""
        constants = self._constants
        if not self._nccl and (line := _price_gloo(collective, place, constants)):
            return [line]
        if collective == "all_reduce":
            return [*_price_ring(place, constants, turns=2), *_price_tree(place, constants), *_price_switch(place)]
        if collective in ("all_gather", "reduce_scatter"):
            return _price_ring(place, constants, turns=1)
        if collective == "broadcast":
            return _list_protocols(
                place,
                constants,
                inner_steps=place.ranks - place.nodes,
                outer_steps=place.nodes - 1,
                per_byte=place.ring_per_byte,
                hop_per_byte=place.ring_per_byte,
            )
        if collective == "p2p":
            link = self._find_intra_node_link(2) if place.local > 1 else place.far
            slowdown = _compute_ll_slowdown(place, constants, hop_per_byte=1 / link.rate)
            return [
                AlphaBetaCost(link.ll_step_seconds, slowdown / link.rate),
                AlphaBetaCost(link.simple_step_seconds, 1 / link.rate),
            ]
        if collective == "all_to_all":
            return [_price_exchange(place) if copies.number == 1 else _price_dispatch(place, copies)]
        raise make_unknown_name_error(collective, list(get_args(Collective)), kind="collective")

    def _find_placement(self, group: RankGroup) -> GroupPlacement:
        """Return the placement of a group: ranks per node, nodes, and the smallest far link that spans it."""
        links = self._machine.links
        local = min(group.ranks, max(1, links[0].span // group.stride))
        nodes = -(-group.ranks // local)
        reach = (group.ranks - 1) * group.stride + 1
        outer = next((i for i, link in enumerate(links) if i and link.span >= reach), len(links) - 1)
        outer_link = self._tiers[outer]
        if self._nccl:  # the slowdown was measured with NCCL
            outer_link = outer_link._replace(rate=outer_link.rate / (1 + self._constants.crowding * math.log2(nodes)))
        return GroupPlacement(group.ranks, local, nodes, self._find_intra_node_link(local), outer_link)

    def _find_intra_node_link(self, ranks: int) -> LinkModel:
        """Return the near link for ``ranks`` of a node; if ranks are wired in pairs, only their wires count."""
        link, tier = self._machine.links[0], self._tiers[0]
        share = (ranks - 1) / (link.span - 1) if link.direct and 1 < ranks < link.span else 1.0
        return tier._replace(rate=share * tier.rate)


def _compute_ll_slowdown(place: GroupPlacement, constants: Constants, *, hop_per_byte: float) -> float:
    """Return how many times as long as under Simple a byte takes under LL; under Simple its hop takes ``hop_per_byte``.

    Between nodes LL sends from and to buffers in the host's memory (NVIDIA/nccl@b647562:src/transport/net.cc).
    """
    if place.nodes == 1:
        return 1 / constants.low_latency_share
    limit = constants.low_latency_rates[min(place.nodes, 3) - 2]
    return max(1 / constants.low_latency_far_share, 1 / (hop_per_byte * limit))


def _list_protocols(
    place: GroupPlacement,
    constants: Constants,
    *,
    inner_steps: float,
    outer_steps: float,
    per_byte: float,
    hop_per_byte: float,
) -> list[AlphaBetaCost]:
    """Return the costs under LL and Simple, for ``inner_steps`` and ``outer_steps`` on the two links.

    ``per_byte``: the seconds of a byte of the payload under Simple; ``hop_per_byte``: those of a byte on its hop.
    """
    return [
        AlphaBetaCost(
            inner_steps * place.near.ll_step_seconds + outer_steps * place.far.ll_step_seconds,
            per_byte * _compute_ll_slowdown(place, constants, hop_per_byte=hop_per_byte),
        ),
        AlphaBetaCost(
            inner_steps * place.near.simple_step_seconds + outer_steps * place.far.simple_step_seconds, per_byte
        ),
    ]


def _price_ring(place: GroupPlacement, constants: Constants, *, turns: int) -> list[AlphaBetaCost]:
    """Return the costs of a ring: every rank passes on n - 1 shards per turn; an all-reduce takes two turns."""
    ranks = place.ranks
    per_byte = turns * (ranks - 1) / ranks * place.ring_per_byte
    return _list_protocols(
        place,
        constants,
        inner_steps=turns * (ranks - place.nodes),
        outer_steps=turns * (place.nodes - 1),
        per_byte=per_byte,
        hop_per_byte=place.ring_per_byte,
    )


def _price_gloo(collective: str, place: GroupPlacement, constants: Constants) -> AlphaBetaCost | None:
    """Return the cost of a gloo collective: a ring of two turns, also for its reduce-scatter; gathers and all-to-alls.

    A rank sends before it requests what it receives, over the same connection: a peer that came earlier and requested
    is sent to at once, and the other direction begins when that has arrived. Measured:
    docs/explanation/how-a-step-costs/constants.md.
    """
    if collective in ("all_reduce", "reduce_scatter"):
        return _price_ring(place, constants, turns=2)[-1]
    if collective == "all_gather":
        (line,) = _price_ring(place, constants, turns=1)[-1:]
        return line._replace(per_byte=constants.gloo_gather_factor * line.per_byte)
    if collective == "all_to_all":
        return _price_exchange(place)._replace(
            per_byte=constants.gloo_exchange_factor * _price_exchange(place).per_byte
        )
    return None


def _compute_nic_load(place: GroupPlacement) -> float:
    """Return the seconds per byte on a tree's NICs: two nodes exchange sums once.

    An inner node of more sends up and down.
    """
    return (1 if place.nodes == 2 else 2) / (place.local * place.far.rate) if place.nodes > 1 else 0.0


def _price_tree(place: GroupPlacement, constants: Constants) -> list[AlphaBetaCost]:
    """Return the costs of two binary trees; an inner rank of one is a leaf of the other, so each sends 2 S bytes."""
    near_steps = 2 * math.ceil(math.log2(place.local))
    far_steps = 2 * math.ceil(math.log2(place.nodes))
    load = max(2 / place.near.rate if place.local > 1 else 0.0, _compute_nic_load(place))
    per_byte = load / constants.tree_rate_share
    lines = _list_protocols(
        place, constants, inner_steps=near_steps, outer_steps=far_steps, per_byte=per_byte, hop_per_byte=per_byte / 2
    )
    return [line._replace(filled=filled) for line, filled in zip(lines, constants.tree_shares, strict=True)]


def _price_switch(place: GroupPlacement) -> list[AlphaBetaCost]:
    """Return the cost of in-switch reduction: a rank sends S bytes, its sum of S / l once (NVIDIA/nccl issue 1083)."""
    if place.near.reduction is None or place.local == 1 or place.nodes > 2:
        return []  # over many nodes the NICs limit it as they limit the tree
    per_byte = max((place.local + 1) / place.local / place.near.reduction, _compute_nic_load(place))
    return [AlphaBetaCost(place.ranks * place.near.simple_step_seconds, per_byte)]


def _price_exchange(place: GroupPlacement) -> AlphaBetaCost:
    """Return the cost of an all-to-all of all pairs at once: within the node on the near link, the rest on NICs.

    Messages to all peers are started one after another, and the last one travels.
    """
    near_peers, far_peers = place.local - 1, place.ranks - place.local
    per_byte = max(near_peers / place.near.rate, far_peers / place.far.rate) / place.ranks
    far_seconds = (far_peers - 1) * place.far.start_seconds + place.far.ll_step_seconds if far_peers else 0.0
    return AlphaBetaCost(near_peers * place.near.ll_step_seconds + far_seconds, per_byte)


def _price_dispatch(place: GroupPlacement, copies: TokenCopies) -> AlphaBetaCost:
    """Return the cost of a fused all-to-all.

    A token goes once to each node and rank that has one of its experts.

    These are the kernels of DeepEP and HybridEP, which write directly into the ranks' buffers: README.md of
    deepseek-ai/DeepEP measures 45 GB/s on the NICs of H100s (two nodes) and 563 to 647 on the NVLink of B200s, the
    rates of rings.
    """
    near_share = _expect_distinct(place.ranks, copies) * (place.local - 1) / place.local
    far_share = _expect_distinct(place.nodes, copies) * (place.nodes - 1) / place.nodes
    per_byte = max(near_share / place.near.rate, far_share / place.far.rate) / copies.number
    return AlphaBetaCost(place.near.ll_step_seconds + (place.far.ll_step_seconds if place.nodes > 1 else 0.0), per_byte)


def _expect_distinct(places: int, copies: TokenCopies) -> float:
    """Return the expected number of distinct places, ranks or nodes, that have one of a token's experts.

    Its experts are drawn from those places that have one of its groups of experts: all, without groups.
    """
    groups, chosen = copies.groups, copies.chosen_groups
    if places >= groups:
        candidates = places * chosen / groups
    else:
        groups_of_place = groups / places
        without = math.prod(max(0.0, (groups - groups_of_place - index) / (groups - index)) for index in range(chosen))
        candidates = places * (1 - without)
    return candidates * (1 - (1 - 1 / candidates) ** copies.number)


def _interpolate(curve: list[tuple[int, float]], size: int) -> float:
    """Return the seconds at ``size`` on a measured curve, interpolated linearly between two sizes.

    A message below the smallest size takes the time of that size; one above the largest size has its rate.
    """
    if size <= curve[0][0]:
        return curve[0][1]
    if size > curve[-1][0]:
        return curve[-1][1] * size / curve[-1][0]
    index = bisect_left(curve, (size, 0.0))
    (small_size, small_seconds), (large_size, large_seconds) = curve[index - 1], curve[index]
    return small_seconds + (large_seconds - small_seconds) * (size - small_size) / (large_size - small_size)
