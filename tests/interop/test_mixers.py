"""Token mixers, output gates and gated shared experts: written by software that has them, an error with any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack
from tests.interop.draws import check_round_trip

GATED_EXPERT = MoE(experts=128, topk=8, ffn=768, shared_experts=1, shared_gate=True)
LACKING: list[tuple[Model, str]] = [
    (build_model("lfm2-1.2b"), r"mixers=\(\)"),
    (build_model("qwen3-next-80b-a3b"), "output_gate=False"),
    (build_model("qwen3-0.6b").replace(output_gate=True), "output_gate=False"),
    (build_model("qwen3-30b-a3b").replace(moe=GATED_EXPERT), "moe.shared_gate=False"),
]


@pytest.mark.parametrize(("model", "lacks"), LACKING, ids=["short_conv", "gated_delta_net", "gate", "shared_gate"])
@pytest.mark.parametrize("to", ["megatron", "bridge", "nanotron", "torchtitan", "torchtitan-0.2"])
def test_a_config_that_would_drop_a_part_of_the_model_is_not_written(to: str, model: Model, lacks: str) -> None:
    plan = ConfigPlan(model=model, layout=Layout(dp=8), job=Job(sequence=4096, global_batch=8))
    says = (
        f"cannot express model .*: read back, it has {lacks}"
        if to in ("megatron", "bridge")
        else f"^model '{model.name}'"
    )
    with pytest.raises(UserError, match=says):
        write(plan, to=to)


@pytest.mark.parametrize("name", ["lfm2-1.2b", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b"])
@pytest.mark.parametrize("to", ["deepspeed", "accelerate"])
def test_software_that_runs_the_model_of_transformers_gives_it_back(to: str, name: str, tmp_path: Path) -> None:
    stack = build_stack({"deepspeed": "deepspeed", "accelerate": "fsdp2"}[to])
    job = Job(sequence=4096, global_batch=8, precision="bf16-grad16", stack=stack)
    plan = ConfigPlan(model=build_model(name), layout=Layout(dp=8, zero=3), job=job)
    assert check_round_trip(plan, to=to, folder=tmp_path) is None


@pytest.mark.parametrize("to", ["megatron", "bridge"])
def test_megatron_gives_latent_experts_back(to: str, tmp_path: Path) -> None:
    moe = MoE(experts=128, topk=8, ffn=768, latent_width=512)
    model = build_model("qwen3-30b-a3b").replace(moe=moe)
    job = Job(sequence=4096, global_batch=8, stack=build_stack("megatron"))
    plan = ConfigPlan(model=model, layout=Layout(dp=8, ep=8, zero=1), job=job)
    assert "latent" in "".join(write(plan, to=to).files.values())
    assert check_round_trip(plan, to=to, folder=tmp_path) is None
