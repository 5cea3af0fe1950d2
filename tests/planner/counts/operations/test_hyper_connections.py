"""Hyper-connections: FLOPs and saved bytes against transformers' modules, sizes of the stream, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection
from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

import fivefold as ff
from fivefold.adapter import Adapter
from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.model.experts import MoE
from fivefold.model.hyper_connections import HyperConnections
from fivefold.model.indexer import Indexer
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.model.weights import list_block_weights, list_embedding_weights, list_head_weights
from fivefold.planner.counts.operations.layer import list_block, list_embedding, list_head
from fivefold.planner.counts.operations.local_shapes import Local, get_local_degrees
from fivefold.planner.counts.operations.op import Op

WIDTH, STREAMS, ROWS = 48, 3, 24
STREAM = Model(
    name="streams",
    layers=2,
    width=WIDTH,
    heads=4,
    kv_heads=2,
    head_dim=12,
    ffn=40,
    vocab=131,
    hyper_connections=HyperConnections(streams=STREAMS, iterations=5),
)


def list_ops(model: Model = STREAM, **of_job: Any) -> dict[str, Op]:
    job = Job(sequence=12, global_batch=2, **of_job)
    return {op.name: op for op in list_block(Local(model, job, get_local_degrees(Layout(mbs=2))), layer=0)}


def run_reference(dtype: torch.dtype, *, mixes: bool) -> tuple[int, int]:
    """Return the FLOPs of a connection and of the sum that follows it, and the bytes that autograd saves for both."""
    module: torch.nn.Module
    if mixes:
        module = DeepseekV4HyperConnection(DeepseekV4Config(hidden_size=WIDTH, hc_mult=STREAMS, hc_sinkhorn_iters=5))
    else:
        module = HYV4HyperConnection(HYV4Config(hidden_size=WIDTH, hc_mult=STREAMS))
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_()
    x = torch.randn(2, ROWS // 2, STREAMS, WIDTH, dtype=dtype, requires_grad=True)
    branch = torch.randn(2, ROWS // 2, WIDTH, dtype=dtype, requires_grad=True)
    parameters = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    saved, kept = dict[int, int](), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.numel() >= ROWS:
            saved[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # so that no address is used twice
        return tensor

    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if mixes:  # DeepseekV4DecoderLayer.forward
            post, comb, _ = module(x)
            post.to(dtype).unsqueeze(-1) * branch.unsqueeze(-2) + torch.matmul(comb.to(dtype).transpose(-1, -2), x)
        else:  # HYV4DecoderLayer.forward
            post, _ = module(x)
            (post.float().unsqueeze(-1) * branch.float().unsqueeze(-2) + x.float()).to(dtype)
    return counter.get_total_flops(), sum(saved.values())


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flops_and_saved_bytes_are_those_of_transformers(dtype: torch.dtype, mixes: bool) -> None:
    flops, saved_bytes = run_reference(dtype, mixes=mixes)
    model = STREAM.replace(hyper_connections=HyperConnections(streams=STREAMS, iterations=5, mixes=mixes))
    precision = get_recipe("fp32" if dtype == torch.float32 else "bf16")
    ops = list_ops(model, kernels="plain", precision=precision)
    connect, mix = ops["hyper1"], ops["hyper1.mix"]
    assert connect.flops + mix.flops == flops
    pairs = STREAMS * mixes
    assert flops == ROWS * (2 * STREAMS * WIDTH * STREAMS * (2 + pairs) + 2 * STREAMS * pairs * WIDTH)
    sizes = {"x": ROWS * STREAMS * WIDTH * dtype.itemsize} | {n: s for op in ops.values() for n, s in op.writes.items()}
    assert sum(sizes[name] for name in {*connect.keeps, *mix.keeps}) == saved_bytes


def test_fused_hyper_connections_save_streams_and_connection_weights() -> None:
    for mixes in (True, False):
        model = STREAM.replace(hyper_connections=HyperConnections(streams=STREAMS, mixes=mixes))
        ops = list_ops(model, precision=get_recipe("bf16"))
        connect, mix = ops["hyper1"], ops["hyper1.mix"]
        numbers = STREAMS * (2 + STREAMS * mixes)
        assert connect.keeps == ("x", "hyper1.m", "hyper1.stat")
        assert connect.writes == {
            "hyper1.out": ROWS * WIDTH * 2,
            "hyper1.m": 4 * ROWS * numbers,
            "hyper1.stat": 4 * ROWS,
        }
        assert mix.keeps == (("x",) if mixes else ()) + ("a", "hyper1.m")
        assert mix.writes == {"y": ROWS * STREAMS * WIDTH * 2}


@given(
    streams=st.integers(1, 5),
    mixes=st.booleans(),
    tp=st.sampled_from([1, 2]),
    experts=st.booleans(),
    latent=st.booleans(),
    half=st.booleans(),
)
def test_operations_use_every_weight_once(
    streams: int, mixes: bool, tp: int, experts: bool, latent: bool, half: bool
) -> None:
    """Together with experts, latent attention with an indexer, and layers of one branch."""
    model = STREAM.replace(
        hyper_connections=HyperConnections(streams=streams, mixes=mixes),
        moe=MoE(experts=4, topk=2, ffn=20, shared_experts=1, clamp=2.0, hashed_layers=1) if experts else None,
        mla=MLA(q_rank=12, kv_rank=20, nope_dim=8, rope_dim=4, v_dim=6, indexer=Indexer(heads=2, head_dim=8, topk=3))
        if latent
        else None,
        feed_forwards=(True, False) if half else (),
    )
    whole = ("norm", "router", "expert_column", "expert_row")
    local = Local(model, Job(sequence=12, global_batch=2), get_local_degrees(Layout(tp=tp)))
    units = [(list_embedding(local), list_embedding_weights(model)), (list_head(local), list_head_weights(model))]
    units += [(list_block(local, layer=layer), list_block_weights(model, layer)) for layer in range(model.layers)]
    for ops, unit_weights in units:
        held = sum(
            weight.numel
            // (1 if weight.kind in whole or weight.name.endswith(("q_down.weight", "kv_down.weight")) else tp)
            for weight in unit_weights
        )
        padding = 0 if tp == 1 else (132 - 131) * WIDTH // 2 * any(op.kind in ("embedding", "loss") for op in ops)
        assert sum(op.parameters for op in ops) == pytest.approx(held, abs=padding + WIDTH)


def test_stages_send_all_streams() -> None:
    fields: dict[str, Any] = {"sequence": 64, "global_batch": 8}
    sent = [
        sum(row.bytes for row in ff.predict(model, "h100:2", "pp2", **fields).traffic if row.axis == "pp")
        for model in (STREAM.replace(hyper_connections=None), STREAM)
    ]
    assert sent[1] == STREAMS * sent[0] > 0


@pytest.mark.parametrize("layout", ["tp2", "cp2", "pp2", "dp2 zero3", "dp2 ac=full", "dp2 ac=selective", "dp2 ac=norm"])
def test_predict_adds_time_and_memory_for_hyper_connections_under_every_layout(layout: str) -> None:
    step = ff.predict(STREAM, "h100:2", layout, sequence=64, global_batch=8)
    plain = ff.predict(STREAM.replace(hyper_connections=None), "h100:2", layout, sequence=64, global_batch=8)
    assert step.time.step_seconds > plain.time.step_seconds
    assert step.memory.peak_bytes > plain.memory.peak_bytes


def test_preferences_are_counted_with_hyper_connections() -> None:
    step = ff.predict(STREAM, "h100:1", "mbs2", sequence=64, global_batch=8, objective="dpo")
    assert step.work.hardware_flops > 0


def test_unsupported_combinations_with_hyper_connections_are_one_line_errors() -> None:
    job = Job(sequence=12, global_batch=2)
    with pytest.raises(UserError, match="hyper-connections are not counted under autocast"):
        refuse(Layout(), model=STREAM, job=job.replace(precision="bf16-autocast", stack="ddp"))
    with pytest.raises(UserError, match="2D tensor parallelism is not supported with hyper-connections"):
        refuse(Layout.parse("tp2x2"), model=STREAM.replace(kv_heads=4), job=job)
    with pytest.raises(UserError, match="adapters are not modelled with hyper-connections of streams"):
        refuse(Layout(), model=STREAM, job=job.replace(adapter=Adapter()))
    for fields, says in (
        ({"block": "post"}, "hyper_connections is of models that norm the input of each branch"),
        ({"residual_scale": 0.5}, "residual_scale is not supported with hyper_connections"),
        ({"dropout": 0.1}, "dropout is not supported with hyper_connections"),
    ):
        with pytest.raises(ValueError, match=says):
            STREAM.replace(**fields)
