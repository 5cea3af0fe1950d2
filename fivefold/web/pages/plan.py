"""The Plan page: one layout of one model on one machine, redrawn with every change."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic import Field

from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.planner import questions
from fivefold.record import UserError
from fivefold.rendering.drawing import interval, memory, pipeline
from fivefold.rendering.drawing.bars import scale, stacked
from fivefold.rendering.grid import make_grid
from fivefold.rendering.memory import finding as memory_finding
from fivefold.rendering.pipeline import finding
from fivefold.rendering.question import describe_job
from fivefold.rendering.search import CHANGES
from fivefold.rendering.step_view import list_memory_parts, list_time_parts, view_step
from fivefold.rendering.table import machine as machine_line
from fivefold.results.search_result import Change
from fivefold.step import StageMemory, Step
from fivefold.units import show_bytes, show_seconds
from fivefold.web import answers
from fivefold.web.controls import Control, Size, controls, sizes
from fivefold.web.pages.render import fragment, page
from fivefold.web.question import Question, ResolvedRequest
from fivefold.web.site import Site


class PlanQuestion(Question):
    """A question about one layout, with the pipeline rank whose memory is drawn."""

    rank: int | None = Field(None, description="Pipeline rank whose memory is drawn. Default: the fullest.")


class View(NamedTuple):
    """The content of the page; ``answer`` is None if there is a ``mistake``."""

    noun: ResolvedRequest | None = None
    rows: list[Control] = []
    sizes: list[Size] = []
    answer: dict[str, Any] | None = None
    mistake: str = ""
    start: str = ""  # a layout to start from, if that of the question cannot be parsed


def router(site: Site) -> APIRouter:
    """Build the routes of the page."""
    pages = APIRouter(include_in_schema=False)

    @pages.get("/plan")
    async def plan(request: Request, asked: Annotated[PlanQuestion, Query()]) -> HTMLResponse:
        view = await site.work.soon(lambda: look(site, asked))
        shown = site.folder.plain(view.mistake)
        return page("plan.html", request, asked=asked, view=view, mistake=shown, sheet=sheet)

    @pages.get("/plan/changes")
    async def changes(asked: Annotated[PlanQuestion, Query()]) -> HTMLResponse:
        """Return what single changes would give, with the plans of those that change the layout."""
        change_list = await site.answer(
            asked,
            lambda noun: questions.changes(model=noun.model, machine=noun.machine, job=noun.job, layout=asked.chosen()),
        )
        own_layout = str(asked.chosen())

        def address(change: Change) -> str:
            return asked.url("/plan", layout=change.layout) if change.layout != own_layout else ""

        links = [address(change) for change in change_list]
        return HTMLResponse(
            fragment("changes.html", grid=make_grid(CHANGES, change_list).drop_columns(["layout"]), links=links)
        )

    return pages


def look(site: Site, asked: PlanQuestion) -> View:
    """Return the view of a question; without an answer, as much as can be shown, and the reason."""
    try:
        noun = site.resolve(asked)
    except UserError as mistake:
        return View(mistake=str(mistake))
    try:
        layout = asked.chosen()
    except UserError as mistake:
        return View(noun, mistake=str(mistake), start=f"dp{noun.machine.ranks} zero3 mbs1")
    rows, machine_sizes = controls(noun, layout), sizes(noun, layout)
    try:
        return View(noun, rows, machine_sizes, add_pictures(noun, layout, rank=asked.rank))
    except UserError as mistake:
        return View(noun, rows, machine_sizes, mistake=str(mistake))


def add_pictures(noun: ResolvedRequest, layout: Layout, *, rank: int | None) -> dict[str, Any]:
    """Return the answer with its pictures."""
    plan = answers.planned(noun, layout, rank=rank)
    step, chip = plan.step, noun.machine.chip.memory_bytes
    scale_bytes, limit = scale(max(stage.peak_bytes for stage in step.memory.stages), chip)
    return {
        "step": step,
        "view": view_step(step),
        "rank": plan.rank,
        "drawn": plan.drawn,
        "layout": layout,
        "chip": chip,
        "cost": cost(step, noun.machine),
        "stages": [(stage, stage_bar(stage, whole=scale_bytes, limit=limit)) for stage in step.memory.stages],
        "fullest": list_memory_parts(max(step.memory.stages, key=lambda stage: stage.peak_bytes)),
        "memory": memory.picture(plan.levels, rank=plan.rank, capacity_bytes=chip),
        "memory_finding": memory_finding(plan.levels, rank=plan.rank, capacity_bytes=chip),
        "memory_looks": memory.looks(plan.levels),
        "pipeline": pipeline.picture(plan.rows, label=finding(step.time, plan.rows)),
        "pipeline_finding": finding(step.time, plan.rows),
        "pipeline_looks": pipeline.looks(plan.rows),
        "causes": (causes := list_time_parts(step.time)),
        "time_bar": stacked(causes, whole=step.time.step_seconds or 1.0, label="time of a step by cause"),
        "parts": sorted(step.time.parts.items(), key=lambda part: -part[1])[:12],
        "bands": bands(step),
    }


def stage_bar(stage: StageMemory, *, whole: float, limit: float | None) -> Any:
    """Return a stage's memory as a bar, all stages to one scale."""
    label = f"stage {stage.stage}: {show_bytes(stage.peak_bytes)}"
    return stacked(list_memory_parts(stage), whole=whole, label=label, limit=limit)


def cost(step: Step, machine: Machine) -> dict[str, float | None]:
    """Return GPU hours per 1 T tokens, and their price if the machine has one."""
    speed, price = step.tokens_per_second_per_gpu, machine.dollars_per_rank_hour
    hours = 1e12 / speed / 3600 if speed else 0.0
    return {"hours": hours, "dollars": None if price is None else hours * price}


def bands(step: Step) -> list[tuple[str, Any, Any]]:
    """Return the intervals of comparable runs, for time and for memory."""
    interval_bands = []
    for name, band, size, show in (
        ("step time", step.time.interval, step.time.step_seconds, show_seconds),
        ("peak memory", step.memory.interval, step.memory.peak_bytes, lambda size: show_bytes(round(size))),
    ):
        if band is not None:
            interval_bands.append((name, band, interval.band(band, predicted=size, show=show, label=name)))
    return interval_bands


def sheet(noun: ResolvedRequest) -> list[tuple[str, str]]:
    """Return the model, the machine and the job in a few facts."""
    model = noun.model
    shape = (
        f"{model.layers} layers of width {model.width:,}, {model.heads} heads ({model.kv_heads} kv), ffn {model.ffn:,}"
    )
    experts = f", {model.moe.topk} of {model.moe.experts} experts" if model.moe else ""
    return [
        (model.name, f"{shape}, vocabulary {model.vocab:,}{experts}"),
        (noun.machine.name, machine_line(noun.machine)),
        ("job", describe_job(noun.job)),
    ]
