"""The Learn page: one chapter of the guide, with its numbers below it, live, for any step."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from fivefold.record import UserError
from fivefold.web.book import list_chapters, read_chapter
from fivefold.web.pages.plan import PlanQuestion, View, build_view
from fivefold.web.pages.render import render_page
from fivefold.web.site import WebServer


def build_router(site: WebServer) -> APIRouter:
    """Build the routes of the page."""
    pages = APIRouter(include_in_schema=False)

    @pages.get("/learn")
    def redirect_to_index() -> Response:
        return RedirectResponse("/learn/index?seq=8192&gbs=64")

    @pages.get("/learn/{name}")
    async def learn(request: Request, name: str, asked: Annotated[PlanQuestion, Query()]) -> HTMLResponse:
        try:
            found_chapter = read_chapter(name)
        except UserError as error:
            return render_page("mistake.html", request, asked=asked, mistake=str(error), code=404)
        view = await site.work.run_soon(lambda: build_view(site, asked)) if found_chapter.live else View()
        return render_page(
            "learn.html",
            request,
            asked=asked,
            chapter=found_chapter,
            chapters=list_chapters(),
            view=view,
            mistake=site.word_message(view.mistake),
        )

    return pages
