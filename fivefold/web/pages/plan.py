"""The Plan page: one layout of one model on one machine, redrawn with every change."""

from __future__ import annotations

from contextlib import suppress
from math import ceil
from typing import Annotated, Any, ClassVar, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import Field

from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan, WrittenConfig
from fivefold.interop.registry import find_stack_format, list_job_formats
from fivefold.interop.write import write
from fivefold.layout.spec import Layout
from fivefold.machine import toml
from fivefold.planner.batch import advise_sequences
from fivefold.planner.questions.changes import find_fitting_change, list_changes_and_pairs
from fivefold.planner.run_estimate import validate_tokens
from fivefold.rendering.answers import list_change_sections
from fivefold.rendering.drawing import interval, memory, pipeline
from fivefold.rendering.drawing.bars import draw_stacked, scale
from fivefold.rendering.interval import describe_basis, format_outside, show_range
from fivefold.rendering.memory import describe_peak as memory_finding
from fivefold.rendering.pipeline import describe_step
from fivefold.rendering.question import describe_job
from fivefold.rendering.search import describe_fitting_change
from fivefold.rendering.step_view import list_memory_parts, list_time_parts, view_step
from fivefold.rendering.table import describe_machine as machine_line
from fivefold.requests.commands import DEFAULT_TOKENS
from fivefold.requests.configs import describe_defaults
from fivefold.requests.fields import Line, TokenCount
from fivefold.requests.settings import Price
from fivefold.results.search_result import Change
from fivefold.step import StageMemory, Step
from fivefold.units import show_bytes, show_count, show_seconds
from fivefold.web import answers
from fivefold.web.controls import Control, JobChoice, Size, list_controls, list_job_choices, list_sizes
from fivefold.web.pages.ask import select_plans
from fivefold.web.pages.render import render_fragment, render_page
from fivefold.web.question import CONFIG, NO_MISTAKE, JobQuestion, Mistake, PredictQuestion, ResolvedRequest
from fivefold.web.run_config import ReadConfig, RunConfig, read_run_config
from fivefold.web.site import WebServer
from fivefold.web.wording import use_page_words

FIRST_STAGES = 32  # whose memory is drawn with the figures; that of the others once they are scrolled to


class PlanQuestion(PredictQuestion):
    """A question about one layout, with the pipeline rank whose memory is drawn."""

    unlinked: ClassVar[tuple[str, ...]] = ("run_config",)

    run_config: RunConfig = ""
    rank: int | None = Field(None, description="Pipeline rank whose memory is drawn. Default: the fullest.")
    tokens: TokenCount = Field(
        DEFAULT_TOKENS, description="Training tokens of the run whose cost is shown, such as 2T."
    )
    price: Price | None = Field(None, description="Dollars per GPU hour. Default: the price of the machine.")
    to: Line = Field("", description="Format of the config that is previewed.")
    over_time: bool = Field(False, description="Draw everything at once, not after the figures.")


class View(NamedTuple):
    """The content of the page; ``answer`` is None if there is a ``mistake``."""

    resolved: ResolvedRequest | None = None
    rows: list[Control] = []
    sizes: list[Size] = []
    answer: dict[str, Any] | None = None
    mistake: Mistake = NO_MISTAKE
    choices: dict[str, list[JobChoice]] = {}  # of the fields of the job
    config: ReadConfig | None = None  # of a trainer, that was pasted
    start: str = ""  # a layout to start from, if that of the question cannot be parsed


