"""``fivefold show``: a finished run, predicted next to measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cli import trace_compare
from fivefold.cli.options import print_line
from fivefold.cli.options import show as print_data
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import ShowOptions

if TYPE_CHECKING:
    from fivefold.step import Step


@accept_request(ShowOptions)
def show(request: ShowOptions) -> None:
    """Compare prediction and measurement of a finished run, and draw its pictures."""
    from fivefold.profiling.step_advice import advise_on_step
    from fivefold.rendering import charts as draw
    from fivefold.rendering.budget import render_page
    from fivefold.rendering.compare import render_table
    from fivefold.rendering.losses import draw_losses
    from fivefold.results.run_folder import find_step_file
    from fivefold.results.step_comparison import compare, describe_assumption, read_pair
    from fivefold.text_files import read_lines

    folder = request.folder
    if (unpredicted_step := _read_watched_step(find_step_file(folder))) is not None:
        from fivefold.rendering.table import step as step_page

        print_data(unpredicted_step.model_dump_json(indent=2) if request.as_json else step_page(unpredicted_step))
        if not request.as_json and (advice := advise_on_step(unpredicted_step)):
            print_data(f"\n{advice}")
        return
    predicted, measured = read_pair(folder / "step.json")
    rows = compare(predicted, measured)
    if request.as_json:
        import json as json_module

        print_data(json_module.dumps([row.model_dump(mode="json") for row in rows], indent=2))
    else:
        print_data(render_table(rows))
        if line := describe_assumption(predicted):
            print_data(line)
        steps = predicted, *trace_compare.read_dry_run(folder / "step.json"), measured
        print_data(render_page(steps, findings=measured.findings))
        if not measured.time.parts and (advice := advise_on_step(measured, predicted)):  # of a watched loop
            print_data(f"\n{advice}")
    if request.charts:
        title = f"{measured.model}, {measured.layout}"
        lines = read_lines(folder / "log.jsonl")
        for name, chart in (
            ("loss", draw_losses(lines, subtitle=title)),
            ("memory", draw.draw_memory_bars([predicted, measured])),
            ("compare", draw.compare_bars(rows)),
        ):
            draw.save(chart, folder / f"{name}.svg")
            print_line(f"drew {folder / name}.svg")
        trace_compare.draw(folder, measured)


def _read_watched_step(path: Path) -> Step | None:
    """Return the step of a watched loop without a prediction; None for the folder of ``train``."""
    from fivefold.step import Step
    from fivefold.text_files import read_file

    steps = read_file(path)
    return Step.read(steps["measured"], origin=f"{path}: measured") if [*steps] == ["measured"] else None
