"""Axolotl, LLaMA-Factory and TRL: configs are written with adapter, objective and data, and read back as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fivefold.adapter import Adapter
from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan, Overrides
from fivefold.interop.read import read
from fivefold.interop.write import write
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.model.published import CATALOG
from fivefold.rendering.reading import list_records
from fivefold.results.reading import DataReading, Reading
from tests.interop.draws import Range, check_round_trip, plans
from tests.selection import mark_share

AMONG = Range(
    models=("llama3-8b", "qwen3-8b", "qwen3-30b-a3b", "tiny"),
    recipes=("bf16-grad16", "bf16-autocast", "fp32"),
    acs=("none", "full"),
    axes=("dp", "cp"),
    fine_tuning=True,
)
FORMATS = ("axolotl", "llamafactory", "trl")
# Of [data], what a software has no key for: one remark for each.
NOT_EXPRESSED = {
    "axolotl": {"chat_template"},  # expressed for messages
    "llamafactory": {"chat_template", "excess"},
    "trl": {"key", "excess", "heldout", "chat_template"},  # the template is expressed without pairs
}
REFUSED = (
    "precision", "zero2", "adapter.dropout", "adapter.base", "adapter.modules_to_save", "adapter.rank_pattern",
    "adapter.alpha_pattern", "cp=ring", "shard groups",
)  # fmt: skip


@pytest.mark.parametrize("stack", mark_share(3, ["deepspeed", "ddp", "fsdp2"]))
@pytest.mark.parametrize("name", FORMATS)
def test_a_drawn_job_is_read_back(name: str, stack: str, tmp_path: Path) -> None:
    written = 0
    for plan in plans(stack, count=16, seed=11, among=AMONG):
        why = check_round_trip(plan, to=name, folder=tmp_path)
        written += why is None
        assert why is None or any(word in why for word in REFUSED), why
        if why is None:
            remarks = [remark for remark in write(plan, to=name).remarks if remark.startswith("data: ")]
            assert {remark.split()[1] for remark in remarks} <= NOT_EXPRESSED[name] | {"packing"}
    assert written >= 5


def plan_of(
    job: dict[str, object], *, data: dict[str, str | float] | None = None, layout: str = "dp8 zero3 mbs2"
) -> ConfigPlan:
    base = {"sequence": 2048, "global_batch": 32, "precision": get_recipe("bf16-grad16"), "objective": "sft"}
    reading = DataReading(fields=data) if data else None
    return ConfigPlan(
        build_model("llama3-8b"), Layout.parse(layout), Job.read(base | job, origin="a test"), data=reading
    )


ADAPTER = {
    "rank": 8,
    "alpha": 24,
    "dropout": 0.05,
    "targets": ["q_proj", "v_proj"],
    "rank_stabilized": True,
    "base": "nf4",
}
DATA: dict[str, str | float] = {
    "corpus": "chat.jsonl", "format": "messages", "key": "talk", "loss_on": "all", "packing": "none", "heldout": 0.1,
}  # fmt: skip
# in the words of each software's documentation, not by the tables of which reader and writer are made
EXPECTED = {
    "axolotl": {
        "base_model": "meta-llama/Meta-Llama-3-8B", "adapter": "qlora", "load_in_4bit": True, "lora_r": 8,
        "lora_alpha": 24, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"], "peft_use_rslora": True,
        "lora_modules_to_save": ["lm_head"],
        "sequence_len": 2048, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "train_on_inputs": True,
        "datasets": [{"path": "chat.jsonl", "ds_type": "json", "type": "chat_template", "field_messages": "talk"}],
        "sample_packing": False, "val_set_size": 0.1, "fsdp_version": 2,
    },
    "llamafactory": {
        "model_name_or_path": "meta-llama/Meta-Llama-3-8B", "finetuning_type": "lora", "quantization_bit": 4,
        "lora_rank": 8, "lora_alpha": 24, "lora_dropout": 0.05, "lora_target": "q_proj,v_proj", "use_rslora": True,
        "additional_target": "lm_head",
        "cutoff_len": 2048, "per_device_train_batch_size": 2, "train_on_prompt": True, "stage": "sft",
        "packing": False, "val_size": 0.1, "disable_gradient_checkpointing": True,
    },
    "trl": {
        "model_name_or_path": "meta-llama/Meta-Llama-3-8B", "use_peft": True, "load_in_4bit": True, "lora_r": 8,
        "lora_alpha": 24, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"], "use_rslora": True,
        "lora_modules_to_save": ["lm_head"],
        "max_length": 2048, "assistant_only_loss": False, "packing": False, "use_bnb_nested_quant": True,
        "datasets": [{"path": "json", "data_files": "chat.jsonl"}],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_the_written_file_has_the_keys_of_the_software(name: str) -> None:
    files = write(plan_of({"adapter": ADAPTER | {"modules_to_save": ["lm_head"]}}, data=DATA), to=name).files
    values = yaml.safe_load(files["axolotl.yaml" if name == "axolotl" else "train.yaml"])
    expected = EXPECTED[name]
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_preference_pair_is_written_as_one_sample(name: str) -> None:
    plan = plan_of({"objective": "dpo", "dpo_beta": 0.3, "global_batch": 64})
    values = yaml.safe_load(write(plan, to=name).files["axolotl.yaml" if name == "axolotl" else "train.yaml"])
    beta = {"axolotl": "rl_beta", "llamafactory": "pref_beta", "trl": "beta"}[name]
    size = "micro_batch_size" if name == "axolotl" else "per_device_train_batch_size"
    assert (values[beta], values[size], values["gradient_accumulation_steps"]) == (0.3, 1, 4)


@pytest.mark.parametrize(
    ("job", "to", "words"),
    [
        ({"adapter": ADAPTER}, "accelerate", "use --to trl, axolotl or llamafactory"),
        ({"adapter": ADAPTER | {"alpha": 12.5}}, "trl", "adapter.alpha=12.5: lora_alpha is a whole number; use 12"),
        ({"adapter": ADAPTER | {"base": None}, "objective": "dpo"}, "axolotl", "adapter.dropout=0.0 instead of 0.05"),
        (
            {"adapter": ADAPTER | {"dropout": 0.0}, "objective": "dpo", "stack": "fsdp2"},
            "axolotl",
            "adapter.base=nf4: Axolotl does not train objective=dpo over a quantized base under FSDP2",
        ),
    ],
)
def test_settings_that_a_config_cannot_express_are_errors(job: dict[str, object], to: str, words: str) -> None:
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        write(plan_of(job), to=to)


@pytest.mark.parametrize(
    ("values", "approximated"),
    [
        ({"stage": "dpo", "finetuning_type": "lora", "adapter_name_or_path": "saves/sft"}, "adapter_name_or_path"),
        ({"sequence_len": 2048, "adapter": "lora", "lora_model_dir": "saves/sft"}, "lora_model_dir"),
    ],
)
def test_an_adapter_that_is_trained_further_costs_as_much(
    values: dict[str, object], approximated: str, tmp_path: Path
) -> None:
    """DPO after SFT in LLaMA-Factory; Axolotl takes the saved adapter's rank, and so does peft."""
    reading = read_yaml(tmp_path, values)
    assert reading.job is not None
    assert reading.job.adapter is not None
    assert reading.not_understood == ()
    assert approximated in [item.key for item in reading.approximated]
    alone = read_yaml(tmp_path, {key: "full" if key == "finetuning_type" else value for key, value in values.items()
                                 if key != "adapter"})  # fmt: skip
    assert [item.key for item in alone.not_understood] == [approximated]


