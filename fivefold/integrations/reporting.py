"""A step that is predicted, measured and reported within the loop of another project's trainer.

    report = StepReport(module, optimizer, predicted=step, log=logger.log_metrics)
    report.begin()
    …                     # the trainer's loop
    report.end()

The prediction is printed and logged at the beginning, predicted next to measured at the end.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.errors import UserError
from fivefold.units import GIB

if TYPE_CHECKING:
    from fivefold.api.job_words import JobWords
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.profiling.watch_loop import Watched
    from fivefold.step import Step

logger = logging.getLogger("fivefold")
LOG_PREFIX = "fivefold"
MIN_STEPS = 4  # the time is that of the steps after the third, which are counted below autograd


class StepReport:
    """Measures the steps of ``optimizer`` on ``module``; ``log`` takes figures by name, on every rank.

    ``tokens``: tokens of a step over all ranks. ``prints``: this rank prints the report. ``folder``: where
    ``step.json`` is written.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Any,
        *,
        predicted: Step | None,
        log: Callable[[dict[str, float]], None],
        machine: Machine | None = None,
        tokens: int = 0,
        prints: bool = True,
        folder: str | Path | None = None,
    ) -> None:
        self.module, self.optimizer, self.predicted, self.machine = module, optimizer, predicted, machine
        self.log, self.tokens, self.prints, self.folder = log, tokens, prints, folder
        self.measured: Step | None = None
        self._watched: Watched | None = None

    def begin(self) -> None:
        """Print and log the prediction, and begin to measure."""
        from fivefold.profiling.watch_loop import watch

        if self.prints:
            print_steps(self.predicted)
        self._log(list_figures("predicted", self.predicted))
        self._watched = watch(
            self.module, self.optimizer, tokens=self.tokens, predicted=self.predicted, machine=self.machine
        )
        self._watched.__enter__()

    def end(self, *, tokens: int = 0) -> None:
        """End the measurement once, print and log predicted next to measured; every rank of the run takes part.

        ``tokens``: of a step over all ranks, if they were not known at the beginning.
        """
        if self._watched is None:
            return
        watched, self._watched = self._watched, None
        watched.tokens = watched.tokens or tokens
        watched.__exit__(None, None, None)
        try:
            self.measured = watched.step
        except UserError as error:
            logger.warning("%s", error)
            return
        if self.folder is not None:
            watched.save(self.folder)
        if self.prints:
            print_steps(self.predicted, self.measured)
            print_advice(self.predicted, self.measured)
        self._log(list_figures("measured", self.measured) | list_errors(self.predicted, self.measured))

    def stop(self) -> None:
        """End the measurement of a loop that failed, without a report."""
        if self._watched is not None:
            watched, self._watched = self._watched, None
            watched.__exit__(RuntimeError, RuntimeError("the loop failed"), None)

    def _log(self, figures: dict[str, float]) -> None:
        if figures:
            self.log(figures)


def load_machine_of_run(machine: str | Machine, *, world: int) -> Machine:
    """Return the machine of a run of ``world`` ranks; a name without a number has as many GPUs."""
    from fivefold.machine.catalog import is_counted, replace_ranks
    from fivefold.requests.machines import load_machine

    if not isinstance(machine, str):
        return machine
    return load_machine(machine if is_counted(machine) else replace_ranks(machine, world))


def predict_step(
    model: str | Model | Mapping[str, Any], machine: str | Machine, layout: str, *, world: int, job: JobWords
) -> tuple[Step | None, Machine | None]:
    """Return the predicted step and its machine; where no prediction is possible, a warning of one line says why.

    ``model``: a name, a record, or a config of Hugging Face as a table. ``machine``: without a number it has ``world``
    GPUs.
    """
    from fivefold.api.functions import predict

    try:
        machine = load_machine_of_run(machine, world=world)
        step = predict(model, machine, layout, **job)
        if step.world != world:
            raise UserError(
                f"layout {layout!r} has {step.world} ranks, but the run has {world}; predict the layout that runs"
            )
    except UserError as error:
        logger.warning("no prediction: %s", error)
        return None, None
    return step, machine


def list_figures(kind: str, step: Step | None) -> dict[str, float]:
    """Return the key figures of a step by the names under which they are logged."""
    if step is None:
        return {}
    figures = {
        "step_seconds": step.time.step_seconds,
        "peak_memory_gib": step.memory.peak_bytes / GIB,
        "tokens_per_second_per_gpu": step.tokens_per_second_per_gpu,
        "mfu": step.mfu.causal,
    }
    return {f"{LOG_PREFIX}/{kind}_{name}": figure for name, figure in figures.items() if figure}  # 0: not known


def list_errors(predicted: Step | None, measured: Step | None) -> dict[str, float]:
    """Return the relative errors of step time and peak memory, by the names under which they are logged."""
    if predicted is None or measured is None or not measured.time.step_seconds:
        return {}
    return {
        f"{LOG_PREFIX}/error_step_time": predicted.time.step_seconds / measured.time.step_seconds - 1,
        f"{LOG_PREFIX}/error_peak_memory": predicted.memory.peak_bytes / measured.memory.peak_bytes - 1,
    }


def print_steps(predicted: Step | None, measured: Step | None = None) -> None:
    """Print one step, or predicted next to measured."""
    from fivefold.rendering.compare import render_table
    from fivefold.rendering.table import step as page
    from fivefold.results.step_comparison import compare

    if predicted is not None and measured is not None:
        _print(render_table(compare(predicted, measured)))
    elif (step := predicted or measured) is not None:
        _print(page(step))


def print_advice(predicted: Step | None, measured: Step) -> None:
    """Print the advice on a measured step, if its time was measured."""
    from fivefold.profiling.step_advice import advise_on_step

    if advice := advise_on_step(measured, predicted):
        _print(f"\n{advice}", markup=False, highlight=False)


def hide_progress_bars() -> AbstractContextManager[None]:
    """Clear the progress bars of tqdm, which trainers show, while lines are printed, and draw them again after it."""
    tqdm = sys.modules.get("tqdm.auto")
    return tqdm.tqdm.external_write_mode() if tqdm else nullcontext()


def _print(content: Any, **options: Any) -> None:
    from rich.console import Console

    with hide_progress_bars():
        Console().print(content, **options)
