"""Chat templates, packing and losses of other software's configs become [data] of a run file, or a remark that names
the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fivefold.interop.format import ConfigPlan, Overrides
from fivefold.interop.launch.run_file import emit_run_file
from fivefold.interop.read import read
from fivefold.model.catalog import build_model
from fivefold.trainer.run import Run

AXOLOTL = {"base_model": "m", "micro_batch_size": 1, "sequence_len": 2048, "gradient_accumulation_steps": 2}
CHAT = {"path": "chat.jsonl", "type": "chat_template", "field_messages": "conversations"}
LLAMAFACTORY = {
    "model_name_or_path": "m",
    "stage": "sft",
    "finetuning_type": "lora",
    "cutoff_len": 2048,
    "dataset": "mine.jsonl",
    "per_device_train_batch_size": 1,
}
TRL = {
    "model_name_or_path": "m",
    "max_length": 2048,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-5,
}


def run_of(values: dict[str, Any], folder: Path) -> tuple[Run, tuple[str, ...], Any]:
    """The run file that a config becomes, the remarks on it, and the reading."""
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    model = build_model("qwen3-0.6b")
    reading = read([str(folder / "config.yaml")], Overrides(ranks=2, ranks_per_node=8, model=model))
    assert reading.layout is not None
    assert reading.job is not None
    written = emit_run_file(ConfigPlan(model, reading.layout, reading.job, 8, "h100:2", reading.data))
    (folder / "run.toml").write_text(written.files["run.toml"])
    return Run.load(folder / "run.toml"), written.remarks, reading


@pytest.mark.parametrize(
    ("values", "data", "objective", "documents"),
    [
        (AXOLOTL | {"datasets": [CHAT], "sample_packing": True, "val_set_size": 0.1},
         {"corpus": "chat.jsonl", "format": "messages", "key": "conversations", "excess": "drop", "heldout": 0.1},
         "sft", "separate"),
        (AXOLOTL | {"datasets": [CHAT], "excess_length_strategy": "truncate", "train_on_inputs": True},
         {"packing": "none", "excess": "truncate", "loss_on": "all"}, "sft", "separate"),
        (AXOLOTL | {"datasets": [{"path": "a.parquet", "type": "completion"}]},
         {"corpus": "a.parquet", "format": "text", "key": "text"}, "pretrain", "joined"),
        (LLAMAFACTORY | {"neat_packing": True, "packing": True, "train_on_prompt": True},
         {"corpus": "mine.jsonl", "format": "messages", "packing": "best-fit", "loss_on": "all"}, "sft", "separate"),
        (LLAMAFACTORY | {"packing": True}, {"packing": "best-fit"}, "sft", "joined"),
        (LLAMAFACTORY | {"val_size": 0.05}, {"packing": "none", "heldout": 0.05}, "sft", "separate"),
        (LLAMAFACTORY | {"stage": "pt"}, {"format": "text"}, "pretrain", "joined"),
        (TRL | {"assistant_only_loss": True, "packing": True},
         {"format": "messages", "loss_on": "replies", "packing": "best-fit"}, "sft", "separate"),
        (TRL | {"assistant_only_loss": True, "packing": False, "chat_template_path": "own.jinja"},
         {"packing": "none"}, "sft", "separate"),
        (TRL | {"completion_only_loss": True}, {"format": "completions", "loss_on": "replies"}, "sft", "separate"),
        (TRL | {"completion_only_loss": False}, {"format": "completions", "loss_on": "all"}, "sft", "separate"),
        (TRL | {"packing": True}, {"format": "messages", "loss_on": "all"}, "sft", "separate"),
        (LLAMAFACTORY | {"stage": "dpo", "pref_beta": 0.2, "pref_loss": "sigmoid"},
         {"corpus": "mine.jsonl", "format": "preferences"}, "dpo", "joined"),
        (AXOLOTL | {"rl": "dpo", "datasets": [CHAT | {"type": "chat_template.default"}]},
         {"corpus": "chat.jsonl", "format": "preferences", "key": "", "excess": "drop"}, "dpo", "joined"),
        (TRL | {"loss_type": "sigmoid", "beta": 0.2}, {"format": "preferences"}, "dpo", "joined"),
        (TRL | {"dataset_text_field": "body"}, {"format": "text", "key": "body"}, "pretrain", "joined"),
    ],
)  # fmt: skip
def test_a_config_becomes_a_run_file(
    values: dict[str, Any], data: dict[str, Any], objective: str, documents: str, tmp_path: Path
) -> None:
    for name in ("chat.jsonl", "mine.jsonl", "a.parquet", "own.jinja"):
        (tmp_path / name).touch()
    run, _, reading = run_of(values, tmp_path)
    told = {name: getattr(run.data, name) for name in data}
    if "corpus" in told:
        told["corpus"] = Path(told["corpus"]).name
    assert told == data
    assert (run.job.objective, run.job.documents) == (objective, documents)
    assert reading.job.objective == objective
    assert Path(run.data.tokenizer).name == ("bytes" if data.get("format") == "text" else "m")
    if objective == "dpo":
        pairs = values.get("per_device_train_batch_size", values.get("micro_batch_size"))
        assert (run.job.global_batch // reading.job.global_batch, reading.layout.mbs) == (1, 2 * pairs)
        assert run.job.dpo_beta == (0.1 if "rl" in values else 0.2)
    assert (run.data.chat_template is not None) == ("chat_template_path" in values)
    run.check_data(build_model("qwen3-0.6b"))
    understood = {key.key for key in reading.understood}
    renamed = {"sample_packing", "neat_packing"}  # read as padding_free
    ours = {key for key in values if key in data_keys()} - renamed
    assert ours <= understood


def data_keys() -> set[str]:
    from fivefold.interop.huggingface.data import TABLES

    return {key for table in TABLES.values() for key in table}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (AXOLOTL | {"datasets": [CHAT | {"path": "org/name"}]}, "data set org/name: the run reads .jsonl and .parquet"),
        (AXOLOTL | {"datasets": [CHAT, CHAT]}, "2 data sets; the run has one corpus"),
        (AXOLOTL | {"datasets": [CHAT | {"type": "alpaca"}]}, "type alpaca renders a prompt"),
        (AXOLOTL | {"datasets": [CHAT | {"roles_to_train": ["user"]}]}, "roles_to_train ['user']"),
        (AXOLOTL | {"datasets": [CHAT], "chat_template": "chatml"}, "chat_template chatml: the run takes"),
        (AXOLOTL | {"datasets": [CHAT], "chat_template_jinja": "{{ x }}"}, "chat_template_jinja: write it to a file"),
        (AXOLOTL | {"datasets": [CHAT], "excess_length_strategy": "raise"}, "excess_length_strategy raise"),
        (AXOLOTL | {"datasets": [CHAT], "val_set_size": 50}, "50 samples are held out; the run"),
        (LLAMAFACTORY | {"template": "llama3"}, "template llama3: the run takes the tokenizer's own"),
        (LLAMAFACTORY | {"mask_history": True}, "mask_history: there, only the last reply"),
        (TRL | {"packing": True}, "the data set decides whether it is text"),
        (TRL | {"packing": True, "packing_strategy": "wrapped"}, "packing_strategy wrapped"),
        (TRL | {"assistant_only_loss": True, "truncation_mode": "keep_end"}, "truncation_mode keep_end"),
        (TRL | {"assistant_only_loss": True}, "tokenizer m: the run reads a folder with tokenizer.json"),
    ],
)
def test_settings_that_a_run_file_cannot_express_are_remarked(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    _, remarks, _ = run_of(values, tmp_path)
    assert any(words in remark for remark in remarks), remarks


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (LLAMAFACTORY | {"stage": "kto"}, "stage"),
        (LLAMAFACTORY | {"stage": "dpo", "pref_loss": "orpo"}, "pref_loss"),
        (LLAMAFACTORY | {"stage": "dpo", "pref_ftx": 0.5}, "pref_ftx"),
        (AXOLOTL | {"rl": "orpo", "datasets": [CHAT]}, "rl"),
        (AXOLOTL | {"rl": "dpo", "datasets": [CHAT], "precompute_ref_log_probs": True}, "precompute_ref_log_probs"),
        (AXOLOTL | {"rl": "dpo", "datasets": [CHAT], "rpo_alpha": 1.0}, "rpo_alpha"),
        (AXOLOTL | {"rl": "dpo", "datasets": [CHAT], "dpo_label_smoothing": 0.1}, "dpo_label_smoothing"),
        (LLAMAFACTORY | {"stage": "dpo", "dpo_label_smoothing": 0.1}, "dpo_label_smoothing"),
        (AXOLOTL | {"datasets": [CHAT], "beta": 0.1}, "beta"),
        (TRL | {"loss_type": "ipo"}, "loss_type"),
        (TRL | {"beta": 0.04}, "beta"),
    ],
)
def test_another_objective_is_not_understood(values: dict[str, Any], key: str, tmp_path: Path) -> None:
    _, _, reading = run_of(values, tmp_path)
    assert [item.key for item in reading.not_understood] == [key]


@pytest.mark.parametrize(
    ("values", "dropout"),
    [
        (LLAMAFACTORY | {"stage": "dpo"}, 0.0),
        (LLAMAFACTORY, 0.05),
        (AXOLOTL | {"rl": "dpo", "datasets": [CHAT]}, 0.0),
        (TRL | {"loss_type": "sigmoid"}, 0.0),
        (TRL | {"loss_type": "sigmoid", "disable_dropout": False}, 0.05),
    ],
)
def test_preferences_are_trained_without_dropout(values: dict[str, Any], dropout: float, tmp_path: Path) -> None:
    switch = {"finetuning_type": "lora"} if "stage" in values else {"use_peft": True}
    run, _, reading = run_of(
        values | ({"adapter": "lora"} if "datasets" in values else switch) | {"lora_dropout": 0.05}, tmp_path
    )
    assert reading.not_understood == ()
    assert run.job.adapter is not None
    assert run.job.adapter.dropout == dropout


def test_a_config_without_data_has_none(tmp_path: Path) -> None:
    run, remarks, reading = run_of(TRL, tmp_path)
    assert reading.data is None
    assert remarks == ()
    assert run.job.objective == "pretrain"