@pytest.mark.parametrize(
    ("values", "targets"),
    [
        ({"lora_target_modules": ["q_proj", "embed_tokens", "lm_head"]}, ("q_proj", "embed_tokens", "lm_head")),
        ({"lora_target_linear": True, "lora_target_modules": ["lm_head"]}, ("all-linear", "lm_head")),
        ({"lora_target_modules": "model.layers.[0-9]+.self_attn.v_proj|lm_head"}, ("v_proj", "lm_head")),
    ],
)
def test_embedding_and_head_are_targets(tmp_path: Path, values: dict[str, object], targets: tuple[str, ...]) -> None:
    """Axolotl adds all linear layers to the modules that are named."""
    reading = read_yaml(tmp_path, {"adapter": "lora", "sequence_len": 2048, **values})
    assert reading.job is not None
    assert reading.job.adapter is not None
    assert reading.job.adapter.targets == targets
    assert reading.not_understood == ()


def test_optimizers_targets_and_losses_of_published_recipes_are_read(tmp_path: Path) -> None:
    """The 4-bit optimizer of torchao, modules named with their parent, and the balancing loss of a mixture."""
    targets = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"]
    recipe_values = {"adapter": "qlora", "load_in_4bit": True, "optimizer": "adamw_torch_4bit"}
    reading = read_yaml(tmp_path, {"sequence_len": 2048, "lora_target_modules": targets, **recipe_values})
    assert reading.job is not None
    assert reading.job.adapter is not None
    assert (reading.job.optimizer.kind, reading.job.adapter.targets) == ("adamw4bit", ("q_proj", "o_proj"))
    (doubt,) = reading.not_understood
    assert "mlp.gate_proj: not supported" in str(doubt)  # of a mixture's shared experts, or of dense layers?
    mixture = {"base_model": "mistralai/Mixtral-8x7B-v0.1", "model_config": {"output_router_logits": True}}
    reading = read_yaml(tmp_path, {"sequence_len": 2048, **mixture})
    assert reading.not_understood == ()
    assert "model_config.output_router_logits" in [item.key for item in reading.approximated]


