"""ms-swift: commands, YAMLs, defaults that follow from other keys, presets, and the ranks that its variables start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import fivefold
from fivefold.errors import UsageWarning, UserError
from fivefold.interop.format import Overrides
from fivefold.interop.read import read
from fivefold.results.reading import Reading

PUBLISHED = Path(__file__).parent / "published" / "swift"
LINE = "swift sft --model Qwen/Qwen3-8B --dataset data.jsonl --max_length 2048 --torch_dtype bfloat16"


def read_line(text: str, ranks: int | None = 2) -> Reading:
    """Read a launch line."""
    return read(f"{LINE} {text}".split(), Overrides(ranks=ranks))


def read_script(text: str, folder: Path, ranks: int | None = None) -> Reading:
    """Read a shell script."""
    (folder / "train.sh").write_text(text, encoding="utf-8")
    return read([str(folder / "train.sh")], Overrides(ranks=ranks))


@pytest.mark.parametrize(
    ("text", "precision", "rate"),
    [
        ("--tuner_type full", "bf16-full", 1e-5),  # DDP trains weights in the type in which they are loaded
        ("--train_type full", "bf16-full", 1e-5),  # its name in 3.x
        ("", "bf16-autocast", 1e-4),  # adapters, in fp32, unless tuner_type says otherwise
        ("--tuner_type full --torch_dtype float32", "fp16-autocast", 1e-5),  # model_args.py, _init_mixed_precision
        ("--tuner_type full --deepspeed zero3", "bf16-grad16", 1e-5),
        ("--tuner_type full --fsdp fsdp2", "bf16-grad16", 1e-5),
        ("--learning_rate 3e-4", "bf16-autocast", 3e-4),
    ],
)
def test_defaults_follow_from_the_tuner_and_the_type_of_the_weights(text: str, precision: str, rate: float) -> None:
    job = read_line(text).job
    assert job is not None
    assert (job.precision.name, job.learning_rate.peak, job.optimizer.weight_decay) == (precision, rate, 0.1)
    assert job.optimizer.betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("text", "ranks", "mbs", "batch"),
    [
        ("", 2, 1, 16),  # as many micro-batches as make 16 samples: ceil(16 / mbs / ranks)
        ("", 3, 1, 18),
        ("--per_device_train_batch_size 4", 8, 4, 32),
        ("--gradient_accumulation_steps 5", 2, 1, 10),
    ],
)
def test_a_batch_has_sixteen_samples_unless_it_is_given(text: str, ranks: int, mbs: int, batch: int) -> None:
    reading = read_line(text, ranks)
    assert reading.layout is not None
    assert reading.job is not None
    assert (reading.layout.mbs, reading.job.global_batch) == (mbs, batch)


def test_what_fits_in_memory_is_what_its_example_states() -> None:
    """The example says 76 GiB on one GPU: 8 bytes a parameter, where masters and moments in fp32 would take 113."""
    config = fivefold.read_config(str(PUBLISHED / "full_sft.sh"), gpus="b200:1")
    with pytest.warns(UsageWarning, match="no config of ddp is written with precision bf16-full"):
        step = fivefold.predict(config.model, "b200:1", config.layout, job=config.job)
    assert step.memory.reserved_bytes == pytest.approx(76 * 2**30, rel=0.05)


def test_variables_of_each_command_start_its_ranks(tmp_path: Path) -> None:
    text = f"nproc=4\nNPROC_PER_NODE=$nproc \\\nCUDA_VISIBLE_DEVICES=0,1,2,3 \\\n{LINE} \\\n"
    text += "    --gradient_accumulation_steps $(expr 32 / $nproc) --deepspeed zero2\n"
    text += "CUDA_VISIBLE_DEVICES=0 \\\nswift infer --adapters output/checkpoint-100\n"
    reading = read_script(text, tmp_path)
    assert (reading.ranks, str(reading.layout)) == (4, "dp4 zero2 mbs1 ac=full")
    assert reading.job is not None
    assert reading.job.global_batch == 32
    nodes = read_script(f"export NNODES=2\nexport NPROC_PER_NODE=8\n{LINE}\n", tmp_path)
    assert nodes.ranks == 16


def test_one_process_that_sees_several_gpus_spreads_its_layers_over_them(tmp_path: Path) -> None:
    reading = read_script(f"CUDA_VISIBLE_DEVICES=0,1 {LINE}\n", tmp_path)
    assert [key.key for key in reading.not_understood] == ["device_map"]
    assert read_script(f"CUDA_VISIBLE_DEVICES=1 {LINE}\n", tmp_path).ranks == 1
    line = LINE.replace("swift sft", "torchrun --nproc_per_node 2 swift/cli/sft.py")
    launched = read_script(f"CUDA_VISIBLE_DEVICES=0,1 {line}\n", tmp_path)
    assert (launched.ranks, launched.not_understood) == (2, ())


def test_a_file_is_read_as_its_command_would_be(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "model": "Qwen/Qwen3-8B",
        "tuner_type": "lora",
        "max_length": 2048,
        "dataset": ["a#500", "b"],
    }
    keys |= {"ENV": {"NPROC_PER_NODE": 2}, "lr_scheduler_kwargs": {"min_lr": 1e-6}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    of_file = read([str(tmp_path / "sft.yaml")], Overrides())
    of_line = read(["swift", "sft", str(tmp_path / "sft.yaml"), "--lora_rank", "8"], Overrides())
    assert of_file.ranks == of_line.ranks == 2
    assert of_file.job == of_line.job
    assert of_file.data is not None
    assert of_file.data.fields["corpus"] == "a"


@pytest.mark.parametrize(
    ("text", "adapter"),
    [
        ("", {"rank": 8, "alpha": 32, "dropout": 0.05, "base": None, "targets": ("all-linear",)}),
        ("--quant_method bnb --quant_bits 4 --lora_rank 16", {"base": "nf4", "rank": 16}),
        (
            "--quant_method bnb --quant_bits 4 --bnb_4bit_quant_type fp4 --bnb_4bit_use_double_quant false",
            {"base": "fp4", "double_quantization": False},
        ),
        ("--quant_method bnb --quant_bits 8", {"base": "int8"}),
        ("--target_modules q_proj v_proj --use_dora true", {"targets": ("q_proj", "v_proj"), "kind": "dora"}),
        ("--target_regex .*[qk]_proj", {"targets": ("q_proj", "k_proj")}),
        ("--modules_to_save embed_tokens lm_head", {"modules_to_save": ("embed_tokens", "lm_head")}),
    ],
)
def test_adapters(text: str, adapter: dict[str, Any]) -> None:
    reading = read_line(text)
    assert reading.not_understood == ()
    assert reading.job is not None
    assert reading.job.adapter is not None
    assert {name: getattr(reading.job.adapter, name) for name in adapter} == adapter


def test_preferences_are_those_of_swift_rlhf() -> None:
    words = f"{LINE} --beta 0.2".replace("swift sft", "swift rlhf").split()
    reading = read(words, Overrides(ranks=2))
    assert reading.job is not None
    assert (reading.job.objective, reading.job.dpo_beta, reading.not_understood) == ("dpo", 0.2, ())
    other = read([*words, "--rlhf_type", "kto"], Overrides(ranks=2))
    assert "rlhf_type" in [key.key for key in other.not_understood]


def test_pretraining_reads_text_and_packed_samples_have_the_length_of_a_pack() -> None:
    words = f"{LINE} --packing true --packing_length 8192 --attn_impl flash_attn".replace("swift sft", "swift pt")
    reading = read(words.split(), Overrides(ranks=2))
    assert reading.job is not None
    assert (reading.job.objective, reading.job.sequence, reading.job.documents) == ("pretrain", 8192, "separate")


@pytest.mark.parametrize(
    ("text", "layout", "approximated"),
    [
        ("--sequence_parallel_size 4 --deepspeed zero3", "dp2 cp4 zero3 mbs1 ac=full cp=ulysses", False),
        ("--sequence_parallel_size 8 --deepspeed zero3", "dp1 cp8 zero3 mbs1 ac=full cp=ulysses", False),
    ],
)
def test_a_sequence_is_cut_by_ulysses_as_far_as_the_key_heads_go(text: str, layout: str, approximated: bool) -> None:
    reading = read_line(text, 8)
    assert str(reading.layout) == layout
    assert ("sequence_parallel_size" in [key.key for key in reading.approximated]) == approximated


def test_a_sequence_over_more_ranks_than_key_heads_is_counted_as_a_ring() -> None:
    reading = read_line("--sequence_parallel_size 16 --deepspeed zero3", 16)
    assert str(reading.layout) == "dp1 cp16 zero3 mbs1 ac=full"
    assert "sequence_parallel_size" in [key.key for key in reading.approximated]


def test_what_has_no_effect_there_or_is_no_preset_is_said() -> None:
    assert [key.key for key in read_line("--quant_bits 4").not_understood] == ["quant_bits"]
    with pytest.raises(UserError, match="deepspeed=default-zero2 is no preset of ms-swift; use zero0, zero1"):
        read_line("--deepspeed default-zero2")


def test_a_file_that_is_named_from_the_folder_of_the_repository_may_be_next_to_the_script(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}')
    line = f"NPROC_PER_NODE=2 {LINE} --deepspeed ./examples/train/zero.json"
    assert str(read_script(line, tmp_path).layout).startswith("dp2 zero3")


def test_packed_samples_of_a_model_with_other_mixers_are_counted_as_joined(tmp_path: Path) -> None:
    line = LINE.replace("Qwen/Qwen3-8B", "Qwen/Qwen3.5-9B")
    assert line != LINE
    reading = read_script(f"NPROC_PER_NODE=2 {line} --packing true --attn_impl flash_attn", tmp_path)
    assert reading.job is not None
    assert reading.job.documents == "joined"
    assert "gated_delta_net" in next(key.means for key in reading.approximated if key.key == "(documents)")


@pytest.mark.parametrize("text", ["--tensor_model_parallel_size 2 --micro_batch_size 4", "--lora_rank 8"])
def test_commands_of_its_megatron_are_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match="arguments of `megatron sft` of ms-swift, which are not read; give model and"):
        read(f"megatron sft --model Qwen/Qwen3-8B {text}".split(), Overrides())
