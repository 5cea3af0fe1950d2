"""SparseMixer against transformers' Phi-3.5-MoE, in training with the same random numbers for both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from fivefold.trainer.model.dropout import sequence_keys
from fivefold.trainer.model.sparse_mixer import ExpertNoise, choose_experts, weigh_experts

ROWS, EXPERTS = 4000, 6
JITTERS = (0.01, 0.2, 1.0)


def draw_logits(seed: int) -> Tensor:
    return torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def draw_uniform() -> Tensor:
    keys = sequence_keys(torch.arange(4), seed=7, step=3)
    return ExpertNoise(layer=2, experts=EXPERTS).draw(keys, rows=ROWS)


def use_same_draws(monkeypatch: pytest.MonkeyPatch, uniform: Tensor) -> None:
    """Let transformers draw the numbers of ``uniform``: exponentials of the experts, then the complement of the last.

    Theirs takes a draw at its full value above 0.75, ours below 0.25.
    """
    exponentials: Iterator[Tensor] = iter([-part[:, :-1].log() for part in uniform.chunk(2, dim=1)])
    shares = iter([1 - part[:, -1:] for part in uniform.chunk(2, dim=1)])
    monkeypatch.setattr(Tensor, "exponential_", lambda self: self.copy_(next(exponentials)))
    last: list[Tensor] = []

    def draw_share(like: Tensor) -> Tensor:
        last.append(next(shares))
        return last[-1].clone()

    monkeypatch.setattr(torch, "rand_like", draw_share)
    monkeypatch.setattr(Tensor, "uniform_", lambda self: self.copy_(last[-1]))


@pytest.mark.parametrize("jitter", JITTERS)
@pytest.mark.parametrize("training", [True, False])
def test_experts_weights_and_gradients_are_those_of_transformers(
    jitter: float, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = draw_logits(1), draw_logits(1)
    uniform = draw_uniform() if training else None
    chosen, factors = choose_experts(ours.detach(), uniform, jitter=jitter)
    weights = weigh_experts(ours, chosen, factors, jitter=jitter)
    if uniform is not None:
        use_same_draws(monkeypatch, uniform)
    their_weights, their_experts = sparsemixer(theirs, jitter_eps=jitter, training=training)
    assert torch.equal(chosen, their_experts)
    torch.testing.assert_close(weights, their_weights, rtol=1e-5, atol=1e-6)
    gradient = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(2))
    weights.backward(gradient)
    their_weights.backward(gradient)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    is_drawn = (chosen != ours.detach().topk(2).indices).any()
    assert bool(is_drawn) == training  # or the test would not see the draws
    assert len(factors.unique()) == 1 + training


def test_a_candidate_is_drawn_as_often_as_its_probability() -> None:
    logits = torch.tensor([1.0, 0.9, 0.2, -3.0]).expand(40_000, 4)
    uniform = ExpertNoise(layer=0, experts=4).draw(sequence_keys(torch.arange(1), seed=0, step=0), rows=len(logits))
    chosen, _ = choose_experts(logits, uniform, jitter=0.1)  # the first two are candidates
    shares = chosen[:, 0].bincount(minlength=4) / len(logits)
    wanted = torch.tensor([1.0, 0.9]).softmax(0)
    torch.testing.assert_close(shares, torch.cat([wanted, torch.zeros(2)]), rtol=0, atol=0.01)


def test_a_rank_draws_the_numbers_of_its_rows() -> None:
    """Tensor parallelism cuts the rows into neighbours, context parallelism by positions."""
    keys = sequence_keys(torch.arange(3), seed=1, step=0)
    whole = ExpertNoise(layer=1, experts=EXPERTS).draw(keys, rows=3 * 8)
    part = ExpertNoise(layer=1, experts=EXPERTS)
    part.row_part = (1, 2)
    assert torch.equal(part.draw(keys, rows=12), whole[12:])
    part = ExpertNoise(layer=1, experts=EXPERTS)
    part.positions = torch.tensor([1, 2, 5, 6])
    assert torch.equal(part.draw(keys, rows=12), whole.view(3, 8, -1)[:, part.positions].flatten(0, 1))
    other = ExpertNoise(layer=2, experts=EXPERTS).draw(keys, rows=24)
    assert not torch.equal(other, whole)
