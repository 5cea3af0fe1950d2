"""Attention by blocks against scores written out in fp64; documents as ranges; what autograd keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.trainer.model import sliding_window_attention
from fivefold.trainer.model.attention_mask import AttentionMask, Heads, count_visible_pairs
from fivefold.trainer.model.flash_attention import (
    DocumentSpan,
    Flash,
    attend,
    attend_backward,
    list_earlier_key_spans,
    list_self_attention_spans,
)

B, T, S, N, K = 2, 6, 10, 4, 2
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 3, 3], [5, 6, 6, 6, 6, 6, 6, 6, 6, 6]])  # [B, S]


def draw_inputs(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(*, tokens: int = S, keys: int = S, dims: tuple[int, int] = (8, 8), kv_heads: int = K) -> tuple[Tensor, ...]:
    return (
        draw_inputs(B, tokens, N, dims[0], seed=1),
        draw_inputs(B, keys, kv_heads, dims[0], seed=2),
        draw_inputs(B, keys, kv_heads, dims[1], seed=3),
    )


def compute_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, rule: AttentionMask, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``seen`` [B, T, S]: which keys each query sees."""
    k, v = (x.repeat_interleave(N // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("btnh,bsnh->btns", q, k) * rule.scale
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None].expand(*scores.shape[:3], 1)), dim=-1)
        v = torch.cat((v, torch.zeros_like(v[:, :1])), dim=1)
    return torch.einsum("btns,bsnh->btnh", scores.softmax(-1).nan_to_num(), v), scores.logsumexp(-1)


RULE = AttentionMask(0.3)
RULES = [
    RULE,
    AttentionMask(0.3, window=3),
    AttentionMask(0.3, softcap=0.7),
    AttentionMask(0.3, window=6, softcap=0.7),
    AttentionMask(0.3, window=30),
]


def check_close(found: Tensor, wanted: Tensor, *, error: float = 1e-5) -> None:
    assert found.shape == wanted.shape
    finite = wanted.isfinite()
    assert torch.equal(finite, found.isfinite())
    if finite.any():
        assert (found.double() - wanted)[finite].abs().max() <= error * wanted[finite].abs().max()


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (12, 8), (8, 12)], ids=["equal", "values narrower", "values wider"])
@pytest.mark.parametrize("case", ["causal", "all", "documents", "documents before"])
def test_blockwise_attention_equals_plain_attention(
    case: str, dims: tuple[int, int], rule: AttentionMask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliding_window_attention, "MAX_SCORES", 40 * B * N)  # several chunks of queries
    spans = None
    tokens = T if case == "documents before" else S
    offset = {"causal": 0, "documents": 0}.get(case, S)
    apart = torch.arange(tokens)[:, None] + offset - torch.arange(S)
    seen = ((apart >= 0) & (apart < (rule.window or 2 * S))).expand(B, tokens, S)
    if case == "documents":
        seen = seen & (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])
        spans = list_self_attention_spans(DOCUMENTS)
    if case == "documents before":  # queries behind all of the keys: of the first sequence two belong to its last one
        after = torch.tensor([[3, 3, 4, 4, 4, 4], [7, 7, 7, 8, 8, 8]])
        seen = seen & (after[:, :, None] == DOCUMENTS[:, None])
        spans = list_earlier_key_spans(after, DOCUMENTS, offset=S)
        assert spans == (DocumentSpan(slice(0, 2), slice(8, 10), 2),)
    inputs = qkv(tokens=tokens, dims=dims)
    out, lse = attend(*inputs, rule, offset=offset, spans=spans)

    exact = [x.double().requires_grad_() for x in inputs]
    wanted, wanted_lse = compute_attention(*exact, seen, rule)
    check_close(out, wanted)
    check_close(lse, wanted_lse)

    gradient = draw_inputs(*out.shape, seed=4)
    wanted.backward(gradient.double())
    result = attend_backward(gradient, *inputs, out, lse, rule, offset=offset, spans=spans)
    for one, x in zip(result, exact, strict=True):
        assert x.grad is not None
        check_close(one, x.grad)


