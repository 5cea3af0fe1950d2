"""Evaluates between steps: held-out loss over all ranks, load of the experts, a sample of text; logs all of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.trainer.build import Built
from fivefold.trainer.data.loader import list_heldout_batches
from fivefold.trainer.data.shards import Shards
from fivefold.trainer.engine import Engine
from fivefold.trainer.generate.sample import sample_run
from fivefold.trainer.logs.run_log import NoLogs
from fivefold.trainer.parallel.collectives import all_reduce
from fivefold.trainer.run import Run


@dataclass(frozen=True)
class Evaluator:
    """An evaluator of the weights that ``engine`` trains, with the settings of ``run``."""

    run: Run
    model: Model
    layout: Layout
    built: Built
    shards: Shards
    engine: Engine
    logs: NoLogs

    def evaluate(self, step: int) -> float:
        """Log the evaluation after ``step`` steps and return its held-out loss; every rank calls it."""
        loss = self.heldout_loss()
        self.logs.write({"step": step, "heldout_loss": loss})
        if shares := self.engine.gather_expert_shares():
            self.logs.write({"step": step, "expert_load": shares})
        if self.run.sample and self.run.sample_at == "evaluations" and step < self.run.job.steps:
            text = sample_run(self.built, model=self.model, run=self.run, tokenizer=self.shards.tokenizer)
            self.logs.event(step, f"sample {text!r}")
        return loss

    def heldout_loss(self) -> float:
        """Return the mean loss in nats per token over the held-out rows of all ranks, by one all_reduce."""
        ranks = self.built.ranks
        loader = self.run.loader(self.shards, split="heldout")
        batches = list_heldout_batches(
            loader, rows=self.run.evaluate_sequences, mbs=self.layout.mbs, rank=ranks["dp"].rank, ranks=self.layout.dp
        )
        rows = np.stack(list(batches))
        total = self.engine.evaluate(torch.from_numpy(rows)).double()
        all_reduce(total, ranks["world"]).wait()
        sequences = self.layout.dp * rows.shape[0] * rows.shape[1]
        counted = loader.count_targets(np.arange(sequences))
        predicted_tokens = sequences * self.run.job.sequence if counted is None else max(1, counted)
        for unit in self.built.units:
            unit.drop()
        return total.item() / predicted_tokens