def build_router(site: WebServer) -> APIRouter:
    """Build the routes of the page."""
    pages = APIRouter(include_in_schema=False)

    @pages.get("/plan")
    async def plan(request: Request, query: Annotated[PlanQuestion, Query()]) -> HTMLResponse:
        view = await site.work.run_soon(lambda: build_view(site, query))
        return render_page(
            "plan.html", request, query=query, view=view, mistake=view.mistake, sheet=list_facts, longest=CONFIG
        )

    @pages.get("/plan/read")
    async def read(query: Annotated[PlanQuestion, Query()]) -> Response:
        """Lead to the plan of a pasted config; one that cannot be read leaves the question as it is."""

        def fill() -> PredictQuestion:
            with suppress(UserError):
                return read_run_config(query, query.run_config, folder=site.folder, local=site.local).filled
            return query

        filled = await site.work.run_soon(fill) if query.run_config.strip() else query
        return RedirectResponse(filled.url("/plan", run_config=query.run_config), status_code=303)

    @pages.get("/plan/over-time")
    async def pictures(query: Annotated[PlanQuestion, Query()]) -> HTMLResponse:
        """Return the pictures of a step over time, which take longer than its figures."""
        values = await site.answer(
            query, lambda resolved: draw_over_time(resolved, query.parse_layout(resolved.machine), query)
        )
        return HTMLResponse(render_fragment("over_time.html", a=values))

    @pages.get("/plan/stages")
    async def stages(query: Annotated[PlanQuestion, Query()]) -> HTMLResponse:
        """Return the memory of the stages after the first."""

        def draw(resolved: ResolvedRequest) -> str:
            step = answers.step(resolved, query.parse_layout(resolved.machine))
            stages = draw_stages(step, resolved.machine.chip.memory_bytes, slice(FIRST_STAGES, None))
            return render_fragment("stages.html", stages=stages, rank=find_drawn_rank(step, query), query=query)

        return HTMLResponse(await site.answer(query, draw))

    @pages.get("/plan/fit")
    async def fit(query: Annotated[PlanQuestion, Query()]) -> HTMLResponse:
        """Return what makes a plan fit, as the command ``predict`` says it."""
        return HTMLResponse(await site.answer(query, lambda resolved: render_fit(resolved, query)))

    @pages.get("/plan/config")
    async def config(query: Annotated[PlanQuestion, Query()]) -> HTMLResponse:
        """Return the config with which a software runs the plan, or what has to change."""
        try:
            written = await site.answer(query, lambda resolved: write_config(resolved, query))
        except UserError as error:
            return HTMLResponse(render_fragment("not_written.html", mistake=site.word_message(error)))
        return HTMLResponse(render_fragment("config.html", files=written.files, remarks=written.remarks))

    @pages.get("/plan/model")
    async def model(query: Annotated[JobQuestion, Query()]) -> Response:
        """Return the model of the page as a file."""
        text = await site.answer(query, lambda resolved: toml.emit(resolved.model.dump_changes()))
        return Response(text, media_type="application/toml")

    @pages.get("/plan/changes")
    async def changes(query: Annotated[PlanQuestion, Query()]) -> HTMLResponse:
        """Return what changes would give, with the plans of those that change the layout only."""

        def find_changes(resolved: ResolvedRequest) -> tuple[ResolvedRequest, list[Change]]:
            layout = query.parse_layout(resolved.machine)
            return resolved, list_changes_and_pairs(
                model=resolved.model, machine=resolved.machine, job=resolved.job, layout=layout
            )

        resolved, change_list = await site.answer(query, find_changes)
        own_layout = str(query.parse_layout(resolved.machine))
        linked = select_plans(change_list)

        def address(change: Change) -> str:
            is_plan = change in linked and change.layout != own_layout
            return query.url("/plan", layout=change.layout, **resolved.chosen_batch) if is_plan else ""

        return HTMLResponse(render_fragment("changes.html", sections=list_change_sections(change_list), to=address))

    return pages


def build_view(site: WebServer, query: PlanQuestion) -> View:
    """Return the view of a question; without an answer, as much as can be shown, and the reason."""
    view = _build_answered_view(site, query)
    if not query.run_config.strip() or view.resolved is None:
        return view
    try:
        config = read_run_config(query, query.run_config, folder=site.folder, local=site.local)
    except UserError as error:
        return view._replace(answer=None, mistake=Mistake(site.word_message(error), "run_config"))
    return view._replace(config=config)


