"""The Search page: started by a button, streams progress, can be stopped; then proposal, Pareto front and table.

It also lists why the other layouts lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from pydantic import TypeAdapter

from fivefold.layout.spec import Layout
from fivefold.machine.catalog import replace_ranks, resolve
from fivefold.rendering.drawing import parallel, scatter
from fivefold.rendering.drawing.plot import time_unit
from fivefold.rendering.elements import Raw
from fivefold.rendering.grid import Column, make_grid
from fivefold.rendering.layout_legend import explain_layouts
from fivefold.rendering.point_charts import draw_front
from fivefold.rendering.robust import make_scenario_grid, render_regrets, summarize
from fivefold.rendering.run_estimate import describe_assumption, format_duration, make_offer_grid
from fivefold.rendering.search import CHANGES, CHOICES, REASONS, choose_changes, format_ranked, make_best_grid
from fivefold.rendering.step_view import list_key_figures
from fivefold.results.run_estimate import Offer, Offers
from fivefold.results.search_result import Ranked, SearchResult, Walk
from fivefold.units import choose_byte_unit, show_bytes, show_seconds
from fivefold.web.answers import Found
from fivefold.web.pages.plan import collect_expected
from fivefold.web.pages.render import render_fragment, render_page
from fivefold.web.pages.stream import Begun, Stream
from fivefold.web.question import SearchQuestion
from fivefold.web.site import WebServer
from fivefold.web.wording import use_page_words

MAX_LINES = 150  # of the parallel coordinates
CHOICE_AXES = ("tp", "cp", "pp", "ep", "v", "dp", "zero", "mbs", "ac")
SKETCHED, DRAWN = 10, 400  # layouts in the table while a search runs, and points of its picture at the end


class Fit(NamedTuple):
    """A layout that fits, as a search has evaluated it; the lowest score is the best."""

    score: float
    layout: str
    seconds: float
    peak_bytes: int
    precision: str
    reduce: str


FITS: tuple[Column[Fit], ...] = (
    Column("layout", attrgetter("layout"), is_text=True),
    Column("step time", attrgetter("seconds"), show_seconds),
    Column("peak memory", attrgetter("peak_bytes"), show_bytes),
)
FOUND: TypeAdapter[Found] = TypeAdapter(Found)


class SearchPage(Begun, SearchQuestion):
    """A question to ``search`` as the page asks it."""


def build_router(site: WebServer) -> APIRouter:
    """Build the routes of the page."""
    pages, stream = APIRouter(include_in_schema=False), Stream(site, "search", read=Fit._make)

    @pages.get("/search")
    async def search(request: Request, query: Annotated[SearchPage, Query()]) -> HTMLResponse:
        mistake = await site.check(query, runs=query.run)
        return render_page("search.html", request, query=query, mistake=mistake)

    @pages.get("/search/events")
    async def events(query: Annotated[SearchPage, Query()]) -> StreamingResponse:
        return stream.answer(
            query.convert(SearchQuestion),
            lambda result, fits: (
                stream.describe(query) + render_result(site, query, FOUND.validate_python(result), sorted(fits))
            ),
            sketch=lambda fits: render_best(query, sorted(fits)),
        )

    @pages.post("/search/events/stop")
    async def stop(work: Annotated[str, Query(max_length=20)]) -> Response:
        site.work.stop(work)
        return Response(status_code=204)

    return pages


def render_best(query: SearchPage, fits: Sequence[Fit]) -> str:
    """Return the best layouts of a search that still runs as a table."""
    best = fits[:SKETCHED]
    return render_fragment(
        "best_so_far.html", grid=make_grid(FITS, best), to=lambda fit: plan_of_fit(query, fit), number=len(fits)
    )


def render_result(site: WebServer, query: SearchPage, result: Found, fits: Sequence[Fit] = ()) -> str:
    """Return the result as HTML; ``fits``: the layouts that were evaluated and fit."""
    if isinstance(result, Offers):
        return render_fragment(
            "offers.html",
            found=result,
            grid=make_offer_grid(result),
            span=format_duration,
            assumption=describe_assumption,
            to=lambda offer: get_plan_url(site, query, offer),
            to_row=lambda row: get_plan_url(site, query, row[1]),
        )
    if isinstance(result, Walk):
        return render_fragment(
            "walk.html",
            found=result,
            changes=make_grid(CHANGES, choose_changes(result.changes, query.top)),
            path=make_grid(CHANGES, result.path),
            to=lambda item: _plan(query, layout=item.layout),
        )
    grids = {"reasons": make_grid(REASONS, result.reasons)}
    grids |= {"best": make_best_grid(enumerate(result.best, start=1))} if result.best else {}
    grids |= {"choices": make_grid(CHOICES, result.proposal.why)} if result.proposal else {}
    grids |= (
        {"regrets": render_regrets(result.robust), "scenarios": make_scenario_grid(result.robust)}
        if result.robust
        else {}
    )
    return render_fragment(
        "found.html",
        query=query,
        found=result,
        expected=collect_expected(result.chosen.step) if result.chosen else {},
        grids=grids,
        to=lambda item: address(query, item),
        figures=list_key_figures(result.proposal.choice.step) if result.proposal else (),
        to_row=lambda row: address(query, row[1]),
        pick=lambda row: pick_layout(query, row[1]),
        front=draw_search_front(query, result, fits[:DRAWN]) if len(result.front) > 1 or len(fits) > 1 else None,
        choices=draw_choices(query, fits),
        drawn=min(len(fits), DRAWN),
        fits=len(fits),
        legend=use_page_words(explain_layouts(map(format_ranked, result.best))),
        worded=summarize(result.robust) if result.robust else "",
    )


def address(query: SearchQuestion, ranked: Ranked) -> str:
    """Return the URL of the plan of one layout, with what the search changed in the job."""
    name = ranked.step.job["precision"]["name"]  # type: ignore[index]
    changes = {"precision": name} if name.removesuffix("-grad16") in query.also else {}
    return _plan(query, layout=ranked.step.layout, reduce=ranked.reduce, **changes)


def pick_layout(query: SearchQuestion, ranked: Ranked) -> str:
    """Return the layout as the page Compare takes it, or an empty text if its job differs from the question's."""
    layout = ranked.step.layout
    return layout if address(query, ranked) == _plan(query, layout=layout) else ""


