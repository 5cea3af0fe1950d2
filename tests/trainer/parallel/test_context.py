"""Ring and ulysses on 2 and 4 ranks equal attention over full sequences in one process; messages; memory."""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.layout.names import CpKind
from fivefold.layout.spec import Layout
from fivefold.trainer.measure.meter import Meter
from fivefold.trainer.model.attention_mask import AttentionMask, Heads
from fivefold.trainer.model.flash_attention import Flash
from fivefold.trainer.parallel.collectives import exchange
from fivefold.trainer.parallel.context import Ring, Ulysses, attach, list_positions
from fivefold.trainer.parallel.mesh import AxisGroup
from tests.selection import mark_share

B, T, N = 2, 24, 4
Fork = Callable[..., list[Any]]
# the second sequence is one document, the first has one that opens and closes on each side of a border of chunks
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 2 + [2] * 13 + [3] * 4, [9] * T])


class Case(NamedTuple):
    kind: CpKind
    ranks: int
    kv_heads: int = 2
    dims: tuple[int, int] = (8, 8)
    documents: bool = False
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def rule(self) -> AttentionMask:
        return AttentionMask(self.dims[0] ** -0.5, self.window, self.softcap)


CASES = [
    Case("ring", 2),
    Case("ring", 4, documents=True),
    Case("ring", 2, kv_heads=4, dims=(12, 8), documents=True),
    Case("ring", 4, dtype=torch.bfloat16),
    Case("ulysses", 2),
    Case("ulysses", 4, kv_heads=1),
    Case("ulysses", 2, kv_heads=4, dims=(12, 8), documents=True),
    Case("ulysses", 4, documents=True, dtype=torch.bfloat16),
    # chunks of 6 and 3 tokens: windows within a chunk, of a chunk, over several
    Case("ring", 2, window=2),
    Case("ring", 2, window=6, sinks=True),
    Case("ring", 2, window=7, documents=True),
    Case("ring", 2, window=24, sinks=True),  # does nothing
    Case("ring", 4, window=1),
    Case("ring", 4, window=4, softcap=0.8),
    Case("ring", 4, window=11, documents=True, sinks=True),
    Case("ring", 4, softcap=0.8, documents=True),
    Case("ulysses", 2, window=5, sinks=True),
    Case("ulysses", 4, window=9, softcap=0.8, documents=True, sinks=True),
]


def inputs(case: Case) -> tuple[Tensor, ...]:
    """Draw q, k, v and the gradient of the output, all of full sequences, and sinks."""
    generator, (dim, value) = torch.Generator().manual_seed(3), case.dims
    shapes = ((N, dim), (case.kv_heads, dim), (case.kv_heads, value), (N, value))
    whole = (torch.randn(B, T, *shape, generator=generator).to(case.dtype) for shape in shapes)
    return *whole, torch.randn(N, generator=generator)


def everyone() -> AxisGroup:
    return AxisGroup("cp", dist.get_rank(), tuple(range(dist.get_world_size())), dist.group.WORLD)


def layout(case: Case) -> Layout:
    return Layout(cp=case.ranks, cp_kind=case.kind)


def swap(
    hooks: Ulysses, core: Flash, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sinks: Tensor | None
) -> Tensor:
    return hooks.leave(core(*hooks.enter(q, k, v), documents, sinks))


def run_on_rank(case: Case) -> tuple[list[Tensor], list[tuple[str, int, int]], list[tuple[str, int, int]]]:
    """Output and gradients of this rank's tokens, and what it sent forward and backward."""
    axis = everyone()
    core: Any = Ring(axis, case.rule)
    if case.kind == "ulysses":
        core = functools.partial(swap, Ulysses(axis), Flash(case.rule, heads=Heads(rank=axis.rank)))
    documents = DOCUMENTS if case.documents else None
    mine = list_positions(layout(case), rank=axis.rank, sequence=T)
    *_, sinks = inputs(case)
    *qkv, gradient = (x[:, mine] for x in inputs(case)[:4])
    qkv = [x.requires_grad_() for x in qkv]
    sinks.requires_grad_()
    with Meter([], axis=lambda _: "cp") as forward:
        out = core(*qkv, documents, sinks if case.sinks else None)
    with Meter([], axis=lambda _: "cp") as backward:
        out.backward(gradient)
    sent = [
        [(result.collective, result.calls, result.bytes) for result in meter.traffic] for meter in (forward, backward)
    ]
    if case.sinks:
        dist.all_reduce(sinks.grad)
    return [out.detach(), *(x.grad for x in qkv), sinks.grad if case.sinks else sinks.detach()], *sent