def _build_answered_view(site: WebServer, query: PlanQuestion) -> View:
    """Return the view of a question without the config that it may have."""
    try:
        resolved = site.resolve(query)
    except UserError as error:
        return View(mistake=site.find_mistake(query, error))
    try:
        layout = query.parse_layout(resolved.machine)
    except UserError as error:
        start = f"dp{resolved.machine.ranks} zero3 mbs1"
        return View(resolved, mistake=site.find_mistake(query, error), start=start)
    view = View(
        resolved,
        list_controls(resolved, layout),
        list_sizes(resolved, layout),
        choices=list_job_choices(resolved, layout),
    )
    try:
        return view._replace(answer=predict_step(resolved, layout, query))
    except UserError as error:
        return view._replace(mistake=site.find_mistake(query, error))


def write_config(resolved: ResolvedRequest, query: PlanQuestion) -> WrittenConfig:
    """Write the plan as a config of the format ``to``; raises ``UserError`` for what that cannot express."""
    machine = f"{resolved.machine.name}:{resolved.machine.ranks}"
    layout = query.parse_layout(resolved.machine)
    plan = ConfigPlan(resolved.model, layout, resolved.job, resolved.machine.ranks_per_node, machine)
    config = write(plan, to=query.to or find_stack_format(resolved.job))
    defaults = use_page_words(describe_defaults(resolved.job, stated=resolved.stated))
    return config._replace(remarks=(*config.remarks, *((defaults,) if defaults else ())))


def predict_step(request: ResolvedRequest, layout: Layout, query: PlanQuestion) -> dict[str, Any]:
    """Predict a step, and return what the templates show of it.

    The pictures over time are left to a second request, unless the question says otherwise.
    """
    step = answers.step(request, layout)
    chip = request.machine.chip.memory_bytes
    formats = list_job_formats(request.job)
    return {
        "step": step,
        "view": view_step(step),
        "rank": find_drawn_rank(step, query),
        "over_time": draw_over_time(request, layout, query, step=step) if query.over_time else None,
        "height": memory.HEIGHT + pipeline.find_row_height(layout.pp) * layout.pp,
        "chip": chip,
        "cost": describe_cost(step, request, tokens=query.tokens, price=query.price),
        "own_formats": [form for form in formats if form.is_of(request.job.stack.name)],
        "other_formats": [form for form in formats if not form.is_of(request.job.stack.name)],
        "stages": draw_stages(step, chip, slice(None if query.over_time else FIRST_STAGES)),
        "fullest": list_memory_parts(max(step.memory.stages, key=lambda stage: stage.peak_bytes)),
        "causes": (causes := list_time_parts(step)),
        "time_bar": draw_stacked(causes, total=step.time.step_seconds or 1.0, label="time of a step by cause"),
        "parts": sorted(step.time.parts.items(), key=lambda part: -part[1])[:12],
        **collect_expected(step),
    }


def render_fit(request: ResolvedRequest, query: PlanQuestion) -> str:
    """Render the single change with which a plan fits, with a link if it changes the layout only, or that none does."""
    layout = query.parse_layout(request.machine)
    change = find_fitting_change(model=request.model, machine=request.machine, job=request.job, layout=layout)
    other = change.layout if change and change.layout != str(layout) else ""
    address = query.url("/plan", layout=other, **request.chosen_batch) if other else ""
    return render_fragment("fit.html", line=describe_fitting_change(change), layout=other, to=address)


def find_drawn_rank(step: Step, query: PlanQuestion) -> int:
    """Return the pipeline rank whose memory is drawn: that of the question, or the fullest."""
    stages = step.memory.stages
    if query.rank is not None and 0 <= query.rank < len(stages):
        return query.rank
    return max(stages, key=lambda stage: stage.peak_bytes).stage


def draw_over_time(
    request: ResolvedRequest, layout: Layout, query: PlanQuestion, *, step: Step | None = None
) -> dict[str, Any]:
    """Draw the memory of one rank and the pipeline over time; ``step``: the predicted step, if it is known already."""
    step = step or answers.step(request, layout)
    chip = request.machine.chip.memory_bytes
    rank = find_drawn_rank(step, query)
    rows, levels, _, drawn = answers.predict_over_time(request, layout, rank=rank)
    title = describe_step(step.time, rows)
    return {
        "pp": layout.pp,
        "rank": rank,
        "drawn": drawn,
        "memory": memory.draw_memory(levels, rank=rank, capacity_bytes=chip),
        "memory_finding": memory_finding(levels, rank=rank, capacity_bytes=chip),
        "memory_legend": memory.list_legend_entries(levels),
        "pipeline": pipeline.draw_pipeline(rows, label=title),
        "pipeline_finding": title,
        "pipeline_legend": pipeline.list_legend_entries(rows),
    }


