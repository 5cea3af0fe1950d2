"""The base of an adapter that names none, by the quantization of the model's repository."""

from __future__ import annotations

import pytest

import fivefold as ff
from fivefold.adapter import Adapter
from fivefold.job import Job
from fivefold.layout.sharding import count_frozen_bytes, list_units
from fivefold.model.catalog import resolve
from fivefold.record import UsageWarning, UserError

REPOSITORY = "unsloth/llama-3-8b-bnb-4bit"


def predict(model: str, **words: object) -> ff.Step:
    return ff.predict(model, "rtx4090:1", "mbs1 ac=full", seq=1024, gbs=8, **words)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("repository", "base"),
    [(REPOSITORY, "nf4"), ("unsloth/Meta-Llama-3.1-8B-bnb-8bit", "int8"), ("unsloth/Qwen3-8B-FP8", "fp8")],
)
def test_an_adapter_over_a_quantized_repository_keeps_its_format(repository: str, base: str) -> None:
    with pytest.warns(UsageWarning, match=f"adapter.base={base}, as {repository} stores its weights"):
        step = predict(repository, adapter="lora:16")
    named = predict(resolve(repository).name, adapter={"rank": 16, "base": base})
    assert step.memory.peak_bytes == named.memory.peak_bytes
    assert step.job["adapter"]["base"] == base  # type: ignore[index, call-overload]


def test_a_named_base_stays() -> None:
    with pytest.warns(UsageWarning, match="add adapter.base=nf4 to train over them as they are"):
        step = predict(REPOSITORY, adapter={"rank": 16, "base": "bf16"})
    assert step.memory.peak_bytes == predict("llama3-8b", adapter="lora:16").memory.peak_bytes


def test_full_training_of_weights_in_4_bits_is_an_error() -> None:
    with pytest.raises(UserError, match="stores its weights in nf4, over which transformers trains adapters alone"):
        predict(REPOSITORY)


def test_a_base_that_the_recipe_holds_in_fp8_takes_a_byte_for_each_weight_of_a_linear_layer() -> None:
    """NVIDIA-NeMo/NeMo: fp8_params of MegatronMixedPrecision, the base of MLPerf's LoRA; tables and norms do not."""
    adapter = Adapter(rank=16)
    jobs = [Job(precision=name, adapter=adapter, stack="megatron-bridge") for name in ("fp8-param", "fp8")]
    unit = list_units(resolve("llama3-8b"), jobs[0])[1]
    held, cast = (count_frozen_bytes(unit, shards=1, job=job) for job in jobs)
    linear = sum(weight.numel for weight in unit.weights if not weight.is_adapter and len(weight.shape) == 2)
    assert cast.shard - held.shard == linear
