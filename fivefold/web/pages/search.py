"""Search: begins with a button, streams how far it is, can be stopped; then proposal, front, table, why others lost."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic import Field
from starlette.responses import StreamingResponse

from fivefold.layout.search_result import Ranked, SearchResult
from fivefold.show.drawing import scatter
from fivefold.units import GIB, show_bytes, show_seconds
from fivefold.web.pages.render import fragment, page
from fivefold.web.pages.stream import streamed
from fivefold.web.question import SearchQuestion
from fivefold.web.site import Site


class SearchPage(SearchQuestion):
    """... as the page asks it: more of everything."""

    top: int = Field(20, ge=1, le=200, description="How many layouts to show.")
    run: bool = Field(False, description="Whether the search begins at once.")


def router(site: Site) -> APIRouter:
    """The routes of the page."""
    pages = APIRouter(include_in_schema=False)
    kept: OrderedDict[str, str] = OrderedDict()

    @pages.get("/search")
    async def search(request: Request, asked: Annotated[SearchPage, Query()]) -> HTMLResponse:
        return page("search.html", request, asked=asked)

    @pages.get("/search/events")
    async def events(asked: Annotated[SearchPage, Query()]) -> StreamingResponse:
        def draw(result: Any) -> str:
            return shown(asked, SearchResult.model_validate(result))

        found = streamed(site, "ranked", asked.question(), draw, kept)
        return StreamingResponse(found, media_type="text/event-stream")

    return pages


def shown(asked: SearchPage, found: SearchResult) -> str:
    """The result as HTML."""
    return fragment(
        "found.html", asked=asked, found=found, to=lambda each: address(asked, each),
        front=front(asked, found) if len(found.front) > 1 else None,
    )  # fmt: skip


def address(asked: SearchQuestion, each: Ranked) -> str:
    """The plan of one of the layouts found, with what the search changed of the job."""
    name = each.step.job["precision"]["name"]  # type: ignore[index]
    changes = {"precision": name} if name.removesuffix("-grad16") in asked.also else {}
    return _plan(asked, layout=each.step.layout, reduce=each.reduce, **changes)


def _plan(asked: SearchQuestion, *, layout: str, reduce: str, **changes: Any) -> str:
    settings = (*asked.set, f"reduce={reduce}") if reduce != "micro_batch" else asked.set
    return asked.about().url("/plan", layout=layout, set=settings, **changes)


def front(asked: SearchQuestion, found: SearchResult) -> Any:
    """The front as a picture."""
    points = [
        scatter.Point(
            each.memory_bytes / GIB, each.step_seconds,
            f"{each.layout}\n{show_seconds(each.step_seconds)}, {show_bytes(each.memory_bytes)}, {each.precision}",
            _plan(asked, layout=each.layout, reduce=each.reduce),
        )
        for each in found.front
    ]  # fmt: skip
    return scatter.picture(
        points, label="memory against time of the layouts that are the fastest for their memory", stairs=True,
        x_title="memory of the fullest rank, GiB", y_title="s",
    )  # fmt: skip
