"""torchtune builds the models and adapters that are read, and takes every component of the configs that are written.

torchtune 0.6.1 needs torchao 0.10, which is older than the packages of `make interop` take: install both in another
environment, with datasets, omegaconf, sentencepiece, tiktoken and torchdata, and run
``pytest -W ignore tests/third_party/test_torchtune.py``.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.interop.format import ConfigPlan, Overrides
from fivefold.interop.read import read
from fivefold.interop.torchtune.builders import BUILDERS, build_model, name_builder
from fivefold.interop.write import write
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.weights import count_adapters
from tests.interop.draws import Range, list_written_plans

PUBLISHED = Path(__file__).parents[1] / "interop" / "published" / "torchtune"
LENGTH = "tokenizer.max_seq_len=2048"
AMONG = Range(
    models=("llama3-8b", "llama3.2-1b", "qwen2.5-1.5b", "gemma2-9b"),
    recipes=("bf16-pure", "fp32"),
    acs=("none", "full"),
    axes=("dp",),
    fine_tuning=True,
)


@pytest.fixture(scope="module")
def torchtune() -> Any:
    return pytest.importorskip("torchtune")


@pytest.mark.parametrize("name", BUILDERS)
def test_models_built_by_torchtune_have_our_parameters(name: str, torchtune: Any) -> None:
    component = name_builder(name, adapts=False)
    package, _, builder = component.rpartition(".")
    build = getattr(importlib.import_module(package), builder)
    with torch.device("meta"):
        theirs = build()
    ours = build_model(component)
    assert ours is not None
    assert ours.parameters == sum(weight.numel() for weight in theirs.parameters())


@pytest.mark.parametrize("name", ["llama31_8b_lora", "llama3_8b_qdora", "gemma2_27b_lora", "llama31_8b_lora_dpo"])
def test_adapters_of_torchtune_have_our_parameters(name: str, torchtune: Any) -> None:
    from omegaconf import OmegaConf
    from torchtune.config import instantiate
    from torchtune.modules.peft import get_adapter_params

    path = PUBLISHED / f"{name}.yaml"
    # without a quantized base, whose weights have no meta tensors
    arguments = {key: value for key, value in OmegaConf.load(path).model.items() if key != "quantize_base"}
    arguments["_component_"] = arguments["_component_"].replace(".qlora_", ".lora_")
    with torch.device("meta"):
        theirs = instantiate(OmegaConf.create(arguments))
    reading = read([str(path), LENGTH], Overrides())
    assert reading.model is not None
    assert reading.job is not None
    assert reading.job.adapter is not None
    factors = sum(weight.numel() for weight in get_adapter_params(theirs).values())
    assert count_adapters(reading.model, reading.job.adapter) == factors


@pytest.mark.parametrize("name", BUILDERS)
def test_torchtune_validates_the_config_of_every_model(name: str, torchtune: Any, tmp_path: Path) -> None:
    from omegaconf import OmegaConf
    from torchtune.config._validate import validate

    model = build_model(name_builder(name, adapts=False))
    assert model is not None
    job = Job(precision=get_recipe("fp32"), sequence=2048, global_batch=4)
    written = write(ConfigPlan(model, Layout.parse("dp2 zero3 mbs1"), job), to="torchtune")
    (tmp_path / "torchtune.yaml").write_text(written.files["torchtune.yaml"])
    validate(OmegaConf.load(tmp_path / "torchtune.yaml"))


def test_torchtune_validates_drawn_configs(torchtune: Any, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from omegaconf import OmegaConf
    from torchtune.config._validate import validate

    for plan in list_written_plans("torchtune", to="torchtune", count=15, among=AMONG):
        (tmp_path / "torchtune.yaml").write_text(write(plan, to="torchtune").files["torchtune.yaml"])
        validate(OmegaConf.load(tmp_path / "torchtune.yaml"))
