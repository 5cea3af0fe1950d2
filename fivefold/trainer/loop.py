"""Training loop: runs optimizer steps on batches, with logs, evaluations, checkpoints and one measured step.

A step: forward and backward of every micro-batch, gradient reduction, norm, clip, update. After a
signal the loop finishes the step, saves a checkpoint and ends. A bad loss (``faults/spikes.py``) skips the update or
loads an earlier checkpoint; a rank that hangs ends the run (``faults/watchdog.py``). The third step after the start, or
the first later one of a full batch if the batch ramps up, runs under the ``Meter``; later ones are timed, some traced.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from fivefold.errors import RunFailure, UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.results.spans import RankTrace
from fivefold.trainer.build import Built
from fivefold.trainer.checkpoint import checkpoint, huggingface_import, peft_adapter
from fivefold.trainer.checkpoint.async_saver import Saver
from fivefold.trainer.checkpoint.resume import quarantine_damaged, skip_checkpoint
from fivefold.trainer.data.prefetch import Prefetcher
from fivefold.trainer.data.shards import Shards
from fivefold.trainer.engine import Engine, StepResult
from fivefold.trainer.evaluation import Evaluator
from fivefold.trainer.faults.signals import catch_signals
from fivefold.trainer.faults.spikes import BadLoss, LossGuard
from fivefold.trainer.faults.watchdog import Watchdog
from fivefold.trainer.logs.run_log import NoLogs
from fivefold.trainer.logs.step_line import step_line
from fivefold.trainer.measure.host_heap import HostHeap
from fivefold.trainer.measure.measured_step import MeasuredStep, list_live_tensors, measure
from fivefold.trainer.measure.meter import Meter
from fivefold.trainer.measure.noise_scale import NoiseScale
from fivefold.trainer.measure.tracer import ALWAYS_TRACED_STEPS, Tracer
from fivefold.trainer.optimizers import optimizer
from fivefold.trainer.optimizers.loss_scaling import MIN_SCALE
from fivefold.trainer.run import Run

STEPS_BEFORE_METERING = 2  # steps before the metered one: by then every persistent buffer is allocated


@dataclass(frozen=True)
class Outcome:
    """The result of ``Loop.train``. ``stopped`` names the signal that ended it early, or is empty."""

    start: int  # step of the checkpoint that training continued from; 0: of none
    step: int
    measured: MeasuredStep | None  # None: too few steps
    step_seconds: float | None  # median of the untraced steps; None: too few steps
    trace: RankTrace
    checkpoint: Path | None
    stopped: str
    last_loss: float | None
    heldout_loss: float | None


class Loop:
    """A training run on one rank; all ranks make the same calls. ``ideal_seconds``: time of a step at peak FLOP/s."""

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
        self.ideal_seconds = ideal_seconds  # time of a step of the full batch at the chips' peak FLOP/s, for the MFU
        self.job: Job = run.job
        self.shards = shards
        self.loader = run.loader(shards, ahead=model.mtp_depth)
        self.loader.check(global_batch=self.job.global_batch)
        self.prefetcher = Prefetcher(self._read, pinned=built.ranks.device.type == "cuda")
        self.signal = ""  # name of the last signal sent to this process
        self.step, self.batch, self.rate = 0, 0, 0.0  # of the current step; batch in samples
        self.samples = 0  # read so far over all ranks: the full state of the loader
        self.saver = Saver(
            run.folder / "checkpoints",
            built=built,
            keep=run.checkpoints.keep,
            asynchronous=run.checkpoints.asynchronous,
        )
        self.bad_loss: BadLoss | None = None  # verdict on the last step; None: it was good
        self.returned: Path | None = None  # checkpoint of the last rollback
        self.seconds: list[float] = []  # of each step after the metered one that is not traced
        self.guard = LossGuard(run.faults)
        self.watchdog = Watchdog(
            run.folder,
            rank=built.ranks.rank,
            world=built.ranks.world,
            seconds=run.faults.watchdog_seconds,
            report=lambda step, text: logs.event(step, text),
        )
        self.heap = HostHeap()
        self.measured: MeasuredStep | None = None
        self.engine = Engine(built, model=model, layout=layout, job=run.job, end=shards.tokenizer.end)
        self.engine.pipeline.on_progress = self.watchdog.note_progress
        self.engine.noise = NoiseScale.from_built(built, layout) if run.noise_scale else None
        self.tracer = Tracer(self.engine, data=self.prefetcher, steps=run.trace_steps or ALWAYS_TRACED_STEPS)
        self.evaluator = Evaluator(
            run, model=model, layout=layout, built=built, shards=shards, engine=self.engine, logs=logs
        )

    def train(self) -> Outcome:
        """Resume from the newest checkpoint, if any, and train to the last step or the first signal."""
        with self.watchdog, self.saver, self.prefetcher:
            start = self._begin()
            step, loss, stopped = start, None, ""
            heldout = self.evaluate(step) if start < self.job.steps else None
            with catch_signals(self._on_signal):
                while step < self.job.steps and not stopped:
                    meter = self._make_meter() if step >= start + STEPS_BEFORE_METERING else None
                    traced = self.measured is not None and self._is_traced(step)
                    result, step_seconds = self._time_step(step, meter, traced=traced)
                    self.watchdog.enter_phase(step, "the end of a step")
                    stopped = self._signal_name(result.stop)
                    if self.bad_loss:
                        step = self._skip_or_roll_back(self.bad_loss, step + 1)
                        is_due = False
                    else:
                        step += 1
                        if self.measured and not meter and not traced:
                            self.seconds.append(step_seconds)
                        loss = result.loss
                        is_due = self.run.checkpoints.is_due(step, last=step == self.job.steps)
                        self._log_step(step, result, step_seconds, measured=self.measured if meter else None)
                        self.heap.trim()
                        if step == self.job.steps or (step % self.run.evaluate_every == 0 and not stopped):
                            heldout = self.evaluate(step)
                            stopped = stopped or self._stop_vote()
                    if stopped or is_due:
                        self._save(step)
                        stopped = stopped or self._stop_vote()
                self.watchdog.enter_phase(step, "a save")
                saved = self.saver.wait()
        seconds = self.seconds or [step_marks.seconds for step_marks in self.tracer.steps]
        median_seconds = statistics.median(seconds) if seconds else None
        return Outcome(start, step, self.measured, median_seconds, self.tracer.trace(), saved, stopped, loss, heldout)

    def _begin(self) -> int:
        """Resume and open the logs; save a first checkpoint if the run may have to roll back. Returns the step."""
        start, events = self._resume()
        self.logs.start(start)
        for event in events:
            self.logs.event(start, event)
        if self.saver.newest is None and self.run.faults.can_roll_back:
            self._save(start)
        return start

    def _time_step(self, step: int, meter: Meter | None, *, traced: bool) -> tuple[StepResult, float]:
        """Run the step; return its result and its wall seconds."""
        self.step = step
        self.watchdog.enter_phase(step, "a step")
        if traced:
            with self.tracer.trace_step(step):
                result = self._step(step, meter)
            return result, self.tracer.close(good=self.bad_loss is None)
        begin = time.perf_counter()
        return self._step(step, meter), time.perf_counter() - begin

    def _is_traced(self, step: int) -> bool:
        """Return whether to trace this step, after the metered one."""
        timed = len(self.seconds) + len(self.tracer.steps)
        last = step + 1 == self.job.steps
        return self.job.batch(self.samples) == self.job.global_batch and self.tracer.can_trace(timed, last=last)

    def _judge(self, loss: float, norm: float) -> bool:
        """Return whether loss and gradient norm of a step allow its update; stores the verdict in ``bad_loss``."""
        self.bad_loss = self.guard.judge(loss, norm)
        return self.bad_loss is None

    def _skip_or_roll_back(self, bad_loss: BadLoss, step: int) -> int:
        """Handle the bad ``step`` (from 1); return the step to continue from: the previous one, or a checkpoint's."""
        if bad_loss.action == "skip":
            self.guard.count(bad_loss, step=step)
            first = self.samples - self.batch
            next_step = step - 1
            action = "no update"
        else:
            progress, action = self._roll_back(bad_loss, step)
            first, next_step = progress.samples, progress.step
        skipped = f"samples {first} to {self.samples - 1} passed over ({bad_loss.action} {self.guard.rollbacks})"
        self.logs.event(step, f"{bad_loss.what}: {action}, and {skipped}")
        return next_step

    def _roll_back(self, bad_loss: BadLoss, step: int) -> tuple[checkpoint.RunProgress, str]:
        """Load the newest checkpoint, or the one before it if the last rollback loaded that one already.

        Raises ``RunFailure`` if the fault rules say stop or there is no checkpoint. Returns its progress and a log
        text.
        """
        newest = self.saver.wait()
        if bad_loss.action == "stop" or newest is None:
            rest = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint before it"
            raise RunFailure(
                f'step {step}: {bad_loss.what}; {rest}; lower the learning rate, or set on_nan = "skip" in [faults]'
            )
        self.guard.count(bad_loss, step=step)
        self.watchdog.enter_phase(step, "going back")
        earlier = skip_checkpoint(newest, ranks=self.built.ranks) if newest == self.returned else None
        self.saver.newest = self.returned = earlier or newest
        progress = self._load(self.returned)
        self.guard.restore(progress.facts, going_back=True)
        self.logs.start(progress.step)
        return progress, f"back to step {progress.step}" + (f", as {newest.name} led here again" if earlier else "")

    def _on_signal(self, name: str) -> None:
        self.signal = name

    def _stop_vote(self) -> str:
        """Ask all ranks, by one all_reduce, if a signal came during the last evaluation or save; return its name."""
        stop_votes = torch.tensor(float(bool(self.signal)), device=self.built.ranks.device)
        dist.all_reduce(stop_votes)
        return self._signal_name(stop_votes.item() > 0)

    def _make_meter(self) -> Meter | None:
        """Return a meter for this step: once, and only for a step of the full batch, as predicted."""
        is_full = self.job.batch(self.samples) == self.job.global_batch
        if not is_full or self.measured:
            return None
        built = self.built
        return Meter(list_live_tensors(built), axis=built.ranks.axis, on_host=built.host_tensors())

    def _signal_name(self, stop: bool) -> str:
        """Return the name of the signal; empty unless the ranks have voted to ``stop``."""
        return (self.signal or "a signal to another rank") if stop else ""

    def _read(self, samples: int) -> NDArray[np.int64]:
        """Read the tokens [micro-batches, mbs, T + 1] of this data rank in the step that begins after ``samples``."""
        layout, size = self.layout, self.job.batch(samples)
        return self.loader.batch(
            samples,
            global_batch=size,
            rank=self.built.ranks["dp"].rank,
            ranks=layout.dp,
            micro_batches=size // (layout.dp * layout.mbs),
            mbs=layout.mbs,
        )

    def _step(self, step: int, meter: Meter | None) -> StepResult:
        """Run one optimizer step (``step`` from 0), measured if there is a ``meter``."""
        job, built, engine = self.job, self.built, self.engine
        self.rate = optimizer.compute_learning_rate(job.learning_rate, step=step, steps=job.steps)
        optimizer.set_rate(built.optimizer, self.rate)
        self.batch = job.batch(self.samples)
        after = self.samples + self.batch
        counted = self.loader.count_targets(np.arange(self.samples, after))
        tokens, self.samples = self.prefetcher.take(self.samples, following=after), after
        if meter and built.ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        engine.meter, engine.step_number, self.bad_loss = meter, step, None
        judge = self._judge if self.run.faults.checks_before_update else None
        with meter or nullcontext():
            result = engine.step(tokens, counted=counted, stop=bool(self.signal) or self.saver.has_failed, judge=judge)
        engine.meter = None
        if judge is None and not (
            result.skipped and result.loss_scale > MIN_SCALE
        ):  # an overflow only lowers the scale
            self._judge(result.loss, result.norm)
        if meter and not result.skipped:
            self.measured = measure(meter, built=built, kept_bytes=engine.kept_bytes)
        engine.zero_grad()
        return result

    def evaluate(self, step: int) -> float:
        """Evaluate and log the held-out loss; return it in nats per token, over all ranks."""
        self.watchdog.enter_phase(step, "an evaluation")
        with self.tracer.record_evaluation(step):
            return self.evaluator.evaluate(step)

    def _log_step(self, step: int, done: StepResult, seconds: float, *, measured: MeasuredStep | None) -> None:
        """Write the line of a step to the logs."""
        self.logs.write(
            step_line(
                step,
                done,
                job=self.job,
                samples=self.samples,
                batch=self.batch,
                rate=self.rate,
                seconds=seconds,
                ideal_seconds=self.ideal_seconds,
                measured=measured,
            )
        )

    def _resume(self) -> tuple[int, list[str]]:
        """Load the newest readable checkpoint, or initial weights; return the step to continue from, and log events."""
        events: list[str] = []
        base = self.run.start.weights
        # a checkpoint holds only the adapters, and never the frozen reference
        if base is not None and (self.job.adapter is not None or self.job.copies_reference):
            huggingface_import.start(base, built=self.built, model=self.model)
        self.engine.hold_reference()
        while newest := checkpoint.find_latest(self.run.folder / "checkpoints"):
            try:
                progress = self._load(newest)
            except UserError:
                event = quarantine_damaged(newest, ranks=self.built.ranks)
                if event is None:
                    raise
                events.append(event)
                continue
            events += checkpoint.describe_unchecked_hashes(newest, progress)
            self.saver.newest, self.samples = newest, progress.samples
            self.guard.restore(progress.facts, going_back=False)
            return progress.step, events
        if base is not None and self.job.adapter is None and not self.job.copies_reference:
            huggingface_import.start(base, built=self.built, model=self.model)
        if (folder := self.run.start.adapter) is not None:
            assert base is not None
            peft_adapter.start(folder, base=base, built=self.built, model=self.model, job=self.job)
        return 0, events

    def _load(self, path: Path) -> checkpoint.RunProgress:
        return checkpoint.load(path, built=self.built, model=self.model, job=self.job, index=self.shards.index)

    def _save(self, step: int) -> None:
        """Start to save a checkpoint of ``step`` steps; written in the background if the run is asynchronous."""
        self.watchdog.enter_phase(step, "a save")
        facts = self.guard.facts() | checkpoint.build_origin(self.shards.index)
        base = self.run.start.weights
        progress = checkpoint.RunProgress(
            step=step, samples=self.samples, tokens=self.samples * self.job.sequence, facts=facts
        )
        self.saver.save(
            checkpoint.Checkpoint(
                torch=torch.__version__,
                device=self.built.ranks.device.type,
                model=self.model,
                layout=self.layout,
                job=self.job,
                progress=progress,
                files=(),
                base=None if base is None or self.job.adapter is None else str(base.absolute()),
            )
        )
