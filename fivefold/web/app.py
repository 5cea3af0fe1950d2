"""The web application: access checks, ``/api``, the pages, and error handlers that turn every failure into one line."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote, urlencode

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import fivefold
from fivefold.errors import RunFailure, UserError
from fivefold.record import VERBS, reword
from fivefold.rendering.drawing.style import build_file_css
from fivefold.requests.settings import load_settings
from fivefold.web import api
from fivefold.web.guard import DROPPED_PATH, Guard
from fivefold.web.pages import ask, compare, dryrun, files, learn, plan, runs, search, sweep
from fivefold.web.pages.render import COMMANDS, INVALID, render_page
from fivefold.web.question import JobQuestion, Mistake
from fivefold.web.site import WebServer
from fivefold.web.wording import LABELS
from fivefold.web.work import Busy, WorkQueue

FIRST = "/plan"  # the page shown first: every answer begins with the defaults of the command line
WITH_CONTROLS = (*COMMANDS, "/sweep", "/sweep/start", "/trace", "/explain")  # pages; besides the chapters of Learn
COLLECTED = 50_000  # allocations between garbage collections: a plan makes 100,000 objects, hardly any in cycles


@asynccontextmanager
async def collect_garbage_less(_: FastAPI) -> AsyncIterator[None]:
    """Collect garbage less often while the page is served, and exempt all objects loaded before.

    Otherwise garbage collection takes two fifths of the time of a plan with many stages. A process that has exempted
    objects itself keeps them exempt at the end.
    """
    thresholds, freezes = gc.get_threshold(), gc.get_freeze_count() == 0
    if freezes:
        gc.collect()
        gc.freeze()
    gc.set_threshold(COLLECTED, *thresholds[1:])
    yield
    gc.set_threshold(*thresholds)
    if freezes:
        gc.unfreeze()


def create(root: Path, *, local: Path, work: WorkQueue | None = None) -> FastAPI:
    """Build the application for the files below ``root``; ``local``: the machine file that ``local`` stands for."""
    site = WebServer(root, local=local, work=work)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with collect_garbage_less(app):
            yield
        site.dropped.close()

    app = FastAPI(
        title="Fivefold",
        version=fivefold.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        description="The JSON of the command line.",
        lifespan=lifespan,
    )
    app.add_middleware(Guard)
    for part in (api, plan, search, ask, compare, sweep, dryrun, runs, files, learn):
        app.include_router(part.build_router(site))

    @app.get("/static/picture-file.css", include_in_schema=False)
    def picture_file() -> Response:
        return Response(build_file_css(), media_type="text/css", headers={"cache-control": "max-age=3600"})

    app.mount("/static", StaticFiles(packages=[("fivefold.web", "static")]), name="static")

    @app.get("/", include_in_schema=False)
    def redirect_to_start(request: Request) -> Response:
        if request.url.query:
            return RedirectResponse(f"/plan?{request.url.query}")
        machine = load_settings().machine
        return RedirectResponse(f"{FIRST}?machine={quote(machine, safe=':')}" if machine else FIRST)

    def respond_error(request: Request, code: int, line: str) -> Response:
        if request.url.path.startswith(("/api/", "/static/", DROPPED_PATH)):
            return JSONResponse({"detail": site.folder.strip_root(line)}, status_code=code)
        if code == HTTPStatus.NOT_FOUND and line == HTTPStatus.NOT_FOUND.phrase:
            line = f"there is no page {request.url.path}"
        mistake = Mistake(site.word_message(line))
        return render_page("mistake.html", request, query=JobQuestion(), mistake=mistake, code=code)

    @app.exception_handler(UserError)
    @app.exception_handler(RunFailure)
    async def mistaken(request: Request, error: Exception) -> Response:
        return respond_error(request, INVALID, str(error))

    @app.exception_handler(Busy)
    async def handle_busy(request: Request, error: Exception) -> Response:
        return respond_error(request, 429, str(error))

    @app.exception_handler(RequestValidationError)
    async def handle_invalid(request: Request, error: RequestValidationError) -> Response:
        labels = {} if request.url.path.startswith("/api/") else LABELS
        line = "; ".join(_explain(item, labels) for item in error.errors()[:8])
        names = [str(item["loc"][1]) for item in error.errors() if len(item["loc"]) > 1]
        if len(names) < len(error.errors()) or not has_controls(request):
            return respond_error(request, INVALID, line)
        return AnswerWithout(request, names, Mistake(site.word_message(line), names[0]))

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> Response:
        return respond_error(request, error.status_code, str(error.detail))

    return app


class AnswerWithout(Response):
    """The page of a request without its invalid fields ``names``, with the ``mistake`` in place of its answer."""

    def __init__(self, request: Request, names: Collection[str], mistake: Mistake) -> None:
        super().__init__()
        values = [(name, value) for name, value in request.query_params.multi_items() if name not in names]
        state = {**request.scope.get("state", {}), "mistake": mistake}
        self.router = request.app.router
        self.scope = {**request.scope, "query_string": urlencode(values).encode(), "state": state}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the page."""
        await self.router(self.scope, receive, send)


def has_controls(request: Request) -> bool:
    """Tell whether a request is for a page with controls, and has not been answered without invalid fields already."""
    path = request.url.path
    return (path in WITH_CONTROLS or path.startswith("/learn/")) and not hasattr(request.state, "mistake")


def _explain(error: dict[str, object], labels: Mapping[str, str]) -> str:
    """Return one of pydantic's errors with its field, in our wording; ``labels``: labels of the controls of a page."""
    location = error["loc"]
    name = ".".join(str(part) for part in location[1:]) if isinstance(location, tuple) else ""
    name = f"“{labels[name]}”" if name in labels else name
    line = reword(str(error["msg"]).removeprefix("Value error, "))
    separator = " " if line.startswith(VERBS) else ": "
    return f"{name}{separator}{line}" if name else line
