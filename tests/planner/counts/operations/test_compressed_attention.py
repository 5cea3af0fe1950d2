"""Attention to compressed keys: FLOPs counted pair by pair, bytes that transformers' compressor saves, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACompressor, DeepseekV4HCACompressor

import fivefold as ff
from fivefold.errors import UsageWarning, UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.model.hyper_connections import HyperConnections
from fivefold.model.indexer import Indexer
from fivefold.model.mixers.compressed_attention import CompressedAttention, count_complete
from fivefold.model.spec import Model
from fivefold.model.weights import list_block_weights
from fivefold.planner.counts.operations.layer import list_block
from fivefold.planner.counts.operations.local_shapes import Local, get_local_degrees
from fivefold.planner.counts.operations.op import Op

HEADS, DIM, WINDOW, TOPK, TOKENS = 6, 8, 5, 3, 23
PLAIN = CompressedAttention(heads=HEADS, head_dim=DIM, rope_dim=4, q_rank=12, window=WINDOW, out_groups=3, out_rank=10)
HEAVY = PLAIN.replace(rate=3)
SPARSE = PLAIN.replace(rate=2, overlaps=True, indexer=Indexer(heads=2, head_dim=4, topk=TOPK))
MODEL = Model(
    name="compressed",
    layers=3,
    width=48,
    heads=HEADS,
    kv_heads=1,
    head_dim=DIM,
    ffn=40,
    vocab=131,
    position="none",
    mixers=("shared_key_attention", "heavily_compressed_attention", "compressed_sparse_attention"),
    shared_key_attention=PLAIN,
    heavily_compressed_attention=HEAVY,
    compressed_sparse_attention=SPARSE,
)


def list_ops(layer: int, *, tokens: int = TOKENS, **of_job: Any) -> dict[str, Op]:
    job = Job(sequence=tokens, global_batch=2, **of_job)
    return {op.name: op for op in list_block(Local(MODEL, job, get_local_degrees(Layout(mbs=2))), layer=layer)}


@given(tokens=st.integers(1, 60), rate=st.integers(1, 9), most=st.none() | st.integers(1, 9))
def test_pairs_of_queries_and_compressed_keys_equal_counting_one_by_one(
    tokens: int, rate: int, most: int | None
) -> None:
    complete = [(query + 1) // rate for query in range(tokens)]
    expected = sum(keys if most is None else min(keys, most) for keys in complete)
    assert count_complete(tokens, rate, most=most) == expected


@pytest.mark.parametrize(("layer", "net"), [(0, PLAIN), (1, HEAVY), (2, SPARSE)])
def test_flops_equal_those_of_every_query_key_pair(layer: int, net: CompressedAttention) -> None:
    """A query sees the last tokens one by one, and of the compressed keys before it all or the best."""
    ops, sequences = list_ops(layer), 2
    pairs = 0
    for query in range(TOKENS):
        compressed = 0 if net.rate is None else (query + 1) // net.rate
        pairs += min(query + 1, WINDOW) + (min(compressed, TOPK) if net.indexer else compressed)
    assert ops["mixer.core"].causal_flops == sequences * pairs * HEADS * 4 * DIM
    assert ops["mixer.out_down"].flops == 2 * sequences * TOKENS * (HEADS * DIM) * 10
    if net.indexer:
        scored = sum((query + 1) // 2 for query in range(TOKENS))
        assert ops["mixer.indexer.choice"].causal_flops == sequences * scored * 2 * 2 * (4 + 1)
    assert ("mixer.indexer.choice" in ops) is (net.indexer is not None)


@pytest.mark.parametrize("layer", range(3))
def test_operations_use_every_weight_once(layer: int) -> None:
    held = sum(weight.numel for weight in list_block_weights(MODEL, layer))
    assert sum(op.parameters for op in list_ops(layer).values()) == held


def test_the_indexer_saves_only_indices_and_has_no_backward() -> None:
    ops = list_ops(2)
    for name in (name for name in ops if name.startswith("mixer.indexer")):
        assert (ops[name].keeps, ops[name].wgrad_numels, ops[name].backward_products) == ((), (), 0)
    assert ops["mixer.indexer.choice"].writes == {"indices": 4 * 2 * TOKENS * TOPK}
    assert ops["mixer.core"].differentiates == ("qr", "kvr", "mixer.compress.r")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("layer", "build"), [(1, DeepseekV4HCACompressor), (2, DeepseekV4CSACompressor)])
def test_a_compressed_key_keeps_what_transformers_saves(layer: int, build: Any, dtype: torch.dtype) -> None:
    """Of the tensors as large as the projection: what the softmax and the product with it save."""
    tokens = 24  # a multiple of both rates
    config = DeepseekV4Config(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=HEADS, head_dim=DIM, partial_rotary_factor=0.5,
        q_lora_rank=12, index_n_heads=2, index_head_dim=4, index_topk=TOPK,
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
    )  # fmt: skip
    module = build(config)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_()
    module = module.to(dtype)
    parameters = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    series, saved, kept = (2 if layer == 2 else 1), dict[int, int](), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() == 2 * tokens * series * DIM and storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # so that no address is used twice
        return tensor

    x = torch.randn(2, tokens, 48, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x, torch.zeros(2, tokens, 12, dtype=dtype), torch.arange(tokens).expand(2, -1), None, 0)
    precision = get_recipe("fp32" if dtype == torch.float32 else "bf16")
    ops = list_ops(layer, tokens=tokens, precision=precision)
    sizes = {name: size for op in ops.values() for name, size in op.writes.items()}
    assert sum(sizes[name] for name in ops["mixer.core.pool"].keeps) == sum(saved.values())


@pytest.mark.parametrize("layout", ["pp3", "dp3 zero3", "dp3 ac=full", "dp3 ac=selective", "dp3 ac=norm"])
@pytest.mark.parametrize("streams", [None, HyperConnections(streams=2)], ids=["one stream", "two streams"])
def test_predict_warns_that_the_loss_of_the_indexer_is_not_counted(
    layout: str, streams: HyperConnections | None
) -> None:
    model = MODEL.replace(hyper_connections=streams)
    with pytest.warns(UsageWarning, match="the indexer's own loss is not counted"):
        step = ff.predict(model, "h100:3", layout, sequence=64, global_batch=12)
    assert step.time.step_seconds > 0


def test_unsupported_combinations_with_compressed_attention_are_one_line_errors() -> None:
    job = Job(sequence=12, global_batch=6)
    for layout, changed, says in (
        ("tp2", {}, "tp=2 would shard the channels of shared_key_attention, which is not supported; use tp1"),
        ("cp2", {}, "cp=2 would shard the tokens of shared_key_attention, which is not supported; use cp1"),
        ("dp2", {"attention": "unfused"}, "unfused attention does not know the compressed keys of"),
        ("dp2", {"documents": "separate"}, "shared_key_attention mixes tokens across documents"),
        ("dp2", {"precision": "bf16-autocast", "stack": "ddp"}, "shared_key_attention is not counted under autocast"),
    ):
        with pytest.raises(UserError, match=says):
            refuse(Layout.parse(layout), model=MODEL, job=job.replace(**changed))
    for fields, says in (
        ({"heads": 7}, "heads=7 is not divisible by out_groups=3"),
        ({"rope_dim": 10}, "rope_dim=10 must be even and at most head_dim=8"),
        ({"rate": None}, "overlaps and indexer need compressed keys"),
        ({"rope_dim": 6}, "indexer.head_dim=4 is less than rope_dim=6"),
    ):
        with pytest.raises(ValueError, match=says):
            SPARSE.replace(**fields)
