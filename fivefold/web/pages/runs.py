"""The Runs page: the folder's runs; for one of them curves, predicted next to measured, timeline and events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic import Field

from fivefold.errors import UserError
from fivefold.rendering.budget import make_budget_grid
from fivefold.rendering.compare import render_table
from fivefold.rendering.drawing import lines, pipeline
from fivefold.rendering.drawing.lines import Curve
from fivefold.rendering.losses import draw_losses, list_loss_curves, list_points
from fivefold.requests.fields import Lines
from fivefold.results import run_folder
from fivefold.results.run_folder import RunFolder
from fivefold.results.step_comparison import QuantityComparison, compare, compare_unfinished
from fivefold.step import Step
from fivefold.units import GIB, choose_byte_unit, show_bytes, show_count, show_seconds
from fivefold.web import runs
from fivefold.web.pages.render import render_page
from fivefold.web.question import JobQuestion, Mistake
from fivefold.web.site import WebServer

LAST = 40  # number of events shown
RUN_LOOKS = ("F", "BW", "W", "messages", "reduce", "update")  # colours of runs that are compared
SMOOTHS = (1, 10, 50, 200)  # offered numbers of steps
LIVE, QUIET = 2000, 5000  # polling intervals in milliseconds: while something runs, and while it may start


class RunQuestion(JobQuestion):
    """The run to show, or the runs to compare; without any, the list."""

    folder: str = Field("", max_length=1000)
    compare: Lines = Field((), description="Folders of runs to compare.")
    smooth: int = Field(1, ge=1, le=1000, description="Steps over which losses and speeds are averaged.")


def build_router(site: WebServer) -> APIRouter:
    """Build the routes of the page."""
    pages = APIRouter(include_in_schema=False)

    @pages.get("/runs")
    async def show_runs(request: Request, query: Annotated[RunQuestion, Query()]) -> HTMLResponse:
        if query.compare and not query.folder:
            try:
                shown = await site.work.run_soon(lambda: compare_runs(site, query))
            except UserError as error:
                return render_page("mistake.html", request, query=query, mistake=Mistake(site.word_message(error)))
            return render_page("runs_compared.html", request, query=query, shown=shown, smooths=SMOOTHS)
        if not query.folder:
            summaries = await site.work.run_soon(lambda: runs.find(site.folder))
            live = any(run_summary.state == "running" for run_summary in summaries)
            return render_page("runs.html", request, query=query, found=summaries, poll=LIVE if live else QUIET)
        try:
            run = await site.work.run_soon(lambda: build_view(site, query.folder))
        except UserError as error:
            return render_page("mistake.html", request, query=query, mistake=Mistake(site.word_message(error)))
        return render_page("run.html", request, query=query, run=run)

    return pages


def compare_runs(site: WebServer, query: RunQuestion) -> dict[str, Any]:
    """Return the curves of several runs in one picture each, and their figures."""
    names = list(dict.fromkeys(query.compare))
    if not 2 <= len(names) <= len(RUN_LOOKS):
        raise UserError(f"{len(names)} runs; compare 2 to {len(RUN_LOOKS)}")
    logs = [[line for line in runs.read_log(site.folder, name) if "loss" in line] for name in names]
    looks = list(zip(RUN_LOOKS, names, strict=False))
    predictions = [read_any_prediction(site, name) for name in names]

    def draw(
        read: Callable[[list[dict[str, Any]]], list[tuple[float, float]]],
        label: str,
        *,
        y_title: str = "",
        expect: Callable[[Step], float] | None = None,
    ) -> Any:
        curves = []
        for (look, name), log, predicted in zip(looks, logs, predictions, strict=True):
            points = smooth(read(log), query.smooth)
            curves.append(Curve(name, look, points))
            if predicted is not None and expect is not None and points:
                ends = [(points[0][0], expect(predicted)), (points[-1][0], expect(predicted))]
                curves.append(Curve(f"{name}, predicted", f"{look} expected", ends))
        return lines.draw_lines(curves, label=label, x_title="optimizer step", y_title=y_title)

    pictures = {
        "Loss": draw(lambda log: list_points(log, "loss"), "loss over steps", y_title="nats per token"),
        "Gradient norm": draw(lambda log: list_points(log, "gradient_norm"), "gradient norm over steps"),
        "Tokens per second": draw(
            list_speeds, "tokens per second over steps", expect=lambda step: step.tokens_per_second_per_gpu * step.world
        ),
        "MFU, causal": draw(
            lambda log: list_points(log, "mfu_causal"), "MFU over steps", expect=lambda step: step.mfu.causal
        ),
        "Memory of the process": draw(
            lambda log: [(step, size / GIB) for step, size in list_points(log, "resident_bytes")],
            "memory over steps",
            y_title="GiB",
        ),
    }
    return {
        "pictures": {title: picture for title, picture in pictures.items() if picture},
        "looks": looks,
        "summaries": [runs.summarize_run(site.folder, site.folder.path(name)) for name in names],
        "poll": LIVE if any(runs.is_live(site.folder, name) for name in names) else 0,
    }


def smooth(points: Sequence[tuple[float, float]], steps: int) -> list[tuple[float, float]]:
    """Return the mean of each point and up to ``steps`` - 1 points before it."""
    sums = [0.0, *accumulate(value for _, value in points)]
    return [
        (step, (sums[index + 1] - sums[max(0, index + 1 - steps)]) / min(index + 1, steps))
        for index, (step, _) in enumerate(points)
    ]


def build_view(site: WebServer, name: str) -> dict[str, Any]:
    """Return everything that is shown for a run."""
    log_lines = runs.read_log(site.folder, name)
    training = [line for line in log_lines if "loss" in line]
    finished = runs.read_steps(site.folder, name)
    live = runs.is_live(site.folder, name)
    predicted = read_any_prediction(site, name)
    return {
        "name": name,
        "poll": 0 if finished else LIVE if live else QUIET,
        "summary": runs.summarize_run(site.folder, site.folder.path(name)),
        "ended": finished,
        "predicted": predicted,
        "loss": draw_losses(log_lines).chart if list_loss_curves(log_lines) else "",
        "speed": draw_speed(training, predicted),
        "memory": draw_memory(training),
        "compared": render_table(rows) if (rows := compare_run(predicted, finished, training)) else None,
        "budget": make_budget_grid(finished.predicted.time, finished.measured.time)
        if finished and finished.measured.time.parts
        else None,
        "lanes": draw_lanes(site, name),
        "events": [line for line in log_lines if "event" in line][: -LAST - 1 : -1],
    }


def read_any_prediction(site: WebServer, name: str) -> Step | None:
    """Return the prediction of a run, whether it has ended or not; None if there is none."""
    finished = runs.read_steps(site.folder, name)
    return finished.predicted if finished else runs.read_prediction(site.folder, name)


def compare_run(
    predicted: Step | None, ended: RunFolder | None, training: list[dict[str, Any]]
) -> list[QuantityComparison]:
    """Compare prediction and measurement: in full once the run has ended, before that what is logged."""
    if ended is not None:
        return compare(ended.predicted, ended.measured)
    return compare_unfinished(predicted, training) if predicted is not None else []


def list_speeds(training: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return (step, tokens per second) of each logged step but the first."""
    return [
        (after["step"], (after["tokens"] - before["tokens"]) / after["seconds"])
        for before, after in pairwise(training)
        if after.get("seconds") and "tokens" in after and "tokens" in before
    ]


