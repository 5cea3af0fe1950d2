"""Blocks of every kind of a hybrid are compiled, also more of them than PyTorch compiles of a function by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from fivefold.layout.schedule import schedule
from fivefold.trainer.parallel.apply import _make_compiler

pytestmark = pytest.mark.slow

KINDS = 12


class Kind(nn.Module):
    """A block whose part has a name of its own, so that no other block's graph fits."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.add_module(f"part{number}", nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the part."""
        for part in self.children():
            x = part(x)
        return x


@torch._dynamo.config.patch(recompile_limit=8)
def test_each_kind_of_block_is_compiled() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def collect(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    _make_compiler(schedule("1f1b", pp=1, v=1, micro_batches=1))
    for number in range(KINDS):
        block = Kind(number)
        torch.compile(block.forward, backend=collect)(torch.ones(1, 2))
    assert len(graphs) == KINDS
