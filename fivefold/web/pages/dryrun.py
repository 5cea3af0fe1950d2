"""The dry-run page: executes the training code in a process with a time limit, and draws its tape."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, StreamingResponse

from fivefold.web.pages.render import render_page
from fivefold.web.pages.stream import Begun, Stream
from fivefold.web.question import DryrunQuestion
from fivefold.web.site import WebServer


class DryrunPage(Begun, DryrunQuestion):
    """A question to ``dryrun`` as the page asks it."""


def build_router(site: WebServer) -> APIRouter:
    """Build the routes of the page."""
    pages = APIRouter(include_in_schema=False)
    stream: Stream[Any] = Stream(site, "dryrun")

    @pages.get("/dryrun")
    async def show_dry_run(request: Request, query: Annotated[DryrunPage, Query()]) -> HTMLResponse:
        mistake = await site.check(query, runs=query.run)
        return render_page("dryrun.html", request, query=query, mistake=mistake)

    @pages.get("/dryrun/events")
    async def events(query: Annotated[DryrunPage, Query()]) -> StreamingResponse:
        return stream.answer(
            query.convert(DryrunQuestion), lambda result, _: stream.describe(query) + str(result["html"])
        )

    return pages