def draw_speed(training: list[dict[str, Any]], predicted: Step | None) -> Any:
    """Draw tokens per second of each step, and their prediction."""
    points = list_speeds(training)
    curves = [Curve("measured", "W", points, show_count)]
    if predicted is not None and points:
        predicted_speed = predicted.tokens_per_second_per_gpu * predicted.world
        ends = [(points[0][0], predicted_speed), (points[-1][0], predicted_speed)]
        curves.append(Curve("predicted", "predicted", ends, show_count))
    return lines.draw_lines(curves, label="tokens per second over steps")


def draw_memory(training: list[dict[str, Any]]) -> Any:
    """Draw the memory that the process holds."""
    sizes = list_points(training, "resident_bytes")
    size, unit = choose_byte_unit(max((resident for _, resident in sizes), default=0))
    curve = Curve(
        "memory",
        "reduce",
        [(step, resident / size) for step, resident in sizes],
        lambda resident: show_bytes(resident * size),
    )
    return lines.draw_lines([curve], label="memory over steps", y_title=unit)


def draw_lanes(site: WebServer, name: str) -> dict[str, Any]:
    """Return the timeline: predicted, dry run and traced, one above the other."""
    try:
        kinds = run_folder.list_lanes(site.folder.path(name))
    except UserError:
        return {}
    rows = [tuple(row) for ranks in kinds.values() for row in ranks if row]
    if not rows:
        return {}
    names = [f"{kind} {rank}" for kind, ranks in kinds.items() for rank, row in enumerate(ranks) if row]
    duration = show_seconds(max(row[-1].end for row in rows))
    stages = min(len(ranks) for ranks in kinds.values())
    picture = pipeline.draw_pipeline(rows, label=f"the step over time, {duration}", names=names, pp=stages)
    return {"picture": picture, "looks": pipeline.list_legend_entries(rows)}
