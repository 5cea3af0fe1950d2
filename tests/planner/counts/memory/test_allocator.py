"""Reserved and live memory: the allocator's rules, and a run that printed both."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.adapter import Adapter
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.machine.spec import Machine
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.allocator import (
    PUBLISHED,
    bound_driver_bytes,
    count_driver_bytes,
    estimate_allocator_totals,
    segment,
)
from fivefold.planner.counts.memory.peak import count_rank_memory, list_live_bytes
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack
from fivefold.units import GIB, MIB

STREAMS = 12 + 1 + 8  # inputs of 12 blocks and of the head's norm, cut by tp; the head's full input
FIVEFOLD = Stack()
NODE, NODES = (resolve(f"h100:{ranks}", local=Path("/nowhere")) for ranks in (8, 16))
LLAMA_70B = build_model("llama3-70b").replace(layers=12)
# Megatron-Core with Transformer Engine, 8 B200: MooreThreads/SimuMax@4dcaae5:docs/b200/b200_release_v1.2_summary.json
MEGATRON = Job(
    sequence=4096,
    global_batch=16,
    overlap=(),
    vocab_multiple=128,
    merged_projections=True,
    wgrad_accumulation="fused_dummy",
)


@pytest.mark.parametrize(
    ("size", "segment_bytes"),
    [(0, 0), (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB)],
)
def test_sizes_are_rounded_to_allocator_segments(size: int, segment_bytes: int) -> None:
    assert segment(size) == segment_bytes


@pytest.mark.parametrize(
    ("text", "batch", "allocated", "reserved"),
    [
        ("dp4 tp2 zero1 mbs1", 16, 60.68, 62.53),
        ("dp2 tp4 zero1 mbs1", 8, 39.07, 40.18),
        ("dp4 pp2 zero1 mbs1", 16, 66.55, 70.88),
    ],
)
def test_allocated_and_reserved_memory_of_published_runs_is_predicted(
    text: str, batch: int, allocated: float, reserved: float
) -> None:
    """Allocated to 0.3 %, reserved to 3 %."""
    counts, layout = Counts(LLAMA_70B, MEGATRON.replace(global_batch=batch)), Layout.parse(text)
    ranks = count_rank_memory(counts, layout)
    result = estimate_allocator_totals(counts, NODE, layout, ranks)
    assert max(rank.peak_bytes for rank in ranks) == pytest.approx(allocated * GIB, rel=0.003)
    assert result.reserved_bytes == pytest.approx(reserved * GIB, rel=0.03)


def test_expandable_segments_reserve_only_the_peak() -> None:
    counts, layout = Counts(LLAMA_70B, MEGATRON.replace(expandable_segments=True)), Layout(dp=4, tp=2, zero=1)
    ranks = count_rank_memory(counts, layout)
    assert estimate_allocator_totals(counts, NODE, layout, ranks).reserved_bytes == segment(ranks[0].peak_bytes)


def count_reserved(job: Job, text: str) -> int:
    counts, layout = Counts(LLAMA_70B, job), Layout.parse(text)
    return estimate_allocator_totals(counts, NODE, layout, count_rank_memory(counts, layout)).reserved_bytes


def peak_of(job: Job, text: str = "dp8 zero1 mbs1 ac=full") -> int:
    return max(rank.peak_bytes for rank in count_rank_memory(Counts(LLAMA_70B, job), Layout.parse(text)))


def test_a_flat_copy_of_the_weights_is_reserved_in_its_own_segment() -> None:
    job = Job(sequence=4096, global_batch=4, wgrad_accumulation="deferred")
    more = count_reserved(job.replace(flat_copies=("weights",)), "dp4 zero1") - count_reserved(job, "dp4 zero1")
    assert 0 <= more - 2 * LLAMA_70B.parameters < 2 * MIB


def test_a_stage_that_trains_nothing_concatenates_no_gradients() -> None:
    """It was a crash, of the largest of no gradients."""
    job = Job(global_batch=8, freeze=("embed_tokens", "layers[:-1]"), flat_copies=("gradients",))
    counts, layout = Counts(build_model("llama3-8b"), job), Layout.parse("dp4 pp2 zero3 1f1b mbs1")
    ranks = count_rank_memory(counts, layout)
    assert estimate_allocator_totals(counts, NODE, layout, ranks).reserved_bytes >= max(
        rank.peak_bytes for rank in ranks
    )


def test_a_host_that_runs_ahead_reserves_buffers_of_messages_in_flight() -> None:
    """Under sequence parallelism two full sums of each layer and one of the embedding: tokens x D in 16 bits.

    Of messages that compute waits for, PyTorch records no stream (ProcessGroupNCCL.cpp, _reduce_scatter_base).
    """
    (behind, ahead), (behind_waiting, ahead_waiting) = (
        [
            count_reserved(MEGATRON.replace(run_ahead=ahead, async_tp=overlaps), "dp4 tp2 zero1")
            for ahead in (False, True)
        ]
        for overlaps in (True, False)
    )
    assert ahead - behind == (2 * 12 + 1) * 4096 * LLAMA_70B.width * 2
    assert ahead_waiting == behind_waiting


@pytest.mark.parametrize(("compiled", "logits"), [(True, 3), (False, 4)])
def test_dtensors_loss_in_eager_holds_four_logits(compiled: bool, logits: int) -> None:
    """Zeros with a one, softmax, their sum and its product with the gradient: loss.py of PyTorch's tensor parallelism;
    and none of them is as large as their sum to the allocator."""
    stack = build_stack("torchtitan").replace(compile_loss=compiled)
    counts = Counts(LLAMA_70B, Job(sequence=8192, global_batch=16, stack=stack))
    layout = Layout.parse("tp8 zero3 mbs16 ac=full")
    ranks, wide = count_rank_memory(counts, layout), 16 * 8192 * LLAMA_70B.vocab // 8 * 4
    assert ranks[0].peak_cause == "head backward loss"
    head = next(moment for moment in list_live_bytes(counts, layout) if moment.cause == "head backward loss")
    assert head.activations_bytes + head.logits_bytes + head.temporary_bytes == pytest.approx(
        logits * wide + STREAMS * 16 * 8192 * 8192 // 8 * 2, rel=0.01
    )
    assert estimate_allocator_totals(counts, NODE, layout, ranks).reserved_bytes - segment(
        ranks[0].peak_bytes
    ) == 2 * segment(wide)


CONNECTED = FIVEFOLD.replace(runtime_connect=False)  # NCCL before 2.22


def list_groups(machine: Machine, text: str, stack: Stack = CONNECTED) -> int:
    return count_driver_bytes(machine, Layout.parse(text), stack) - PUBLISHED.context_bytes


def test_driver_memory_is_the_cuda_context_and_the_buffers_of_each_communicator() -> None:
    """Of all ranks, and of each axis: a ring and a tree of the 24 channels of a node, or of two for each NIC."""
    model = Model(name="m", layers=2, width=64, heads=2, kv_heads=2, head_dim=32, ffn=128, vocab=300)
    counts, layout = Counts(model, Job(sequence=64, global_batch=8)), Layout.parse("dp2 tp8")
    result = estimate_allocator_totals(counts, NODES, layout, count_rank_memory(counts, layout))
    assert result.driver_bytes - result.reserved_bytes == count_driver_bytes(NODES, layout, FIVEFOLD)
    node, all_ranks, pair = 24 * 12 * 22 // 8, 16 * 12 * 46 // 16, 80
    assert list_groups(NODES, "dp2 tp8") == (node + all_ranks + pair) * MIB
    assert list_groups(NODES, "dp1") == 0
    assert list_groups(NODE, "tp8") == 2 * node * MIB


@pytest.mark.parametrize(("ranks", "measured"), [(2, 544), (4, 688)])
def test_buffers_of_a_communicator_are_those_measured_on_a100(ranks: int, measured: int) -> None:
    """MiB that nvidia-smi shows more for each group of GPUs joined by NVLink: NVIDIA/nccl issue 964."""
    both = list_groups(resolve(f"a100:{ranks}", local=Path("/nowhere")), f"dp{ranks}")
    assert both / 2 == pytest.approx(measured * MIB, rel=0.06)


@pytest.mark.parametrize("lazy", [False, True])
def test_buffers_of_an_all_to_all_are_near_those_measured_on_h100(lazy: bool) -> None:
    """3.28 GB more after the first all-to-all of eight H100: NVIDIA/nccl issue 1685. A fused dispatcher has none."""
    exchanged, fused = (
        list_groups(NODE, "dp8 ep8", build_stack("megatron-core").replace(dispatcher=dispatcher, runtime_connect=lazy))
        for dispatcher in ("all_to_all", "fused")
    )
    assert exchanged - fused == pytest.approx(3.28e9, rel=0.15)


def test_deepspeeds_grid_of_a_pipeline_has_groups_of_its_own() -> None:
    software, node, all_ranks, pair = build_stack("megatron-deepspeed"), 24 * 12 * 22 // 8, 16 * 12 * 46 // 16, 80
    more = list_groups(NODES, "tp8 pp2", software) - list_groups(NODES, "tp8 pp2")
    assert more == (node + all_ranks + pair + 40) * MIB  # 40: two channels to the other stage
    assert list_groups(NODES, "dp2 tp8", software) == list_groups(NODES, "dp2 tp8")


@pytest.mark.parametrize(
    ("machine", "text", "sizes"),
    [
        (NODE, "tp8", [288, 288]),  # all ranks, and tp: rings of 24 channels
        (NODE, "dp8 zero1", [288, 288]),
        (NODES, "dp2 tp8 zero1", [16 * 12 * 46 // 16, 288, 40]),  # trees between nodes are of all-reduces
        (NODES, "dp2 tp8", [16 * 12 * 46 // 16, 288, 80]),
        (NODES, "tp8 pp2", [16 * 12 * 46 // 16, 288, 40]),  # no ring of stages
        (NODE, "cp8", [288, 32 * 12]),  # no ring of the algorithm that has its name
    ],
)
def test_nccl_since_2_22_connects_only_what_is_used(machine: Machine, text: str, sizes: list[int]) -> None:
    """NVIDIA/nccl@v2.22.3-1:src/group.cc, ncclCollPreconnectFunc. Before, a node had 2.75 times as much."""
    assert list_groups(machine, text, FIVEFOLD) == sum(sizes) * MIB
    assert list_groups(machine, text) > list_groups(machine, text, FIVEFOLD)


@pytest.mark.parametrize("stack", [CONNECTED, FIVEFOLD], ids=["connected", "at run time"])
@pytest.mark.parametrize("name", ["a100", "v100", "l40s", "mi300x", "gb200", "gh200"])
def test_no_layout_has_fewer_driver_bytes_than_the_bound_of_a_search(name: str, stack: Stack) -> None:
    for world in (1, 2, 3, 4, 5, 8, 9, 12, 16, 64):  # 5 and 9: one rank is alone on its node
        machine = resolve(f"{name}:{world}", local=Path("/nowhere"))
        for tp, pp in ((tp, pp) for tp in range(1, world + 1) for pp in range(1, world + 1) if world % (tp * pp) == 0):
            layout = Layout(dp=world // (tp * pp), tp=tp, pp=pp, schedule="1f1b")
            assert bound_driver_bytes(machine, world, stack) <= count_driver_bytes(machine, layout, stack)


def test_gradients_allocated_one_by_one_leave_the_rest_of_freed_blocks() -> None:
    """Those of a layer of Llama lie in blocks of activations that are larger; permanent buffers leave nothing."""
    job = Job(sequence=65_536, global_batch=16, vocab_multiple=128)
    one, several, permanent = (
        count_reserved(job.replace(**changes), "dp8 zero1 mbs1 ac=full") - peak_of(job.replace(**changes))
        for changes in ({"global_batch": 8}, {}, {"wgrad_accumulation": "fused"})
    )
    assert one == pytest.approx(permanent, rel=0.5)
    assert several > 1.5 * max(one, permanent)


def test_freed_logits_of_a_rank_with_one_micro_batch_in_flight_are_reused() -> None:
    """In 1f1b the last rank has no other micro-batch, whose activations could take the block of freed logits."""
    job, layout = Job(sequence=131_072, global_batch=16), Layout.parse("dp2 pp4 zero1 mbs1 ac=full")
    counts = Counts(build_model("llama3-8b").replace(layers=6), job)
    ranks = count_rank_memory(counts, layout)
    reserved_bytes = estimate_allocator_totals(counts, NODE, layout, ranks).reserved_bytes
    assert reserved_bytes < max(rank.peak_bytes for rank in ranks) + counts.logits(get_local_degrees(layout))


def test_weights_that_are_gathered_one_by_one_are_tensors_of_their_own() -> None:
    """DeepSpeed gathers a weight into a tensor of its size, from its shard, and its bucket is part of the backward."""
    job = Job(sequence=2048, global_batch=16, stack=build_stack("deepspeed"), adapter=Adapter(rank=16, base="nf4"))
    counts, layout = Counts(build_model("llama3-8b"), job), Layout.parse("dp2 zero3 mbs1 ac=full")
    ranks = count_rank_memory(counts, layout)
    table = segment(2 * 128_256 * 4096)  # the head, the embedding, and logits in fp32 of 2048 tokens
    beyond_peak = estimate_allocator_totals(counts, NODE, layout, ranks).reserved_bytes - segment(ranks[0].peak_bytes)
    assert 2 * table <= beyond_peak <= 2 * table + segment(ranks[0].updated_numel * 8)
