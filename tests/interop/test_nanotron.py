"""nanotron's YAML: a published one is read as its file says, and what is written is read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan, Overrides
from fivefold.interop.read import read
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from tests.interop.draws import Range, check_round_trip, plans
from tests.selection import mark_share

# huggingface/nanotron@09fd0ec:examples/config_tiny_llama.yaml
TINY = """
checkpoints:
  checkpoint_interval: 10
  checkpoints_path: checkpoints
data_stages:
- data:
    dataset:
      hf_dataset_or_datasets: stas/openwebtext-10k
    seed: 42
  name: Stable Training Stage
  start_training_step: 1
general:
  project: debug
  seed: 42
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  init_method:
    std: 0.025
  make_vocab_size_divisible_by: 1
  model_config:
    bos_token_id: 1
    hidden_act: silu
    hidden_size: 16
    intermediate_size: 64
    is_llama_config: true
    max_position_embeddings: 256
    num_attention_heads: 4
    num_hidden_layers: 2
    num_key_value_heads: 4
    rms_norm_eps: 1.0e-05
    rope_scaling: null
    tie_word_embeddings: true
    use_cache: true
    vocab_size: 256
optimizer:
  accumulate_grad_in_fp32: true
  clip_grad: 1.0
  learning_rate_scheduler:
    learning_rate: 0.0003
    lr_decay_style: cosine
    lr_warmup_steps: 2
    min_decay_lr: 1.0e-05
  optimizer_factory:
    adam_beta1: 0.9
    adam_beta2: 0.95
    adam_eps: 1.0e-08
    name: adamW
    torch_adam_is_fused: true
  weight_decay: 0.01
  zero_stage: 0
parallelism:
  dp: 2
  expert_parallel_size: 1
  pp: 2
  pp_engine: 1f1b
  tp: 2
  tp_linear_async_communication: true
  tp_mode: REDUCE_SCATTER
tokenizer:
  tokenizer_name_or_path: robot-test/dummy-tokenizer-wordlevel
tokens:
  batch_accumulation_per_replica: 1
  micro_batch_size: 2
  sequence_length: 256
  train_steps: 15
