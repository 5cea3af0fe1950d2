"""Run real training steps of one rank under the clock of its units, and sum up what several steps took.

Modules, optimizer, schedule and tensors are those of ``train``; tokens are random.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fivefold.calibration.message_orders import Timed
from fivefold.calibration.null_process_group import NullProcessGroup
from fivefold.calibration.unit_clock import MESSAGE, MeasuredUnitSeconds, UnitClock
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.results.spans import ACTIONS, iterate_enclosing
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.measure.clock import ProcessorClock
from fivefold.trainer.measure.recorder import SpanRecorder
from fivefold.trainer.measure.regions import Regions
from fivefold.trainer.parallel.mesh import ProcessGroups

WARMUP_STEPS = 2  # warm-up steps that are not counted: optimizer states and buffers exist after them


class ClockedStep:
    """A rank's training step; each call runs one under the clock of its units.

    ``gaps``: processor seconds between operations of the step that was traced, in forwards and in backwards.
    """

    def __init__(self, engine: Engine, clock: UnitClock, tokens: Tensor) -> None:
        self.engine, self.clock, self.tokens = engine, clock, tokens
        self.gaps: dict[Literal["F", "BW"], float] = {}

    def __call__(self) -> MeasuredUnitSeconds:
        """Run one step and return its seconds."""
        NullProcessGroup.untimed[0] = self.clock.exclude
        self.clock.start()
        self.engine.step(self.tokens)
        self.engine.zero_grad()
        return self.clock.stop()

    def trace_gaps(self) -> None:
        """Run one step whose operations are traced as ``train`` traces them, and keep the seconds between them.

        They are processor time, as those of units.
        """
        recorder = SpanRecorder(ProcessorClock())
        with Regions(recorder, engine=self.engine, data=None).report():
            recorder.begin(recorder.label("step", "step"))
            self()
            recorder.end()
        spans = recorder.read(recorder.take_marks(0), offset=0.0).spans
        self.gaps = {"F": 0.0, "BW": 0.0}
        for span in spans:
            action = next((outer.kind for outer in iterate_enclosing(spans, span) if outer.kind in ACTIONS), None)
            if action is not None and span.kind not in ("op", "post", "wait"):
                self.gaps["F" if action == "F" else "BW"] += span.own


def build_step(
    model: Model,
    layout: Layout,
    job: Job,
    *,
    rank: int,
    device: torch.device,
    sends: bool,
    groups: ProcessGroups | None = None,
) -> ClockedStep:
    """Build a rank's share of the model and return its step.

    ``sends``: messages are really exchanged with the other workers, and timed. ``groups``: as in ``create_ranks``.
    """
    built = build(model=model, layout=layout, job=job, device=device, streams=False, groups=groups)
    end = 0 if job.documents == "separate" else None  # any token may end a document
    engine = Engine(built, model=model, layout=layout, job=job, end=end)
    clock = UnitClock(engine)
    if sends:
        clock.follow(engine)
    draw = torch.Generator().manual_seed(rank)
    shape = layout.micro_batches(job), layout.mbs, job.row_tokens(model.mtp_depth)
    return ClockedStep(engine, clock, torch.randint(0, model.vocab, shape, generator=draw))


def summarize_steps(steps: Sequence[MeasuredUnitSeconds]) -> dict[str, Timed]:
    """Return the seconds of one occurrence of each unit and direction: the median over steps.

    Of messages it is the lower quartile: other programs that run on the cores lengthen them, and never shorten them.
    ``step`` is the full step.
    """
    full_steps = [step.step for step in steps]
    median_step = statistics.median(full_steps)
    spread = (max(full_steps) - min(full_steps)) / median_step if median_step else 0.0
    timed = {"step": Timed(seconds=median_step, spread=spread)}
    for label in sorted({label for step in steps for label in step.seconds}):
        seconds = sorted(step.seconds[label] / max(1, step.times[label]) for step in steps)
        median_seconds = statistics.median(seconds)
        spread = (seconds[-1] - seconds[0]) / median_seconds if median_seconds else 0.0
        typical = seconds[(len(seconds) - 1) // 4] if label[0] == MESSAGE else median_seconds
        times = max(1, steps[0].times[label])
        clock = statistics.median(step.clock[label] / max(1, step.times[label]) for step in steps)
        timed[" ".join(label).strip()] = Timed(seconds=typical, spread=spread, times=times, clock_seconds=clock)
    return timed
