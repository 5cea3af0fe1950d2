"""FSDP2's buffers by hand, moment by moment of one block, and what PyTorch's pipelines keep between B and W.

``tests/third_party/measured.py`` measures the same on real processes (docs/measurements/014-interop.md).
"""

from __future__ import annotations

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.peak import PeakMoment, count_rank_memory, list_live_bytes
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.stack.catalog import build_stack as stack_named

MODEL = build_model("tiny")
FSDP2 = stack_named("fsdp2")


def moments(layout: str, **changed: object) -> dict[str, PeakMoment]:
    parsed = Layout.parse(layout)
    job = Job(stack=FSDP2.replace(**changed), sequence=128, global_batch=parsed.dp * parsed.mbs, precision="fp32")
    return {moment.cause: moment for moment in list_live_bytes(Counts(MODEL, job), parsed)}


def gathered_bytes(name: str) -> int:
    """Bytes of a unit's gathered weights, which two ranks divide."""
    counts, layout = Counts(MODEL, Job(precision="fp32")), Layout.parse("dp2 zero3")
    run = next(run for run in counts.list_stage_groups(layout)[0] if name in (run.name, run.name_unit(0)))
    return counts.states(layout, run.name).gathered


def test_gathered_buffer_is_allocated_next_to_the_weights() -> None:
    block, embedding, last = gathered_bytes("block 0"), gathered_bytes("embed"), MODEL.layers - 1
    for overlap in ((), ("dp",)):  # on a CPU as on GPUs
        result = moments("dp2 zero3 mbs1", overlap=overlap)
        assert result["block 0 forward"].gathers_bytes == 2 * block
        assert result["block 0 gather"].gathers_bytes == block + max(block, embedding)
        backward = next(item for cause, item in result.items() if cause.startswith(f"block {last} backward"))
        assert backward.gathers_bytes == 2 * block  # and the next one's, which are not copied yet
        backward = next(item for cause, item in result.items() if cause.startswith("block 0 backward"))
        assert backward.gathers_bytes == block + embedding


def test_an_embedding_with_hooks_stays_gathered_until_the_backward_has_ended() -> None:
    """The input of an embedding has no gradient, so that no hook of FSDP2 frees its weights in the backward."""
    for layout, changed in (("dp2 zero3 mbs1", {"reshard": "backward"}), ("dp2 zero2 mbs1", {})):
        peaks = []
        for gather in ("all", "needed"):
            items = moments(layout, overlap=(), backward_all_gather=gather, **changed)
            peaks.append(max(item.gathers_bytes for item in items.values()))
            last = MODEL.layers - 1
            assert items[f"block {last} forward"].gathers_bytes > items["block 0 forward"].gathers_bytes
        assert peaks[0] - peaks[1] == gathered_bytes("embed")


def test_gradients_are_copied_when_all_are_made_and_their_copy_stays_for_a_unit() -> None:
    block, head, last = gathered_bytes("block 0"), gathered_bytes("head"), MODEL.layers - 1
    result = moments("dp2 zero3 mbs1", overlap=())
    reduced = result[f"block {last} reduce"]
    assert reduced.gradients_bytes == head // 2 + 2 * block  # the head's shard; gradients and their copy
    assert reduced.gathers_bytes == block  # of the block before: its own are freed
    after = result[f"block {last - 1} gather"]
    assert after.gradients_bytes == head // 2 + block // 2 + block  # shards, and the copy that is being reduced


def test_the_logits_of_a_plain_loop_live_until_the_backward_has_ended() -> None:
    logits = 128 * MODEL.vocab * 4
    held, let_go = (moments("dp2 zero3 mbs1 ac=full", loss=loss, overlap=()) for loss in ("low_precision", "plain"))
    assert held["block 0 reduce"].temporary_bytes - let_go["block 0 reduce"].temporary_bytes == logits


def test_keeping_the_autograd_graph_between_b_and_w_keeps_all_saved_tensors() -> None:
    layout = Layout.parse("pp2 v2 zbv mbs2")
    model = MODEL.replace(layers=4)
    job = Job(stack=stack_named("torchtitan").replace(compile=False, kernels="plain"), sequence=128, global_batch=8)
    peaks = {
        item: [rank.peak_bytes for rank in count_rank_memory(Counts(model, job.replace(deferred_wgrad=item)), layout)]
        for item in ("operands", "graph")
    }
    assert all(more > less for more, less in zip(peaks["graph"], peaks["operands"], strict=True))
    counts = Counts(model, job)
    part = counts.list_stage_groups(layout)[1][0]
    profile, split = (
        counts.profile(get_local_degrees(layout), part.name),
        counts.profile_deferred_wgrad(get_local_degrees(layout), part.name),
    )
    sizes = {op.name: next(iter(op.writes.values())) for op in counts.unit(get_local_degrees(layout), part.name).ops}
    weighed = [op.name for op in counts.unit(get_local_degrees(layout), part.name).ops if op.wgrad_numels]
    assert split.deferred_bytes == profile.kept_bytes + sum(sizes[name] for name in weighed)


def test_a_copy_freed_when_experts_are_reduced_is_counted_once() -> None:
    """Experts are reduced within their block's backward, which frees the copy of the unit before; the block's own
    gradients and their copy follow.
    """
    moe, layout = build_model("qwen3-30b-a3b").replace(layers=3), Layout.parse("dp4 ep4 zero2 mbs1")
    job = Job(stack=stack_named("fivefold").replace(comm_buffers="retained"), sequence=128, global_batch=8)
    counts = Counts(moe, job)
    (block,) = {counts.states(layout, run.name).sums for run in counts.list_stage_groups(layout)[0] if run.routes}
    assert (
        min(item.gradients_bytes for item in list_live_bytes(counts, layout) if item.cause.endswith("reduce")) >= block
    )


def test_an_indexer_that_no_gradient_reaches_defers_none() -> None:
    """Its matmuls have weights, but W has no operands of them, however gradients are accumulated."""
    model, layout = build_model("glm5-744b-a40b"), Layout(pp=2, schedule="zb1p")
    deferred_bytes = set()
    for item in ("separate", "fused", "fused_dummy"):
        counts = Counts(model, Job(sequence=64, global_batch=2, wgrad_accumulation=item))
        block = counts.list_stage_groups(layout)[1][0].name
        deferred_bytes.add(counts.profile_deferred_wgrad(get_local_degrees(layout), block).deferred_bytes)
    assert len(deferred_bytes) == 1
