"""The context manager around a real loop of Accelerate: predicted and measured agree, trackers get both."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="pip install accelerate")
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from fivefold.integrations.accelerate import measure_steps
from fivefold.integrations.reporting import StepReport
from fivefold.results.step_comparison import compare

SEQUENCE, BATCH, STEPS = 32, 4, 5
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXACT = ("parameters", "parameter state", "gradient state", "optimizer state", "hardware FLOPs")


def train(*, layout: str = "dp1 zero0 mbs4", failing: bool = False) -> tuple[StepReport, dict[str, float]]:
    """Train a tiny Llama in full precision on one process; return the report and what was logged."""
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    logged: dict[str, float] = {}
    accelerator.log = logged.update
    config = LlamaConfig(**CONFIG)
    module = LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    words: Any = {"seq": SEQUENCE, "gbs": BATCH, "stack": "ddp", "precision": "fp32"}
    with measure_steps(accelerator, model, optimizer, config.to_dict(), "h100", layout, **words) as report:
        for _ in range(STEPS):
            tokens = torch.randint(0, 64, (BATCH, SEQUENCE))
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            if failing:
                raise ValueError("of the loop")
    return report, logged


def test_states_and_flops_are_as_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    report, logged = train()
    assert report.predicted is not None
    assert report.measured is not None
    rows = {row.quantity: row for row in compare(report.predicted, report.measured)}
    for name in EXACT:
        assert rows[name].predicted == rows[name].measured > 0, name
    assert logged["fivefold/predicted_step_seconds"] == report.predicted.time.step_seconds
    assert logged["fivefold/measured_step_seconds"] == report.measured.time.step_seconds
    assert "fivefold/error_peak_memory" in logged
    printed = capsys.readouterr().out
    assert printed.index("predicted  llama on h100, 1 rank") < printed.index("optimizer state")
    assert printed.index("optimizer state") < printed.index("Predicted: ")


def test_a_layout_of_another_number_of_ranks_gives_no_prediction(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fivefold"):
        report, logged = train(layout="dp2")
    assert "no prediction:" in caplog.text
    assert report.predicted is None
    assert report.measured is not None
    assert {name for name in logged if "predicted" in name} == set()


def test_an_error_of_the_loop_ends_the_measurement() -> None:
    with pytest.raises(ValueError, match="of the loop"):
        train(failing=True)