def read_yaml(folder: Path, values: dict[str, object]) -> Reading:
    """Read a config of Llama 3 8B on one GPU."""
    path = folder / "config.yaml"
    base = "base_model" if "sequence_len" in values else "model_name_or_path"
    path.write_text(yaml.safe_dump({base: "meta-llama/Meta-Llama-3-8B", "bf16": True, **values}))
    return read([str(path)], Overrides(ranks=1))


def test_every_catalog_model_is_written_with_a_name_that_is_read_back() -> None:
    from fivefold.interop.huggingface.emit import find_repository
    from fivefold.model import catalog

    models = [build_model(name) for name in CATALOG]
    named = {model.name: repository for model in models if (repository := find_repository(model)) != "."}
    assert len(named) > 20
    assert "deepseek-v3" in named
    assert "deepseek-v3-mtp" not in named  # the repository's name is that of the model without further layers
    assert {name: catalog.find_repository(repository) for name, repository in named.items()} == {
        name: name for name in named
    }


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("repository", ["meta-llama/Llama-3.1-8B-Instruct", "someone/Qwen2.5-7B-Instruct"])
def test_a_config_trains_the_repository_that_was_named(repository: str, to: str, tmp_path: Path) -> None:
    from fivefold.interop.format import Overrides
    from fivefold.interop.read import read
    from fivefold.model.catalog import resolve

    file, key = ("axolotl.yaml", "base_model") if to == "axolotl" else ("train.yaml", "model_name_or_path")
    files = write(plan_of({"adapter": ADAPTER})._replace(model=resolve(repository)), to=to).files
    assert yaml.safe_load(files[file])[key] == repository
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    back = read([str(tmp_path / file)], Overrides(ranks=8))
    assert back.model is not None
    assert back.layout is not None
    assert back.job is not None
    again = write(ConfigPlan(back.model, back.layout, back.job), to=to).files
    assert yaml.safe_load(again[file])[key] == repository


def test_a_run_file_contains_the_repository_given_on_the_command_line() -> None:
    from fivefold.interop.launch.run_file import build_files
    from fivefold.model.catalog import resolve

    plan = plan_of({})._replace(model=resolve("Qwen/Qwen2.5-7B-Instruct"), machine="h100:8")
    assert list(build_files(plan)) == ["run.toml"]
    assert 'model = "Qwen/Qwen2.5-7B-Instruct"' in build_files(plan)["run.toml"]


