"""What experts keep besides their activations: where each copy of a token goes, and how it comes back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.liveness import GradientSums
from fivefold.planner.counts.operations.feedforward import count_routed_rows
from fivefold.planner.counts.operations.layer import Kind
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.counts.operations.op import Op

E, K, D, F, T = 8, 2, 128, 64, 64
MIXTURE = Model(
    name="mixture",
    layers=2,
    width=D,
    heads=8,
    kv_heads=8,
    head_dim=16,
    ffn=320,
    vocab=1000,
    moe=MoE(experts=E, topk=K, ffn=F, shared_experts=1),
)
MOE = Kind(slides=False, moe=True)


def operations(text: str, model: Model = MIXTURE) -> Sequence[Op]:
    return Counts(model, Job(sequence=T)).unit(get_local_degrees(Layout.parse(text)), MOE).ops


def list_saved(ops: Sequence[Op]) -> dict[str, int]:
    names = {name for op in ops for name in op.keeps}
    return {name: size for op in ops for name, size in op.writes.items() if name in names}


def test_routing_saves_the_tensors_that_the_trainer_saves() -> None:
    """fp32 scores of all experts; int64 order, token and place of each copy, and where those of each token begin."""
    result = list_saved(operations("dp1"))
    assert result["scores"] == 4 * T * E
    assert result["chosen"] == 8 * T * K
    assert result["shares"] == 4 * T * (K + 1)  # the chosen scores and their sum
    assert result["permutation"] == 8 * (3 * T * K + T + E + 1)
    assert result["share"] == 4 * T * K
    assert result["ends"] == 4 * E
    assert "weights" not in result


def test_unnormalized_routing_saves_no_sums() -> None:
    assert MIXTURE.moe is not None
    plain = MIXTURE.replace(moe=MIXTURE.moe.replace(normalized=False))
    assert "shares" not in list_saved(operations("dp1", plain))


@pytest.mark.parametrize(("text", "arrived", "order", "ends"), [
    ("dp2 ep2", T * K, True, E // 2),
    ("dp8 ep8", T * K, False, 1),  # from all ranks to the only expert here: in any order
    ("tp2 etp2", T * K, True, E),
    ("dp2 tp2 ep2 etp2", T * K, True, E // 2),
])  # fmt: skip
def test_dispatch_saves_the_order_of_received_rows(text: str, arrived: int, order: bool, ends: int) -> None:
    result = list_saved(operations(text))
    assert result["dispatch_plan"] == 8 * arrived * order + 4 * ends
    assert result["arrived"] == 2 * D * arrived
    assert result["arrived.share"] == 4 * arrived
    assert "routed" not in result


def test_recomputation_frees_all_but_the_planned_tensors() -> None:
    """What was planned is not planned again: expert choice must be the same."""
    for text, stays in (("dp1", ("permutation",)), ("dp2 ep2", ("permutation", "dispatch_plan"))):
        counts, part = Counts(MIXTURE, Job(sequence=T)), get_local_degrees(Layout.parse(f"{text} ac=full"))
        sizes = list_saved(operations(text))
        assert counts.profile(part, MOE).kept_bytes == 2 * T * D + sum(sizes[name] for name in stays)


@pytest.mark.parametrize("text", ["dp4 ep4", "dp2 tp2 ep2 etp2", "tp2 etp2"])
def test_every_expert_weight_gets_its_gradient_once(text: str) -> None:
    """Those of gate and up while the gradients of rows travel, whose place is where the rows arrive."""
    layout = Layout.parse(text)
    whole, mine = (
        sum(sum(op.wgrad_numels) for op in operations(item) if op.name.startswith(("moe.experts", "moe.arrive")))
        for item in ("dp1", text)
    )
    assert whole == 3 * E * D * F
    assert mine * layout.ep * layout.etp == whole
    (arrive,) = (op for op in operations(text) if op.name == "moe.arrive")
    assert len(arrive.wgrad_numels) == 2
    assert "arrived" in arrive.keeps


def test_gradient_sums_of_experts_are_allocated_with_their_first_gradient() -> None:
    """Before those of the other weights: at the fullest moment, which is theirs, these do not live yet."""
    counts, part = Counts(MIXTURE, Job(sequence=T)), get_local_degrees(Layout.parse("dp2 ep2"))
    early = counts.profile(part, MOE, GradientSums(dense=10**5, experts=9 * 10**5))
    assert early.backward_cause == "moe.arrive"
    assert early.backward_sums_bytes == 9 * 10**5
    reduced = counts.profile(part, MOE, GradientSums(shard_bytes=10**6, freed_bytes=10**7))
    assert reduced.backward_sums_bytes == 10**6
    assert reduced.backward_peak_bytes == counts.profile(part, MOE).backward_peak_bytes + 10**6


@pytest.mark.parametrize(("capacity", "ours", "padded"), [(None, 1.0, 1.0), (0.5, 0.5, 0.5), (1.5, 1.0, 1.5)])
def test_an_expert_capacity_drops_rows_and_adds_rows_only_as_padding(
    capacity: float | None, ours: float, padded: float
) -> None:
    assert MIXTURE.moe is not None
    model = MIXTURE.replace(moe=MIXTURE.moe.replace(capacity=capacity))
    for linears, share in (("fused_backward", ours), ("separate", padded)):
        local = Counts(model, Job(sequence=T, linears=linears)).get_local(get_local_degrees(Layout(ep=2, dp=2)))
        assert count_routed_rows(local) == T * K * share
