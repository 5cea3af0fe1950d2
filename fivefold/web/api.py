"""``/api``: the JSON of the command line over HTTP, typed; its OpenAPI is at ``/api/openapi.json``.

A mistake is a 422 with one line in ``detail``, as the command prints it; 429: too much at once, or too long.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query
from fastapi.responses import JSONResponse, Response

from fivefold.machine.catalog import names as machine_names
from fivefold.model.catalog import names as model_names
from fivefold.planner.compare import compare as side_by_side
from fivefold.record import Mistake, Record
from fivefold.requests.commands import Question as Ask
from fivefold.results import run_folder
from fivefold.results.balance import Ratios
from fivefold.results.comparison import Comparison
from fivefold.results.playbook import Playbook
from fivefold.results.search_result import Answer, Batch, Change, Lengths
from fivefold.results.step_comparison import Row
from fivefold.results.whole_run import WholeRun
from fivefold.step import Step
from fivefold.web import answers, runs
from fivefold.web.answers import Found
from fivefold.web.question import (
    About,
    AskQuestion,
    CompareQuestion,
    PlaybookQuestion,
    Question,
    RatiosQuestion,
    SearchQuestion,
)
from fivefold.web.runs import RunSummary
from fivefold.web.site import Site

LONG = ("gpus", "model")  # questions that take a search


class Catalog(Record):
    """Names that a question may use."""

    models: tuple[str, ...]
    machines: tuple[str, ...]


def router(site: Site) -> APIRouter:
    """The routes below ``/api``."""
    api = APIRouter(prefix="/api", tags=["fivefold"])
    _short(api, site)
    _others(api, site)
    return api


def _short(api: APIRouter, site: Site) -> None:
    """Questions that are answered while one waits."""

    @api.get("/catalog")
    def catalog() -> Catalog:
        """Names of models and machines."""
        return Catalog(models=tuple(model_names()), machines=tuple(machine_names()))

    @api.get("/predict")
    async def predict(asked: Annotated[Question, Query()]) -> Step:
        """Memory, work, traffic and time of one training step: ``fivefold predict --json``."""
        return await site.answer(asked, lambda noun: answers.step(noun, asked.chosen()))

    @api.post("/predict")
    async def predict_posted(asked: Annotated[Question, Body()]) -> Step:
        """The same for a question that is too long for an address."""
        return await site.answer(asked, lambda noun: answers.step(noun, asked.chosen()))

    @api.get("/compare")
    async def compare(asked: Annotated[CompareQuestion, Query()]) -> Comparison:
        """Predicted steps side by side: ``fivefold compare --json``."""
        return await site.work.soon(
            lambda: side_by_side(list(asked.cases(folder=site.folder, local=site.local)), risk=asked.risk)
        )


def _others(api: APIRouter, site: Site) -> None:
    """Questions that take a process of their own, and what lies in the folder."""

    @api.get("/search", response_model=Found)
    async def search(asked: Annotated[SearchQuestion, Query()]) -> Response:
        """The best of all legal layouts that fit, or one run on several machines: ``fivefold search --json``."""
        return JSONResponse(await _long(site, "search", asked))

    @api.get("/ask/{question}", response_model=list[Answer | Change | Batch | WholeRun | Lengths])
    async def ask(question: Ask, asked: Annotated[AskQuestion, Query()]) -> Any:
        """What people ask of a layout, or of a model and a machine: ``fivefold ask QUESTION --json``."""
        if question in LONG or not asked.layout:  # which a search answers
            return JSONResponse(await _long(site, f"ask {question}", asked))
        return await site.answer(asked, lambda noun: answers.asked(question, asked, noun, folder=site.folder))

    @api.get("/ratios", response_model=Ratios)
    async def ratios(asked: Annotated[RatiosQuestion, Query()]) -> Response:
        """When each axis stops paying: ``fivefold ratios --json``."""
        return JSONResponse(await _long(site, "ratios", asked))

    @api.get("/plan", response_model=Playbook)
    async def plan(asked: Annotated[PlaybookQuestion, Query()]) -> Response:
        """From a model, a machine and tokens to a run file, step by step: ``fivefold plan --json``."""
        return JSONResponse(await _long(site, "plan", asked))

    @api.get("/dryrun")
    async def dryrun(asked: Annotated[Question, Query()]) -> dict[str, Any]:
        """A rehearsal of the training code, in a process with a limit of time: ``fivefold dryrun --json``."""
        found: dict[str, Any] = (await _long(site, "dryrun", asked))["data"]
        return found

    @api.get("/runs")
    async def listed() -> list[RunSummary]:
        """The runs below the folder, the newest first."""
        return await site.work.soon(lambda: runs.find(site.folder))

    @api.get("/show")
    async def show(folder: Annotated[str, Query(max_length=1000)]) -> list[Row]:
        """Predicted beside measured of a run that has ended: ``fivefold show FOLDER --json``."""
        site.folder.path(f"{folder}/step.json")  # which may be a link, or too large
        return await site.work.soon(lambda: list(run_folder.read(site.folder.path(folder)).compared))


async def _long(site: Site, verb: str, asked: About) -> Any:
    event = await site.long(verb, asked)
    if "mistake" in event:
        raise Mistake(event["mistake"])
    return event["result"]