def test_a_run_file_keeps_its_data(tmp_path: Path) -> None:
    from fivefold.interop.launch.run_file import emit_run_file
    from fivefold.interop.read import read

    plan = plan_of({"adapter": ADAPTER}, data=DATA)._replace(machine="h100:8")
    (tmp_path / "run.toml").write_text(emit_run_file(plan).files["run.toml"])
    back = read([str(tmp_path / "run.toml")])
    assert back.data is not None
    assert back.data.fields == DATA
    assert back.job is not None
    assert back.job.adapter == Adapter.model_validate(ADAPTER)


@pytest.mark.parametrize(
    ("command", "objective", "learning_rate"),
    [
        ("python trl/scripts/sft.py", "pretrain", 2e-5),
        ("trl sft", "pretrain", 2e-5),
        ("accelerate launch -m trl.scripts.dpo", "dpo", 1e-6),
        ("python examples/scripts/dpo.py", "dpo", 1e-6),
    ],
)
def test_a_launch_script_of_trl_has_the_defaults_of_trl(command: str, objective: str, learning_rate: float) -> None:
    words = [*command.split(), "--model_name_or_path", "meta-llama/Llama-3.1-8B"]
    result = read(words, Overrides(ranks=8))
    assert (result.missing, result.not_understood) == ((), ())
    assert result.job is not None
    assert result.layout is not None
    assert (result.job.objective, result.job.learning_rate.peak) == (objective, learning_rate)
    assert (result.job.sequence, result.layout.ac, result.job.precision.compute) == (1024, "full", "bf16")
    plain = read([*words, "--no_gradient_checkpointing", "--no_remove_unused_columns"], Overrides(ranks=8))
    assert plain.layout is not None
    assert (plain.layout.ac, plain.not_understood) == ("none", ())
    half = read([*words, "--fp16", "true"], Overrides(ranks=8))
    assert half.job is not None
    assert half.job.precision.compute == "fp16"


def test_recomputation_that_trl_enables_by_default_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    values = {"model_name_or_path": "meta-llama/Llama-3.1-8B", "max_length": 512, "bf16": True, "learning_rate": 1e-5,
              "per_device_train_batch_size": 1}  # fmt: skip
    for more, named, recomputation in (
        ({}, False, "none"),
        ({"use_peft": True}, True, "full"),
        ({"use_peft": True, "gradient_checkpointing": 0}, True, "none"),
    ):
        path.write_text(yaml.safe_dump(values | more))
        result = read([str(path)], Overrides(ranks=8))
        assert ("(software)" in {key.key for key in result.approximated}) == named
        assert result.layout is not None
        assert result.layout.recomputation == recomputation


@pytest.mark.parametrize("script", ["reward_modeling", "kto", "ppo/ppo", "sft_vlm"])
def test_another_script_of_trl_is_an_error_by_name(script: str) -> None:
    words = ["python", f"examples/scripts/{script}.py", "--model_name_or_path", "meta-llama/Llama-3.1-8B"]
    result = read([*words, "--max_length", "512", "--per_device_train_batch_size", "2"], Overrides(ranks=8))
    assert "script" in {key.key for key in result.not_understood}


def test_the_description_of_a_job_contains_its_adapter_and_its_offloaded_states(tmp_path: Path) -> None:
    keys = {
        "base_model": "llama3-8b", "adapter": "qlora", "load_in_4bit": True, "lora_r": 16, "lora_alpha": 32,
        "lora_target_linear": True, "lora_rank_pattern": {"q_proj": 8, "mlp.down_proj": 64}, "sequence_len": 4096,
        "micro_batch_size": 1, "bf16": True, "fsdp_version": 2, "fsdp_config": {"offload_params": True},
    }  # fmt: skip
    (tmp_path / "a.yml").write_text(yaml.safe_dump(keys))
    reading = read([str(tmp_path / "a.yml")], Overrides(ranks=2))
    assert reading.job is not None
    assert reading.job.adapter is not None
    assert reading.job.adapter.ranks == {"q_proj": 8, "down_proj": 64}
    (line,) = (text for name, text in list_records(reading) if name == "job")
    assert "offload=parameters, adapter=qlora:16" in line
    assert line.endswith("adapter.rank_pattern=q_proj:8,down_proj:64")
