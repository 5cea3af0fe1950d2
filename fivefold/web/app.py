"""The application: guard, ``/api``, pages, and how every failure becomes one line."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

import fivefold
from fivefold.record import Fault, Mistake, reworded
from fivefold.rendering.drawing.style import css
from fivefold.web import api
from fivefold.web.guard import Guard
from fivefold.web.pages import compare, learn, plan, rehearse, runs, search, sweep
from fivefold.web.pages.render import page
from fivefold.web.question import About
from fivefold.web.site import Site
from fivefold.web.work import Busy, Work

FIRST = "/plan?seq=8192&gbs=64"  # what is shown before anything is asked
COLLECTED = 50_000  # objects made between two garbage collections: a plan makes 100,000, of which hardly any are cycles


@asynccontextmanager
async def seldom_collected(_: FastAPI) -> AsyncIterator[None]:
    """While the page is served, what was loaded before is not searched for garbage, and the rest less often: two fifths
    of the time of a plan of many stages went into that.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED, *before[1:])
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def create(root: Path, *, local: Path, work: Work | None = None) -> FastAPI:
    """The application for the files below ``root``; ``local``: what the machine of this name means."""
    site = Site(root, local=local, work=work)
    app = FastAPI(
        title="Fivefold", version=fivefold.__version__, docs_url=None, redoc_url=None,
        openapi_url="/api/openapi.json", description="The JSON of the command line.", lifespan=seldom_collected,
    )  # fmt: skip
    app.add_middleware(Guard)
    for part in (api, plan, search, compare, sweep, rehearse, runs, learn):
        app.include_router(part.router(site))

    @app.get("/static/pictures.css", include_in_schema=False)
    def pictures() -> Response:
        return Response(css(), media_type="text/css", headers={"cache-control": "max-age=3600"})

    app.mount("/static", StaticFiles(packages=[("fivefold.web", "static")]), name="static")

    @app.get("/", include_in_schema=False)
    def first() -> Response:
        return RedirectResponse(FIRST)

    def told(request: Request, code: int, line: str) -> Response:
        line = site.folder.plain(line)
        if request.url.path.startswith(("/api/", "/static/")):
            return JSONResponse({"detail": line}, status_code=code)
        return page("mistake.html", request, asked=About(), mistake=line, code=code)

    @app.exception_handler(Mistake)
    @app.exception_handler(Fault)
    async def mistaken(request: Request, error: Exception) -> Response:
        return told(request, 422, str(error))

    @app.exception_handler(Busy)
    async def busy(request: Request, error: Exception) -> Response:
        return told(request, 429, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return told(request, 422, "; ".join(_explained(each) for each in error.errors()[:8]))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return told(request, error.status_code, str(error.detail))

    return app


def _explained(error: dict[str, object]) -> str:
    """One error of pydantic with its field, in our words."""
    place = error["loc"]
    name = ".".join(str(part) for part in place[1:]) if isinstance(place, tuple) else ""
    line = reworded(str(error["msg"]).removeprefix("Value error, "))
    return f"{name}: {line}" if name else line
