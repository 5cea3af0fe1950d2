"""Step lines: the line that a training step adds to ``log.jsonl``."""

from __future__ import annotations

from typing import Any

from fivefold.job import Job
from fivefold.trainer.engine import StepResult
from fivefold.trainer.measure.measured_step import MeasuredStep
from fivefold.trainer.measure.meter import read_resident_bytes


def step_line(
    step: int,
    done: StepResult,
    *,
    job: Job,
    samples: int,
    batch: int,
    rate: float,
    seconds: float,
    ideal_seconds: float,
    measured: MeasuredStep | None = None,
) -> dict[str, Any]:
    """Build the log line of step number ``step`` (from 1); its keys are those of ``log.jsonl``.

    ``samples``: samples read since the start of the run; ``batch``: samples of this step; ``seconds``: wall time of
    the step; ``ideal_seconds``: time of a step of the full batch at the chips' peak FLOP/s, which gives the MFU;
    ``measured``: the meter's result, in the metered step.
    """
    return {
        "step": step,
        "loss": done.loss,
        **{f"mtp_loss_{module}": loss for module, loss in enumerate(done.further, start=1)},
        **_list_rewards(done),
        "gradient_norm": done.norm,
        "learning_rate": rate,
        "tokens": samples * job.sequence,
        "seconds": seconds,
        "mfu_causal": ideal_seconds / seconds * batch / job.global_batch,
        "resident_bytes": read_resident_bytes(),
        **({"peak_bytes": measured.peak_bytes} if measured is not None else {}),
        **_list_noise(done, job),
        **({"batch": batch} if job.ramp else {}),
        **({"loss_scale": done.loss_scale, "skipped": done.skipped} if job.precision.loss_scaling else {}),
    }


def _list_rewards(done: StepResult) -> dict[str, float]:
    """Return the rewards of DPO, by TRL's names."""
    if done.rewards is None:
        return {}
    chosen, rejected, accuracy = done.rewards
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": accuracy,
    }


def _list_noise(done: StepResult, job: Job) -> dict[str, Any]:
    """Return the gradient noise scale in tokens, and |G|² and S per token of only this step."""
    if done.noise is None:
        return {}
    scale = None if done.noise.scale is None else done.noise.scale * job.sequence
    return {
        "noise_scale": scale,
        "gradient_square": done.noise.square,
        "gradient_variance": done.noise.variance * job.sequence,
    }
