"""The Sweep page: the rows of a sweep's file as points, as a heat map, and as rows that link to their plans."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import Field

from fivefold.errors import UserError
from fivefold.machine import toml
from fivefold.machine.catalog import replace_ranks
from fivefold.rendering.drawing import heat, scatter
from fivefold.rendering.point_charts import draw_rows
from fivefold.rendering.sweep.settings import get_mfu, list_varied_axes
from fivefold.rendering.sweep.table import make_row_grid
from fivefold.results.sweep_row import SweepRow
from fivefold.sweeps.rows_file import SUFFIXES, read
from fivefold.units import show_bytes, show_count, show_seconds
from fivefold.web.folder import ServedFolder
from fivefold.web.pages.render import render_fragment, render_page
from fivefold.web.pages.stream import Begun, Stream
from fivefold.web.question import NO_MISTAKE, JobQuestion, Mistake, SweepStart
from fivefold.web.site import WebServer

MAX_ROWS, MAX_POINTS = 300, 1500  # largest number of rows in the table, and of points
SKETCHED = 20  # rows in the table of a sweep that runs, or has just ended
REACH = 2  # points that do not fit are drawn up to this multiple of the largest memory that fits
Across = Literal[
    "dp",
    "tp",
    "cp",
    "pp",
    "ep",
    "v",
    "zero",
    "mbs",
    "sequence",
    "batch",
    "ranks",
    "recomputation",
    "schedule",
    "precision",
    "stack",
    "model",
    "machine",
]
Value = Literal["mfu_causal", "tokens_per_second_per_gpu", "step_seconds", "peak_bytes"]
VALUES = {
    "mfu_causal": "MFU",
    "tokens_per_second_per_gpu": "tokens/s per GPU",
    "step_seconds": "step time",
    "peak_bytes": "peak memory",
}


class SweepQuestion(JobQuestion):
    """The file to show, and the axes and value of its heat map."""

    file: str = Field("", max_length=1000)
    across: Across = "tp"
    down: Across = "pp"
    value: Value = "mfu_causal"


class SweepStartPage(Begun, SweepStart):
    """A sweep as the page starts it."""


def build_router(site: WebServer) -> APIRouter:
    """Build the routes of the page."""
    pages = APIRouter(include_in_schema=False)
    stream = Stream(site, "sweep", read=SweepRow.model_validate, keeps=False)

    @pages.get("/sweep")
    async def sweep(request: Request, query: Annotated[SweepQuestion, Query()]) -> HTMLResponse:
        files = await site.work.run_soon(lambda: list_files(site.folder))
        content = None
        mistake = NO_MISTAKE
        if query.file:
            try:
                content = await site.work.run_soon(lambda: build_view(site, query))
            except UserError as error:
                mistake = Mistake(site.word_message(error))
        return render_page(
            "sweep.html",
            request,
            query=query,
            files=files,
            found=content,
            mistake=mistake,
            values=VALUES,
            axes=get_args(Across),
        )

    @pages.get("/sweep/start")
    async def start(request: Request, query: Annotated[SweepStartPage, Query()]) -> Response:
        if query.run and request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return RedirectResponse(query.url("/sweep/start", run=None))  # another site's link starts nothing
        mistake = await site.check(query, runs=query.run)
        return render_page("sweep_start.html", request, query=query, mistake=mistake)

    @pages.get("/sweep/events")
    async def events(request: Request, query: Annotated[SweepStartPage, Query()]) -> Response:
        if request.headers.get("sec-fetch-mode") == "navigate":
            raise UserError("a sweep is started with the button of the page Sweep, not by a link")
        return stream.answer(
            query.convert(SweepStart),
            lambda result, rows: render_fragment("sweep_started.html", **result) + render_best(query, rows),
            sketch=lambda rows: render_best(query, rows),
        )

    @pages.post("/sweep/events/stop")
    async def stop(work: Annotated[str, Query(max_length=20)]) -> Response:
        site.work.stop(work)
        return Response(status_code=204)

    @pages.get("/sweep/file")
    async def file(query: Annotated[SweepStartPage, Query()]) -> Response:
        """Return the sweep as the file that ``fivefold sweep`` reads."""
        swept = await site.work.run_soon(lambda: query.read_sweep(folder=site.folder, local=site.local))
        text = toml.emit(swept.dump_changes())
        return Response(text, media_type="application/toml")

    return pages


def list_files(folder: ServedFolder) -> list[str]:
    """Return files that may hold rows, at most three folders deep."""
    patterns = [f"{'*/' * depth}*{suffix}" for depth in range(4) for suffix in SUFFIXES]
    paths = (path for pattern in patterns for path in sorted(folder.root.glob(pattern)))
    names = (folder.name(path) for path in paths if path.name != "log.jsonl" and not path.is_symlink())
    return [name for name in names if not any(part.startswith(".") for part in Path(name).parts)][:200]


def describe_question(rows: Sequence[SweepRow]) -> str:
    """Return in one line what the rows share, and the number of values of what varies."""
    parts = []
    for name in ("model", "machine", "ranks", "sequence", "batch", "precision", "stack"):
        values = list(dict.fromkeys(str(getattr(row, name)) for row in rows))
        if values:
            parts.append(f"{name} {values[0]}" if len(values) == 1 else f"{name}: {len(values)} values")
    return " · ".join(parts)


def build_view(site: WebServer, query: SweepQuestion) -> dict[str, Any]:
    """Return the rows and their pictures."""
    rows = read(site.folder.path(query.file))
    predicted = [row for row in rows if row.step_seconds is not None and row.peak_bytes is not None]
    fitting = [row for row in predicted if row.status == "fits"]
    best = sorted(fitting, key=get_mfu, reverse=True)
    return {
        "rows": rows,
        "question": describe_question(rows),
        "fits": len(fitting),
        "invalid": sum(row.status == "invalid" for row in rows),
        "has_measured": any(row.measured == "measured" for row in fitting),
        "points": draw_points(best, predicted) if predicted else "",
        "heat": heat.build_table(
            find_best_cells(fitting, query),
            show=lambda size: format_value(query.value, size),
            less=query.value in ("step_seconds", "peak_bytes"),
        )
        if fitting
        else None,
        "shown": make_row_grid(best[:MAX_ROWS], axes=("model", "machine", "ranks", "sequence", "batch")),
        "to": address,
    }


def render_best(query: SweepStartPage, rows: Sequence[SweepRow]) -> str:
    """Return the best of the rows that a sweep has predicted so far as a table."""
    best = nlargest(SKETCHED, (row for row in rows if row.status == "fits"), key=get_mfu)
    return render_fragment(
        "best_rows.html",
        grid=make_row_grid(best, axes=list_varied_axes(rows)),
        to=lambda row: address(row, query.to_shared()),
        rows=len(rows),
        fits=sum(row.status == "fits" for row in rows),
    )


def draw_points(best: Sequence[SweepRow], known: Sequence[SweepRow]) -> Any:
    """Draw memory against speed: rows that fit, rows that do not, rows that were measured."""
    max_bytes = REACH * max((row.peak_bytes or 0 for row in best), default=2**80)
    over = (row for row in known if row.status != "fits" and (row.peak_bytes or 0) <= max_bytes)
    chosen = [*best[:MAX_POINTS], *over][:MAX_POINTS]
    dots = [
        scatter.ScatterPoint(
            row.peak_bytes or 0,
            row.tokens_per_second_per_gpu or 0.0,
            make_tooltip(row),
            address(row),
            "dot over" if row.status != "fits" else "dot measured" if row.measured == "measured" else "dot",
        )
        for row in chosen
    ]
    return draw_rows(dots, label="memory against speed of the rows", zero=True)


def make_tooltip(row: SweepRow) -> str:
    """Return a row in a few lines."""
    seconds = show_seconds(row.step_seconds or 0.0)
    size = show_bytes(row.peak_bytes or 0)
    measured = f"\nmeasured {show_seconds(row.measured_step_seconds)}" if row.measured_step_seconds else ""
    return (
        f"{row.layout}\n{row.model} on {row.ranks} {row.machine}, seq {row.sequence}, batch {row.batch}, "
        f"{row.precision}\n{seconds}, {size}, MFU {row.mfu_causal or 0.0:.1%}{measured}"
    )


def find_best_cells(rows: Sequence[SweepRow], query: SweepQuestion) -> dict[tuple[Any, Any], tuple[float, str]]:
    """Return the best value for each pair of axis values, and the URL of its plan."""
    sign = -1 if query.value in ("step_seconds", "peak_bytes") else 1
    best: dict[tuple[Any, Any], tuple[float, str]] = {}
    for row in rows:
        cell = (getattr(row, query.down), getattr(row, query.across))
        value = getattr(row, query.value)
        if value is not None and (cell not in best or sign * value > sign * best[cell][0]):
            best[cell] = value, address(row)
    return best


def address(row: SweepRow, query: JobQuestion | None = None) -> str:
    """Return the URL of a row's plan; ``query``: the rest of the job, which no row contains."""
    return (query or JobQuestion()).url(
        "/plan",
        model=row.model,
        machine=replace_ranks(row.machine, row.ranks),
        seq=row.sequence,
        gbs=row.batch,
        precision=row.precision,
        stack=row.stack,
        layout=row.layout,
    )


def format_value(value: str, size: float | None) -> str:
    """Return a value with its unit."""
    if size is None:
        return "–"
    shows: dict[str, Any] = {"mfu_causal": "{:.1%}".format, "step_seconds": show_seconds, "peak_bytes": show_bytes}
    return str(shows.get(value, show_count)(size))