"""


def put(folder: Path, text: str) -> str:
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    return str(folder / "config.yaml")


def test_an_optimizer_that_is_not_counted_is_not_read_as_another_without_a_word(tmp_path: Path) -> None:
    result = read([put(tmp_path, TINY.replace("name: adamW", "name: lion"))])
    assert [said.key for said in result.not_understood] == ["optimizer.optimizer_factory.name"]
    assert read([put(tmp_path, TINY)]).not_understood == ()


def test_the_published_config_of_a_tiny_llama_is_read(tmp_path: Path) -> None:
    result = read([put(tmp_path, TINY)])
    assert result.model is not None
    assert result.job is not None
    assert result.model.parameters == 256 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 64 + 2 * 16) + 16
    assert str(result.layout) == "dp2 tp2 pp2 zero0 1f1b mbs2"
    job = result.job
    assert (job.sequence, job.global_batch, job.precision.name, job.steps) == (256, 4, "bf16", 15)
    assert (job.stack.name, job.stack.async_tp) == ("nanotron", True)
    assert (result.not_understood, result.missing, result.errors) == ((), (), ())


@pytest.mark.parametrize(
    ("degrees", "layout"), [("1", "dp1 tp2 pp2 zero0"), ("1\n  context_parallel_size: 2", "dp1 tp2 cp2 pp2 zero1")]
)
def test_zero_shards_over_data_parallel_and_context_parallel_ranks(degrees: str, layout: str, tmp_path: Path) -> None:
    text = TINY.replace("zero_stage: 0", "zero_stage: 1").replace("  dp: 2", f"  dp: {degrees}")
    assert str(read([put(tmp_path, text)]).layout).startswith(layout)


@pytest.mark.parametrize(
    ("key", "ac"),
    [
        ("recompute_layer: false", "none"),
        ("recompute_layer: true", "full"),
        ("recompute_granularity: FULL", "full"),
        ("recompute_granularity: SELECTIVE", "selective"),
    ],
)
def test_recomputation_has_two_keys(key: str, ac: str, tmp_path: Path) -> None:
    layout = read([put(tmp_path, TINY.replace("  dp: 2", f"  dp: 2\n  {key}"))]).layout
    assert layout is not None
    assert layout.ac == ac


@pytest.mark.parametrize(
    ("start", "approximated"), [("12", ""), ("5", "lr_decay_starting_step"), ("null", "lr_decay_starting_step")]
)
def test_a_decay_that_does_not_end_with_the_run_is_approximated(start: str, approximated: str, tmp_path: Path) -> None:
    keys = f"lr_decay_style: linear\n    lr_decay_steps: 3\n    lr_decay_starting_step: {start}"
    result = read([put(tmp_path, TINY.replace("lr_decay_style: cosine", keys))])
    assert result.job is not None
    assert (result.job.learning_rate.kind, result.job.learning_rate.decay_steps) == ("wsd", 3)
    assert [said.key.rpartition(".")[2] for said in result.approximated] == ([approximated] if approximated else [])


@pytest.mark.parametrize(
    ("change", "ranks", "reason"),
    [
        (("  dp: 2", "  dp: 4"), 8, r"number of GPUs: 16 in dp·cp·tp·pp=4·1·2·2, 8 in --gpus"),
        (("dtype: bfloat16", "dtype: int8"), None, "model.dtype is 'int8'"),
        (("  dp: 2", "  dp: two"), None, "parallelism.dp must be a whole number"),
    ],
)
def test_contradictions_are_one_line_errors(
    change: tuple[str, str], ranks: int | None, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=reason):
        read([put(tmp_path, TINY.replace(*change))], Overrides(ranks=ranks))


def test_missing_keys_are_reported(tmp_path: Path) -> None:
    result = read([put(tmp_path, TINY.replace("  micro_batch_size: 2\n", ""))])
    assert result.missing == ("tokens.micro_batch_size",)


NANOS = Range(
    models=("tiny", "llama2-7b", "llama3-8b", "qwen2-7b"),
    recipes=("bf16", "bf16", "fp32", "bf16-full"),
    acs=("none", "none", "full"),
    axes=("dp", "tp", "cp", "pp"),
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", mark_share(3, range(3)))
def test_written_config_is_read_back(tmp_path: Path, seed: int) -> None:
    drawn = plans("nanotron", count=15, seed=seed, among=NANOS)
    refused = [check_round_trip(plan, to="nanotron", folder=tmp_path) for plan in drawn]
    assert refused.count(None) >= 6, refused


@pytest.mark.parametrize(
    ("text", "model", "reason"),
    [
        ("dp4 zero1 mbs1 ac=selective", "llama3-8b", "nanotron recomputes complete layers only; use ac=full"),
        ("dp4 zero1 mbs1", "mixtral-8x7b", "experts are not written for nanotron"),
        ("dp4 zero1 mbs1", "gemma2-9b", "nanotron has Llama and Qwen2, not gemma2"),
        ("dp4 zero3 mbs1", "llama3-8b", "nanotron does not support zero3; use zero0 or zero1"),
    ],
)
def test_inexpressible_layout_is_an_error_with_the_closest_one(text: str, model: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        write(ConfigPlan(build_model(model), Layout.parse(text), Job(sequence=2048, global_batch=16)), to="nanotron")


@pytest.mark.parametrize(("dtype", "name", "bytes_each"), [("float32", "fp32", 4), ("bfloat16", "bf16", 2)])
def test_weights_have_the_dtype_of_the_config(tmp_path: Path, dtype: str, name: str, bytes_each: int) -> None:
    job = read([put(tmp_path, TINY.replace("dtype: bfloat16", f"dtype: {dtype}"))]).job
    assert job is not None
    assert (job.precision.name, job.precision.weights_bytes) == (name, bytes_each)