def draw_stages(step: Step, capacity_bytes: float, chosen: slice) -> list[tuple[StageMemory, Any]]:
    """Return the ``chosen`` stages with their memory as bars, all stages to one scale."""
    total, limit = scale(max(stage.peak_bytes for stage in step.memory.stages), capacity_bytes)
    return [
        (stage, draw_stacked(list_memory_parts(stage), total=total, label=label, limit=limit))
        for stage in step.memory.stages[chosen]
        for label in [f"stage {stage.stage}: {show_bytes(stage.peak_bytes)}"]
    ]


def describe_cost(step: Step, request: ResolvedRequest, *, tokens: float, price: float | None) -> tuple[str, str, str]:
    """Return the cost of a run as a figure: its value, its name and a remark. Dollars if there is a price."""
    machine = request.machine
    speed = step.tokens_per_second_per_gpu * step.world
    price = machine.dollars_per_rank_hour if price is None else price
    run = f"for {show_count(validate_tokens(tokens)).replace('.00', '')} tokens"
    if not speed:
        return "–", f"GPU hours {run}", ""
    hours, days = tokens / speed / 3600 * machine.ranks, tokens / speed / 86400
    duration = f"{days:,.1f} days, {describe_steps(request, tokens=tokens)}"
    if price is None:
        return show_count(hours), f"GPU hours {run}", f"{duration}; for dollars give “$ per GPU and hour”"
    return f"${show_count(hours * price)}", run, f"{duration}, {show_count(hours)} GPU hours at ${price:g}"


def describe_steps(request: ResolvedRequest, *, tokens: float) -> str:
    """Return the number of steps of a run, and the sequences per step that are advised if the question names none.

    The advice is for pretraining, not for adapters.
    """
    job = request.job
    line = f"{show_count(ceil(tokens / job.tokens_per_step))} steps of {job.global_batch:,} sequences"
    advised = advise_sequences(request.model, sequence=job.sequence, tokens=tokens)
    is_advised = request.chosen_batch and job.adapter is None and advised > job.global_batch
    return f"{line} ({advised:,} are advised)" if is_advised else line


def collect_expected(step: Step) -> dict[str, Any]:
    """Return what ``part_expected.html`` shows: the intervals of a step, and in what no published run is like it."""
    return {"bands": draw_bands(step), "outside": format_outside(step)}


def draw_bands(step: Step) -> list[tuple[str, str, Any, str]]:
    """Return the intervals of comparable runs, for time and for memory: with the prediction, a picture and words."""
    interval_bands = []
    for name, band, size, show in (
        ("step time", step.time.interval, step.time.step_seconds, show_seconds),
        ("peak memory", step.memory.interval, step.memory.peak_bytes, lambda size: show_bytes(round(size))),
    ):
        if band is not None:
            half = show_range(show(band.low_50), show(band.high_50))
            words = f"50 % interval {half}, 90 % interval {show_range(show(band.low_90), show(band.high_90))}"
            picture = interval.draw_band(band, predicted=size, show=show, label=name)
            interval_bands.append((name, show(size), picture, f"{words} ({describe_basis(band)})"))
    return interval_bands


def list_facts(resolved: ResolvedRequest) -> list[tuple[str, str]]:
    """Return the model, the machine, the job and the user's settings in a few facts."""
    model = resolved.model
    shape = (
        f"{model.layers} layers of width {model.width:,}, {model.heads} heads ({model.kv_heads} kv), ffn {model.ffn:,}"
    )
    experts = f", {model.moe.topk} of {model.moe.experts} experts" if model.moe else ""
    return [
        (model.name, f"{shape}, vocabulary {model.vocab:,}{experts}"),
        (resolved.machine.name, machine_line(resolved.machine)),
        ("job", describe_job(resolved.job, stated=resolved.stated)),
        *([("from", resolved.settings)] if resolved.settings else []),
    ]
