"""The end of a run: prints its last output, compares prediction with measurement, and writes its report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.cli import trace_compare
from fivefold.cli.options import print_line, show
from fivefold.record import UserError, read_text

if TYPE_CHECKING:
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.step import Step
    from fivefold.trainer.run import Run


def write_report(run: Run, layout: Layout, *, model: Model, machine: Machine) -> None:
    """Write the run's report into its folder; an error is printed and has no other effect."""
    try:
        from fivefold.cli.commands import report
        from fivefold.planner.predict import get_planner
        from fivefold.results.run_folder import read

        if not (run.folder / "step.json").exists():
            return
        finished_run = read(run.folder)
        has_own_schedule = run.schedule is None  # the planner knows only the layout's own schedules
        drawing = (
            report.draw_step(get_planner(model, machine, run.job), layout, finished_run.predicted)
            if has_own_schedule
            else None
        )
        print_line(f"wrote {report.write_run_report(finished_run, drawing, run)}")
    except Exception as error:
        print_line(f"no report: {str(error).splitlines()[0] if str(error) else type(error).__name__}")


def print_proof(run: Run, proof: Any, *, json: bool) -> None:
    """Print the run's end, its sample, and predicted next to measured; raises ``SystemExit`` if a signal stopped it."""
    from fivefold.rendering.budget import render_page
    from fivefold.rendering.compare import render_table
    from fivefold.results.step_comparison import compare, describe_assumption

    outcome = proof.outcome
    if outcome.stopped:
        print_line(
            f"fivefold: stopped by {outcome.stopped} after step {outcome.step} of {run.job.steps}; "
            f"saved {outcome.checkpoint}; the same command goes on from there"
        )
        raise SystemExit(1)
    print_line(f"finished {outcome.step} steps; saved {outcome.checkpoint or 'nothing'}")
    if proof.text:
        print_line(f"\nsample after {run.sample!r}:\n{proof.text}\n")
    pair = (
        (proof.predicted, proof.measured)
        if proof.measured
        else _read_earlier_steps(run.folder / "step.json", proof.predicted)
    )
    if pair is None:
        print_line("too few steps to measure one; a run of 5 steps or more ends with predicted next to measured")
        return
    show(read_text(run.folder / "step.json", kind="JSON") if json else render_table(compare(*pair)))
    if not json:
        if line := describe_assumption(pair[0]):
            show(line)
        show(
            render_page(
                (pair[0], *trace_compare.read_dry_run(run.folder / "step.json"), pair[1]), findings=pair[1].findings
            )
        )


def _read_earlier_steps(path: Path, predicted: Step) -> tuple[Step, Step] | None:
    """Return the steps that an earlier start of this run wrote, as this start may have had nothing left to train."""
    from fivefold.results.step_comparison import read_pair

    try:
        earlier_prediction, measured = read_pair(path)
    except UserError:
        return None
    is_same_run = all(
        getattr(earlier_prediction, name) == getattr(predicted, name) for name in ("model", "machine", "layout", "job")
    )
    return (earlier_prediction, measured) if is_same_run else None
