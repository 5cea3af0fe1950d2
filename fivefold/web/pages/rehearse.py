"""Rehearse: a dry run of the training code in a process of its own, with a limit of time; its tape as pictures."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic import Field
from starlette.responses import StreamingResponse

from fivefold.web.pages.render import page
from fivefold.web.pages.stream import streamed
from fivefold.web.question import Question
from fivefold.web.site import Site


class RehearsePage(Question):
    """... as the page asks it."""

    run: bool = Field(False, description="Whether the rehearsal begins at once.")


def router(site: Site) -> APIRouter:
    """The routes of the page."""
    pages = APIRouter(include_in_schema=False)
    kept: OrderedDict[str, str] = OrderedDict()

    @pages.get("/rehearse")
    async def rehearse(request: Request, asked: Annotated[RehearsePage, Query()]) -> HTMLResponse:
        return page("rehearse.html", request, asked=asked)

    @pages.get("/rehearse/events")
    async def events(asked: Annotated[RehearsePage, Query()]) -> StreamingResponse:
        question = Question(**{name: getattr(asked, name) for name in Question.model_fields})
        found = streamed(site, "dryrun", question, lambda result: str(result["html"]), kept)
        return StreamingResponse(found, media_type="text/event-stream")

    return pages
