"""The crank: batches in, optimizer steps out, with logs, held-out loss, checkpoints and one step that is measured.

Every step: micro-batches forward and backward, one reduction, norm, clip, update. A signal finishes the step, saves
and ends. The third step after the start runs under the ``Meter`` and its time is left out.
"""

from __future__ import annotations

import signal
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
from fivefold.step import Traffic
from fivefold.train import checkpoint, optimizer
from fivefold.train.build import Built
from fivefold.train.data import Loader, heldout_batches
from fivefold.train.engine import Done, Engine
from fivefold.train.logs import NoLogs
from fivefold.train.metrics import Meter, resident_bytes
from fivefold.train.parallel.collectives import all_reduce
from fivefold.train.run import Run
from fivefold.train.shards import Shards

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
        self.measured: Measured | None = None
        self.engine = Engine(built, model=model, layout=layout, job=run.job, end=shards.tokenizer.end)

    def train(self) -> Outcome:
        """Resume from the newest checkpoint, if any, and train to the last step or the first signal."""
        start, saved = self._resume()
        self.logs.start(start)
        seconds: list[float] = []
        step, loss, stopped = start, None, ""
        heldout = self.evaluate(step) if start < self.job.steps else None
        with _Signals(self):
            while step < self.job.steps and not stopped:
                meter = Meter(self._living(), axis=self.built.ranks.axis) if step == start + METERED else None
                begin = time.perf_counter()
                done = self._step(step, meter)
                took = time.perf_counter() - begin
                step += 1
                if step - start > UNTIMED:
                    seconds.append(took)
                loss = done.loss
                self._log_step(step, done, took)
                stopped = self._named(done.stop)
                if step == self.job.steps or (step % self.run.evaluate_every == 0 and not stopped):
                    heldout = self.evaluate(step)
                    stopped = stopped or self._wish()
                if stopped or step == self.job.steps or step % self.run.checkpoints.every_steps == 0:
                    saved = self._save(step)
                    stopped = stopped or self._wish()
        typical = statistics.median(seconds) if seconds else None
        return Outcome(step, self.measured, typical, saved, stopped, loss, heldout)

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
            step, global_batch=job.global_batch, rank=built.ranks["dp"].rank, ranks=self.layout.dp,
            micro_batches=self.layout.micro_batches(job), mbs=self.layout.mbs,
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
            }
        )

    def _resume(self) -> tuple[int, Path | None]:
        found = checkpoint.latest(self.run.folder / "checkpoints")
        if found is None:
            return 0, None
        progress = checkpoint.load(found, built=self.built, model=self.model, job=self.job)
        return progress.step, found

    def _save(self, step: int) -> Path:
        progress = checkpoint.Progress(
            step=step, samples=step * self.job.global_batch, tokens=step * self.job.tokens_per_step
        )
        return checkpoint.save(
            self.run.folder / "checkpoints", built=self.built, progress=progress, model=self.model,
            layout=self.layout, job=self.job, keep=self.run.checkpoints.keep,
        )  # fmt: skip


class _Signals:
    """Turns SIGINT and SIGTERM into a wish that the loop grants after the step."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def __enter__(self) -> None:
        self.former = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.loop.signal = signal.Signals(number).name
