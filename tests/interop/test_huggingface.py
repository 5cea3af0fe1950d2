"""Trainers on transformers: published configs are read as they are meant, and what is written is read back."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from transformers import get_scheduler

from fivefold.adapter import EXPERT_TARGETS, Adapter
from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan, Overrides
from fivefold.interop.huggingface import dialects
from fivefold.interop.huggingface.adapters import write_adapter
from fivefold.interop.huggingface.keys import DERIVED_FROM_WIDTH, FILLED_BY_TRAINER
from fivefold.interop.huggingface.shipped import find_shipped
from fivefold.interop.read import read
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.model.weights import count_adapters, list_targets
from fivefold.results.reading import Reading
from tests.interop.draws import Range, check_round_trip, plans
from tests.planner.counts.expert_adapters import count_expert_adapters
from tests.selection import mark_share

# huggingface/alignment-handbook@19f0345:recipes/zephyr-7b-beta/sft/config_full.yaml
ZEPHYR = """
model_name_or_path: mistralai/Mistral-7B-v0.1
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_mixture:
  datasets:
    - id: HuggingFaceH4/ultrachat_200k
bf16: true
gradient_accumulation_steps: 1
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: False
learning_rate: 2.0e-05
lr_scheduler_type: cosine
max_seq_length: 2048
max_steps: -1
per_device_train_batch_size: 16
report_to:
- wandb
warmup_ratio: 0.1
"""
# huggingface/trl@7d75884:examples/accelerate_configs/deepspeed_zero3.yaml
ZERO3 = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 1
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: 'fp16'
num_machines: 1
num_processes: 8
use_cpu: false
"""
# huggingface/trl@a91c73c:examples/accelerate_configs/fsdp2.yaml
FSDP2 = """
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_version: 2
mixed_precision: bf16
num_processes: 8
"""
# hiyouga/LLaMA-Factory@03da9a7:examples/train_full/llama3_full_sft.yaml
FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
output_dir: saves/llama3-8b/full/sft
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
lr_scheduler_type: cosine
bf16: true
"""
# hiyouga/LLaMA-Factory@1d6e8b2:examples/deepspeed/ds_z3_config.json
DS_Z3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3, "overlap_comm": False, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
    },
}  # fmt: skip
# axolotl-ai-cloud/axolotl@15f7910:examples/llama-3/fft-8b.yaml
AXOLOTL = """
base_model: meta-llama/Meta-Llama-3-8B
load_in_8bit: false
datasets:
  - path: tatsu-lab/alpaca
sequence_len: 8192
sample_packing: true
pad_to_sequence_len: true
wandb_project:
gradient_accumulation_steps: 8
micro_batch_size: 1
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-5
bf16: auto
fp16:
gradient_checkpointing: true
flash_attention: true
deepspeed:
fsdp:
fsdp_config:
special_tokens:
  pad_token: <|end_of_text|>
"""
# axolotl-ai-cloud/axolotl@015d9de:examples/llama-3/3b-fp8-fsdp2.yaml
AXOLOTL_FSDP = """
base_model: meta-llama/Llama-3.2-3B
liger_fused_linear_cross_entropy: true
datasets:
  - path: yahma/alpaca-cleaned
