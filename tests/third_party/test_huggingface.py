"""accelerate, transformers and DeepSpeed parse what is written for them; parameters of their model on meta are ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fivefold.interop.format import ConfigPlan
from fivefold.interop.write import write
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.stack.catalog import build_stack as stack_named
from tests.interop.draws import Range, list_written_plans

config_args = pytest.importorskip("accelerate.commands.config.config_args")
pytest.importorskip("deepspeed")

AMONG = Range(
    models=("llama3-8b", "llama3.2-1b", "qwen3-8b", "mixtral-8x7b", "tiny"),
    recipes=("bf16", "bf16-grad16", "fp32", "fp16"),
    acs=("none", "full"),
    axes=("dp",),
)


def put(plan: ConfigPlan, to: str, folder: Path) -> None:
    for name, text in write(plan, to=to).files.items():
        (folder / name).write_text(text)


def test_accelerate_reads_its_file_and_trainer_its_arguments(tmp_path: Path) -> None:
    drawn = list_written_plans("fsdp2", to="accelerate", count=10, among=AMONG)
    assert len(drawn) == 10
    for plan in drawn:
        put(plan, "accelerate", tmp_path)
        config = config_args.load_config_from_file(str(tmp_path / "accelerate.yaml"))
        assert config.num_processes == plan.layout.world
        assert str(config.distributed_type).endswith("FSDP")
        assert config.fsdp_config["fsdp_version"] == 2
        said = yaml.safe_load((tmp_path / "arguments.yaml").read_text())
        assert said["per_device_train_batch_size"] * said["gradient_accumulation_steps"] * plan.layout.dp == (
            plan.job.global_batch
        )


def test_deepspeed_reads_its_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime import config as config_of

    drawn = list_written_plans("deepspeed", to="deepspeed", count=10, among=AMONG)
    assert len(drawn) == 10
    for plan in drawn:
        put(plan, "deepspeed", tmp_path)
        values, layout = json.loads((tmp_path / "deepspeed.json").read_text()), plan.layout
        monkeypatch.setattr(config_of.dist, "get_rank", lambda *_: 0)
        monkeypatch.setattr(config_of.dist, "get_world_size", lambda *_, world=layout.world: world)
        config = config_of.DeepSpeedConfig(values)
        assert config.train_batch_size == plan.job.global_batch
        assert config.train_micro_batch_size_per_gpu == layout.mbs
        assert config.gradient_accumulation_steps == layout.micro_batches(plan.job)
        assert int(config.zero_config.stage) == layout.zero
        zero, stack = config.zero_config, plan.job.stack
        if layout.zero:
            assert zero.reduce_bucket_size == stack.reduce_bucket
        if layout.zero == 3:
            held = (
                zero.prefetch_bucket_size,
                zero.param_persistence_threshold,
                zero.max_live_parameters,
                zero.max_reuse_distance,
            )
            assert held == (
                stack.prefetch_bucket_size,
                stack.param_persistence_threshold,
                stack.max_live_parameters,
                stack.max_reuse_distance,
            )
        assert bool(config.bfloat16_config.enabled) == (plan.job.precision.compute == "bf16")
        assert bool(config.float16_config.enabled) == (plan.job.precision.compute == "fp16")


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b", "mixtral-8x7b", "gemma2-9b"])
def test_the_model_that_transformers_builds_has_our_parameters(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = build_model(name)
    job = Job(sequence=2048, global_batch=8, precision=get_recipe("bf16-grad16"))
    put(ConfigPlan(model, Layout.parse("dp4 zero3 mbs1"), job), "accelerate", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in built.parameters()) == model.parameters


def run_training(folder: Path, command: list[str], script: str = "train.py", **environment: str) -> str:
    """The folder as it is written, on the CPU; what it prints."""
    with (folder / "arguments.yaml").open("a") as file:
        file.write("use_cpu: true\nreport_to: none\nsave_strategy: 'no'\nlogging_steps: 1\n")
    done = subprocess.run(
        [sys.executable, "-m", *command, script, "arguments.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


SHARDED_ON_A_CPU = """import runpy
from accelerate import state
from torch.distributed.tensor import DTensor

begin = state.AcceleratorState.__init__

def told(self, *given, fsdp_plugin=None, **words):
    begin(self, *given, fsdp_plugin=fsdp_plugin, **words)
    if fsdp_plugin is not None and self.distributed_type == state.DistributedType.MULTI_CPU:
        self.fsdp_plugin, self.distributed_type = fsdp_plugin, state.DistributedType.FSDP
        state.PartialState._shared_state["distributed_type"] = state.DistributedType.FSDP

state.AcceleratorState.__init__ = told
weights = list(runpy.run_path("train.py", run_name="__main__")["model"].parameters())
whole, here = sum(each.numel() for each in weights), sum(each.to_local().numel() for each in weights)
print(f"a rank holds 1/{whole // here} of the weights" if isinstance(weights[0], DTensor) else "whole weights")
"""


def test_written_config_trains_on_two_processes(tmp_path: Path) -> None:
    """accelerate's FSDP2 over gloo; it takes it on accelerators alone, and trains under DDP on a CPU unless told."""
    job = Job(sequence=64, global_batch=4, precision="fp32", steps=2)
    put(ConfigPlan(build_model("nano"), Layout.parse("dp2 zero3 mbs1 ac=full"), job), "accelerate", tmp_path)
    config = tmp_path / "accelerate.yaml"
    config.write_text(config.read_text().replace("use_cpu: false", "use_cpu: true"))
    (tmp_path / "first.py").write_text(SHARDED_ON_A_CPU)
    said = run_training(tmp_path, ["accelerate.commands.launch", "--config_file", "accelerate.yaml"], "first.py")
    assert "train_loss" in said
    assert "a rank holds 1/2 of the weights" in said


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_written_deepspeed_config_trains_on_two_processes(zero: int, tmp_path: Path) -> None:
    stack = stack_named("deepspeed").replace(reduce_bucket=100_000)
    job = Job(sequence=64, global_batch=4, precision="fp32", steps=2, stack=stack)
    put(ConfigPlan(build_model("nano"), Layout.parse(f"dp2 zero{zero} mbs1"), job), "deepspeed", tmp_path)
    # on a CPU transformers lets DeepSpeed shard the model before there is a process group
    (tmp_path / "first.py").write_text(
        "import runpy, deepspeed\n"
        "deepspeed.init_distributed(dist_backend='gloo')\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert "train_loss" in run_training(tmp_path, launch, "first.py", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
