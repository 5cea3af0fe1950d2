"""Latent attention to chosen keys: the choice and the core against every pair, and what a training step changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fivefold.trainer.model.sparse_attention as kernels
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.indexer import Indexer
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.update import Optimizer

TOKENS, TOPK, HEADS, DIM = 11, 4, 3, 6


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


@pytest.fixture(params=[2**22, 60], ids=["one block", "many blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_TEMPORARY_ELEMENTS", request.param)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 5 + [1] * 6, [2] * 9 + [3] * 2])])
def test_the_keys_with_the_largest_scores_are_chosen(documents: Tensor | None) -> None:
    q, k, w = draw(2 * TOKENS, HEADS, DIM).float(), draw(2 * TOKENS, DIM).float(), draw(2 * TOKENS, HEADS).float()
    ids = None if documents is None else documents.flatten()
    chosen = kernels.choose_keys(q, k, w, 0, TOKENS, TOPK, ids)
    parts = [kernels.choose_keys(q[r], k, w[r], r.start, TOKENS, TOPK, ids) for r in (slice(0, 8), slice(8, 22))]
    assert torch.equal(chosen, torch.cat(parts))  # a rank's own rows, as under sequence parallelism
    for row in range(2 * TOKENS):
        start, token = row // TOKENS * TOKENS, row % TOKENS
        visible = [s for s in range(token + 1) if documents is None or ids[start + s] == ids[row]]  # type: ignore[index]
        scores = {s: float((w[row] * (q[row] @ k[start + s]).relu()).sum()) for s in visible}
        best = sorted(scores.values(), reverse=True)[:TOPK]
        mine = [int(s) for s in chosen[row] if s != kernels.NO_KEY]
        assert len(set(mine)) == len(mine) == min(TOPK, len(visible))
        assert sorted((scores[s] for s in mine), reverse=True) == pytest.approx(best, abs=1e-5)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("has_sinks", [False, True])
def test_core_and_gradients_equal_those_of_masked_scores(has_sinks: bool) -> None:
    q, keys = draw(2 * TOKENS, HEADS, DIM).requires_grad_(), draw(2 * TOKENS, DIM).requires_grad_()
    sinks = torch.randn(HEADS, dtype=torch.float64).requires_grad_() if has_sinks else None
    chosen = torch.full((2 * TOKENS, TOPK), kernels.NO_KEY, dtype=torch.int32)
    mask = torch.zeros(2 * TOKENS, 2 * TOKENS, dtype=torch.bool)
    for row in range(2 * TOKENS):
        token = row % TOKENS
        picked = torch.randperm(token + 1)[:TOPK]
        chosen[row, : len(picked)] = picked
        mask[row, row - token + picked] = True
    core = kernels.SparseCore(kernels.AttentionMask(0.3), value_dim=4)
    out = core(q, keys, chosen, sinks, TOKENS)
    scores = torch.einsum("rnh,sh->rns", q, keys).mul(0.3).masked_fill(~mask[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None].expand(len(q), -1, 1)), dim=-1)
    wanted = scores.softmax(-1)[..., : len(keys)] @ keys[:, :4]
    torch.testing.assert_close(out, wanted)
    leaves = [x for x in (q, keys, sinks) if x is not None]
    gradient = draw(*out.shape)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, gradient), torch.autograd.grad(wanted, leaves, gradient), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


SPARSE = Model(
    name="sparse",
    layers=2,
    width=24,
    heads=2,
    kv_heads=2,
    head_dim=12,
    ffn=40,
    vocab=64,
    mla=MLA(
        q_rank=12,
        kv_rank=20,
        nope_dim=8,
        rope_dim=4,
        v_dim=6,
        indexer=Indexer(heads=3, head_dim=8, topk=5, pattern=(True, False)),
    ),
)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon", "adafactor"])
def test_a_step_leaves_the_weights_of_an_indexer_as_they_are(forked: Callable[..., list[list[str]]], kind: str) -> None:
    """Whatever the optimizer and its weight decay are: nothing differentiates the choice of keys."""
    (changed,) = forked(1, list_changed, kind)
    assert changed
    assert not [name for name in changed if ".indexer." in name]


def list_changed(kind: str) -> list[str]:
    """Return the names of the weights that two steps of an optimizer change."""
    optimizer = Optimizer.model_validate({"kind": kind, "weight_decay": 0.5})
    job = Job(sequence=16, global_batch=2, steps=2, precision=get_recipe("fp32"), optimizer=optimizer)
    layout = Layout.parse("mbs1")
    built = build(model=SPARSE, layout=layout, job=job, device=torch.device("cpu"))
    engine = Engine(built, model=SPARSE, layout=layout, job=job)
    shards = [shard for unit in built.units for shard in unit.shards]
    before = [shard.weight.detach().clone() for shard in shards]
    for number in range(2):
        engine.step(torch.randint(64, (2, 1, 17), generator=torch.Generator().manual_seed(number)))
        engine.zero_grad()
    return [shard.name for shard, old in zip(shards, before, strict=True) if not torch.equal(shard.weight, old)]