sample_packing: true
sequence_len: 512
torch_compile: true
gradient_accumulation_steps: 1
micro_batch_size: 16
optimizer: adamw_torch_fused
bf16: true
fsdp_config:
  fsdp_version: 2
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
"""


def read_files(files: dict[str, str], folder: Path, *words: str, ranks: int | None = 8) -> Reading:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    first = str(folder / next(iter(files)))
    return read(words or [first], Overrides(ranks=ranks))


@pytest.mark.parametrize(
    ("files", "layout", "job", "stack", "strange"),
    [
        (
            {"run.sh": "accelerate launch --config_file zero3.yaml scripts/sft.py --config config_full.yaml\n",
             "zero3.yaml": ZERO3, "config_full.yaml": ZEPHYR},
            "dp8 zero3 mbs16 ac=full", ("mistral-7b", 2048, 128, "bf16-grad16", "adamw"), "deepspeed", [],
        ),
        (
            {"run.sh": "accelerate launch --config_file f.yaml scripts/sft.py --config c.yaml --max_seq_length 4096\n",
             "f.yaml": FSDP2, "c.yaml": ZEPHYR},
            "dp8 zero3 mbs16 ac=full", ("mistral-7b", 4096, 128, "bf16-grad16", "adamw"), "fsdp2", [],
        ),
        (
            {"train.yaml": FACTORY, "examples/deepspeed/ds_z3_config.json": json.dumps(DS_Z3)},
            "dp8 zero3 mbs1 ac=full", ("llama3-8b", 2048, 16, "bf16-grad16", "adamw"), "deepspeed", [],
        ),
        (
            {"fft.yaml": AXOLOTL},
            "dp8 zero0 mbs1 ac=full", ("llama3-8b", 8192, 64, "bf16-autocast", "adamw8bit"), "ddp", [],
        ),
        (
            {"fsdp.yaml": AXOLOTL_FSDP},
            "dp8 zero3 mbs16 ac=full", ("llama3.2-3b", 512, 128, "bf16-grad16", "adamw"), "fsdp2", [],
        ),
    ],
    ids=["handbook-zero3", "handbook-fsdp2", "llama-factory", "axolotl-ddp", "axolotl-fsdp2"],
)  # fmt: skip
def test_published_configs_are_read(
    files: dict[str, str],
    layout: str,
    job: tuple[str, int, int, str, str],
    stack: str,
    strange: list[str],
    tmp_path: Path,
) -> None:
    result = read_files(files, tmp_path)
    assert result.job is not None, result.missing
    assert result.model is not None
    assert str(result.layout) == layout
    said = result.job
    assert (result.model.name, said.sequence, said.global_batch, said.precision.name, said.optimizer.kind) == job
    assert said.stack.name == stack
    assert [item.key for item in result.not_understood] == strange
    assert result.errors == ()


@pytest.mark.parametrize(
    ("lines", "precision"),
    [("", "bf16-autocast"), ("fp16: true\n", "bf16-autocast"), ("bf16: false\nfp16: true\n", "fp16-autocast"),
     ("bf16: false\n", "fp32"), ("bf16:\n", "fp32")],
)  # fmt: skip
def test_axolotl_trains_in_bf16_unless_its_file_says_otherwise(lines: str, precision: str, tmp_path: Path) -> None:
    """axolotl/utils/schemas/config.py: bf16 is "auto" by default; with both on, fp16 is left out."""
    result = read_files({"fft.yaml": AXOLOTL.replace("bf16: auto\nfp16:\n", lines)}, tmp_path)
    assert result.job is not None, result.missing
    assert result.job.precision.name == precision
    assert ("fp16" in {item.key for item in result.approximated}) == (lines == "fp16: true\n")


def test_axolotls_version_of_fsdp_may_be_off(tmp_path: Path) -> None:
    """It is the version of fsdp_config, and alone does not turn FSDP on; off, it is said like every other key."""
    off = read_files({"fft.yaml": AXOLOTL + "fsdp_version: false\n"}, tmp_path)
    plain = read_files({"fft.yaml": AXOLOTL}, tmp_path)
    assert (off.layout, off.job, off.not_understood) == (plain.layout, plain.job, plain.not_understood)
    assert "fsdp_version" in {key.key for key in off.understood}
    assert "fsdp_version" not in {key.key for key in plain.understood}


@pytest.mark.parametrize(
    "key",
    [
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping",
        "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay",
        "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps", "fp16.enabled", "bf16.enabled",
    ],
)  # fmt: skip
def test_auto_is_accepted_where_transformers_replaces_it(key: str) -> None:
    """Against its own list: fill_match and fill_only of transformers/integrations/deepspeed.py."""
    source = Path(transformers.__file__).with_name("integrations").joinpath("deepspeed.py").read_text()
    filled = set(re.findall(r'fill_(?:match|only)\(\s*"([a-z0-9_.]+)"', source))
    assert key in filled
    assert {f"deepspeed.{name}" for name in filled} <= FILLED_BY_TRAINER | DERIVED_FROM_WIDTH.keys()


def test_auto_in_the_section_of_zero_is_the_default_of_deepspeed(tmp_path: Path) -> None:
    """Its DeepSpeedConfigModel drops the value (deepspeed/runtime/config_utils.py)."""
    results = []
    for bucket in ({"prefetch_bucket_size": "auto", "overlap_comm": "auto"}, {}):
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3, **bucket}}
        (tmp_path / "ds.json").write_text(json.dumps(config))
        words = [str(tmp_path / "ds.json"), "max_length=4096"]
        results.append(read(words, Overrides(ranks=4, model=build_model("llama3-8b"))))
    assert results[0].layout is not None
    assert (results[0].layout, results[0].job) == (results[1].layout, results[1].job)


@pytest.mark.parametrize("name", ["zero3_bf16_cpuoffload_all.json"])
def test_a_shipped_config_is_the_one_of_the_repository(name: str) -> None:
    published = Path(__file__).parent / "published" / "axolotl" / "deepspeed_configs" / name
    assert find_shipped(f"deepspeed_configs/{name}", dialects.AXOLOTL) == json.loads(published.read_text())


def test_a_recipe_may_name_the_deepspeed_configs_that_axolotl_ships(tmp_path: Path) -> None:
    recipe = "base_model: llama3-8b\nsequence_len: 4096\nmicro_batch_size: 1\nbf16: true\ndeepspeed: {}\n"
    about = {
        "zero1.json": ("dp8 zero1 mbs1", ()),
        "zero2_torch_compile.json": ("dp8 zero2 mbs1", ("optimizer",)),
        "zero3.json": ("dp8 zero3 mbs1", ()),
        "zero3_bf16_cpuoffload_params.json": ("dp8 zero3 mbs1", ("parameters",)),
        "zero3_bf16_cpuoffload_all.json": ("dp8 zero3 mbs1", ("optimizer", "parameters")),
    }
    for name, (layout, offload) in about.items():
        result = read_files({"c.yaml": recipe.format(f"deepspeed_configs/{name}")}, tmp_path, ranks=8)
        assert result.job is not None
        assert (str(result.layout), result.job.offload) == (layout, offload)
        (note,) = [key for key in result.approximated if key.key == "deepspeed"]
        assert (note.value, note.means) == (
            f"deepspeed_configs/{name}",
            "not next to the config: read as axolotl 0.19.0 ships it",
        )
    assert result.job.stack.max_live_parameters == result.job.stack.max_reuse_distance == 0
    (tmp_path / "deepspeed_configs").mkdir()
    (tmp_path / "deepspeed_configs" / "zero3.json").write_text('{"zero_optimization": {"stage": 2}}')
    own = read_files({"c.yaml": recipe.format("deepspeed_configs/zero3.json")}, tmp_path, ranks=8)
    assert own.layout is not None
    assert own.layout.zero == 2  # the user's own file of that name
    assert "deepspeed" not in [key.key for key in own.approximated]
    for name in ("deepspeed_configs/zero9.json", "zero1.json"):
        with pytest.raises(UserError, match=r"which does not exist; put it next to this file"):
            read_files({"c.yaml": recipe.format(name)}, tmp_path, ranks=8)


def test_a_recipe_may_name_the_deepspeed_configs_that_llama_factory_ships(tmp_path: Path) -> None:
    recipe = (
        "model_name_or_path: llama3-8b\nstage: sft\nfinetuning_type: full\nbf16: true\n"
        "per_device_train_batch_size: 1\ndeepspeed: {}\n"
    )
    about = {
        "ds_z0_config.json": ("dp8 zero0 mbs1 ac=full", ()),
        "ds_z2_offload_config.json": ("dp8 zero2 mbs1 ac=full", ("optimizer",)),
        "ds_z3_config.json": ("dp8 zero3 mbs1 ac=full", ()),
        "ds_z3_offload_config.json": ("dp8 zero3 mbs1 ac=full", ("optimizer", "parameters")),
    }
    for name, (layout, offload) in about.items():
        result = read_files({"c.yaml": recipe.format(f"examples/deepspeed/{name}")}, tmp_path, ranks=8)
        assert result.job is not None
        assert (str(result.layout), result.job.offload) == (layout, offload)
        (note,) = [key for key in result.approximated if key.key == "deepspeed"]
        assert note.means == "not next to the config: read as llamafactory 0.9.5 ships it"
    with pytest.raises(UserError, match=r"which does not exist; put it next to this file"):
        read_files({"c.yaml": recipe.format("deepspeed_configs/zero3.json")}, tmp_path, ranks=8)


@pytest.mark.parametrize(
    ("zero", "ranks", "offload", "not_modelled"),
    [
        ({"offload_param": {"device": "cpu"}}, 4, ("parameters",), []),
        ({"cpu_offload_param": True, "cpu_offload": True}, 4, ("optimizer", "parameters"), []),
        ({"offload_optimizer": {"device": "cpu"}, "sub_group_size": 0}, 4, ("optimizer",), []),
        ({"offload_param": {"device": "cpu"}, "sub_group_size": 0}, 4, ("parameters",), []),
        ({"offload_param": {"device": "nvme"}}, 4, ("parameters",), ["offload_param.device"]),
        ({"offload_param": {"device": "cpu"}}, 1, ("parameters",), []),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, 1, ("optimizer",), []),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, 4, (), []),
    ],
)
def test_offloading_of_deepspeed_is_read(
    zero: dict[str, Any], ranks: int, offload: tuple[str, ...], not_modelled: list[str], tmp_path: Path
) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = [str(tmp_path / "ds.json"), "max_length=4096"]
    result = read(words, Overrides(ranks=ranks, model=build_model("llama3-8b")))
    assert result.job is not None
    assert result.job.offload == offload
    assert result.job.stack.update_group_size == max(1, zero.get("sub_group_size", 1_000_000_000))
    assert result.layout is not None
    assert result.layout.zero == zero.get("stage", 3)
    prefix = "zero_optimization."
    assert [key.key.rpartition(prefix)[2] for key in result.not_understood] == not_modelled
    approximated = [key.key.rpartition(prefix)[2] for key in result.approximated]
    assert ("offload_param.device" in approximated) is (zero.get("stage") == 2 and "offload_param" in zero)


def test_activation_checkpointing_of_deepspeed_is_not_that_of_transformers(tmp_path: Path) -> None:
    """No module of transformers calls ``deepspeed.checkpointing``, which reads these keys."""
    config = {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {"cpu_checkpointing": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = [str(tmp_path / "ds.json"), "max_length=4096"]
    result = read(words, Overrides(ranks=4, model=build_model("llama3-8b")))
    assert result.job is not None
    assert (result.not_understood, result.job.offload) == ((), ())
    assert "deepspeed.activation_checkpointing.cpu_checkpointing" in [key.key for key in result.approximated]


def test_offloading_of_accelerate_is_read(tmp_path: Path) -> None:
    text = (
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n"
        "  offload_param_device: cpu\n  offload_optimizer_device: cpu\n"
    )
    (tmp_path / "accelerate.yaml").write_text(text)
    words = [str(tmp_path / "accelerate.yaml"), "max_length=4096"]
    result = read(words, Overrides(ranks=4, model=build_model("llama3-8b")))
    assert result.job is not None
    assert (result.job.offload, result.not_understood) == (("optimizer", "parameters"), ())


@pytest.mark.parametrize("key", ["prescale_gradients"])
def test_auto_in_a_key_that_transformers_does_not_fill_is_a_one_line_error(key: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": "auto"}}
    *groups, name = key.split(".")
    inner = config
    for group in groups:
        inner = inner.setdefault(group, {})
    inner[name] = "auto"
    (tmp_path / "ds.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f'{key}="auto" is filled by neither'):
        read([str(tmp_path / "ds.json"), "max_length=4096"], Overrides(ranks=4, model=build_model("llama3-8b")))


def test_a_folder_is_read_by_its_script(tmp_path: Path) -> None:
    files = {"run.sh": "accelerate launch --config_file f.yaml t.py c.yaml\n", "f.yaml": FSDP2, "c.yaml": ZEPHYR}
    read_files(files, tmp_path)
    assert str(read([str(tmp_path)]).layout) == "dp8 zero3 mbs16 ac=full"
    (tmp_path / "run.sh").unlink()
    with pytest.raises(UserError, match=r"is a folder without run\.sh"):
        read([str(tmp_path)])


def test_a_json_of_deepspeed_alone_says_what_is_missing(tmp_path: Path) -> None:
    alone = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    result = read_files({"ds.json": json.dumps(alone)}, tmp_path, ranks=None)
    assert [line.partition(":")[0] for line in result.missing] == [
        "the model",
        "the length of a sequence",
        "on how many GPUs it runs",
    ]
    whole = read([str(tmp_path / "ds.json"), "max_length=4096"], Overrides(ranks=4, model=build_model("llama3-8b")))
    assert whole.job is not None
    assert (str(whole.layout), whole.job.sequence, whole.job.global_batch) == ("dp4 zero2 mbs2", 4096, 8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train_batch_size": 100}, r"train_batch_size=100 is not micro-batch·accumulation·dp=1·2·8=16"),
        ({"train_micro_batch_size_per_gpu": 4}, "per_device_train_batch_size=1, but .*=4; set DeepSpeed's to"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
    ],
)
def test_contradictions_are_one_line_errors(changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason):
        read_files(
            {"train.yaml": FACTORY, "examples/deepspeed/ds_z3_config.json": json.dumps(DS_Z3 | changes)}, tmp_path
        )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1", r"not valid YAML: line 1: "),
        ("- 1\n- 2", "holds a list, not a table of keys"),
        ("learning_rate: 1\nbf16: true\n!!python/object/apply:os.system ['x']: 1", "could not determine a constructor"),
    ],
)  # fmt: skip
def test_broken_yaml_is_a_one_line_error(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        read_files({"x.yaml": text}, tmp_path)
    assert "\n" not in str(refused.value)


def test_yaml_aliases_that_expand_without_bound_are_rejected(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(UserError, match="holds more than 100000 values"):
        read_files({"x.yaml": "\n".join(lines)}, tmp_path)


def test_adapters_are_read_and_missing_files_are_reported(tmp_path: Path) -> None:
    lora = FACTORY.replace("finetuning_type: full", "finetuning_type: lora").replace(
        "deepspeed: examples/deepspeed/ds_z3_config.json", ""
    )
    result = read_files({"train.yaml": lora}, tmp_path)
    assert result.not_understood == ()
    assert result.job is not None
    assert result.job.adapter == Adapter(rank=8)
    missing = FACTORY.replace("ds_z3_config", "ds_z9_config")
    with pytest.raises(UserError, match=r"names examples/deepspeed/ds_z9_config.json, which does not exist"):
        read_files({"other.yaml": missing}, tmp_path)


# axolotl-ai-cloud/axolotl: examples/llama-3/qlora.yml
QLORA = """
base_model: NousResearch/Meta-Llama-3-8B
load_in_8bit: false
load_in_4bit: true
adapter: qlora
sequence_len: 4096
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
flash_attention: true
"""


def test_a_quantized_base_with_adapters_is_read(tmp_path: Path) -> None:
    result = read_files({"qlora.yml": QLORA}, tmp_path)
    assert result.not_understood == ()
    assert [said.key for said in result.approximated] == ["optimizer", "lora_mlp_kernel"]
    assert result.job is not None
    assert result.job.adapter == Adapter(rank=32, alpha=16, dropout=0.05, base="nf4")
    assert result.job.precision.name == "bf16-autocast"


@pytest.mark.parametrize(
    ("changed", "adapter", "doubted"),
    [
        ({"lora_target_linear": None, "lora_target_modules": ["q_proj", "v_proj"]}, ("q_proj", "v_proj"), []),
        (
            {"lora_target_linear": None, "lora_target_modules": ["q_proj", "lm_head", "score"]},
            ("q_proj", "lm_head"),
            ["lora_target_modules"],
        ),
        (
            {
                "lora_target_linear": None,
                "lora_target_modules": r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|q|v)_proj",
            },
            ("q_proj", "v_proj", "up_proj", "down_proj"),
            [],
        ),
        (
            {"lora_target_linear": None, "lora_target_modules": r".*\.layers\.(3|7)\.self_attn\.(q|k)_proj"},
            ("q_proj", "k_proj"),
            ["lora_target_modules"],
        ),
        ({"lora_target_linear": None, "lora_target_modules": "(a+)+b"}, ("all-linear",), ["lora_target_modules"]),
        ({"lora_target_linear": None, "lora_target_modules": "(a"}, ("all-linear",), ["lora_target_modules"]),
        ({"lora_modules_to_save": ["embed_tokens"]}, ("all-linear",), []),
        ({"lora_modules_to_save": ["norm"]}, ("all-linear",), ["lora_modules_to_save"]),
        ({"peft_layers_to_transform": [0, 1]}, ("all-linear",), ["peft_layers_to_transform"]),
        ({"peft_layers_to_transform": [], "lora_mlp_kernel": False}, ("all-linear",), []),
        ({"load_in_4bit": None}, ("all-linear",), ["adapter"]),
        ({"load_in_8bit": True}, ("all-linear",), ["load_in_4bit", "load_in_8bit", "adapter"]),
    ],
)
def test_variants_of_adapters_are_counted_or_named(
    changed: dict[str, object], adapter: tuple[str, ...], doubted: list[str], tmp_path: Path
) -> None:
    values = yaml.safe_load(QLORA) | changed
    result = read_files(
        {"qlora.yml": yaml.safe_dump({key: value for key, value in values.items() if value is not None})}, tmp_path
    )
    assert result.job is not None
    assert result.job.adapter is not None
    assert result.job.adapter.targets == adapter
    assert [said.key for said in result.not_understood] == doubted


def test_a_base_in_eight_bits_is_read(tmp_path: Path) -> None:
    """Axolotl's examples for LoRA have it."""
    text = QLORA.replace("load_in_8bit: false", "load_in_8bit: true").replace(
        "load_in_4bit: true", "load_in_4bit: false"
    )
    result = read_files({"lora.yml": text.replace("adapter: qlora", "adapter: lora")}, tmp_path)
    assert result.not_understood == ()
    assert result.job is not None
    assert result.job.adapter == Adapter(rank=32, alpha=16, dropout=0.05, base="int8")