@pytest.mark.parametrize("block", [(7, 9, 0), (7, 9, 4), (9, 7, 5), (4, 4, 4), (4, 4, 3), (1, 6, 5), (5, 5, 9)])
@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_counted_query_key_pairs_are_those_of_the_mask(block: tuple[int, int, int], window: int) -> None:
    queries, keys, offset = block
    apart = torch.arange(queries)[:, None] + offset - torch.arange(keys)
    wanted = int(((apart >= 0) & (apart < window)).sum())
    assert count_visible_pairs(queries, keys, offset=offset, window=window) == wanted


def test_sliding_window_attention_never_holds_all_scores() -> None:
    """Nor does a soft cap: what one chunk of queries sees is all that there is at once."""
    q = torch.empty(2, 8, 5000, 4)
    k = torch.empty(2, 2, 5000, 4)
    for window in (0, 1, 100, 4999):
        chunks = list(sliding_window_attention.list_chunks(q, k, offset=0, window=window))
        assert sum(chunk.queries.stop - chunk.queries.start for chunk in chunks) == 5000
        sizes = [(c.queries.stop - c.queries.start) * (c.keys.stop - c.keys.start) for c in chunks]
        assert max(sizes) * 2 * 8 <= sliding_window_attention.MAX_SCORES
        if window == 100:  # masked or not, at most three times what is seen
            assert sum(sizes) <= 3 * count_visible_pairs(5000, 5000, offset=0, window=window)


def test_document_spans_are_listed_and_only_the_last_sees_earlier_keys() -> None:
    assert list_self_attention_spans(DOCUMENTS) == tuple(
        DocumentSpan(slice(*run), slice(*run)) for run in ((0, 3), (3, 4), (4, 8), (8, 10), (10, 11), (11, 20))
    )
    assert list_earlier_key_spans(DOCUMENTS[:, 6:], DOCUMENTS[:, 2:5], offset=4) == (
        DocumentSpan(slice(0, 2), slice(2, 3), 2),  # two tokens of document 2 see its first one
        DocumentSpan(slice(4, 8), slice(3, 6), 4),
    )


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("rule", [RULE, AttentionMask(0.3, window=4, softcap=2.0)], ids=["plain", "window"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize("dims", [(8, 8), (12, 8)], ids=["equal", "latent"])
def test_flash_attention_is_exact_and_saves_five_tensors(
    documents: Tensor | None, dims: tuple[int, int], rule: AttentionMask, sinks: bool
) -> None:
    inputs = [x.requires_grad_() for x in (*qkv(dims=dims), *([draw_inputs(2 * N, seed=9)] if sinks else []))]
    core = Flash(rule, heads=Heads(rank=1 if sinks else 0))  # of sinks the second half
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = core(*inputs[:3], documents, *inputs[3:])
    assert sum(kept.values()) == 4 * (sum(x.numel() for x in inputs) + out.numel() + B * S * N)  # the last is lse

    apart = torch.arange(S)[:, None] - torch.arange(S)
    seen = ((apart >= 0) & (apart < (rule.window or S))).expand(B, S, S)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None])
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted, _ = compute_attention(*exact[:3], seen, rule, exact[3][N:] if sinks else None)
    check_close(out.detach(), wanted.detach())
    gradient = draw_inputs(*out.shape, seed=4)
    out.backward(gradient)
    wanted.backward(gradient.double())
    for x, y in zip(inputs, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        check_close(x.grad, y.grad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rule", [RULE, AttentionMask(0.3, window=4, softcap=2.0)], ids=["plain", "window"])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (20, 20)], ids=str)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
def test_gpu_agrees_with_cpu(documents: Tensor | None, dims: tuple[int, int], rule: AttentionMask) -> None:
    spans = None if documents is None else list_self_attention_spans(documents)
    inputs = [x.bfloat16() for x in qkv(dims=dims)]
    gradient = draw_inputs(B, S, N, dims[1], seed=4).bfloat16()
    there = [x.cuda() for x in inputs]
    out, lse = attend(*inputs, rule, spans=spans)
    result, found_lse = attend(*there, rule, spans=spans)
    check_close(result.cpu(), out.double(), error=2e-2)
    check_close(found_lse.cpu(), lse.double(), error=1e-3)
    wanted = attend_backward(gradient, *inputs, out, lse, rule, spans=spans)
    for one, other in zip(
        attend_backward(gradient.cuda(), *there, result, found_lse, rule, spans=spans), wanted, strict=True
    ):
        check_close(one.cpu(), other.double(), error=3e-2)
    local = Flash(rule)(*there, documents)
    check_close(local.cpu(), out.double(), error=2e-2)
