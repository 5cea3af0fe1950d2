"""The traces of a run beside its prediction: one file for Perfetto, in the run's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.cli.options import say
from fivefold.record import Mistake

if TYPE_CHECKING:
    from fivefold.layout.spans import Span
    from fivefold.step import Step
    from fivefold.train.run import Run


def save_lanes(run: Run, predicted: Step) -> None:
    """Merge the ranks' files; where some lie on other hosts, say so instead."""
    from fivefold.layout import trace_file
    from fivefold.show import trace

    try:
        traces = trace_file.read(run.folder)
    except Mistake as mistake:
        say(f"traces are not merged: {mistake}")
        return
    path = run.folder / trace_file.FOLDER / "step.json"
    error = max(each.clock_error for each in traces)
    about = {"model": predicted.model, "machine": predicted.machine, "layout": predicted.layout,
             "clock_error_us": f"{1e6 * error:.1f}"}  # fmt: skip
    trace.write(trace.lanes(traces, predicted=_planned(run, predicted)), path, about=about)
    say(f"wrote {path}: {len(traces[0].steps)} steps of {len(traces)} ranks, whose clocks agree to "
        f"{1e6 * error:.0f} us; open it at https://ui.perfetto.dev")  # fmt: skip


def _planned(run: Run, predicted: Step) -> tuple[tuple[Span, ...], ...]:
    """The spans of the predicted step, unless it has another schedule than the layout's own."""
    from fivefold.cli.options import load_machine
    from fivefold.cli.pictures import IN_TRACE
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve
    from fivefold.plan.predict import planner
    from fivefold.plan.price.spans import spans

    if run.schedule is not None:
        return ()
    layout = Layout.parse(predicted.layout)
    return spans(planner(resolve(run.model), load_machine(run.machine), run.job), layout, limit=IN_TRACE)
