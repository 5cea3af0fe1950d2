"""The callback within the real Trainer: predicted and measured agree, loggers get both, training is left as it is."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.errors import UserError
from fivefold.results.step_comparison import compare, read_pair

pytest.importorskip("accelerate", reason="the Trainer needs accelerate: pip install accelerate")
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from fivefold.integrations.huggingface import PredictionCallback
from fivefold.integrations.reporting import hide_progress_bars

SEQUENCE = 32
STEPS = 5


def make_trainer(folder: Path, *, lengths: tuple[int, ...] = (SEQUENCE,), **arguments: Any) -> Trainer:
    """A Trainer of a tiny Llama on random tokens, the same for each call."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    rows = [torch.randint(0, 64, (lengths[index // 2 % len(lengths)],)) for index in range(4 * STEPS)]
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "use_cpu": True,
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "report_to": [], "train_sampling_strategy":
        "sequential",
    }  # fmt: skip
    return Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(output_dir=str(folder), **(settings | arguments)),
        train_dataset=[{"input_ids": row, "labels": row.clone()} for row in rows],
    )


def figures(trainer: Trainer) -> dict[str, float]:
    """All figures of ours in the trainer's history."""
    entries = [entry.items() for entry in trainer.state.log_history]
    return {name: value for entry in entries for name, value in entry if name.startswith("fivefold/")}


@pytest.mark.slow
def test_states_and_flops_are_as_predicted_and_both_are_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = make_trainer(tmp_path, report_to=["tensorboard"])
    callback = PredictionCallback(trainer, "h100", sequence_length=SEQUENCE, folder=tmp_path / "run")
    trainer.add_callback(callback)
    trainer.train()
    predicted, measured = callback.predicted, callback.measured
    assert predicted is not None
    assert measured is not None
    rows = {row.quantity: row for row in compare(*read_pair(tmp_path / "run" / "step.json"))}
    for name in ("parameters", "parameter state", "gradient state", "optimizer state", "hardware FLOPs"):
        assert rows[name].exact
        assert rows[name].predicted == rows[name].measured > 0, name
    assert rows["activations"].error == pytest.approx(0, abs=0.05)
    job = predicted.job
    assert (job["sequence"], job["global_batch"], predicted.stack) == (SEQUENCE, 4, measured.stack)
    assert predicted.layout == "dp1 zero0 mbs2"
    assert measured.time.step_seconds > 0

    printed = capsys.readouterr().out
    assert printed.index("predicted  llama on h100, 1 rank") < printed.index("optimizer state")
    logged = figures(trainer)
    assert logged["fivefold/predicted_step_seconds"] == predicted.time.step_seconds
    assert logged["fivefold/measured_step_seconds"] == measured.time.step_seconds
    assert logged["fivefold/measured_peak_memory_gib"] == measured.memory.peak_bytes / 2**30
    assert logged["fivefold/error_step_time"] == pytest.approx(
        predicted.time.step_seconds / measured.time.step_seconds - 1
    )
    assert trainer.state.log_history[0]["step"] == 0
    assert scalars(tmp_path / "board") == {f"train/{name}" for name in logged}


def scalars(folder: Path) -> set[str]:
    """The names of ours that TensorBoard shows."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    names: set[str] = set()
    for file in folder.rglob("events*"):
        events = accumulator.EventAccumulator(str(file.parent)).Reload()
        names |= {name for name in events.Tags()["scalars"] if "fivefold/" in name}
    return names


@pytest.mark.slow
def test_training_with_the_callback_is_bitwise_equal_to_training_without(tmp_path: Path) -> None:
    trained = []
    for watches in (False, True):
        trainer = make_trainer(tmp_path)
        if watches:
            trainer.add_callback(PredictionCallback(trainer, "h100", sequence_length=SEQUENCE, report_after=4))
        trainer.train()
        trained.append([weight.detach().clone() for weight in trainer.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*trained, strict=True))


@pytest.mark.slow
def test_a_step_that_cannot_be_predicted_is_measured_with_a_one_line_remark(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tmp_path, optim="lomo")
    with pytest.raises(UserError, match="lomo"):
        PredictionCallback(trainer, "h100", sequence_length=SEQUENCE).predict(trainer.args)
    trainer = make_trainer(tmp_path)
    callback = PredictionCallback(trainer, "h100")  # the sequence length is not given
    trainer.add_callback(callback)
    with caplog.at_level(logging.WARNING, "fivefold"):
        trainer.train()
    assert "no prediction: TrainingArguments do not give the sequence length; add sequence_length=4096" in caplog.text
    assert callback.predicted is None
    assert callback.measured is not None
    assert {name for name in figures(trainer) if "predicted" in name or "error" in name} == set()
    assert figures(trainer)["fivefold/measured_step_seconds"] == callback.measured.time.step_seconds
    speed = 4 * SEQUENCE / callback.measured.time.step_seconds  # tokens of the batches
    assert callback.measured.tokens_per_second_per_gpu == pytest.approx(speed)
    printed = capsys.readouterr().out
    assert "measured  LlamaForCausalLM on this computer, 1 rank\nsoftware own loop\n" in printed  # no default of a job
    assert "defaults" not in printed


def test_progress_bars_are_cleared_before_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with tqdm(total=2, file=sys.stderr), hide_progress_bars():
        print("predicted", file=sys.stderr, flush=True)
    bar, _, rest = capsys.readouterr().err.partition("predicted\n")
    assert re.search(r"0/2 .*\r +\r$", bar)
    assert "0/2" in rest


@pytest.mark.slow
def test_batches_of_another_sequence_length_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, lengths=(16, SEQUENCE))
    trainer.add_callback(PredictionCallback(trainer, "h100", sequence_length=SEQUENCE))
    with caplog.at_level(logging.WARNING, "fivefold"):
        trainer.train()
    assert f"the prediction is of sequences of {SEQUENCE} tokens, and batches had 16 to 16" in caplog.text


def test_keywords_of_a_job_override_what_was_read(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, activation_checkpointing=True, lr_scheduler_type="cosine", warmup_steps=2)
    step, machine = PredictionCallback(trainer, "a100", sequence_length=SEQUENCE, loss="chunked").predict(trainer.args)
    assert (step.layout, machine.name, machine.ranks) == ("dp1 zero0 mbs2 ac=full", "a100", 1)
    assert step.job["stack"]["loss"] == "chunked"
    assert json.loads(json.dumps(step.job))["learning_rate"]["kind"] == "cosine"
    trainer.model.peft_config = {}
    with pytest.raises(UserError, match="adapter='lora:16'"):
        PredictionCallback(trainer, "a100", sequence_length=SEQUENCE).predict(trainer.args)


@pytest.mark.slow
def test_the_callback_reports_when_training_ends_early(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
            control.should_training_stop = state.global_step == 4

    trainer = make_trainer(tmp_path)
    callback = PredictionCallback(trainer, "h100", sequence_length=SEQUENCE)
    trainer.add_callback(callback)
    trainer.add_callback(Stops())
    trainer.train()
    assert callback.measured is not None
    with pytest.raises(UserError, match="report_after=2"):
        PredictionCallback(trainer, "h100", report_after=2)
