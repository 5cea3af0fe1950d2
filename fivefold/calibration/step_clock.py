"""Run real training steps of one rank under the clock of its units, and sum up what several steps took.

Modules, optimizer, schedule and tensors are those of ``train``; tokens are random.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from fivefold.calibration.message_orders import Timed
from fivefold.calibration.null_process_group import NullProcessGroup
from fivefold.calibration.unit_clock import MESSAGE, MeasuredUnitSeconds, UnitClock
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.parallel.mesh import ProcessGroups

WARMUP_STEPS = 2  # warm-up steps that are not counted: optimizer states and buffers exist after them


def build_step(
    model: Model,
    layout: Layout,
    job: Job,
    *,
    rank: int,
    device: torch.device,
    sends: bool,
    groups: ProcessGroups | None = None,
) -> Callable[[], MeasuredUnitSeconds]:
    """Build a rank's share of the model; return a function that runs one step under the clock.

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
    tokens = torch.randint(0, model.vocab, shape, generator=draw)

    def step() -> MeasuredUnitSeconds:
        NullProcessGroup.untimed[0] = clock.exclude
        clock.start()
        engine.step(tokens)
        engine.zero_grad()
        return clock.stop()

    return step


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
        timed[" ".join(label).strip()] = Timed(seconds=typical, spread=spread, times=times)
    return timed
