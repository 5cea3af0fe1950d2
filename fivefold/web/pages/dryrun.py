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
    async def show_dry_run(request: Request, asked: Annotated[DryrunPage, Query()]) -> HTMLResponse:
        return render_page("dryrun.html", request, asked=asked)

    @pages.get("/dryrun/events")
    async def events(asked: Annotated[DryrunPage, Query()]) -> StreamingResponse:
        return stream.answer(
            asked.convert(DryrunQuestion), lambda result, _: stream.describe(asked) + str(result["html"])
        )

    return pages
