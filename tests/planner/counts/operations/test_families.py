"""Every family: operations use every weight of a block once, and matmuls multiply by all that a token reaches."""

from __future__ import annotations

import pytest

from fivefold.job import Job
from fivefold.model.huggingface.read import from_config
from fivefold.model.spec import Model
from fivefold.model.weights import Weight, list_block_weights
from fivefold.planner.counts.operations.layer import list_block
from fivefold.planner.counts.operations.local_shapes import Local, LocalDegrees
from tests.model.mutations import FAMILIES

# Matrices that no matmul of its own reads, or experts of whom a fraction computes a token.
OTHER_PRODUCTS = {
    "deepseek_v4": "products of hyper-connections, and biases of the gates of compressed keys",
    "falcon_mamba": "a scan has matmuls of its own",
    "gpt_oss": "biases of experts",
    "gemma3n_text": "the router of AltUp reads two tensors",
    "hy_v4": "products of hyper-connections",
    "jamba": "a scan has matmuls of its own",
    "longcat_flash": "one and a half experts a token, counted as two",
    "mamba": "a scan has matmuls of its own",
    "qwen2_moe": "a gate of the shared expert",
    "qwen3_5_moe_text": "a gate of the shared expert",
    "qwen3_next": "a gate of the shared expert",
    "recurrent_gemma": "gates of blocks of channels",
}


@pytest.mark.parametrize(
    ("kind", "changed"), [*((kind, {}) for kind in FAMILIES), ("gemma4_text", {"enable_moe_block": True})]
)
def test_operations_use_every_weight_once(kind: str, changed: dict[str, bool]) -> None:
    model = from_config({"model_type": kind, **FAMILIES[kind], **changed}, name=kind)
    local = Local(model, Job(sequence=16, global_batch=1), LocalDegrees(sequences=1))
    for layer in range(model.layers):
        ops, weights = list_block(local, layer=layer), list(list_block_weights(model, layer))
        assert sum(op.parameters for op in ops) == sum(weight.numel for weight in weights)
        assert len({op.name for op in ops}) == len(ops)
        if kind not in OTHER_PRODUCTS:
            flops = sum(op.flops for op in ops if op.kind == "matmul")
            assert flops == 2 * local.rows * sum(_count_reached(model, weight) for weight in weights)


def _count_reached(model: Model, weight: Weight) -> int:
    """Count the elements of a matrix by which a token is multiplied: of experts, those of its ``topk``."""
    if len(weight.shape) == 1 or weight.kind == "conv":
        return 0
    if "experts." in weight.name and model.moe is not None:
        return weight.numel // weight.shape[0] * model.moe.topk
    return weight.numel
