"""Blocks of every kind, and the embedding, against the same written out with torch's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.shape import ModelShape
from fivefold.model.spec import Model
from fivefold.model.weights import list_block_weights
from fivefold.trainer.model.block import Block
from fivefold.trainer.model.embed import Embed
from fivefold.trainer.model.rotary import RowInputs, rotary_tables

MODEL = Model(name="m", layers=1, width=12, heads=2, kv_heads=1, head_dim=4, ffn=20, vocab=16)
KINDS = {*get_args(ModelShape.model_fields["block"].annotation)} - {"norm_stream"}  # which is planned, not trained


def build_part(part: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for weight in part.parameters():
        nn.init.normal_(weight, 0.0, 0.5, generator=generator)
    return part


def norm_of(model: Model, block: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    part: Any = block.get_submodule(name)
    factor = part.weight + model.norm_plus_one
    if model.norm == "layernorm":
        return lambda x: F.layer_norm(x, (12,), factor, part.bias, model.norm_epsilon)
    return lambda x: F.rms_norm(x, (12,), factor, model.norm_epsilon)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_every_kind_of_block_computes_its_formula(kind: str, norm: str) -> None:
    model = Model.read(
        dict(MODEL)
        | {
            "block": kind,
            "norm": norm,
            "norm_plus_one": norm == "rmsnorm",
            "residual_scale": 0.3,
            "norm_bias": kind != "parallel_shared",
        },
        origin="test",
    )
    block: Any = build_part(Block(model, layer=0))
    tables = rotary_tables(model, positions=torch.arange(5), dtype=torch.float32, device=torch.device("cpu"))
    rows = RowInputs(5, tables)
    n = {
        name: norm_of(model, block, name)
        for name in ("norm1", "norm1_post", "norm2", "norm2_post")
        if getattr(block, name) is not None
    }

    def attend(x: Tensor) -> Tensor:
        return 0.3 * block.attention(x, rows)

    def f(x: Tensor) -> Tensor:
        return 0.3 * block.feed_forward(x)

    x = torch.randn(10, 12, generator=torch.Generator().manual_seed(1))
    if kind == "pre":
        y = x + attend(n["norm1"](x))
        z = y + f(n["norm2"](y))
    elif kind == "post":
        y = x + 0.3 * n["norm1"](attend(x) / 0.3)
        z = y + 0.3 * n["norm2"](f(y) / 0.3)
    elif kind == "sandwich":
        y = x + 0.3 * n["norm1_post"](attend(n["norm1"](x)) / 0.3)
        z = y + 0.3 * n["norm2_post"](f(n["norm2"](y)) / 0.3)
    elif kind == "post_sum":
        y = n["norm1"](x + attend(x))
        z = n["norm2"](y + f(y))
    else:
        z = x + attend(n["norm1"](x)) + f(n["norm1" if kind == "parallel_shared" else "norm2"](x))
    torch.testing.assert_close(block(x, rows), z, rtol=1e-5, atol=1e-5)
    assert [name for name, _ in block.named_parameters()] == [weight.name for weight in list_block_weights(model, 0)]


@pytest.mark.parametrize("positions", [None, torch.tensor([2, 3, 8, 9])])
def test_the_embedding_adds_scaled_tokens_and_positions(positions: Tensor | None) -> None:
    model = MODEL.replace(position="learned", positions=10, embedding_scale=3.0)
    embed: Any = build_part(Embed(model))
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 1]])
    places = torch.arange(4) if positions is None else positions
    wanted = (3.0 * F.embedding(tokens, embed.tokens.weight) + embed.positions.weight[places]).flatten(0, 1)
    result = embed(tokens, positions)
    torch.testing.assert_close(result, wanted)
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    for mine, other in zip(
        torch.autograd.grad(result, list(embed.parameters()), upstream),
        torch.autograd.grad(wanted, list(embed.parameters()), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)