@functools.cache
def compute_reference(case: Case) -> list[Tensor]:
    """The same by scores written out in fp64."""
    q, k, v, gradient, sinks = (x.double() for x in inputs(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sinks.requires_grad_()
    k, v = (x.repeat_interleave(N // case.kv_heads, dim=2) for x in leaves[1:])
    seen = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
    if case.documents:
        seen = seen & (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])
    if case.window:
        seen = seen & torch.ones(T, T, dtype=torch.bool).triu(1 - case.window)
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * case.dims[0] ** -0.5
    if case.softcap:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if case.sinks:
        scores = torch.cat((scores, sinks[:, None, None].expand(B, N, T, 1)), dim=-1)
    out = torch.einsum("bnts,bsnh->btnh", scores.softmax(-1)[..., :T], v)
    out.backward(gradient)
    result = [*leaves, sinks] if case.sinks else leaves
    return [out.detach(), *(x.grad for x in result if x.grad is not None)]


def combine_ranks(case: Case, parts: list[list[Tensor]]) -> list[Tensor]:
    order = torch.cat([list_positions(layout(case), rank=rank, sequence=T) for rank in range(case.ranks)])
    results = [torch.cat(item, dim=1)[:, order.argsort()] for item in zip(*(part[:4] for part in parts), strict=True)]
    return [*results, parts[0][4]] if case.sinks else results


def errors(case: Case, parts: list[list[Tensor]]) -> list[float]:
    return [
        float((result.double() - wanted).abs().max() / wanted.abs().max())
        for result, wanted in zip(combine_ranks(case, parts), compute_reference(case), strict=True)
    ]


def count_sent(case: Case) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]:
    """Messages and bytes by rule."""
    (dim, value), width = case.dims, case.dtype.itemsize
    rows = B * T // case.ranks
    if case.kind == "ring":
        hops, pair = case.ranks - 1, rows * case.kv_heads * (dim + value) * width
        return [("p2p", hops, hops * pair)], [("p2p", 2 * hops, 2 * hops * pair)]
    heads = N + max(case.kv_heads, case.ranks)  # q and out, k and v
    item = [("all_to_all", 4, (case.ranks - 1) * rows * heads * (dim + value) * width // case.ranks)]
    return item, item


@pytest.mark.parametrize("case", mark_share(6, CASES), ids=lambda case: " ".join(map(str, case)))
def test_context_parallel_attention_equals_full_attention_with_the_planned_bytes(case: Case, forked: Fork) -> None:
    results = forked(case.ranks, run_on_rank, case)
    assert max(errors(case, [result for result, *_ in results])) < (1e-5 if case.dtype == torch.float32 else 3e-2)
    for _, forward, backward in results:
        assert (forward, backward) == count_sent(case)


def test_ring_attention_has_zigzag_positions_and_ulysses_contiguous_ones() -> None:
    ring, runs = Layout(cp=2), Layout(cp=2, cp_kind="ulysses")
    assert [list_positions(ring, rank=rank, sequence=8).tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [list_positions(runs, rank=rank, sequence=8).tolist() for rank in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    pairs = [sum(list_positions(Layout(cp=8), rank=rank, sequence=64).add(1).tolist()) for rank in range(8)]
    assert len(set(pairs)) == 1  # every rank's queries see equally many keys


def resident_growth(tokens: int) -> int:
    """Bytes by which the process grew, forward and backward over as many tokens per rank."""
    core, before = Ring(everyone(), AttentionMask(0.25)), 0
    for count in (64, tokens):  # the first, that libraries are loaded
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        q, k, v = (torch.randn(1, count, 1, 16).requires_grad_() for _ in range(3))
        for documents in (None, torch.arange(2 * count)[None] // (count // 3)):
            core(q, k, v, documents).sum().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.long  # the dry run counts a ring to the byte
def test_memory_grows_with_tokens_not_with_their_square(forked: Fork) -> None:
    """A square of scores or of a mask in one byte each would be 64 MiB."""
    assert max(forked(2, resident_growth, 8192)) < 32 * 2**20


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rule = AttentionMask(0.3, window=5)
        self.core, self.hooks = Flash(self.rule), None


def test_attach_sets_ring_attention_or_the_ulysses_hooks() -> None:
    model, axis = nn.Sequential(Attention(), nn.Linear(2, 2), Attention()), AxisGroup("cp", 0, (0, 1), None)
    attach(model, axis, exchanges_heads=True)
    assert [type(item.hooks) for item in (model[0], model[2])] == [Ulysses, Ulysses]
    assert [(type(item.core), item.core.rule.window, item.core.heads) for item in (model[0], model[2])] == [
        (Flash, 5, Heads(rank=0, ranks=2))
    ] * 2
    attach(model, axis, exchanges_heads=False)
    assert [(type(item.core), item.core.rule) for item in (model[0], model[2])] == [
        (Ring, AttentionMask(0.3, window=5))
    ] * 2


def test_receives_are_posted_before_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one connection of gloo what is posted second waits behind what is posted first, if the peer came earlier."""
    posted: list[dist.P2POp] = []
    monkeypatch.setattr(dist, "P2POp", lambda call, tensor, peer, group: (call, tensor, peer))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: posted.extend(operations) or [])
    here, coming, axis = torch.zeros(1), torch.zeros(2), AxisGroup("cp", 0, (0, 5), None)
    (pending,) = exchange([(here, 1)], [(coming, 1)], axis)
    assert posted == [(dist.irecv, coming, 5), (dist.isend, here, 5)]
    assert pending.output_buffer is coming


def test_a_ring_of_two_uses_one_process_group_per_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[tuple[Any, ...]] = []

    def post(name: str) -> Any:
        return lambda tensor, peer, group: posted.append((name, tensor, peer, group))

    monkeypatch.setattr(dist, "irecv", post("receive"))
    monkeypatch.setattr(dist, "isend", post("send"))
    monkeypatch.setattr(
        dist, "P2POp", lambda op, tensor, peer, group: SimpleNamespace(op=op, tensor=tensor, peer=peer, group=group)
    )
    there: Any = "to higher"
    back: Any = "to lower"
    here, coming = torch.zeros(1), torch.zeros(2)
    for rank, peer, ways in ((0, 5, (back, there)), (1, 3, (there, back))):
        posted.clear()
        exchange([(here, 1 - rank)], [(coming, 1 - rank)], AxisGroup("cp", rank, (3, 5), there, back=back))
        assert posted == [("receive", coming, peer, ways[0]), ("send", here, peer, ways[1])]
