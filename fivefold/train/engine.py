"""One training step on this rank: the schedule is played, gradients meet, their norm is cut, the shards are updated.

tokens [micro-batches, mbs, T + 1] → F, B, W of this rank's stages → reductions → norm, clip, update
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.stages import stage_layers
from fivefold.model.spec import Model
from fivefold.train import optimizer
from fivefold.train.build import Built
from fivefold.train.metrics import Watch
from fivefold.train.parallel import expert
from fivefold.train.parallel.pipeline import Pipeline
from fivefold.train.precision import Dtypes


class Done(NamedTuple):
    """What all know after a step: mean loss in nats per token, gradient norm before clipping, whether to stop.

    ``skipped``: a scaled gradient was not finite, so that weights and moments are what they were.
    """

    loss: float
    norm: float
    stop: bool
    skipped: bool = False
    loss_scale: float = 1.0  # of this step


class Engine:
    """Plays steps. ``meter``, where there is one, learns the phase, and ``kept_bytes`` what a forward left behind."""

    def __init__(self, built: Built, *, model: Model, layout: Layout, job: Job, end: int | None = None) -> None:
        """``end``: the token with which a document ends, needed where documents are kept apart."""
        if job.documents == "apart" and end is None:
            raise ValueError("documents that are kept apart need the token that ends one")
        self.built, self.layout, self.job = built, layout, job
        self.end = end if job.documents == "apart" else None
        self.layers = stage_layers(model.layers, layout)
        self.scale = 1 / job.tokens_per_step  # of the loss of one token, in the graph
        self.tokens = torch.empty(0, dtype=torch.long)
        self.meter: Watch | None = None
        self.kept_bytes = 0
        self.routed = built.routed
        self._scale_losses(1.0)
        self.free = model.moe is not None and model.moe.balance == "free"
        self.loads = torch.zeros(len(self.routed), model.moe.experts if model.moe else 0, dtype=torch.int64)
        rows = layout.mbs * job.sequence // layout.cp
        self.pipeline = Pipeline(
            built.table, ranks=built.ranks, later=built.later,
            stages={stage: partial(self._stage, stage) for stage in built.table.held[built.ranks["pp"].rank]},
            shape=(rows // layout.tp if layout.sp else rows, model.width), dtype=Dtypes(job.precision).weights,
        )  # fmt: skip

    def step(self, tokens: Tensor, *, stop: bool = False) -> Done:
        """One optimizer step on this data rank's ``tokens`` [micro-batches, mbs, T + 1]; every rank calls it."""
        built, scaler = self.built, self.built.scaler
        if scaler is not None:
            self._scale_losses(scaler.scale)
            biases = [moe.bias.clone() for moe in self.routed.values()]
        total = self.backward(tokens)
        if self.meter:
            self.meter.phase = "optimizer"
        norm, (loss, wishes) = optimizer.sum_over_ranks(
            built.shards, total / self.layout.tp, float(stop), ranks=built.ranks
        )
        if scaler is None:
            optimizer.clip(built.shards, norm, largest=self.job.optimizer.clip)
            built.optimizer.step()
            return Done(loss.item(), norm.item(), wishes.item() > 0)
        scale, norm = scaler.scale, norm / scaler.scale
        finite = math.isfinite(norm.item())  # of all ranks alike
        if finite:
            optimizer.clip(built.shards, norm, largest=self.job.optimizer.clip, scale=scale)
            built.optimizer.step()
        else:  # experts were chosen by what was not finite
            for moe, bias in zip(self.routed.values(), biases, strict=True):
                moe.bias.copy_(bias)
        scaler.learn(finite=finite)
        return Done(loss.item() / scale, norm.item(), wishes.item() > 0, skipped=not finite, loss_scale=scale)

    def _scale_losses(self, scale: float) -> None:
        """Losses of one token are multiplied by ``scale`` over the tokens of a step, those of the router too."""
        self.scale = scale / self.job.tokens_per_step
        for moe in self.routed.values():
            moe.scale = self.scale

    def backward(self, tokens: Tensor) -> Tensor:
        """Losses of this rank, summed; afterwards every shard has its gradient."""
        self.tokens = tokens.to(self.built.ranks.device, non_blocking=True)
        total = self.pipeline.step()
        for unit in self.built.units:
            unit.finish()
        if self.free:
            self._balance()
        return total

    def expert_loads(self) -> dict[int, list[int]]:
        """Layer → how often each expert was chosen since this was last asked, over all data; every rank calls it."""
        if not self.free:
            self._balance()
        loads, self.loads = self.loads, torch.zeros_like(self.loads)
        return dict(zip(self.routed, loads.tolist(), strict=True))

    def _balance(self) -> None:
        """Sum over ranks how often experts were chosen, and move the biases by which they are."""
        if self.routed:
            axes = [self.built.ranks[name] for name in ("stage", "twin") if name in self.built.ranks.axes]
            self.loads += expert.balance(torch.nn.ModuleList(self.routed.values()), *axes).cpu()

    def forget(self) -> None:
        """Let gradients go; the weights are stale."""
        for unit in self.built.units:
            unit.updated()

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor:
        """Σ nats of ``tokens`` [batches, mbs, T + 1] over this rank's part, to be summed over the world."""
        scale, self.scale = self.scale, 1.0
        self.tokens = tokens.to(self.built.ranks.device)
        total = self.pipeline.evaluate(len(tokens)) / self.layout.tp
        self.scale = scale
        return total

    def _stage(self, stage: int, entry: Tensor | None, micro_batch: int) -> Tensor:
        module, tokens = self.built.module, self.tokens[micro_batch]
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        documents = None if self.end is None else (inputs == self.end).cumsum(1) - (inputs == self.end).long()
        if module.positions is not None:
            inputs, targets = inputs[:, module.positions], targets[:, module.positions]
        before = self._begin_forward()
        out = module.stage(
            inputs, targets, layers=self.layers[stage], entry_RD=entry, documents_BT=documents, scale=self.scale
        )
        self._end_forward(before)
        return out

    # What the meter is told

    def _begin_forward(self) -> int | None:
        turns = self.built.ranks.turns
        if self.meter is None or (turns is not None and not turns.alone):  # a backward beside it lets go of its own
            return None
        self.meter.phase = "forward"
        return self._apart_from_weights(self.meter)

    def _end_forward(self, before: int | None) -> None:
        if self.meter is not None and before is not None:
            self.kept_bytes = max(self.kept_bytes, self._apart_from_weights(self.meter) - before)
            self.meter.phase = "backward"

    def _apart_from_weights(self, meter: Watch) -> int:
        """Live bytes less the gathered weights, which come and go under ZeRO-3."""
        return meter.live_bytes - sum(unit.whole.untyped_storage().nbytes() for unit in self.built.units)