def get_plan_url(site: WebServer, query: SearchQuestion, offer: Offer) -> str:
    """Return the URL of an offer's plan, on the machine by the name used in the question."""
    words = (query.machine, *query.machines)
    word_by_machine = {resolve(word, local=site.local, find=site.folder.path).name: word for word in words}
    return query.to_shared().url(
        "/plan",
        machine=replace_ranks(word_by_machine[offer.machine], offer.ranks),
        layout=offer.layout,
        **site.resolve(query).chosen_batch,
    )


def _plan(query: SearchQuestion, *, layout: str, reduce: str = "micro_batch", **changes: Any) -> str:
    settings = (*query.set, f"reduce={reduce}") if reduce != "micro_batch" else query.set
    return query.to_shared().url("/plan", layout=layout, set=settings, **changes)


def plan_of_fit(query: SearchQuestion, fit: Fit) -> str:
    """Return the URL of the plan of a layout that fits."""
    changes = {"precision": fit.precision} if fit.precision.removesuffix("-grad16") in query.also else {}
    reduce = fit.reduce if fit.reduce == "step" else "micro_batch"
    return _plan(query, layout=fit.layout, reduce=reduce, **changes)


def draw_search_front(query: SearchQuestion, result: SearchResult, fits: Sequence[Fit] = ()) -> Any:
    """Draw the Pareto front as a staircase, and the other layouts that fit as points."""
    points = [
        _build_point(
            entry.layout,
            entry.step_seconds,
            entry.memory_bytes,
            entry.precision,
            _plan(query, layout=entry.layout, reduce=entry.reduce),
        )
        for entry in result.front
    ]
    other_points = [
        _build_point(
            entry.step.layout,
            entry.step.time.step_seconds,
            entry.step.memory.peak_bytes,
            "",
            address(query, entry),
            look="dot other",
        )
        for entry in result.best
    ]
    other_points += [
        _build_point(fit.layout, fit.seconds, fit.peak_bytes, "", plan_of_fit(query, fit), look="dot other")
        for fit in fits
    ]
    drawn = {point.href for point in points}
    others = {point.href: point for point in other_points if point.href not in drawn}
    return draw_front([*others.values(), *points])  # the front on top


def draw_choices(query: SearchQuestion, fits: Sequence[Fit]) -> Raw:
    """Draw the choices of the fastest layouts that fit, with their memory and step time, as parallel coordinates."""
    fits = sorted(fits, key=lambda fit: fit.seconds)[:MAX_LINES]
    layouts = [Layout.parse(fit.layout) for fit in fits]
    size, unit = choose_byte_unit(max((fit.peak_bytes for fit in fits), default=1))
    scale, time_name = time_unit(max((fit.seconds for fit in fits), default=1.0))
    axes = [
        *(parallel.ParallelAxis(name, [getattr(layout, name) for layout in layouts]) for name in CHOICE_AXES),
        parallel.ParallelAxis(f"memory, {unit}", [fit.peak_bytes / size for fit in fits], is_measure=True),
        parallel.ParallelAxis(f"time, {time_name}", [fit.seconds * scale for fit in fits], is_measure=True),
    ]
    best = len(fits) // 10 or 1
    lines = [
        parallel.ParallelLine(
            f"{fit.layout}\n{show_seconds(fit.seconds)}, {show_bytes(fit.peak_bytes)}",
            plan_of_fit(query, fit),
            "F" if index < best else "update",
        )
        for index, fit in enumerate(fits)
    ]
    return parallel.draw_parallel_axes(axes, lines, label=f"choices of the {len(fits)} fastest layouts that fit")


def _build_point(
    layout: str, seconds: float, size: int, precision: str, href: str, *, look: str = "dot"
) -> scatter.ScatterPoint:
    tip = f"{layout}\n{show_seconds(seconds)}, {show_bytes(size)}" + (f", {precision}" if precision else "")
    return scatter.ScatterPoint(size, seconds, tip, href, look)
