"""The pages Trace and Explain: files are dropped on them or named, and read in a process with a time limit."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

from fivefold.web.dropped import MAX_FILE_BYTES
from fivefold.web.guard import DROPPED_PATH
from fivefold.web.pages.render import render_page
from fivefold.web.pages.stream import Begun, Stream
from fivefold.web.question import ExplainQuestion, FilesQuestion, TraceQuestion
from fivefold.web.site import WebServer


class TracePage(Begun, TraceQuestion):
    """A question to ``trace`` as the page asks it."""


class ExplainPage(Begun, ExplainQuestion):
    """A question to ``explain`` as the page asks it."""


def build_router(site: WebServer) -> APIRouter:
    """Build the routes of both pages, and of the files that are dropped on them."""
    pages = APIRouter(include_in_schema=False)
    streams: dict[str, Stream[Any]] = {verb: Stream(site, verb) for verb in ("trace", "explain")}

    def answer(verb: str, query: FilesQuestion) -> StreamingResponse:
        stream = streams[verb]

        def render(result: Any, _: object) -> str:
            return (stream.describe(query) if query.against else "") + site.word_message(result["html"])

        return stream.answer(query, render)

    @pages.get("/trace")
    async def show_trace(request: Request, query: Annotated[TracePage, Query()]) -> HTMLResponse:
        mistake = await site.check(query, runs=query.run)
        return render_page("trace.html", request, query=query, largest_bytes=MAX_FILE_BYTES, mistake=mistake)

    @pages.get("/trace/events")
    async def stream_trace(query: Annotated[TracePage, Query()]) -> StreamingResponse:
        return answer("trace", query.convert(TraceQuestion))

    @pages.get("/explain")
    async def show_explanation(request: Request, query: Annotated[ExplainPage, Query()]) -> HTMLResponse:
        mistake = await site.check(query, runs=query.run)
        return render_page("explain.html", request, query=query, largest_bytes=MAX_FILE_BYTES, mistake=mistake)

    @pages.get("/explain/events")
    async def stream_explanation(query: Annotated[ExplainPage, Query()]) -> StreamingResponse:
        return answer("explain", query.convert(ExplainQuestion))

    @pages.post(DROPPED_PATH)
    async def receive(request: Request, name: Annotated[str, Query(max_length=300)]) -> JSONResponse:
        return JSONResponse({"file": await site.dropped.receive(name, request.stream())})

    return pages
