"""The crank: batches in, optimizer steps out, with logs, held-out loss, checkpoints and one step that is measured.

Every step: micro-batches forward and backward, one reduction, norm, clip, update. A signal finishes the step, saves
and ends. A loss that cannot be used leads back to the newest checkpoint (``spikes.py``); a rank that hangs ends all
(``watchdog.py``). The third step after the start runs under the ``Meter`` and its time is left out.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.record import Fault, Mistake
from fivefold.step import Traffic
from fivefold.train import checkpoint, huggingface, optimizer
from fivefold.train.build import Built
from fivefold.train.data import Loader, heldout_batches
from fivefold.train.ending import noted
from fivefold.train.engine import Done, Engine
from fivefold.train.logs import NoLogs
from fivefold.train.metrics import Meter, resident_bytes
from fivefold.train.parallel.collectives import all_reduce
from fivefold.train.resume import set_aside
from fivefold.train.run import Run
from fivefold.train.shards import Shards
from fivefold.train.spikes import Guard, Trouble
from fivefold.train.watchdog import Watchdog

METERED = 2  # steps after the start: by then every buffer of the steady state exists
UNTIMED = 3  # the first steps, the metered one among them


@dataclass(frozen=True)
class Measured:
    """What this rank did in the metered step. Bytes of storages; ``kept_bytes`` from a forward to its backward."""

    parameters: float  # this rank's share of the model: what n ranks hold counts 1/n on each
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    peak_bytes: int
    peak_cause: str
    flops: int
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True)
class Outcome:
    """What the loop leaves behind. ``stopped`` names the signal that ended it early, or is empty."""

    step: int
    measured: Measured | None  # None: too few steps
    step_seconds: float | None  # median; None: too few steps
    checkpoint: Path | None
    stopped: str
    last_loss: float | None
    heldout_loss: float | None


class Loop:
    """One rank's training run."""

    def __init__(
        self,
        run: Run,
        *,
        model: Model,
        layout: Layout,
        built: Built,
        shards: Shards,
        logs: NoLogs,
        ideal_seconds: float,
    ) -> None:
        self.run, self.model, self.layout, self.built, self.logs = run, model, layout, built, logs
        self.ideal_seconds = ideal_seconds  # of a step at the chips' peak, for the MFU
        self.job: Job = run.job
        self.shards = shards
        self.loader = Loader(shards, sequence=self.job.sequence, seed=self.job.seed)
        self.loader.check(global_batch=self.job.global_batch)
        self.signal = ""
        self.step = 0  # the one that is underway
        self.saved: Path | None = None
        self.seconds: list[float] = []
        self.guard = Guard(run.faults)
        self.watchdog = Watchdog(
            run.folder, rank=built.ranks.rank, world=built.ranks.world, seconds=run.faults.watchdog_seconds,
            tell=lambda text: logs.event(self.step, text),
        )  # fmt: skip
        self.measured: Measured | None = None
        self.engine = Engine(built, model=model, layout=layout, job=run.job, end=shards.tokenizer.end)

    def train(self) -> Outcome:
        """Resume from the newest checkpoint, if any, and train to the last step or the first signal."""
        with self.watchdog:
            start = self._begin()
            step, loss, stopped = start, None, ""
            heldout = self.evaluate(step) if start < self.job.steps else None
            with noted(self._note):
                while step < self.job.steps and not stopped:
                    meter = Meter(self._living(), axis=self.built.ranks.axis) if step == start + METERED else None
                    done, took = self._timed_step(step, meter)
                    step += 1
                    stopped = self._named(done.stop)
                    if trouble := self._judge(done):
                        step = self._back(trouble, step)
                        continue
                    if step - start > UNTIMED:
                        self.seconds.append(took)
                    loss = done.loss
                    self._log_step(step, done, took)
                    if step == self.job.steps or (step % self.run.evaluate_every == 0 and not stopped):
                        heldout = self.evaluate(step)
                        stopped = stopped or self._wish()
                    if stopped or step == self.job.steps or step % self.run.checkpoints.every_steps == 0:
                        self._save(step)
                        stopped = stopped or self._wish()
        typical = statistics.median(self.seconds) if self.seconds else None
        return Outcome(step, self.measured, typical, self.saved, stopped, loss, heldout)

    def _begin(self) -> int:
        """Resume, open the logs, and see to it that there is a checkpoint to go back to where that may be asked."""
        start, events = self._resume()
        self.logs.start(start)
        for event in events:
            self.logs.event(start, event)
        if self.saved is None and self.run.faults.goes_back:
            self._save(start)
        return start

    def _timed_step(self, step: int, meter: Meter | None) -> tuple[Done, float]:
        self.step = step
        self.watchdog.at(step, "a step")
        begin = time.perf_counter()
        return self._step(step, meter), time.perf_counter() - begin

    def _judge(self, done: Done) -> Trouble | None:
        """What is wrong with a step; one that the loss scale has skipped changed nothing, and a lower one follows."""
        if done.skipped and done.loss_scale > 1:
            return None
        return self.guard.judge(done.loss, done.norm)

    def _back(self, trouble: Trouble, step: int) -> int:
        """From the bad ``step`` to the newest checkpoint, from where other data is read."""
        good = self.saved
        if trouble.action == "stop" or good is None:
            rest = f"the last good checkpoint is {good}" if good else "there is no checkpoint before it"
            raise Fault(
                f'step {step}: {trouble.what}; {rest}; lower the learning rate, or set on_nan = "skip" in [faults]'
            )
        where = checkpoint.read(good).progress.step
        event = self.guard.pass_over(trouble, step=step, good=where)
        self.watchdog.at(where, "going back")
        progress = checkpoint.load(good, built=self.built, model=self.model, job=self.job)
        self.guard.restore(progress.facts, going_back=True)
        self.logs.start(where)
        self.logs.event(step, event)
        return where

    def _note(self, name: str) -> None:
        self.signal = name

    def _wish(self) -> str:
        """The signal that came to any rank during the evaluation or save that is done."""
        wishes = torch.tensor(float(bool(self.signal)), device=self.built.ranks.device)
        dist.all_reduce(wishes)
        return self._named(wishes.item() > 0)

    def _named(self, stop: bool) -> str:
        return (self.signal or "a signal to another rank") if stop else ""

    def _step(self, step: int, meter: Meter | None) -> Done:
        """One optimizer step; with a ``meter``, measured."""
        job, built, engine = self.job, self.built, self.engine
        rate = optimizer.learning_rate(job.learning_rate, step=step, steps=job.steps)
        for group in built.optimizer.param_groups:
            group["lr"] = rate
        tokens = self.loader.batch(
            self.guard.passed.batch(step), global_batch=job.global_batch, rank=built.ranks["dp"].rank,
            ranks=self.layout.dp, micro_batches=self.layout.micro_batches(job), mbs=self.layout.mbs,
        )  # fmt: skip
        if self._on_gpu and meter:
            torch.cuda.reset_peak_memory_stats()
        engine.meter = meter
        with meter or nullcontext():
            done = engine.step(torch.from_numpy(tokens), stop=bool(self.signal))
        engine.meter = None
        if meter:
            self.measured = self._read(meter)
        engine.forget()
        return done

    @property
    def _on_gpu(self) -> bool:
        return self.built.ranks.device.type == "cuda"

    def _living(self) -> list[Tensor]:
        """Every tensor that lives from step to step."""
        return [*self.built.weights(), *self.built.moments(), *self.built.module.tables]

    def _read(self, meter: Meter) -> Measured:
        """The meter after the update, while the gradients still live."""
        gradients = [unit.reduced for unit in self.built.units if unit.reduced is not None]
        return Measured(
            parameters=self.built.parameters,
            parameters_bytes=sum(tensor.untyped_storage().nbytes() for tensor in self.built.weights()),
            gradients_bytes=sum(tensor.untyped_storage().nbytes() for tensor in gradients),
            optimizer_bytes=sum(tensor.nbytes for tensor in self.built.moments()),
            kept_bytes=self.engine.kept_bytes,
            peak_bytes=torch.cuda.max_memory_allocated() if self._on_gpu else meter.peak_bytes,
            peak_cause=meter.peak_cause,
            flops=meter.flops,
            traffic=meter.traffic,
        )

    def evaluate(self, step: int) -> float:
        """Held-out loss in nats per token, over all ranks."""
        self.watchdog.at(step, "an evaluation")
        ranks, job = self.built.ranks, self.job
        rows = np.stack(list(heldout_batches(
            self.shards, sequence=job.sequence, rows=self.run.evaluate_sequences, mbs=self.layout.mbs,
            rank=ranks["dp"].rank, ranks=self.layout.dp,
        )))  # fmt: skip
        total = self.engine.evaluate(torch.from_numpy(rows)).double()
        all_reduce(total, ranks["world"]).wait()
        predicted_tokens = self.layout.dp * rows[..., 1:].size
        for unit in self.built.units:
            unit.drop()
        loss = total.item() / predicted_tokens
        self.logs.write({"step": step, "heldout_loss": loss})
        if self.model.moe:
            self._log_loads(step)
        return loss

    def _log_loads(self, step: int) -> None:
        """By layer, the share of choices that went to each expert since it was last told; an even share is 1."""
        everyone: list[Any] = [None] * self.built.ranks.world
        dist.all_gather_object(everyone, self.engine.expert_loads())
        loads = {layer: load for found in everyone for layer, load in found.items() if sum(load)}
        shares = {layer: [round(n * len(load) / sum(load), 3) for n in load] for layer, load in sorted(loads.items())}
        if shares:
            self.logs.write({"step": step, "expert_load": shares})

    def _log_step(self, step: int, done: Done, seconds: float) -> None:
        self.logs.write(
            {
                "step": step,
                "loss": done.loss,
                "gradient_norm": done.norm,
                "learning_rate": self.built.optimizer.param_groups[0]["lr"],
                "tokens": step * self.job.tokens_per_step,
                "seconds": seconds,
                "mfu_causal": self.ideal_seconds / seconds,
                "resident_bytes": resident_bytes(),
                **({"loss_scale": done.loss_scale, "skipped": done.skipped} if self.built.scaler else {}),
            }
        )

    def _resume(self) -> tuple[int, list[str]]:
        """The step from which to go on, and what was wrong with newer checkpoints than that one."""
        events: list[str] = []
        while found := checkpoint.latest(self.run.folder / "checkpoints"):
            try:
                progress = checkpoint.load(found, built=self.built, model=self.model, job=self.job)
            except Mistake:
                event = set_aside(found, ranks=self.built.ranks)
                if event is None:
                    raise
                events.append(event)
                continue
            self.saved = found
            self.guard.restore(progress.facts, going_back=False)
            return progress.step, events
        if self.run.start.weights is not None:
            huggingface.start(self.run.start.weights, built=self.built, model=self.model)
        return 0, events

    def _save(self, step: int) -> None:
        self.watchdog.at(step, "a save")
        progress = checkpoint.Progress(
            step=step, samples=self.guard.passed.batch(step) * self.job.global_batch,
            tokens=step * self.job.tokens_per_step, facts=self.guard.facts(),
        )  # fmt: skip
        self.saved = checkpoint.save(
            self.run.folder / "checkpoints", built=self.built, progress=progress, model=self.model,
            layout=self.layout, job=self.job, keep=self.run.checkpoints.keep,
        )  # fmt: skip