@pytest.mark.parametrize(
    ("adapter", "loaded_as", "dequantized", "base", "doubted"),
    [
        ("lora", "FineGrainedFP8Config", False, "fp8", []),
        ("lora", "FineGrainedFP8Config", True, None, []),
        ("lora", "Mxfp4Config", True, None, []),  # as in Axolotl's examples of gpt-oss
        ("lora", "Mxfp4Config", False, None, ["model_quantization_config"]),
        ("", "Mxfp4Config", True, None, []),
        ("", "FineGrainedFP8Config", False, None, ["model_quantization_config"]),
    ],
)
def test_axolotl_loads_weights_as_they_are_published(
    tmp_path: Path, adapter: str, loaded_as: str, dequantized: bool, base: str | None, doubted: list[str]
) -> None:
    text = QLORA.replace("load_in_4bit: true", "load_in_4bit: false").replace("adapter: qlora", f"adapter: {adapter}")
    kwargs = "\nmodel_quantization_config_kwargs:\n  dequantize: true\n" if dequantized else "\n"
    result = read_files({"lora.yml": f"{text}\nmodel_quantization_config: {loaded_as}{kwargs}"}, tmp_path)
    assert [said.key for said in result.not_understood if "quantization" in said.key] == doubted
    assert result.job is not None
    assert (result.job.adapter.base if result.job.adapter else None) == base


