import math
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.published import reader
from benchmarks.published.case import Message
from fivefold.errors import UserError
from fivefold.machine.catalog import list_names, resolve
from fivefold.machine.spec import Calibration, Chip, Collective, CollectivePoint, Link, Machine
from fivefold.planner.time.constants import PUBLISHED
from fivefold.planner.time.network import Network, RankGroup, TokenCopies, _expect_distinct

COLLECTIVES = get_args(Collective)
GIB = 2**30


def catalog(text: str) -> Network:
    return Network(resolve(text, local=Path("no/such/local.toml")))


def round_machine(backend="nccl", calibration=None, near=400e9, far=40e9, reduction=None) -> Machine:
    """Four ranks per node, with numbers that can be worked by hand."""
    chip = Chip(name="chip", peak_flops={"bf16": 1e12}, memory_bytes=1, memory_bandwidth=1e12, source="test")
    links = (
        Link(
            name="near",
            span=4,
            bandwidth=near,
            sustained=0.5,
            reduction_bandwidth=reduction,
            latency_seconds=1e-6,
            source="test",
        ),
        Link(name="far", span=64, bandwidth=far, sustained=0.5, latency_seconds=2e-6, source="test"),
    )
    return Machine(
        name="round", chip=chip, ranks=64, ranks_per_node=4, links=links, backend=backend, calibration=calibration
    )


