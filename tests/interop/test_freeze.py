"""Frozen parts in configs of LLaMA-Factory and Axolotl, against what these freeze by their own rules."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fivefold.interop.format import Overrides
from fivefold.interop.read import read
from fivefold.layout.sharding import is_trained, list_units
from fivefold.layout.validity.job import list_mismatches
from fivefold.model.catalog import build_model
from fivefold.results.reading import Reading

FACTORY = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B", "stage": "sft", "cutoff_len": 2048, "pure_bf16": True,
    "finetuning_type": "freeze", "per_device_train_batch_size": 1, "template": "llama3",
}  # fmt: skip
AXOLOTL = {"base_model": "meta-llama/Meta-Llama-3-8B", "sequence_len": 2048, "micro_batch_size": 1, "bf16": True}


def read_config(folder: Path, values: dict[str, object]) -> Reading:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return read([str(path)], Overrides(ranks=1))


@pytest.mark.parametrize(
    ("keys", "frozen"),
    [
        ({}, ("layers[:-2]", "embed_tokens", "norm", "lm_head")),
        ({"freeze_trainable_layers": 3, "freeze_trainable_modules": "mlp,self_attn"},
         ("layers[:-3]", "layers[-3:].norms", "embed_tokens", "norm", "lm_head")),
        ({"freeze_trainable_layers": -1, "freeze_extra_modules": "norm,lm_head"}, ("layers[1:]", "embed_tokens")),
        ({"freeze_trainable_layers": 99, "freeze_trainable_modules": "mlp"},
         ("layers[-99:].attention", "layers[-99:].norms", "embed_tokens", "norm", "lm_head")),
    ],
)  # fmt: skip
def test_frozen_layers_of_llama_factory_are_read(
    tmp_path: Path, keys: dict[str, object], frozen: tuple[str, ...]
) -> None:
    reading = read_config(tmp_path, FACTORY | keys)
    assert reading.job is not None
    assert (reading.job.freeze, reading.job.precision.name, reading.not_understood) == (frozen, "bf16-full", ())


@pytest.mark.parametrize(("optimizer", "precision"), [("adamw_torch", "bf16-full"), ("paged_adamw_32bit", "bf16-pure")])
def test_moments_of_weights_in_bf16_are_those_of_the_library(tmp_path: Path, optimizer: str, precision: str) -> None:
    """PyTorch's AdamW has moments of the weights' dtype, bitsandbytes' of 32 bits has them in fp32."""
    reading = read_config(tmp_path, FACTORY | {"optim": optimizer})
    assert reading.job is not None
    assert reading.job.precision.name == precision


def test_the_precision_of_most_configs_is_planned(tmp_path: Path) -> None:
    """``bf16: true`` on one GPU is autocast."""
    reading = read_config(
        tmp_path, {key: value for key, value in FACTORY.items() if key != "pure_bf16"} | {"bf16": True}
    )
    assert reading.job is not None
    assert reading.job.precision.name == "bf16-autocast"
    assert reading.model is not None
    assert list(list_mismatches(reading.model, reading.job)) == []


def test_patterns_of_axolotl_are_matched_with_names_of_weights(tmp_path: Path) -> None:
    """Periods are literal, and a pattern matches from the beginning of a name."""
    patterns = [
        "^lm_head.weight$", "model.layers.3[01].self_attn", "model.layers.(0|7).mlp.down_proj", "layers.5.mlp",
    ]  # fmt: skip
    reading = read_config(tmp_path, AXOLOTL | {"unfrozen_parameters": patterns})
    assert reading.job is not None
    trained = {
        weight.name
        for unit in list_units(build_model("llama3-8b"), reading.job)
        for weight in unit.weights
        if is_trained(weight, reading.job)
    }
    attention = {f"blocks.{layer}.attention.{name}.weight" for layer in (30, 31) for name in ("q", "k", "v", "out")}
    assert trained == {"head.out.weight", *attention, "blocks.0.mlp.down.weight", "blocks.7.mlp.down.weight"}
    assert "layers[1:7]" in reading.job.freeze


def test_keys_that_train_rows_of_a_weight_or_single_modules_are_not_understood(tmp_path: Path) -> None:
    rows = read_config(tmp_path, AXOLOTL | {"unfrozen_parameters": ["^model.embed_tokens.weight$[:32000]"]})
    assert [item.key for item in rows.not_understood] == ["unfrozen_parameters"]
    modules = read_config(tmp_path, FACTORY | {"freeze_trainable_modules": "input_layernorm"})
    assert [item.key for item in modules.not_understood] == ["freeze_trainable_modules"]