def test_reported_keys_are_spelled_as_in_the_config(tmp_path: Path) -> None:
    result = read_files({"lora.yml": QLORA}, tmp_path)
    names = {said.key for said in result.understood}
    assert {"base_model", "sequence_len", "micro_batch_size", "lr_scheduler", "sample_packing"} <= names
    assert {"model_name_or_path", "max_length", "per_device_train_batch_size", "padding_free"}.isdisjoint(names)
    assert "tensor_parallel_size" in {said.key for said in result.defaulted}
    result = read_files({"train.yaml": FACTORY.replace("deepspeed: ", "# deepspeed: ")}, tmp_path)
    assert {"cutoff_len", "model_name_or_path", "per_device_train_batch_size"} <= {
        said.key for said in result.understood
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ("", True),  # on by default
        ("lora_qkv_kernel: true\n", False),
        ("lora_mlp_kernel: false\n", False),
        ("trust_remote_code: true\n", False),
        ("rl: dpo\n", False),
        ("fsdp_version: 2\nfsdp_config:\n  offload_params: false\n", True),
        ("fsdp_version: 1\nfsdp_config:\n  offload_params: false\n", False),  # not with FSDP1
    ],
)
def test_axolotl_turns_on_fused_kernels_of_adapters(tmp_path: Path, changes: str, named: bool) -> None:
    result = read_files({"lora.yml": QLORA + changes}, tmp_path)
    reasons = [said.means for said in result.approximated if said.key == "lora_mlp_kernel"]
    assert bool(reasons) is named
    assert all("on, as Axolotl does where no lora_*_kernel is set" in reason for reason in reasons)
    assert not {said.key for said in result.not_understood} & {"lora_qkv_kernel", "lora_mlp_kernel"}


