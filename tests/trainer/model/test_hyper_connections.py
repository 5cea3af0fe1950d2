"""Hyper-connections in the trainer: their modules against transformers' in fp64, and in 16 bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead
from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection, HYV4HyperHead

from fivefold.model.hyper_connections import HyperConnections
from fivefold.model.spec import Model
from fivefold.trainer.model.hyper_connections import HyperConnection
from tests.selection import mark_share

ROWS = 14


def make_model(hyper: HyperConnections, *, width: int, epsilon: float) -> Model:
    sizes = {"layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 4, "ffn": 8, "vocab": 16}
    return Model(name="streams", width=width, norm_epsilon=epsilon, hyper_connections=hyper, **sizes)


def draw_pair(number: int, *, mixes: bool) -> tuple[list[HyperConnection], list[nn.Module], Model]:
    """Return a connection and a head of ours, and those of transformers with the same weights, of random geometry."""
    chance = random.Random(number)
    streams, width, epsilon = chance.choice((1, 2, 3, 4)), chance.choice((6, 10)), chance.choice((1e-6, 0.1))
    hyper = HyperConnections(
        streams=streams,
        mixes=mixes,
        iterations=chance.choice((1, 2, 7)),
        magnitude=2.0 if mixes else chance.choice((1.5, 3.0)),
        epsilon=chance.choice((1e-6, 0.05)),
    )
    model = make_model(hyper, width=width, epsilon=epsilon)
    fields: dict[str, Any] = {"hidden_size": width, "hc_mult": streams, "hc_eps": hyper.epsilon}
    fields["rms_norm_eps"] = epsilon
    theirs: list[nn.Module]
    if mixes:
        config = DeepseekV4Config(**fields, hc_sinkhorn_iters=hyper.iterations)
        theirs = [DeepseekV4HyperConnection(config), DeepseekV4HyperHead(config)]
    else:
        of_hy = HYV4Config(**fields, hc_magnitude=hyper.magnitude)
        theirs = [HYV4HyperConnection(of_hy), HYV4HyperHead(of_hy)]
    ours = [HyperConnection(model, name="hyper1"), HyperConnection(model, name="head.hyper", is_head=True)]
    generator = torch.Generator().manual_seed(number)
    for module, reference in zip(ours, theirs, strict=True):
        for weight, other in zip(module.parameters(), reference.parameters(), strict=True):
            values = torch.randn(weight.shape, generator=generator)
            weight.data, other.data = values.clone(), values.clone()
    return ours, theirs, model


def apply_theirs(modules: list[nn.Module], x: Tensor, branch: Tensor, *, mixes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the branch reads, the streams after it and their sum, as transformers' layers and models do."""
    connect, head = modules
    if mixes:
        post, comb, entry = connect(x[None])
        streams = post.unsqueeze(-1) * branch[None].unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x[None])
    else:
        post, entry = connect(x[None])
        streams = post.unsqueeze(-1) * branch[None].unsqueeze(-2) + x[None]
    return entry[0], streams[0], head(streams)[0]


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("number", mark_share(4, range(24)))
def test_connections_and_their_gradients_equal_transformers(number: int, mixes: bool) -> None:
    ours, theirs, model = draw_pair(number, mixes=mixes)
    assert model.hyper_connections is not None
    generator = torch.Generator().manual_seed(number)
    inputs = [
        torch.randn(ROWS, model.hyper_connections.streams, model.width, generator=generator).requires_grad_(),
        torch.randn(ROWS, model.width, generator=generator).requires_grad_(),
    ]
    connect, head = ours
    entry, numbers = connect(inputs[0])
    streams = connect.mix(inputs[0], inputs[1], numbers)
    results = entry, streams, head(streams)[0]
    references = apply_theirs(theirs, *inputs, mixes=mixes)
    outer = [torch.randn(result.shape, generator=generator) for result in results]
    for result, reference in zip(results, references, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5)
    leaves = [
        [*inputs, *(weight for module in modules for weight in module.parameters())] for modules in (ours, theirs)
    ]
    gradients = [
        torch.autograd.grad(values, of_leaves, outer)
        for values, of_leaves in zip((results, references), leaves, strict=True)
    ]
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mixes", [True, False])
def test_gradients_are_those_of_differences(mixes: bool) -> None:
    ours, _, model = draw_pair(3, mixes=mixes)
    connect, head = (module.double() for module in ours)
    assert model.hyper_connections is not None
    shape = 3, model.hyper_connections.streams, model.width
    x, branch = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in (shape, (shape[0], shape[2])))

    def run(x: Tensor, branch: Tensor, *_weights: Tensor) -> tuple[Tensor, Tensor]:
        entry, numbers = connect(x)
        return entry, head(connect.mix(x, branch, numbers))[0]

    assert torch.autograd.gradcheck(run, (x, branch, *connect.parameters(), *head.parameters()))


@pytest.mark.parametrize("mixes", [True, False])
def test_16_bit_streams_are_summed_in_fp32(mixes: bool) -> None:
    ours, theirs, model = draw_pair(5, mixes=mixes)
    assert model.hyper_connections is not None
    shape = ROWS, model.hyper_connections.streams, model.width
    x, branch = (torch.randn(size).bfloat16() for size in (shape, (ROWS, model.width)))
    connect = ours[0]
    entry, numbers = connect(x)
    streams = connect.mix(x, branch, numbers)
    assert entry.dtype == streams.dtype == torch.bfloat16
    assert numbers.dtype == torch.float32
    reference = apply_theirs(theirs, x.float(), branch.float(), mixes=mixes)
    torch.testing.assert_close(entry.float(), reference[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(streams.float(), reference[1], rtol=2e-2, atol=3e-2)
