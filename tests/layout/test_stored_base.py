"""The base of an adapter that names none, by the quantization of the model's repository."""

from __future__ import annotations

import pytest

import fivefold as ff
from fivefold.adapter import Adapter
from fivefold.errors import UsageWarning, UserError
from fivefold.job import RECIPES, Job
from fivefold.layout.sharding import FsdpUnit, count_frozen_bytes, list_units
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.model.catalog import resolve
from fivefold.planner.counts.memory.states import count_part_states
from tests.selection import mark_share

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


def test_scales_are_quantized_as_the_repository_has_them() -> None:
    """Transformers takes both from the checkpoint's config, whatever the run's own says."""
    model = resolve("llama3-8b").replace(quantization="nf4", double_quantization=False)
    with pytest.warns(UsageWarning, match="adapter.base=nf4 without double quantization, as the checkpoint stores"):
        single = predict(model, adapter="qlora:16")
    named = predict("llama3-8b", adapter={"rank": 16, "base": "nf4", "double_quantization": False})
    double = predict("llama3-8b", adapter="qlora:16")
    assert single.memory.peak_bytes == named.memory.peak_bytes > double.memory.peak_bytes


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


@pytest.mark.parametrize("name", RECIPES)
def test_factors_are_held_in_16_bits_at_least_under_every_recipe(name: str) -> None:
    """Transformer Engine holds its own linear layers in fp8; the factors next to them are parameters of PyTorch."""
    model = resolve("llama3-8b")
    job = Job(precision=name, adapter=Adapter(rank=16), stack="megatron-bridge")
    factors = tuple(weight for weight in list_units(model, job)[1].weights if weight.is_adapter)
    layout = Layout.parse("dp8 zero1 mbs1")
    states = count_part_states(FsdpUnit("dense", factors), unsharded=factors, shards=8, layout=layout, job=job)
    assert states.gathered == sum(weight.numel for weight in factors) * max(2, RECIPES[name].weights_bytes)


@pytest.mark.filterwarnings("ignore::fivefold.errors.UsageWarning")
@pytest.mark.parametrize("name", mark_share(2, RECIPES))
def test_adapters_are_predicted_or_one_line_says_why_not_under_every_recipe(name: str) -> None:
    model, layout = resolve("llama3-8b"), Layout.parse("dp4 tp2 zero1 mbs1")
    for stack in ("fivefold", "megatron-bridge", "ddp"):
        for base in (None, "nf4", "fp8"):
            job = Job(precision=name, adapter=Adapter(rank=16, base=base), stack=stack, sequence=1024, global_batch=16)
            words = {"precision": name, "adapter": {"rank": 16, "base": base}, "stack": stack, "seq": 1024, "gbs": 16}
            if is_legal(layout, model=model, job=job):
                step = ff.predict("llama3-8b", "h100:8", str(layout), **words)  # type: ignore[arg-type]
                assert step.memory.peak_bytes > 0
            else:
                with pytest.raises(UserError):
                    ff.predict("llama3-8b", "h100:8", str(layout), **words)  # type: ignore[arg-type]