@pytest.mark.parametrize(
    ("adapter", "mode", "ac", "offload", "doubted"),
    [
        ("qlora", "true", "none", ("activations",), []),  # in place of recomputation
        ("qlora", "legacy", "none", ("activations",), []),
        ("qlora", "hidden_states", "full", ("activations",), []),
        ("qlora", "disk", "full", (), ["activation_offloading"]),
        ("qlora", "false", "full", (), []),
        ("", "true", "full", ("activations",), []),
    ],
)
def test_axolotl_offloads_activations(
    tmp_path: Path, adapter: str, mode: str, ac: str, offload: tuple[str, ...], doubted: list[str]
) -> None:
    text = QLORA if adapter else QLORA.replace("adapter: qlora", "").replace("load_in_4bit: true", "")
    result = read_files({"lora.yml": f"{text}activation_offloading: {mode}\n"}, tmp_path)
    assert result.layout is not None
    assert result.job is not None
    assert (result.layout.ac, result.job.offload) == (ac, offload)
    assert [said.key for said in result.not_understood] == doubted
    approximated = {said.key for said in result.approximated}
    assert ("activation_offloading" in approximated) is (mode == "legacy")
    if mode == "true" and adapter:
        old = QLORA.replace("gradient_checkpointing: true", "gradient_checkpointing: offload")
        assert read_files({"lora.yml": old}, tmp_path).job == result.job


