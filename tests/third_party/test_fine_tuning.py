"""Axolotl, LLaMA-Factory and TRL parse the configs that are written for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fivefold.interop.write import write
from tests.interop.draws import Range, list_written_plans

AMONG = Range(models=("llama3-8b",), recipes=("bf16-grad16", "bf16-autocast"), axes=("dp",), fine_tuning=True)


def write_drawn(to: str, folder: Path) -> list[tuple[dict[str, Any], bool]]:
    """Return the values of drawn configs in one folder each, and whether they train pairs."""
    values = []
    for stack in ("ddp", "fsdp2", "deepspeed"):
        for plan in list_written_plans(stack, to=to, count=6, among=AMONG):
            files = write(plan, to=to).files
            text = files["axolotl.yaml" if to == "axolotl" else "train.yaml"]
            # the file of DeepSpeed is judged in test_huggingface, and a GPU for bf16 is not there
            values.append((yaml.safe_load(text) | {"deepspeed": None}, plan.job.objective == "dpo"))
    assert len(values) == 18
    return values


def test_axolotl_validates_its_config(tmp_path: Path) -> None:
    schema = pytest.importorskip("axolotl.utils.schemas.config").AxolotlInputConfig
    for values, _ in write_drawn("axolotl", tmp_path):
        schema(**values)
        assert values.keys() <= schema.model_fields.keys()


def test_llamafactory_parses_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    arguments = pytest.importorskip("llamafactory.hparams")
    transformers = pytest.importorskip("transformers")
    parser = transformers.HfArgumentParser(
        (
            arguments.ModelArguments,
            arguments.DataArguments,
            transformers.Seq2SeqTrainingArguments,
            arguments.FinetuningArguments,
        )
    )
    for values, _ in write_drawn("llamafactory", tmp_path):
        parser.parse_dict(values | {"use_cpu": True, "bf16": False})


def test_trl_parses_its_config(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    for values, is_preference in write_drawn("trl", tmp_path):
        config = trl.DPOConfig if is_preference else trl.SFTConfig
        parser = trl.TrlParser((trl.ScriptArguments, config, trl.ModelConfig, trl.DatasetMixtureConfig))
        file = tmp_path / "train.yaml"
        file.write_text(yaml.safe_dump(values | {"use_cpu": True, "bf16": False}))
        parser.parse_args_and_config(["--config", str(file)])
