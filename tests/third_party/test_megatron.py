"""Megatron-Core and Megatron-Bridge make of what is written the degrees, batches and parameters that are ours."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from fivefold.interop.format import ConfigPlan
from fivefold.interop.megatron.emit import emit_arguments
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from tests.interop.draws import Range, list_written_plans

transformer_config = pytest.importorskip("megatron.core.transformer.transformer_config")

AMONG = Range(
    models=("llama3-8b", "llama3-70b", "qwen3-8b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3"),
    recipes=("bf16", "bf16-grad16", "fp8"),
    acs=("none", "full", "selective"),
)


def core_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments as fields of TransformerConfig: by name, and by the few names that arguments.py changes."""
    import torch

    names = {field.name for field in dataclasses.fields(transformer_config.TransformerConfig)}
    result = {name: value for name, value in given.items() if name in names}
    result |= {
        "layernorm_epsilon": given.get("norm_epsilon", 1e-5),
        "add_bias_linear": not given.get("disable_bias_linear"),
    }
    result |= {"num_moe_experts": given.get("num_experts"), "gated_linear_unit": bool(given.get("swiglu"))}
    result |= {"qk_layernorm": bool(given.get("qk_layernorm"))}
    if given.get("bf16"):
        result |= {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    else:
        result["pipeline_dtype"] = torch.float32
    if given.get("fp8_format"):
        result["fp8"] = given["fp8_format"]
    if v := given.get("num_virtual_stages_per_pipeline_rank"):
        result["virtual_pipeline_model_parallel_size"] = v
    if given.get("swiglu"):
        result["activation_func"] = torch.nn.functional.silu
    for name in ("cross_entropy_loss_fusion", "attention_backend", "cuda_graph_scope", "moe_enable_deepep"):
        result.pop(name, None)
    return result


def test_megatron_core_accepts_the_written_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import utils
    from packaging.version import Version

    monkeypatch.setattr(utils, "get_te_version", lambda: Version("2.9.0"))
    drawn = [
        plan
        for plan in list_written_plans("megatron-core", to="megatron", count=40, among=AMONG)
        if plan.model.mla is None
    ][:20]
    assert len(drawn) == 20
    for plan in drawn:
        given, layout = emit_arguments(plan), plan.layout
        given.pop("pipeline_model_parallel_layout", None)
        config = transformer_config.TransformerConfig(**core_fields(given))
        assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (layout.tp, layout.pp)
        assert (config.context_parallel_size, config.expert_model_parallel_size) == (layout.cp, layout.ep)
        if plan.model.moe:
            assert config.expert_tensor_parallel_size == layout.etp
        assert config.sequence_parallel == (layout.tp > 1 and layout.sp)
        assert config.num_query_groups == plan.model.kv_heads


SMALL = Model(
    name="small",
    layers=2,
    width=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=96,
    vocab=512,
)
MODELS = (
    SMALL,
    SMALL.replace(name="tied", tied_embeddings=True, qk_norm="head"),
    SMALL.replace(name="experts", moe=MoE(experts=4, topk=2, ffn=32, shared_experts=1)),
    SMALL.replace(
        name="gpt", mlp="plain", activation="gelu", norm="layernorm", position="learned", kv_heads=4, qkv_bias=True,
        out_bias=True, mlp_bias=True, positions=64, tied_embeddings=True,
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def parallel_state(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import torch
    from megatron.core import parallel_state

    store = tmp_path_factory.mktemp("store") / "file"
    os.environ.setdefault("WORLD_SIZE", "1")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_model_that_megatron_core_builds_has_our_parameters(
    model: Model, parallel_state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    monkeypatch.setattr(torch.cuda, "Stream", MagicMock())
    given = emit_arguments(ConfigPlan(model, Layout(), Job(sequence=64, global_batch=1, precision="fp32")))
    config = transformer_config.TransformerConfig(
        **core_fields(given), use_cpu_initialization=True, perform_initialization=False
    )
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    built = GPTModel(
        config,
        spec,
        vocab_size=given["vocab_size"],
        max_sequence_length=model.positions,
        position_embedding_type=given.get("position_embedding_type", "learned_absolute"),
        share_embeddings_and_output_weights="untie_embeddings_and_output_weights" not in given,
    )
    assert sum(parameter.numel() for parameter in built.parameters()) == model.parameters


def test_megatron_bridge_accepts_the_written_config(tmp_path: Path, hide_transformer_engine: None) -> None:
    pytest.importorskip("megatron.bridge")
    from megatron.bridge.training.config import ConfigContainer

    drawn = list_written_plans("megatron-bridge", to="bridge", count=10, among=AMONG)
    assert len(drawn) == 10
    for plan in drawn:
        path, layout = tmp_path / "run_config.yaml", plan.layout
        path.write_text(write(plan, to="bridge").files["run_config.yaml"])
        config = ConfigContainer.from_yaml(str(path))
        model = config.model
        assert (model.tensor_model_parallel_size, model.pipeline_model_parallel_size) == (layout.tp, layout.pp)
        assert (model.context_parallel_size, model.expert_model_parallel_size) == (layout.cp, layout.ep)
        assert config.get_data_parallel_size(layout.world) == layout.dp
        assert (config.train.micro_batch_size, config.train.global_batch_size) == (layout.mbs, plan.job.global_batch)
        assert config.optimizer.use_distributed_optimizer == (layout.zero == 1)
        assert (model.num_layers, model.hidden_size, model.vocab_size) == (
            plan.model.layers,
            plan.model.width,
            plan.model.vocab,
        )


def test_catalog_models_are_written() -> None:
    plan = ConfigPlan(build_model("llama3-8b"), Layout.parse("dp2 tp2 zero1 mbs1"), Job(sequence=2048, global_batch=8))
    assert emit_arguments(plan)["tensor_model_parallel_size"] == 2


def test_the_compiled_cross_entropy_holds_the_bytes_of_upcast_compiled() -> None:
    """Its backward, as PyTorch compiles it, writes the logits' gradient and an fp32 copy of the softmax, which stays.

    ``list_head`` counts the three: 10 bytes for each logit.
    """
    import torch
    from megatron.core.fusions.fused_cross_entropy import calculate_gradients
    from torch._inductor.utils import run_and_get_code

    rows, vocab = 16, 512
    softmax = torch.rand(rows, 1, vocab)
    arguments = softmax, torch.ones(rows, 1), torch.zeros(rows, 1, dtype=torch.bool), torch.arange(rows)
    _, (code,) = run_and_get_code(calculate_gradients, *arguments)
    buffers = re.findall(r"= empty_strided_cpu\(\(([\d, ]+)\), [^)]*\), torch\.(\w+)\)", code)
    kinds = [
        kind
        for shape, kind in buffers
        if math.prod(int(size) for size in shape.split(",") if size.strip()) == rows * vocab
    ]
    assert sorted(kinds) == ["bfloat16", "float32"]
