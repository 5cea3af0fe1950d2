"""Attention in chunks, and queries by their position, against the same written out with a mask; one token at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.factors import Temperature
from fivefold.model.spec import Model
from fivefold.trainer.generate.decode import enable_kv_cache
from fivefold.trainer.model.attention import GroupedAttention
from fivefold.trainer.model.dropout import sequence_keys
from fivefold.trainer.model.rotary import RowInputs, list_tables
from fivefold.trainer.model.transformer import Transformer
from fivefold.trainer.supported import check_supported

CHUNKED = Model(
    name="chunked", layers=4, width=24, heads=4, kv_heads=2, head_dim=6, ffn=40, vocab=83, qk_norm="unit", window=4,
    window_kind="chunks", window_pattern=(True, False), rope_pattern=(True, False),
    temperature=Temperature(scale=0.5, floor=3),
)  # fmt: skip
B, T = 2, 11
DOCUMENTS = torch.tensor([[0] * 6 + [1] * 5, [0] * 3 + [1] * 8])


def module(layer: int) -> GroupedAttention:
    made = GroupedAttention(CHUNKED, layer=layer)
    for number, weight in enumerate(made.parameters()):
        weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)) * 0.4
    return made


def rows(documents: Tensor | None = None, keys: Tensor | None = None) -> RowInputs:
    tables = list_tables(CHUNKED, positions=torch.arange(T), dtype=torch.float32, device=torch.device("cpu"))
    return RowInputs(T, tables, documents, keys)


def compute_attention(made: GroupedAttention, x: Tensor, seen: Tensor, *, factors: Tensor | None) -> Tensor:
    """With torch's own attention under a mask [B, T, T]; ``factors``: of queries, where nothing rotates."""
    q, k, v = ((x @ linear.weight.T).view(B, T, -1, 6) for linear in (made.q, made.k, made.v))
    if factors is None:
        q, k = (x / (x.square().mean(-1, keepdim=True) + CHUNKED.norm_epsilon).sqrt() for x in (q, k))
        angles = torch.arange(T)[:, None] * CHUNKED.rope_theta ** (-torch.arange(3) / 3)
        turns = torch.polar(torch.ones(T, 3), angles.float())[:, None]
        q, k = (torch.view_as_real(turns * torch.complex(*x.chunk(2, -1))).mT.flatten(-2) for x in (q, k))
    else:
        q = q * factors[:, None, None]
    k, v = (x.repeat_interleave(2, dim=2).transpose(1, 2) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=seen[:, None])
    return out.transpose(1, 2).flatten(2).flatten(0, 1) @ made.out.weight.T


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("layer", [0, 1])
def test_tokens_attend_inside_their_chunk(layer: int, documents: Tensor | None) -> None:
    made, x = module(layer), torch.randn(B * T, 24, generator=torch.Generator().manual_seed(9))
    place = torch.arange(T)
    seen = (place[:, None] >= place).expand(B, T, T)
    if layer == 0:
        seen = seen & (place[:, None] // 4 == place // 4)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None])
    factors = None if layer == 0 else 1 + 0.5 * torch.log1p((place + 1) // 3)
    result, wanted = ([w.clone().requires_grad_()] for w in (x, x))
    ours = made(result[0], rows(documents))
    theirs = compute_attention(made, wanted[0], seen, factors=factors)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for out, start in ((ours, result), (theirs, wanted)):
        out.square().sum().backward()
        start.append(start[0].grad)
    torch.testing.assert_close(result[1], wanted[1], rtol=1e-4, atol=1e-4)


def test_each_attention_chunk_has_its_own_dropout_mask() -> None:
    model = CHUNKED.replace(attention_dropout=0.5)
    made = GroupedAttention(model, layer=0)
    for weight in made.parameters():
        weight.data = torch.full(weight.shape, 0.1)
    keys = sequence_keys(torch.arange(B), seed=1, step=0)
    out = made(torch.ones(B * T, 24), rows(keys=keys)).view(B, T, 24)[..., 0]
    assert not torch.equal(out[:, :4], out[:, 4:8])
    again = made(torch.ones(B * T, 24), rows(keys=keys)).view(B, T, 24)[..., 0]
    assert torch.equal(out, again)


def test_generating_one_token_at_a_time_equals_a_full_forward() -> None:
    decoder = Transformer(CHUNKED)
    for number, weight in enumerate(decoder.parameters()):
        weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)) * 0.3
    text = torch.randint(0, 83, (B, T), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        wanted = decoder(text)
        with enable_kv_cache(decoder, tokens=T) as reader:
            result = [reader.read(text[:, :3].tolist())] + [
                reader.read(text[:, t : t + 1].tolist()) for t in range(3, T)
            ]
    torch.testing.assert_close(torch.stack(result, 1), wanted[:, 2:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "changed", "says"),
    [
        (
            "dp1",
            {"sequence": 10},
            "sequences of 10 tokens are not a multiple of the 4-token attention chunks of .*; use --seq 8 or 12",
        ),
        ("cp2", {}, "ring attention does not support chunks of 4 tokens; use cp=ulysses"),
        ("dp1", {"attention": "unfused"}, "unfused attention does not support chunks; use attention='flash'"),
    ],
)
def test_unsupported_feature_with_chunks_is_a_one_line_error(
    layout: str, changed: dict[str, object], says: str
) -> None:
    job = Job(sequence=8, global_batch=2, precision=get_recipe("fp32")).replace(**changed)
    with pytest.raises(UserError, match=says):
        check_supported(Layout.parse(layout), job, model=CHUNKED)
    longer = CHUNKED.replace(window=16)  # than the sequences: it does nothing
    check_supported(Layout.parse(layout), job, model=longer)