def test_liger_s_norms_and_activations_are_fused_without_its_loss(tmp_path: Path) -> None:
    plugins = "plugins:\n  - axolotl.integrations.liger.LigerPlugin\n"
    kernels = "liger_rope: true\nliger_rms_norm: true\nliger_glu_activation: true\nliger_layer_norm: true\n"
    result = read_files({"lora.yml": QLORA + plugins + kernels}, tmp_path)
    assert result.not_understood == ()
    assert result.job is not None
    assert (result.job.stack.kernels, result.job.stack.loss) == ("fused", "plain")
    only_norms = read_files({"lora.yml": QLORA + plugins + "liger_rms_norm: true\n"}, tmp_path)
    assert [said.key for said in only_norms.not_understood] == ["liger_rms_norm"]


def test_configs_of_llamafactory_s_new_trainer_are_an_error_of_one_line(tmp_path: Path) -> None:
    text = "model: Qwen/Qwen3-4B\nmodel_class: llm\npeft_config:\n  name: lora\n  r: 16\ntrain_dataset: data.yaml\n"
    more = "micro_batch_size: 1\ncutoff_len: 2048\nlearning_rate: 1.0e-4\nbf16: true\n"
    for config in (text, text + more):
        with pytest.raises(UserError, match="a config of LLaMA-Factory's v1 trainer, whose keys are not read"):
            read_files({"train.yaml": config}, tmp_path)


@pytest.mark.parametrize(
    ("repository", "adapter", "base", "reason"),
    [
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "lora", "nf4", None),
        ("Qwen/Qwen3-8B-FP8", "lora", "fp8", None),
        ("TheBloke/Llama-2-7B-GPTQ", "lora", None, "its weights are quantized (gptq), which is not modelled here"),
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "", None, "over which transformers trains adapters alone"),
    ],
)
def test_the_base_of_an_adapter_follows_from_the_repository(
    tmp_path: Path, repository: str, adapter: str, base: str | None, reason: str | None
) -> None:
    text = QLORA.replace("load_in_4bit: true", "load_in_4bit: false").replace("adapter: qlora", f"adapter: {adapter}")
    named = re.sub("base_model: .*", f"base_model: {repository}", text)
    result = read_files({"lora.yml": named}, tmp_path)
    reasons = [said.means for said in result.not_understood if said.key == "base_model"]
    assert [reason is not None and reason in said for said in reasons] == ([True] if reason else [])
    assert result.job is not None
    assert (result.job.adapter.base if result.job.adapter else None) == base


@pytest.mark.parametrize(
    ("kernels", "attention"),
    [("kernels-community/vllm-flash-attn3", "flash"), ("kernels-community/flash-attn2", "flash2")],
)
def test_kernels_of_attention_from_the_hub_are_known(tmp_path: Path, kernels: str, attention: str) -> None:
    result = read_files({"lora.yml": f"{QLORA}\nattn_implementation: {kernels}\n"}, tmp_path)
    assert [said.key for said in result.not_understood if "attn" in said.key] == []
    assert result.job is not None
    assert result.job.stack.attention == attention


def test_keys_of_trl_s_adapters_are_not_those_of_llamafactory(tmp_path: Path) -> None:
    text = FACTORY.replace("finetuning_type: full", "finetuning_type: lora").replace("deepspeed: ", "# deepspeed: ")
    result = read_files({"train.yaml": text + "load_in_4bit: true\nlora_r: 4\n"}, tmp_path)
    assert sorted(said.key for said in result.not_understood) == ["load_in_4bit", "lora_r"]
    eight = read_files({"train.yaml": text + "quantization_bit: 8\n"}, tmp_path)
    assert eight.not_understood == ()
    assert eight.job is not None
    assert eight.job.adapter == Adapter(rank=8, base="int8")
    for method in ("bnb", "bitsandbytes"):
        four = read_files({"train.yaml": text + f"quantization_bit: 4\nquantization_method: {method}\n"}, tmp_path)
        assert four.not_understood == ()
        assert four.job is not None
        assert four.job.adapter == Adapter(rank=8, base="nf4")
    other = read_files({"train.yaml": text + "quantization_bit: 4\nquantization_method: hqq\n"}, tmp_path)
    assert [said.key for said in other.not_understood] == ["quantization_method"]