# Single figures of the published curves: the single-node ones and issue 1229 set the constants, the others were only
# compared with them. Bus bandwidth in GB/s.
@pytest.mark.parametrize(
    ("machine", "collective", "ranks", "gib", "bus", "error"),
    [
        ("a100", "all_reduce", 8, 16, 234.89, 0.01),  # stas00/ml-engineering@744d01e:network/README.md#L1241
        ("a100", "all_reduce", 8, 1 / 16, 171.54, 0.10),  # #L1233
        ("h200", "all_reduce", 8, 1, 463.58, 0.01),  # #L1272
        ("h200", "all_reduce", 5, 8, 414.2, 0.03),  # #L926, and a ring is faster on four GPUs:
        ("h200", "all_reduce", 4, 8, 363.3, 0.02),  # #L925
        ("h200", "all_gather", 8, 16, 361.4, 0.01),  # #L980
        ("b200", "all_reduce", 8, 1, 723.34, 0.02),  # #L1419
        ("gb200", "all_reduce", 72, 1, 681.17, 0.08),  # coreweave/nccl-tests pull request 43
        ("h100:16", "all_reduce", 16, 16, 470, 0.10),  # NVIDIA/nccl-tests issue 309
        ("h100:32", "all_reduce", 32, 16, 365.84, 0.03),  # the same
        ("h100:256", "all_reduce", 256, 2, 340, 0.08),  # NVIDIA/nccl issue 1218; EFA reaches 270 (nccl_efa)
        ("h100:32", "reduce_scatter", 32, 8, 360, 0.03),  # NVIDIA/nccl issue 1229, the size is our reading
        ("h100:1024", "reduce_scatter", 1024, 8, 260, 0.05),
    ],
)
def test_predicted_bus_bandwidths_are_near_the_published(machine, collective, ranks, gib, bus, error):
    payload = int(gib * GIB)
    sent = (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks * payload
    seconds = catalog(machine).seconds(collective, payload, RankGroup(ranks, 1))
    assert sent / seconds == pytest.approx(bus * 1e9, rel=error)


def test_latencies_of_small_all_reduces_are_near_the_published():
    # 8 GPUs: 32 KiB in 44 us (A100), 40 us (H200). 256 GPUs on 32 nodes: 8 bytes in 63 us (NVIDIA/nccl issue 652).
    assert catalog("a100").seconds("all_reduce", 2**15, RankGroup(8, 1)) == pytest.approx(44e-6, rel=0.2)
    assert catalog("h200").seconds("all_reduce", 2**15, RankGroup(8, 1)) == pytest.approx(40e-6, rel=0.1)
    assert catalog("a100:256").seconds("all_reduce", 8, RankGroup(256, 1)) == pytest.approx(63e-6, rel=0.3)


def test_seconds_of_collectives_equal_those_by_hand():
    network = Network(round_machine())
    near, far = 200e9, 20e9
    crowded = far / 1.02  # two nodes
    launch, bulk, payload = 20e-6, 8e-6, 8 * 10**9

    def seconds(collective: str, ranks: int, stride: int) -> float:
        return network.seconds(collective, payload, RankGroup(ranks, stride))

    # In the node: three shards of a quarter each, over the near link.
    assert seconds("all_gather", 4, 1) == pytest.approx(launch + 3 * bulk + 0.75 * payload / near, rel=1e-12)
    # Over two nodes with four NICs each, and over two nodes with one NIC each.
    assert seconds("reduce_scatter", 8, 1) == pytest.approx(launch + 7 * bulk + payload * 7 / 8 / (4 * crowded))
    assert seconds("reduce_scatter", 2, 4) == pytest.approx(launch + bulk + payload / 2 / crowded, rel=1e-12)
    # A pair of nodes swaps its sums: half of what the ring sends, at 0.92 of the rate.
    assert seconds("all_reduce", 8, 1) == pytest.approx(launch + 6 * bulk + payload / (4 * crowded) / 0.92, rel=1e-12)
    # Half of every rank's bytes leave the node, by its own NIC.
    assert seconds("all_to_all", 8, 1) == pytest.approx(launch + 3e-6 + 8e-6 + payload / 2 / crowded, rel=1e-12)
    assert seconds("p2p", 2, 2) == pytest.approx(launch + bulk + payload / near, rel=1e-12)
    assert seconds("p2p", 2, 4) == pytest.approx(launch + bulk + payload / crowded, rel=1e-12)
    assert seconds("broadcast", 4, 1) == pytest.approx(launch + 3 * bulk + payload / near, rel=1e-12)


def test_small_messages_between_nodes_reach_a_quarter_of_the_rate_and_at_most_what_nccl_states():
    network, launch, payload = Network(round_machine()), 20e-6, 10_000
    far = 20e9 / 1.02  # two nodes
    half = payload / 2
    # One NIC each: a quarter of its rate. Four ranks each, over faster NICs: NCCL's limit for two nodes and for more.
    assert network.seconds("all_gather", payload, RankGroup(2, 4)) == pytest.approx(launch + 2e-6 + half / (far / 4))
    fast = Network(round_machine(near=4e12, far=400e9))
    for nodes, limit in ((2, 29.6e9), (4, 19.7e9)):
        ranks = 4 * nodes
        steps = (ranks - nodes) * 1e-6 + (nodes - 1) * 2e-6
        by_hand = launch + steps + (ranks - 1) / ranks * payload / limit
        assert fast.seconds("all_gather", payload, RankGroup(ranks, 1)) == pytest.approx(by_hand, rel=1e-12)


def test_gathers_over_efa_take_the_seconds_that_were_printed():
    # 32 and 64 MiB over 2 to 32 p5.48xlarge (nccl_efa, held out of all fits): up to 45 % too fast while LL reached half
    # of the rate between nodes.
    messages = [item for item in reader("nccl_efa")() if isinstance(item, Message) and item.payload <= 2**26]
    gathers = [item for item in messages if item.collective == "all_gather"]
    assert len(gathers) == 10
    for item in gathers:
        seconds = Network(item.machine).seconds("all_gather", item.payload, RankGroup(item.machine.ranks, 1))
        assert seconds == pytest.approx(item.seconds, rel=0.09), item.row


def test_the_latency_of_a_network_passes_once_in_an_exchange_with_all_peers():
    """Of 16 ranks in nodes of 4, each starts messages to 12 on other nodes: the last one travels, the others before."""
    machine = round_machine().replace(ranks=16)
    slow = machine.replace(links=(machine.links[0], machine.links[1].replace(latency_seconds=50e-6)))
    quick, late = (Network(item).seconds("all_to_all", 64, RankGroup(16, 1)) for item in (machine, slow))
    assert late - quick == pytest.approx(50e-6 - machine.links[1].latency_seconds + 11 * 2e-6, rel=1e-9)


def test_tokens_sent_once_per_node_take_the_time_of_the_formula():
    """Of 4 copies of a token on 2 nodes of 4 ranks 2 · (1 - 1/16) nodes and 8 · (1 - (7/8)^4) ranks want one."""
    network, payload = Network(round_machine()), 8 * 10**9
    once = network.seconds("all_to_all", payload, RankGroup(8, 1), copies=TokenCopies(4))
    assert once == pytest.approx(20e-6 + 3e-6 + payload / 4 * (15 / 16) / (20e9 / 1.02), rel=1e-12)
    near = network.seconds("all_to_all", payload, RankGroup(4, 1), copies=TokenCopies(4))
    assert near == pytest.approx(20e-6 + 1e-6 + payload / 4 * 3 * (1 - (3 / 4) ** 4) / 200e9, rel=1e-12)


@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (4, 2), (8, 3), (16, 4), (64, 8)])
@pytest.mark.parametrize("places", [2, 4, 8, 16, 64])
def test_tokens_reach_as_many_places_as_drawn_experts_have(places: int, groups: int, chosen: int) -> None:
    """Group-limited routing by hand: groups are drawn, experts of these are, and the places that hold them counted.

    A place holds consecutive experts. Experts are drawn with replacement, as the formula has it.
    """
    random, experts, copies, draws = Random(3), 256, 8, 2000
    count = 0
    for _ in range(draws):
        drawn = random.sample(range(groups), chosen)
        size = experts // groups
        held = [random.choice(drawn) * size + random.randrange(size) for _ in range(copies)]
        count += len({expert * places // experts for expert in held})
    assert _expect_distinct(places, TokenCopies(copies, groups, chosen)) == pytest.approx(count / draws, rel=0.08)


@given(payload=st.integers(1, 2**40), copies=st.integers(2, 64), ranks=st.sampled_from([8, 16, 64, 256]))
def test_sending_a_token_once_is_never_slower(payload, copies, ranks):
    network = NETWORKS["h100"]
    often = network.seconds("all_to_all", payload, RankGroup(ranks, 1))
    assert network.seconds("all_to_all", payload, RankGroup(ranks, 1), copies=TokenCopies(copies)) <= often


def test_all_reduces_reduced_in_the_switch_take_the_time_of_the_formula():
    network = Network(round_machine(reduction=250e9))
    expected = 20e-6 + 4 * 8e-6 + 8e9 * 5 / 4 / 250e9
    assert network.seconds("all_reduce", 8 * 10**9, RankGroup(4, 1)) == pytest.approx(expected, rel=1e-12)


def test_the_switch_reduces_only_on_one_or_two_nodes():
    """Where the NICs are no limit, so that a price of the switch over more nodes would be seen."""
    switched, plain = (Network(round_machine(near=40e9, far=4e12, reduction=switch)) for switch in (250e9, None))
    for nodes in range(1, 6):
        seconds, without = (
            network.seconds("all_reduce", 8 * 10**9, RankGroup(4 * nodes, 1)) for network in (switched, plain)
        )
        assert (seconds < without) == (nodes <= 2), nodes
        assert (seconds == without) == (nodes > 2), nodes


def test_measured_curves_replace_the_model_of_the_network():
    points = [("all_reduce", 4, 10**3, 1e-4), ("all_reduce", 4, 10**5, 1e-2), ("all_reduce", 2, 10**4, 5.0)]
    measured = tuple(CollectivePoint(collective=c, ranks=r, bytes=b, seconds=s) for c, r, b, s in points)
    calibration = Calibration(date="2026-01-01", torch="2.13.0", cores=2, collectives=measured)
    network = Network(round_machine("gloo", calibration))
    four = RankGroup(4, 1)
    assert network.seconds("all_reduce", 10**4, four) == pytest.approx(1e-3, rel=1e-12)
    assert network.seconds("all_reduce", 50_500, four) == pytest.approx(5.05e-3, rel=1e-12)  # half way
    assert network.seconds("all_reduce", 10, four) == 1e-4
    assert network.seconds("all_reduce", 10**5, four) == 1e-2
    assert network.seconds("all_reduce", 10**6, four) == pytest.approx(1e-1, rel=1e-12)
    # Never measured: the link alone, which on gloo has its start within, and half of a gather goes one way at a time.
    assert network.seconds("all_gather", 10**9, four) == pytest.approx(3e-6 + 1.5 * 0.75e9 / 200e9, rel=1e-12)


def test_gloo_between_hosts_is_priced_as_it_sends() -> None:
    """Four hosts of a rank each at 20 GB/s: a reduce-scatter is an all-reduce, an exchange goes one way at a time."""
    machine = round_machine("gloo")
    hosts = machine.replace(ranks_per_node=1, links=(machine.links[0].replace(span=1), machine.links[1]))
    network, payload, four = Network(hosts), 8 * 10**9, RankGroup(4, 1)
    once = 3 / 4 * payload / 20e9
    for collective, latencies, times in (
        ("all_reduce", 6, 2),
        ("reduce_scatter", 6, 2),
        ("all_gather", 3, 1.5),
        ("all_to_all", 3, 2),
    ):
        assert network.seconds(collective, payload, four) == pytest.approx(2e-6 * latencies + times * once, rel=1e-12)
        assert network.busy_seconds(collective, payload, four) == pytest.approx(1e-6 * latencies + times * once / 10)
    assert network.seconds("p2p", payload, four) == pytest.approx(2e-6 + payload / 20e9, rel=1e-12)


def test_a_measured_curve_applies_to_its_number_of_hosts() -> None:
    points = [(1, 1e-3, None), (2, 3e-3, 2e-3)]
    measured = tuple(
        CollectivePoint(collective="all_reduce", ranks=4, bytes=1000, seconds=s, nodes=n, busy_seconds=b)
        for n, s, b in points
    )
    network = Network(round_machine("gloo", Calibration(date="2026-01-01", torch="2", cores=2, collectives=measured)))
    assert (
        network.seconds("all_reduce", 1000, RankGroup(4, 1)),
        network.busy_seconds("all_reduce", 1000, RankGroup(4, 1)),
    ) == (
        1e-3,
        1e-3,  # within a host a core does it all
    )
    assert (
        network.seconds("all_reduce", 1000, RankGroup(4, 2)),
        network.busy_seconds("all_reduce", 1000, RankGroup(4, 2)),
    ) == (
        3e-3,
        2e-3,
    )


def test_an_unknown_collective_is_an_error():
    with pytest.raises(UserError, match="unknown collective 'all_gathr'; did you mean all_gather"):
        catalog("h100").seconds("all_gathr", 1, RankGroup(8, 1))


groups = st.builds(RankGroup, ranks=st.integers(2, 1024), stride=st.integers(1, 64))
payloads = st.integers(1, 64 * GIB)
collectives = st.sampled_from(COLLECTIVES)
NETWORKS = {name: catalog(f"{name}:8192") for name in list_names()}
# a tree's share of the rate at a size over that at the double size, such as 0.8 at 8 MiB under Simple over 0.7 at 16
LARGEST_TREE_FALL = max(low / high for shares in PUBLISHED.tree_shares for low, high in pairwise(shares))


@given(collective=collectives, payload=payloads, stride=st.integers(1, 64))
def test_a_collective_of_one_rank_takes_no_time(collective, payload, stride):
    assert NETWORKS["h100"].seconds(collective, payload, RankGroup(1, stride)) == 0


@given(name=st.sampled_from(list_names()), collective=collectives, payload=payloads, group=groups)
@example(name="v100", collective="all_reduce", payload=7_863_422, group=RankGroup(31, 1))
def test_time_grows_with_the_payload_smoothly_and_no_faster_than_rates_fall(name, collective, payload, group):
    """A double payload takes twice as long at most, but for trees, whose rate NCCL's table lowers at some sizes."""
    network = NETWORKS[name]
    once = network.seconds(collective, payload, group)
    assert once < network.seconds(collective, payload + 1, group) + 1e-15
    assert network.seconds(collective, payload + 1, group) - once < 1e-8  # no jump where the algorithm changes
    falling = LARGEST_TREE_FALL if collective == "all_reduce" else 1
    assert once < network.seconds(collective, 2 * payload, group) <= 2 * falling * once


@given(
    collective=collectives,
    payload=payloads,
    group=groups,
    near=st.floats(1, 10),
    far=st.floats(1, 10),
    reduction=st.none() | st.floats(1, 10),
)
def test_more_bandwidth_is_never_slower(collective, payload, group, near, far, reduction):
    plain = Network(round_machine()).seconds(collective, payload, group)
    switch = None if reduction is None else reduction * 200e9
    faster = round_machine(near=400e9 * near, far=40e9 * far, reduction=switch)
    assert Network(faster).seconds(collective, payload, group) <= plain * (1 + 1e-12)


@given(name=st.sampled_from(list_names()), collective=collectives, payload=payloads, data=st.data())
@settings(max_examples=300)
def test_a_group_inside_a_node_is_never_slower_than_the_same_across(name, collective, payload, data):
    node = resolve(name, local=Path("none")).ranks_per_node
    ranks = data.draw(st.integers(2, node))
    stride = data.draw(st.integers(math.ceil(node / ranks) + 1, 2 * node))
    inside = NETWORKS[name].seconds(collective, payload, RankGroup(ranks, 1))
    assert inside <= NETWORKS[name].seconds(collective, payload, RankGroup(ranks, stride)) * (1 + 1e-12)


@given(name=st.sampled_from(list_names()), payload=payloads, group=groups)
def test_an_all_reduce_is_at_most_its_two_halves(name, payload, group):
    network = NETWORKS[name]
    halves = sum(network.seconds(half, payload, group) for half in ("reduce_scatter", "all_gather"))
    assert network.seconds("all_reduce", payload, group) <= halves


def test_directly_linked_gpus_share_only_the_links_between_them() -> None:
    """Four GPUs with three wires each: two of them share one, three share two; and a message takes one wire."""
    machine = round_machine()
    direct = machine.replace(links=(machine.links[0].replace(direct=True), machine.links[1]))
    switched, wired = Network(machine), Network(direct)
    start = switched.seconds("all_gather", 1, RankGroup(2, 1))
    for ranks, share in ((2, 3), (3, 3 / 2), (4, 1)):
        payload, place = 4 * GIB, RankGroup(ranks, 1)
        ratio = (wired.seconds("all_gather", payload, place) - start) / switched.seconds("all_gather", payload, place)
        assert ratio == pytest.approx(share, rel=0.01)
    assert wired.seconds("p2p", GIB, RankGroup(4, 1)) == pytest.approx(
        3 * switched.seconds("p2p", GIB, RankGroup(4, 1)), rel=0.01
    )
    assert wired.seconds("all_gather", GIB, RankGroup(8, 4)) == switched.seconds("all_gather", GIB, RankGroup(8, 4))
