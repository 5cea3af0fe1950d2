"""Attention to keys that an indexer chooses: FLOPs counted pair by pair, what is kept, and what is not supported."""

from __future__ import annotations

from typing import Any

import pytest

import fivefold as ff
from fivefold.errors import UsageWarning, UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.model.indexer import Indexer
from fivefold.model.latent_attention import MLA
from fivefold.model.mixers.short_conv import ShortConv
from fivefold.model.spec import Model
from fivefold.model.weights import list_block_weights
from fivefold.planner.counts.flops import work
from fivefold.planner.counts.operations.layer import list_block
from fivefold.planner.counts.operations.local_shapes import Local, get_local_degrees
from fivefold.planner.counts.operations.op import Op

HEADS, DIM, TOPK = 3, 8, 5
INDEXER = Indexer(heads=HEADS, head_dim=DIM, topk=TOPK, pattern=(True, False))
SPARSE = Model(
    name="sparse",
    layers=2,
    width=48,
    heads=4,
    kv_heads=4,
    head_dim=12,
    ffn=40,
    vocab=131,
    mla=MLA(q_rank=12, kv_rank=20, nope_dim=8, rope_dim=4, v_dim=6, indexer=INDEXER),
)


def list_ops(model: Model = SPARSE, *, layer: int = 0, layout: Layout | None = None, **of_job: Any) -> dict[str, Op]:
    job = Job(sequence=12, global_batch=2, **of_job)
    local = Local(model, job, get_local_degrees(layout or Layout(mbs=2)))
    return {op.name: op for op in list_block(local, layer=layer)}


def test_flops_equal_those_of_every_query_key_pair() -> None:
    """Each query scores all keys up to its own with every head, weighs the sums, and attends to the best of them."""
    ops, sequences, tokens = list_ops(), 2, 12
    scored = sum(1 for query in range(tokens) for key in range(tokens) if key <= query)
    attended = sum(min(query + 1, TOPK) for query in range(tokens))
    choice, core = ops["attention.indexer.choice"], ops["attention.core"]
    assert choice.causal_flops == sequences * scored * HEADS * 2 * (DIM + 1)
    assert core.causal_flops == sequences * attended * SPARSE.heads * 2 * (20 + 4 + 20)  # latent | rope, and latent
    assert ops["attention.core.absorb_k"].flops == 24 * SPARSE.heads * 2 * 8 * 20
    assert ops["attention.core.absorb_v"].flops == 24 * SPARSE.heads * 2 * 20 * 6


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("layer", [0, 1])
def test_operations_use_every_weight_once(layer: int, tp: int) -> None:
    ops = list_ops(layer=layer, layout=Layout(tp=tp, mbs=2))
    held = 0
    for weight in list_block_weights(SPARSE, layer):
        whole = weight.kind in ("norm", "router") or any(part in weight.name for part in ("q_down", "kv_down"))
        held += weight.numel // (1 if whole else tp)
    assert sum(op.parameters for op in ops.values()) == held
    assert ("attention.indexer.choice" in ops) is (layer == 0)


def test_the_indexer_saves_only_indices_and_has_no_backward() -> None:
    ops = list_ops()
    for name in (name for name in ops if name.startswith("attention.indexer")):
        assert (ops[name].keeps, ops[name].wgrad_numels, ops[name].backward_products) == ((), (), 0)
    core = ops["attention.core"]
    assert ops["attention.indexer.choice"].writes == {"indices": 4 * 24 * TOPK}
    assert "indices" in core.keeps
    assert core.differentiates == ("qr", "lk")


def test_layers_with_and_without_an_indexer_are_counted_separately() -> None:
    job = Job(sequence=64, global_batch=1)
    every, half = (
        work(SPARSE.replace(mla=SPARSE.mla and SPARSE.mla.replace(indexer=INDEXER.replace(pattern=pattern))),
             layout=Layout(), job=job).model_flops_causal
        for pattern in ((), (True, False))
    )  # fmt: skip
    assert every > half


def test_unsupported_combinations_with_an_indexer_are_one_line_errors() -> None:
    job = Job(sequence=12, global_batch=2)
    with pytest.raises(UserError, match="cp=2 would shard the keys that the indexer of sparse selects"):
        refuse(Layout(cp=2), model=SPARSE, job=job)
    with pytest.raises(UserError, match="unfused attention does not know the keys that the indexer"):
        refuse(Layout(), model=SPARSE, job=job.replace(attention="unfused"))
    with pytest.raises(UserError, match="an indexer is not counted under autocast"):
        refuse(Layout(), model=SPARSE, job=job.replace(precision="bf16-autocast", stack="ddp"))
    with pytest.raises(
        UserError, match="a stage begins with layer 1 of sparse, which attends to the keys that layer 0 chose"
    ):
        refuse(Layout(pp=2, stages=(1, 1)), model=SPARSE, job=job)
    with pytest.raises(ValueError, match="layer 1 is the first that attends to chosen keys, and must choose them"):
        SPARSE.replace(mixers=("short_conv", "attention"), short_conv=ShortConv())
    with pytest.raises(UserError, match="give q_rank, or no indexer"):
        MLA.read({**SPARSE.mla.model_dump(), "q_rank": None} if SPARSE.mla else {}, origin="x")
    with pytest.raises(UserError, match=r"attention_softcap is not supported with mla\.indexer"):
        Model.read({**SPARSE.model_dump(), "attention_softcap": 2.0}, origin="x")


@pytest.mark.parametrize(
    "layout", ["tp2", "tp2 nosp", "pp2", "dp2 zero3", "dp2 ac=full", "dp2 ac=selective", "dp2 ac=norm"]
)
def test_predict_supports_every_layout_and_warns_that_the_loss_of_the_indexer_is_not_counted(layout: str) -> None:
    with pytest.warns(UsageWarning, match="the indexer's own loss is not counted"):
        step = ff.predict(SPARSE, "h100:2", layout, sequence=64, global_batch=8)
    assert step.time.step_seconds > 0