def test_trl_s_adapters_have_its_defaults(tmp_path: Path) -> None:
    text = """
model_name_or_path: meta-llama/Meta-Llama-3-8B
max_length: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 2.0e-4
bf16: true
use_peft: true
lora_target_modules: all-linear
load_in_4bit: true
use_bnb_nested_quant: true
use_rslora: true
"""
    result = read_files({"sft.yaml": text + "gradient_checkpointing: true\n"}, tmp_path)
    assert result.not_understood == ()
    [named] = result.approximated
    assert (named.key, named.value) == ("(software)", "TRL")
    without = read_files({"sft.yaml": text}, tmp_path)
    assert without.layout == result.layout
    assert without.layout is not None
    assert without.layout.recomputation == "full"
    assert result.job is not None
    assert result.job.adapter == Adapter(rank=16, alpha=32, dropout=0.05, rank_stabilized=True, base="nf4")


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("model", "targets", "approximated", "adapts_experts"),
    [
        ("Qwen/Qwen3-30B-A3B", {"lora_target_modules": ATTENTION}, (), False),
        ("Qwen/Qwen3-30B-A3B", {"lora_target_linear": True}, ("lora_target_linear",), False),
        ("Qwen/Qwen3-30B-A3B", {"lora_target_modules": ATTENTION + MLP}, ("lora_target_modules",), True),
        ("Qwen/Qwen3-30B-A3B", {"lora_target_modules": "all-linear"}, ("lora_target_modules",), True),
        ("mistralai/Mixtral-8x7B-v0.1", {"lora_target_modules": "all-linear"}, ("lora_target_modules",), True),
        ("mistralai/Mixtral-8x7B-v0.1", {"lora_target_linear": True}, ("lora_target_linear",), False),
        # shared experts have layers of an MLP
        ("deepseek-ai/DeepSeek-V2-Lite", {"lora_target_linear": True}, ("lora_target_linear",), True),
        ("openai/gpt-oss-20b", {"lora_target_modules": "all-linear"}, ("lora_target_modules",), False),
    ],
    ids=str,
)
def test_peft_targets_of_experts_are_read_as_expert_adapters(
    model: str, targets: dict[str, object], approximated: tuple[str, ...], adapts_experts: bool, tmp_path: Path
) -> None:
    """Then without the layers of dense MLPs, and without dropout, with which peft stops."""
    values = yaml.safe_load(QLORA) | {"base_model": model, "optimizer": "adamw_torch", "lora_mlp_kernel": False}
    del values["lora_target_linear"]
    result = read_files({"qlora.yml": yaml.safe_dump(values | targets)}, tmp_path)
    assert tuple(said.key for said in result.approximated) == approximated
    assert {said.key for said in result.not_understood} == ({"lora_dropout"} if adapts_experts else set())
    assert result.job is not None
    assert result.model is not None
    adapter = result.job.adapter
    assert adapter is not None
    attention_alone = adapter.replace(
        targets=[name for name in list_targets(result.model, adapter) if name not in (*MLP, *EXPERT_TARGETS)],
        rank_pattern=(), alpha_pattern=(),
    )  # fmt: skip
    added = count_adapters(result.model, adapter) - count_adapters(result.model, attention_alone)
    if adapts_experts:
        assert adapter.dropout == 0
        assert set(adapter.targets).isdisjoint(MLP)
        assert added == count_expert_adapters(result.model, adapter)
        assert adapter.resolve_target("experts.gate_up_proj").scale == adapter.scale
    else:
        assert not adapter.adapts_experts
    without = read_files({"qlora.yml": yaml.safe_dump(values | targets | {"lora_dropout": 0})}, tmp_path)
    assert without.not_understood == ()


