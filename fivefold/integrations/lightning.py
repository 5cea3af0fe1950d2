"""A callback for the Trainer of Lightning: it predicts the step, measures it, and logs both.

    Trainer(callbacks=[PredictionCallback("llama3-8b", "h100:8", "dp8 zero3 mbs1", seq=8192, gbs=64)])

Lightning does not know the sizes of a model or the length of a sequence, so they are arguments here, as on the command
line. The prediction is printed and given to the loggers when the training starts, predicted next to measured at the
end or after ``report_after`` steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fivefold.api.job_words import JobWords
from fivefold.errors import UserError
from fivefold.integrations.reporting import MIN_STEPS, StepReport, predict_step

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback

if TYPE_CHECKING:
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model


class PredictionCallback(Callback):
    """Predict the step of a LightningModule, measure it, and log predicted next to measured.

    ``model``: a catalog name, a path, a record, or ``config.to_dict()`` of a model of transformers. ``machine`` and
    ``layout``: as on the command line. ``report_after``: report after this many steps instead of at the end.
    ``folder``: where ``step.json`` is written. Other keywords are those of a job, such as ``seq=4096``.

    A prediction that is not possible is a warning of one line; the step is measured in any case.
    """

    def __init__(
        self,
        model: str | Model | Mapping[str, Any],
        machine: str | Machine,
        layout: str,
        *,
        report_after: int | None = None,
        folder: str | Path | None = None,
        **job: Unpack[JobWords],
    ) -> None:
        if report_after is not None and report_after < MIN_STEPS:
            raise UserError(f"report_after={report_after}: the first steps are slower; use {MIN_STEPS} or more")
        self.model, self.machine, self.layout, self.job = model, machine, layout, job
        self.report_after, self.folder = report_after, folder
        self.report: StepReport | None = (
            None  # with the steps ``predicted`` and ``measured``, once training has started
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Predict the step, print and log it, and begin to measure."""
        step, machine = predict_step(self.model, self.machine, self.layout, world=trainer.world_size, job=self.job)

        def log(figures: dict[str, float]) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)

        self.report = StepReport(
            trainer.strategy.model or pl_module,
            tuple(trainer.optimizers),
            predicted=step,
            machine=machine,
            tokens=int(str(step.job["sequence"])) * int(str(step.job["global_batch"])) if step else 0,
            log=log,
            prints=trainer.is_global_zero,
            folder=self.folder,
        )
        self.report.begin()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Report once enough steps are measured."""
        if self.report and self.report_after and trainer.global_step >= self.report_after:
            self.report.end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report a training that ended before."""
        if self.report:
            self.report.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the measurement of a training that failed."""
        if self.report:
            self.report.stop()
