"""Masks from a counter: known outputs of the generator, shares, and the same masks however the work is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.trainer.model import dropout, sliding_window_attention
from fivefold.trainer.model.attention_mask import AttentionMask, Heads
from fivefold.trainer.model.dropout import (
    GAMMA,
    Dropout,
    compute_keep_scale,
    dropout_mask,
    make_keep_mask,
    mix,
    place_keys,
    row_keys,
    sequence_keys,
)
from fivefold.trainer.model.dropout import score_rows as numbers_of
from fivefold.trainer.model.flash_attention import Flash
from fivefold.trainer.model.kernels.fused.dropout import draw_mask
from fivefold.trainer.model.unfused_attention import Unfused
from tests.trainer.model.test_flash_attention import DOCUMENTS, B, K, N, S, check_close, draw_inputs, qkv

KEYS = sequence_keys(torch.arange(B), seed=5, step=2)


def test_the_generator_is_splitmix64() -> None:
    """Outputs of the published code for the seed 1234567 (https://prng.di.unimi.it/splitmix64.c)."""
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    result = mix(1234567 + torch.arange(1, 6) * GAMMA)
    assert [value % 2**64 for value in result.tolist()] == wanted


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_stated_share_in_rows_and_columns(rate: float) -> None:
    keys = row_keys(KEYS[:1], torch.arange(500), place=3).flatten()
    mask = make_keep_mask(keys, columns=range(400), rate=rate).double()
    spread = (rate * (1 - rate)) ** 0.5
    assert abs(float(mask.mean()) - (1 - rate)) < 5 * spread / 200_000**0.5
    for dim in (0, 1):
        assert float((mask.mean(dim) - (1 - rate)).abs().max()) < 5 * spread / mask.shape[dim] ** 0.5
    neighbours = (mask[:, 1:] * mask[:, :-1]).mean(), (mask[1:] * mask[:-1]).mean()
    assert all(abs(float(both) - (1 - rate) ** 2) < 0.01 for both in neighbours)
    assert compute_keep_scale(rate) == pytest.approx(1 / (1 - rate), rel=2e-4)


def test_the_mask_of_some_columns_is_a_part_of_the_full_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "MAX_DRAWN_ELEMENTS", 30)
    keys = row_keys(KEYS, torch.arange(7), place=3)
    whole = dropout_mask(keys, 23, 0.3)
    assert whole.shape == (B, 7, 23)
    for columns in (range(23), range(5, 9), range(4, 5), range(7, 22)):
        assert torch.equal(make_keep_mask(keys, columns=columns, rate=0.3), whole[..., columns.start : columns.stop])


def test_every_key_gives_another_dropout_mask() -> None:
    x = torch.ones(2 * 8, 64)
    masks = []
    for seed, step, place in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)):
        keys = sequence_keys(torch.tensor([[0, 1]]), seed=seed, step=step)[0]
        masks += list(Dropout(0.5, place=place)(x, keys, 8).view(2, -1))
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks)
    assert {0.0, 2.0} == set(torch.stack(masks).unique().tolist())


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize("window", [None, 4])
def test_flash_and_unfused_attention_drop_the_same(
    window: int | None, documents: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as written out; with half of the heads each, as two ranks of tp, all the same."""
    monkeypatch.setattr(sliding_window_attention, "MAX_SCORES", 40 * B * N)
    rule = AttentionMask(0.3, window, dropout=0.25, layer=3)
    gradient = draw_inputs(B, S, N, 8, seed=4)
    rows = row_keys(KEYS, numbers_of(range(N), range(S), device=gradient.device), place=1 + 3 * 3)
    mask = make_keep_mask(rows, columns=range(S), rate=0.25).transpose(1, 2)
    wanted = _compute_attention(mask, window, documents, gradient)
    for kind in (Flash, Unfused):
        inputs = [x.requires_grad_() for x in qkv()]
        keys = (None, KEYS) if kind is Flash else (KEYS,)
        out = kind(rule)(*inputs, documents, *keys)  # type: ignore[arg-type]
        out.backward(gradient)
        for one, other in zip([out.detach(), *(x.grad for x in inputs)], wanted, strict=True):
            assert one is not None
            check_close(one, other)
        q, k, v = (x.detach() for x in inputs)
        second = kind(rule, heads=Heads(part=1))(
            q[:, :, N // 2 :],
            k[:, :, K // 2 :],
            v[:, :, K // 2 :],
            documents,
            *keys,  # type: ignore[arg-type]
        )
        check_close(second, wanted[0][:, :, N // 2 :])
        assert torch.equal(kind(rule)(q, k, v, documents), kind(rule._replace(dropout=0.0))(q, k, v, documents))
    assert place_keys(KEYS, 1).tolist() != KEYS.tolist()


def _compute_attention(mask: Tensor, window: int | None, documents: Tensor | None, gradient: Tensor) -> list[Tensor]:
    leaves = [x.double().requires_grad_() for x in qkv()]
    q, k, v = leaves[0], *(x.repeat_interleave(N // K, dim=2) for x in leaves[1:])
    apart = torch.arange(S)[:, None] - torch.arange(S)
    seen = ((apart >= 0) & (apart < (window or S))).expand(B, S, S)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None])
    scores = torch.einsum("btnh,bsnh->btns", q, k) * 0.3
    shares = scores.masked_fill(~seen[:, :, None], -torch.inf).softmax(-1) * mask / 0.75
    out = torch.einsum("btns,bsnh->btnh", shares, v)
    out.backward(gradient.double())
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize(("columns", "first"), [(64, 0), (3000, 0), (37, 6), (5, 1)])
def test_the_kernel_draws_the_mask_of_pytorchs_operations(columns: int, first: int) -> None:
    keys = dropout.mix(torch.arange(6)).view(2, 3)
    for rate in (0.1, 0.5, 0.93):
        drawn = draw_mask(keys, columns, first=first, dropped=round(rate * dropout.LEVELS))
        assert drawn.equal(dropout.dropout_mask(keys, columns, rate, first))
