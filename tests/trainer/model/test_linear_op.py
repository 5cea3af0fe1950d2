"""Blocks under torch.compile: each is one graph, and trains as it does uncompiled, also with a deferred W."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # once, before any fork

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.model.linear_op import linears
from tests.selection import mark_share

Fork = Callable[..., list[Any]]
MODEL = Model(
    name="small",
    layers=4,
    width=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn=44,
    vocab=83,
    qkv_bias=True,
    qk_norm="head",
)
JOB = Job(sequence=32, global_batch=4, precision="fp32", steps=9)


def train(text: str, compiled: bool) -> tuple[list[tuple[float, float]], dict[str, int], int]:
    """Loss and gradient norm of two steps; graph breaks by reason; graphs. Compiled without C++, which takes long."""
    real = torch.compile
    torch.compile = lambda function, options=None: real(function, backend="aot_eager")  # type: ignore[misc]
    layout, job = Layout.parse(text), JOB.replace(compile=compiled)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()  # of what this process compiled before
    built = build(model=MODEL, layout=layout, job=job, device=torch.device("cpu"))
    engine, results = Engine(built, model=MODEL, layout=layout, job=job), []
    for number in range(2):
        drawn = torch.Generator().manual_seed(number)
        tokens = torch.randint(MODEL.vocab, (layout.micro_batches(job), layout.mbs, 33), generator=drawn)
        done = engine.step(tokens)
        engine.zero_grad()
        results.append((done.loss, done.norm))
    counters = torch._dynamo.utils.counters
    return results, dict(counters["graph_break"]), counters["stats"]["unique_graphs"]


@pytest.mark.filterwarnings("ignore")  # torch warns itself when it compiles
@pytest.mark.parametrize(
    ("text", "ranks"), mark_share(3, [("dp1 mbs2", 1), ("pp2 zb1p mbs1", 2), ("tp2 mbs2 zero1", 2)])
)
def test_a_compiled_block_is_one_graph_and_trains_the_same(forked: Fork, text: str, ranks: int) -> None:
    wanted, compiled = forked(ranks, train, text, False), forked(ranks, train, text, True)
    for (numbers, breaks, graphs), (others, *_) in zip(compiled, wanted, strict=True):
        for mine, other in zip(numbers, others, strict=True):
            assert mine == pytest.approx(other, rel=1e-5)
        assert (breaks, graphs) == ({}, 1)


def test_the_linear_operation_has_a_fake_implementation() -> None:
    """What the compiler checks of a custom operation: its form without data, and its backward."""
    from fivefold.trainer.model.linear import Linear
    from fivefold.trainer.model.linear_op import attach

    layers = [Linear(6, width, bias=bias) for width, bias in ((4, True), (8, False))]
    for layer in layers:
        torch.nn.init.ones_(layer.matrix)
    layers[0].bias.data.zero_()
    attach(layers)
    x = torch.randn(5, 6, requires_grad=True)
    torch.library.opcheck(
        linears,
        (x, layers[0].matrix, [layer.token for layer in layers], 5, [4, 8]),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.library.opcheck(
        torch.ops.fivefold.linears_backward.default,
        ([torch.ones(5, 4), torch.ones(5, 8)], x.detach(), [layer.token for layer in layers]),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.filterwarnings("ignore")  # torch warns itself when it compiles
def test_matmuls_of_layers_without_messages_are_left_to_the_compiler() -> None:
    """So it plans where they lie. What is left to us is one operation for dx and dW of the layers on one input."""
    from torch._dynamo.backends.common import aot_autograd

    from fivefold.trainer.model.linear import Linear, fused_linears
    from fivefold.trainer.model.linear_op import attach

    layers = [Linear(6, width, bias=False) for width in (4, 8)]
    for layer in layers:
        torch.nn.init.ones_(layer.matrix)
    attach(layers)
    graphs: list[list[str]] = []

    def record_graph(graph: Any, _inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def block(x: torch.Tensor) -> torch.Tensor:
        return sum(y.sum() for y in fused_linears(x, *layers))  # type: ignore[return-value]

    x = torch.randn(5, 6, requires_grad=True)
    torch.compile(block, backend=aot_autograd(fw_compiler=record_graph, bw_compiler=record_graph))(x).backward()  # type: ignore[no-untyped-call]
    forward, backward = graphs
    assert forward.count("aten.mm.default") == 2
    assert not any("fivefold" in name for name in forward)
    assert [name for name in backward if "mm" in name or "fivefold" in name] == ["fivefold.linears_backward.default"]
    torch.testing.assert_close(x.grad, torch.full((5, 6), 12.0))
    for layer in layers:
        torch.testing.assert_close(layer.matrix.grad, x.detach().sum(0).expand_as(layer.matrix))


def test_weight_gradients_are_computed_into_their_accumulation_buffer() -> None:
    from fivefold.trainer.model.linear import GradBuffer, Linear
    from fivefold.trainer.model.linear_op import attach

    layers, handed = [Linear(6, width, bias=False) for width in (4, 8)], list[object]()
    sums = [torch.full((layer.matrix.shape), torch.nan) for layer in layers]
    attach(layers)
    x, gradients, tokens = torch.randn(5, 6), [torch.randn(5, 4), torch.randn(5, 8)], [entry.token for entry in layers]
    for times in (1, 2):
        for layer, item in zip(layers, sums, strict=True):
            torch.nn.init.ones_(layer.matrix)
            layer.matrix.grad_buffer = lambda _, entry=item: GradBuffer(entry, fresh=times == 1)  # type: ignore[attr-defined]  # noqa: B023
            layer.matrix.collect = handed.append  # type: ignore[attr-defined]
        torch.ops.fivefold.linears_backward(gradients, x, tokens)
        for item, gradient in zip(sums, gradients, strict=True):
            torch.testing.assert_close(item, times * gradient.t() @ x)
    assert handed == [None] * 4
