"""Runs: the folder's runs, and of one its curves, live, predicted beside measured, its timeline, samples and events."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic import Field

from fivefold.record import Mistake
from fivefold.show import run_folder
from fivefold.show.budget import budget
from fivefold.show.compare import compare, difference, shown
from fivefold.show.drawing import lines, pipeline
from fivefold.show.drawing.lines import Curve
from fivefold.units import show_bytes, show_count, show_seconds
from fivefold.web import runs
from fivefold.web.pages.render import page
from fivefold.web.question import About
from fivefold.web.site import Site

LAST = 40  # events that are shown


class RunQuestion(About):
    """Which run is looked at; none: the list."""

    folder: str = Field("", max_length=1000)


def router(site: Site) -> APIRouter:
    """The routes of the page."""
    pages = APIRouter(include_in_schema=False)

    @pages.get("/runs")
    async def listed(request: Request, asked: Annotated[RunQuestion, Query()]) -> HTMLResponse:
        if not asked.folder:
            found = await site.work.soon(lambda: runs.find(site.folder))
            live = any(each.state == "running" for each in found)
            return page("runs.html", request, asked=asked, found=found, live=live)
        try:
            run = await site.work.soon(lambda: look(site, asked.folder))
        except Mistake as error:
            return page("mistake.html", request, asked=asked, mistake=site.folder.plain(str(error)))
        return page("run.html", request, asked=asked, run=run, show=shown, difference=difference)

    return pages


def look(site: Site, name: str) -> dict[str, Any]:
    """All that is shown of a run."""
    found = runs.log(site.folder, name)
    training = [line for line in found if "loss" in line]
    ended = runs.steps(site.folder, name)
    return {
        "name": name, "live": ended is None and runs.is_live(site.folder, name),
        "summary": runs.summary(site.folder, site.folder.path(name)), "ended": ended,
        "loss": loss(found), "speed": speed(training), "memory": memory(training),
        "rows": compare(ended.predicted, ended.measured) if ended else [],
        "budget": budget(ended.predicted.time, ended.measured.time) if ended and ended.measured.time.parts else [],
        "lanes": lanes(site, name),
        "events": [line for line in found if "event" in line][: -LAST - 1 : -1],
    }  # fmt: skip


def loss(found: list[dict[str, Any]]) -> Any:
    """Training and held-out loss."""
    named = (("training", "F", "loss"), ("held-out", "BW", "heldout_loss"))
    return lines.picture([Curve(name, look, _points(found, key)) for name, look, key in named],
                         label="loss over steps", y_title="nats")  # fmt: skip


def speed(training: list[dict[str, Any]]) -> Any:
    """Tokens per second of each step."""
    pairs = pairwise(training)
    points = [
        (after["step"], (after["tokens"] - before["tokens"]) / after["seconds"])
        for before, after in pairs
        if after.get("seconds") and "tokens" in after and "tokens" in before
    ]
    return lines.picture([Curve("tokens/s", "W", points, show_count)], label="tokens per second over steps")


def memory(training: list[dict[str, Any]]) -> Any:
    """What the process holds, in GiB."""
    points = [(step, size / 2**30) for step, size in _points(training, "resident_bytes")]
    points = points or [(step, size / 2**30) for step, size in _points(training, "peak_bytes")]
    curve = Curve("memory", "reduce", points, lambda size: show_bytes(size * 2**30))
    return lines.picture([curve], label="memory over steps", y_title="GiB")


def lanes(site: Site, name: str) -> dict[str, Any]:
    """The timeline: predicted, rehearsed and traced, one above the other."""
    try:
        kinds = run_folder.lanes(site.folder.path(name))
    except Mistake:
        return {}
    rows = [tuple(row) for each in kinds.values() for row in each if row]
    if not rows:
        return {}
    names = [f"{kind} {rank}" for kind, each in kinds.items() for rank, row in enumerate(each) if row]
    whole = show_seconds(max(row[-1].end for row in rows))
    stages = min(len(each) for each in kinds.values())
    drawn = pipeline.picture(rows, label=f"the step over time, {whole}", names=names, pp=stages)
    return {"picture": drawn, "looks": pipeline.looks(rows)}


def _points(found: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(line["step"], line[key]) for line in found if isinstance(line.get(key), int | float)]
