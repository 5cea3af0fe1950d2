"""Attention by blocks against scores written out in fp64; documents as ranges; what autograd keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.train.model.flash_attention import Flash, Span, across, attend, attend_backward, flash_attention, within

B, T, S, N, K = 2, 6, 10, 4, 2
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 3, 3], [5, 6, 6, 6, 6, 6, 6, 6, 6, 6]])  # [B, S]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(*, tokens: int = S, keys: int = S, dims: tuple[int, int] = (8, 8), kv_heads: int = K) -> tuple[Tensor, ...]:
    return (
        drawn(B, tokens, N, dims[0], seed=1), drawn(B, keys, kv_heads, dims[0], seed=2),
        drawn(B, keys, kv_heads, dims[1], seed=3),
    )  # fmt: skip


def written_out(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``seen`` [B, T, S]: which keys each query sees."""
    k, v = (x.repeat_interleave(N // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("btnh,bsnh->btns", q, k) * scale
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    return torch.einsum("btns,bsnh->btnh", scores.softmax(-1).nan_to_num(), v), scores.logsumexp(-1)


def agrees(found: Tensor, wanted: Tensor, *, error: float = 1e-5) -> None:
    assert found.shape == wanted.shape
    finite = wanted.isfinite()
    assert torch.equal(finite, found.isfinite())
    assert (found.double() - wanted)[finite].abs().max() <= error * wanted[finite].abs().max()


@pytest.mark.parametrize("dims", [(8, 8), (12, 8), (8, 12)], ids=["equal", "values narrower", "values wider"])
@pytest.mark.parametrize("case", ["causal", "all", "documents", "documents before"])
def test_block_is_attention_written_out(case: str, dims: tuple[int, int]) -> None:
    spans = None
    tokens = T if case == "documents before" else S
    seen = torch.ones(B, tokens, S, dtype=torch.bool)
    if case in ("causal", "documents"):
        seen = seen.tril()
    if case == "documents":
        seen &= DOCUMENTS[:, :, None] == DOCUMENTS[:, None]
        spans = within(DOCUMENTS)
    if case == "documents before":  # queries behind all of the keys: of the first sequence two belong to its last one
        after = torch.tensor([[3, 3, 4, 4, 4, 4], [7, 7, 7, 8, 8, 8]])
        seen &= after[:, :, None] == DOCUMENTS[:, None]
        spans = across(after, DOCUMENTS)
        assert spans == (Span(slice(0, 2), slice(8, 10)),)
    inputs = qkv(tokens=tokens, dims=dims)
    causal = case in ("causal", "documents")
    out, lse = attend(*inputs, causal=causal, scale=0.3, spans=spans)

    exact = [x.double().requires_grad_() for x in inputs]
    wanted, wanted_lse = written_out(*exact, seen, 0.3)
    agrees(out, wanted)
    agrees(lse, wanted_lse)

    gradient = drawn(*out.shape, seed=4)
    wanted.backward(gradient.double())
    found = attend_backward(gradient, *inputs, out, lse, causal=causal, scale=0.3, spans=spans)
    for one, x in zip(found, exact, strict=True):
        assert x.grad is not None
        agrees(one, x.grad)


def test_documents_are_runs_and_only_the_last_reaches_over() -> None:
    assert within(DOCUMENTS) == tuple(
        Span(slice(*run), slice(*run)) for run in ((0, 3), (3, 4), (4, 8), (8, 10), (10, 11), (11, 20))
    )
    assert across(DOCUMENTS[:, 6:], DOCUMENTS[:, 2:5]) == (
        Span(slice(0, 2), slice(2, 3)),  # two tokens of document 2 see its first one
        Span(slice(4, 8), slice(3, 6)),
    )


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize("dims", [(8, 8), (12, 8)], ids=["equal", "latent"])
def test_core_is_exact_and_keeps_five_tensors(documents: Tensor | None, dims: tuple[int, int]) -> None:
    inputs = [x.requires_grad_() for x in qkv(dims=dims)]
    core = Flash(scale=0.3)
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = core(*inputs, documents)
    assert sum(kept.values()) == 4 * (sum(x.numel() for x in inputs) + out.numel() + B * S * N)  # the last is lse

    seen = torch.ones(B, S, S, dtype=torch.bool).tril()
    if documents is not None:
        seen &= documents[:, :, None] == documents[:, None]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted, _ = written_out(*exact, seen, 0.3)
    agrees(out.detach(), wanted.detach())
    out.sum().backward()
    wanted.sum().backward()
    for x, y in zip(inputs, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        agrees(x.grad, y.grad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (20, 20)], ids=str)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
def test_gpu_agrees_with_cpu(documents: Tensor | None, dims: tuple[int, int]) -> None:
    spans = None if documents is None else within(documents)
    inputs = [x.bfloat16() for x in qkv(dims=dims)]
    gradient = drawn(B, S, N, dims[1], seed=4).bfloat16()
    there = [x.cuda() for x in inputs]
    out, lse = attend(*inputs, causal=True, spans=spans)
    found, found_lse = attend(*there, causal=True, spans=spans)
    agrees(found.cpu(), out.double(), error=2e-2)
    agrees(found_lse.cpu(), lse.double(), error=1e-3)
    wanted = attend_backward(gradient, *inputs, out, lse, causal=True, spans=spans)
    for one, other in zip(
        attend_backward(gradient.cuda(), *there, found, found_lse, causal=True, spans=spans), wanted, strict=True
    ):
        agrees(one.cpu(), other.double(), error=3e-2)
    local = flash_attention(*there, documents_BT=documents)
    agrees(local.cpu(), out.double(), error=2e-2)
