"""The pieces of all ranks are the full weight, each element on as many ranks of a group as its piece says."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.job import Job
from fivefold.layout.local_weight import RankCoordinate, find_local_slice, pad_vocab
from fivefold.layout.sharding import shard_weight
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights

GROUPED = Model(
    name="grouped",
    layers=1,
    width=24,
    heads=8,
    kv_heads=2,
    head_dim=6,
    ffn=48,
    vocab=83,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qk_norm="head",
    head_bias=True,
    moe=None,
)
ROUTED = GROUPED.replace(
    moe=MoE(experts=8, topk=2, ffn=12, shared_experts=1, shared_ffn=16, expert_bias=True, router_bias=True)
)
LATENT = ROUTED.replace(mla=MLA(q_rank=12, kv_rank=10, nope_dim=4, rope_dim=2, v_dim=6), qk_norm="none", qkv_bias=False)


@pytest.mark.parametrize("model", [GROUPED, ROUTED, LATENT], ids=["grouped", "routed", "latent"])
@pytest.mark.parametrize("text", ["tp1", "tp2", "tp4", "tp8", "dp4 ep4", "tp4 etp2 ep2", "tp4 etp4", "dp2 tp4 ep8"])
def test_shards_cover_the_tensor_without_overlap(model: Model, text: str) -> None:
    layout, job = Layout.parse(text), Job(vocab_multiple=3)
    vocab = pad_vocab(model, job, tp=layout.tp)
    assert vocab % (3 * layout.tp) == 0
    for weight in list_weights(model):
        expert = weight.kind.startswith("expert")
        places = (
            [RankCoordinate(ep=ep, etp=etp) for ep in range(layout.ep) for etp in range(layout.etp)]
            if expert
            else [RankCoordinate(tp=tp) for tp in range(layout.tp)]
        )
        held, holders = np.zeros(weight.shape, int), set()
        for place in places:
            result = find_local_slice(weight, model=model, layout=layout, vocab=vocab, place=place)
            assert result.shape == shard_weight(weight, model=model, layout=layout, vocab=vocab).shape
            filled = np.zeros(result.shape, int)
            for full, local in result.list_slices():
                assert held[full].shape == filled[local].shape
                held[full] += 1
                filled[local] += 1
            assert filled.max() <= 1
            holders.add(result.holders)
        copies = layout.etp if expert and (held == layout.etp).all() else holders.pop()
        assert (held == copies).all(), weight.name
