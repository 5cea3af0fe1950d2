"""A context manager for loops of Accelerate: it predicts the step, measures it, and logs both.

    with measure_steps(accelerator, model, optimizer, config, "h100:8", "dp8 zero3 mbs1", seq=4096, gbs=64):
        ...

``model`` and ``optimizer`` are what ``accelerator.prepare`` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fivefold.api.job_words import JobWords
from fivefold.integrations.reporting import StepReport, predict_step

if TYPE_CHECKING:
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model


@contextmanager
def measure_steps(
    accelerator: Any,
    module: Any,
    prepared_optimizer: Any,
    model: str | Model | Mapping[str, Any],
    machine: str | Machine,
    layout: str,
    *,
    folder: str | Path | None = None,
    **job: Unpack[JobWords],
) -> Iterator[StepReport]:
    """Predict the step of a loop, measure it, and log both to the trackers of ``accelerator``.

    ``module`` and ``prepared_optimizer``: what ``accelerator.prepare`` returned. ``model``: a catalog name, a path, a
    record, or ``config.to_dict()`` of a model of transformers. ``machine`` and ``layout``: as on the command line.
    ``folder``: where ``step.json`` is written. Other keywords are those of a job, such as ``seq=4096``. The report has
    ``predicted`` and, after the loop, ``measured``. If the loop raises an error, nothing is reported.
    """
    step, place = predict_step(model, machine, layout, world=accelerator.num_processes, job=job)
    report = StepReport(
        module,
        getattr(prepared_optimizer, "optimizer", prepared_optimizer),  # the wrapper has the optimizer that steps
        predicted=step,
        machine=place,
        tokens=int(str(step.job["sequence"])) * int(str(step.job["global_batch"])) if step else 0,
        log=accelerator.log,
        prints=accelerator.is_main_process,
        folder=folder,
    )
    report.begin()
    try:
        yield report
    except BaseException:
        report.stop()
        raise
    report.end()
