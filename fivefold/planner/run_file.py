"""Derive the run settings that a plan adds to a run file: number of steps, warm-up and checkpoint interval."""

from __future__ import annotations

from math import ceil

from fivefold.job import Job
from fivefold.results.run_estimate import RunEstimate
from fivefold.units import show_seconds

WARMUP = 2000  # steps of Llama 2 (arXiv:2307.09288 §2.2); of short runs a fiftieth


def plan_run_job(job: Job, *, tokens: float) -> Job:
    """Return the job with the number of steps that ``tokens`` need, and with a warm-up unless the job has one."""
    steps = max(1, ceil(tokens / job.tokens_per_step))
    warmup = job.learning_rate.warmup_steps or min(WARMUP, steps // 50)
    return job.replace(steps=steps, learning_rate=job.learning_rate.replace(warmup_steps=min(warmup, steps)))


def write_run_file(content: str, job: Job, *, run: RunEstimate, command: str) -> str:
    """Return the run file ``content`` with the command that made it and its data.

    Checkpoints are as frequent as loses the least time.
    """
    every = min(job.steps, max(1, round(run.interval_seconds / run.step_seconds)))
    duration = f"{run.seconds / 86400:.1f} days" if run.seconds >= 2 * 86400 else show_seconds(run.seconds)
    head = [f"# {command}", f"# {duration} on {run.ranks} GPUs, {run.step_seconds:.3g} s a step"]
    tail = [
        "",
        "[data]",
        'corpus = "stdlib"  # a file or folder of your own',
        'tokenizer = "bytes"  # bpe:SIZE, or a tokenizer.json: of no more tokens than the model has',
        "",
        "[checkpoints]",
        f"every_steps = {every}  # {run.interval_seconds:.0f} s: what loses the least",
    ]
    return "\n".join([*head, content.rstrip("\n"), *tail]) + "\n"
