"""``/api``: the JSON of the command line over HTTP, typed; its OpenAPI is at ``/api/openapi.json``.

A user error is a 422 with one line in ``detail``, as the command prints it; 429: too many requests, or too long.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query
from fastapi.responses import JSONResponse, Response

from fivefold.errors import UserError
from fivefold.machine.catalog import list_names as machine_names
from fivefold.model.catalog import list_names as model_names
from fivefold.planner.compare import compare as side_by_side
from fivefold.record import Record
from fivefold.requests.commands import AskedQuestion
from fivefold.results import run_folder
from fivefold.results.balance import Ratios
from fivefold.results.comparison import Comparison
from fivefold.results.playbook import Playbook
from fivefold.results.step_comparison import QuantityComparison
from fivefold.step import Step
from fivefold.web import answers, runs
from fivefold.web.answers import Found, Reply
from fivefold.web.question import (
    AskQuestion,
    ChosenQuestion,
    CompareQuestion,
    DryrunQuestion,
    JobQuestion,
    PlaybookQuestion,
    PredictQuestion,
    RatiosQuestion,
    SearchQuestion,
)
from fivefold.web.runs import RunSummary
from fivefold.web.site import WebServer

SEARCH_QUESTIONS = ("gpus", "model")  # questions that need a search


class Catalog(Record):
    """The names that a question may use."""

    models: tuple[str, ...]
    machines: tuple[str, ...]


def build_router(site: WebServer) -> APIRouter:
    """Build the routes below ``/api``."""
    api = APIRouter(prefix="/api", tags=["fivefold"])
    _add_short_routes(api, site)
    _add_process_routes(api, site)
    return api


def _add_short_routes(api: APIRouter, site: WebServer) -> None:
    """Add the routes of questions that are answered in a thread."""

    @api.get("/catalog")
    def catalog() -> Catalog:
        """List the names of models and machines."""
        return Catalog(models=tuple(model_names()), machines=tuple(machine_names()))

    @api.get("/predict")
    async def predict(query: Annotated[PredictQuestion, Query()]) -> Step:
        """Estimate memory, FLOPs, communication and time of one training step: ``fivefold predict --json``."""
        return await site.answer(query, lambda resolved: answers.step(resolved, query.parse_layout(resolved.machine)))

    @api.post("/predict")
    async def predict_posted(query: Annotated[PredictQuestion, Body()]) -> Step:
        """Answer the same question with a body, for a question that is too long for a URL."""
        return await site.answer(query, lambda resolved: answers.step(resolved, query.parse_layout(resolved.machine)))

    @api.get("/compare")
    async def compare(query: Annotated[CompareQuestion, Query()]) -> Comparison:
        """Compare predicted steps side by side: ``fivefold compare --json``."""
        return await site.work.run_soon(
            lambda: side_by_side(list(query.cases(folder=site.folder, local=site.local)), risk=query.risk)
        )


def _add_process_routes(api: APIRouter, site: WebServer) -> None:
    """Add the routes that compute in a child process, as search does, and those of the runs in the folder."""

    @api.get("/search", response_model=Found)
    async def search(query: Annotated[SearchQuestion, Query()]) -> Response:
        """Find the best layouts that fit, or compare one run on several machines: ``fivefold search --json``."""
        return JSONResponse(await _answer_long(site, "search", query))

    @api.get("/ask/{question}", response_model=list[Reply])
    async def ask(question: AskedQuestion, query: Annotated[AskQuestion, Query()]) -> Any:
        """Answer a question about a layout, or about a model and a machine: ``fivefold ask QUESTION --json``."""
        if question in SEARCH_QUESTIONS or not query.layout:  # needs a search
            return JSONResponse(await _answer_long(site, f"ask {question}", query))
        chosen = ChosenQuestion(**dict(query), question=question)
        return await site.answer(chosen, lambda resolved: answers.answer_question(chosen, resolved, folder=site.folder))

    @api.get("/ratios", response_model=Ratios)
    async def ratios(query: Annotated[RatiosQuestion, Query()]) -> Response:
        """Find the degree at which each axis becomes communication-bound: ``fivefold ratios --json``."""
        return JSONResponse(await _answer_long(site, "ratios", query))

    @api.get("/plan", response_model=Playbook)
    async def plan(query: Annotated[PlaybookQuestion, Query()]) -> Response:
        """Plan a run step by step, from a model, a machine and tokens to a run file: ``fivefold plan --json``."""
        return JSONResponse(await _answer_long(site, "plan", query))

    @api.get("/dryrun")
    async def dryrun(query: Annotated[DryrunQuestion, Query()]) -> dict[str, Any]:
        """Dry-run the training code, in a process with a time limit: ``fivefold dryrun --json``."""
        dry_run_data: dict[str, Any] = (await _answer_long(site, "dryrun", query))["data"]
        return dry_run_data

    @api.get("/runs")
    async def list_runs() -> list[RunSummary]:
        """List the runs below the folder, newest first."""
        return await site.work.run_soon(lambda: runs.find(site.folder))

    @api.get("/show")
    async def show(folder: Annotated[str, Query(max_length=1000)]) -> list[QuantityComparison]:
        """Compare prediction and measurement of a finished run: ``fivefold show FOLDER --json``."""
        site.folder.path(f"{folder}/step.json")  # raises if it is a link out of the folder, or too large
        return await site.work.run_soon(lambda: list(run_folder.read(site.folder.path(folder)).comparison))


async def _answer_long(site: WebServer, verb: str, query: JobQuestion) -> Any:
    event = await site.run_long(verb, query)
    if "mistake" in event:
        raise UserError(event["mistake"])
    return event["result"]
