"""The groups of operations that are recomputed together, which planner and trainer read by names."""

from __future__ import annotations

from functools import cache

import pytest

from fivefold.job import Job
from fivefold.layout.recomputation import list_groups
from fivefold.model.catalog import build_model, list_names
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.operations.local_shapes import LocalDegrees
from fivefold.planner.counts.operations.op import Op


@pytest.mark.parametrize(
    ("operation", "groups"),
    [
        ("norm1", "norm"),
        ("attention.q_norm", "norm"),
        ("moe.router.norm", "norm moe"),
        ("attention.qkv", "qkv"),
        ("attention.clip.q", "qkv"),
        ("attention.kv_up", "qkv up"),
        ("attention.gate.lora_a", "qkv"),
        ("attention.out.lora_a", "out"),
        ("attention.out.reduce", ""),
        ("attention.indexer.q", ""),
        ("mixer.core.act", "core act"),
        ("mlp.gate_up", "mlp"),
        ("mlp.add", ""),
        ("mlp.scale.norm2.out", ""),
        ("moe.shared.act", "shared act"),
        ("moe.router", "moe router"),
        ("rope.k", "rope"),
    ],
)
def test_an_operation_is_in_these_groups(operation: str, groups: str) -> None:
    assert list_groups(operation) == frozenset(groups.split())


@cache
def list_operations(name: str) -> list[Op]:
    """Return the operations of the layers of a model of the catalog."""
    counts = Counts(build_model(name), Job(sequence=128))
    return [op for kind in counts.example for op in counts.unit(LocalDegrees(sequences=1), kind).ops]


def test_every_linear_layer_of_a_block_is_in_a_group() -> None:
    linears = {op.name for name in list_names() for op in list_operations(name) if op.kind == "matmul"}
    blocks = {name for name in linears if name.startswith(("attention.", "mixer.", "mlp.", "moe."))}
    assert [name for name in blocks if ".indexer." not in name and not list_groups(name)] == []


def test_every_norm_of_a_block_is_recomputed_with_norms() -> None:
    norms = {op.name for name in list_names() for op in list_operations(name) if op.kind == "norm"}
    assert [name for name in norms if ".indexer." not in name and "norm" not in list_groups(name)] == []
