"""The callback within the real Trainer of Lightning: predicted and measured agree, and loggers get both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pytorch_lightning", reason="pip install pytorch-lightning")
import pytorch_lightning as lightning
from transformers import LlamaConfig, LlamaForCausalLM

from fivefold.errors import UserError
from fivefold.integrations.lightning import PredictionCallback
from fivefold.results.step_comparison import compare
from tests.integrations.test_accelerate import BATCH, CONFIG, EXACT, SEQUENCE, STEPS

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, of its options


class Llama(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(**CONFIG))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Memory(lightning.loggers.logger.DummyLogger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, float] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.figures.update(metrics)


def fit(folder: Path, callback: PredictionCallback) -> Memory:
    torch.manual_seed(1)
    memory = Memory()
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        callbacks=[callback],
        logger=memory,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    rows = torch.randint(0, 64, (STEPS * BATCH, SEQUENCE))
    trainer.fit(Llama(), torch.utils.data.DataLoader(rows, batch_size=BATCH))
    return memory


@pytest.mark.parametrize("report_after", [None, 4])
def test_states_and_flops_are_as_predicted(tmp_path: Path, report_after: int | None) -> None:
    config = LlamaConfig(**CONFIG).to_dict()
    words: Any = {"seq": SEQUENCE, "gbs": BATCH, "stack": "ddp", "precision": "fp32", "report_after": report_after}
    callback = PredictionCallback(config, "h100", f"dp1 zero0 mbs{BATCH}", folder=tmp_path / "run", **words)
    memory = fit(tmp_path, callback)
    report = callback.report
    assert report is not None
    assert report.predicted is not None
    assert report.measured is not None
    rows = {row.quantity: row for row in compare(report.predicted, report.measured)}
    for name in EXACT:
        assert rows[name].predicted == rows[name].measured > 0, name
    assert memory.figures["fivefold/predicted_mfu"] == report.predicted.mfu.causal
    assert memory.figures["fivefold/measured_step_seconds"] == report.measured.time.step_seconds
    assert (tmp_path / "run" / "step.json").exists()


def test_too_few_steps_are_an_error() -> None:
    with pytest.raises(UserError, match="use 4 or more"):
        PredictionCallback("nano", "h100", "dp1", report_after=2)