@pytest.mark.parametrize(
    ("words", "targets", "doubted"),
    [
        (["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], EXPERT_TARGETS, ""),
        (["down_proj"], ["experts.down_proj"], ""),
        (["7.mlp.experts.gate_up_proj"], ["experts.gate_up_proj"], "experts of some blocks; counted in all"),
        (["mlp.gate.weight", "experts.down_proj"], ["experts.down_proj"], "mlp.gate.weight: not supported"),
    ],
    ids=str,
)
@pytest.mark.parametrize("software", ["axolotl", "trl"])
def test_adapted_parameters_of_experts_are_read(
    software: str, words: list[str], targets: Sequence[str], doubted: str, tmp_path: Path
) -> None:
    values = yaml.safe_load(QLORA) | {"base_model": "openai/gpt-oss-20b", "optimizer": "adamw_torch"}
    del values["lora_target_linear"]
    if software == "trl":
        values = {"model_name_or_path": "openai/gpt-oss-20b", "max_length": 2048, "bf16": True, "use_peft": True}
        values |= {"per_device_train_batch_size": 1, "learning_rate": 2e-4}
    values |= {"lora_target_modules": ATTENTION, "lora_target_parameters": words, "lora_dropout": 0.0}
    result = read_files({"sft.yaml": yaml.safe_dump(values)}, tmp_path)
    assert [said.key for said in result.not_understood] == (["lora_target_parameters"] if doubted else [])
    assert all(doubted in said.means for said in result.not_understood)
    assert result.job is not None
    assert result.job.adapter is not None
    assert result.job.adapter.targets == (*ATTENTION, *targets)


def test_adapters_of_experts_are_written_and_read_again(tmp_path: Path) -> None:
    """With Axolotl's patterns of ranks; TRL has no such key, and LLaMA-Factory none for parameters."""
    model = build_model("gpt-oss-20b")
    adapter = Adapter(rank=8, targets=("q_proj", *EXPERT_TARGETS), rank_pattern={"experts.gate_up_proj": 16})
    keys = write_adapter(adapter, "axolotl", model)
    assert keys["lora_target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    values = yaml.safe_load(QLORA) | {"base_model": "openai/gpt-oss-20b", "load_in_4bit": False} | keys
    del values["lora_target_linear"]
    result = read_files({"lora.yml": yaml.safe_dump(values | {"optimizer": "adamw_torch"})}, tmp_path)
    assert result.not_understood == ()
    assert result.job is not None
    assert result.job.adapter == adapter.replace(alpha=16)
    with pytest.raises(UserError, match="llamafactory has no key for parameters of experts"):
        write_adapter(adapter, "llamafactory", model)


@pytest.mark.parametrize("software", ["axolotl", "llamafactory", "trl"])
def test_adapters_of_a_mixture_are_written_with_the_names_of_their_layers(software: str) -> None:
    """So that peft leaves its routed experts frozen, and read again without a remark; else an error."""
    written = write_adapter(Adapter(rank=8), software, build_model("qwen3-30b-a3b"))
    targets = written["lora_target" if software == "llamafactory" else "lora_target_modules"]
    assert targets == (",".join(ATTENTION) if software == "llamafactory" else ATTENTION)
    assert "lora_target_linear" not in written
    with pytest.raises(UserError, match="PEFT also adapts the routed experts of deepseek_v2"):
        write_adapter(Adapter(rank=8), software, build_model("deepseek-v2-lite"))


def test_all_linear_layers_of_llamafactory_are_those_of_attention_in_a_mixture(tmp_path: Path) -> None:
    text = FACTORY.replace("finetuning_type: full", "finetuning_type: lora").replace("deepspeed: ", "# deepspeed: ")
    mixture = text.replace("meta-llama/Meta-Llama-3-8B-Instruct", "Qwen/Qwen3-30B-A3B")
    result = read_files({"train.yaml": mixture + "lora_target: all\n"}, tmp_path)
    assert result.not_understood == ()
    assert "lora_target" in [said.key for said in result.approximated]


TRAINED = Range(
    models=("llama3-8b", "llama3.2-1b", "qwen3-8b", "mixtral-8x7b", "tiny"),
    recipes=("bf16", "bf16-grad16", "bf16-grad16", "fp32", "fp16"),
    acs=("none", "full", "full", "selective"),
    axes=("dp",),
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", mark_share(3, range(3)))
@pytest.mark.parametrize(("to", "stack", "least"), [("accelerate", "fsdp2", 2), ("deepspeed", "deepspeed", 6)])
def test_written_config_is_read_back(to: str, stack: str, least: int, tmp_path: Path, seed: int) -> None:
    drawn = plans(stack, count=20, seed=seed, among=TRAINED)
    refused = [check_round_trip(plan, to=to, folder=tmp_path) for plan in drawn]
    assert refused.count(None) >= least, refused


@pytest.mark.parametrize("offload", ["optimizer", "parameters", "optimizer+parameters"])
def test_what_deepspeed_offloads_is_written(offload: str) -> None:
    layout = Layout.parse(f"dp4 zero3 mbs1 offload={offload}")
    job = Job(precision="bf16-grad16", sequence=2048, global_batch=4)
    files, remarks = write(ConfigPlan(build_model("llama3-8b"), layout, job), to="deepspeed")
    zero = json.loads(files["deepspeed.json"])["zero_optimization"]
    assert {key: zero.get(f"offload_{key}", {}).get("device") for key in ("optimizer", "param")} == {
        "optimizer": "cpu" if "optimizer" in offload else None,
        "param": "cpu" if "parameters" in offload else None,
    }
    assert not any("offload" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("text", "precision", "to", "reason"),
    [
        ("dp4 tp2 zero1 mbs1", "bf16", "deepspeed", "has only dp and cp=ulysses"),
        (
            "dp4 zero3 mbs1 ac=selective",
            "bf16-grad16",
            "accelerate",
            "recomputes all blocks in full; use ac=full",
        ),
        ("dp4 zero3 mbs1", "bf16", "accelerate", "reduces in 16 bits; use bf16-grad16 or fp32"),
        ("dp4 zero2 mbs1", "bf16-grad16", "accelerate", "the nearest is zero3 with --set reshard=backward"),
        ("dp4 zero3 mbs1", "fp8", "deepspeed", "DeepSpeed has bf16, bf16-grad16, fp16 and fp32"),
    ],
)
def test_inexpressible_layout_is_an_error_with_the_closest_one(text: str, precision: str, to: str, reason: str) -> None:
    plan = ConfigPlan(
        build_model("llama3-8b"), Layout.parse(text), Job(precision=precision, sequence=2048, global_batch=16)
    )
    with pytest.raises(UserError, match=reason):
        write(plan, to=to)


def test_the_least_rate_is_a_share_of_the_peak(tmp_path: Path) -> None:
    """``cosine_with_min_lr`` ends where transformers' own schedule does."""
    kind = "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs:\n  min_lr: 5.0e-06"
    changed = ZEPHYR.replace("lr_scheduler_type: cosine", kind).replace("max_steps: -1", "max_steps: 100")
    files = {
        "run.sh": "accelerate launch --config_file f.yaml scripts/sft.py --config c.yaml\n",
        "f.yaml": FSDP2,
        "c.yaml": changed,
    }
    job = read_files(files, tmp_path).job
    assert job is not None
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=job.learning_rate.peak)
    theirs = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=0,
        num_training_steps=100,
        scheduler_specific_kwargs={"min_lr": 5e-6},
    )
    for _ in range(100):
        optimizer.step()
        theirs.step()
    assert job.learning_rate.floor * job.learning_rate.peak == pytest.approx(theirs.get_last_lr()[0])


def test_deepspeeds_own_optimizer_has_its_own_betas(tmp_path: Path) -> None:
    """The example of deepspeed.ai/docs/config-json: its betas, not those that transformers would take by default."""
    config = DS_Z3 | {
        "optimizer": {
            "type": "Adam",
            "params": {
                "lr": 0.001,
                "betas": [0.8, 0.999],
                "eps": 1e-8,
                "weight_decay": 3e-7,
            },
        }
    }
    files = {"train.yaml": FACTORY, "examples/deepspeed/ds_z3_config.json": json.dumps(config)}
    job = read_files(files, tmp_path).job
    assert job is not None
    assert job.optimizer.betas == (0.8, 0.999)
    assert (job.learning_rate.peak, job.optimizer.epsilon, job.optimizer.weight_decay) == (0.001, 1e-8, 3e-7)
