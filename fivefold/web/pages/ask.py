"""The Ask page: one question of ``ask`` about a model and a machine, or a layout, in a process with a time limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, StreamingResponse
from pydantic import TypeAdapter

from fivefold.machine.catalog import is_counted, replace_ranks
from fivefold.rendering.answers import list_sections
from fivefold.rendering.lengths import list_answers
from fivefold.requests.answers import OF_LAYOUT, QUESTIONS, USED_BY, list_open_fields
from fivefold.results.search_result import Change, FineTune, Lengths, QuestionAnswer
from fivefold.web.answers import Reply
from fivefold.web.pages.render import render_fragment, render_page
from fivefold.web.pages.stream import Begun, Stream
from fivefold.web.question import AskQuestion, ChosenQuestion
from fivefold.web.site import WebServer

REPLIES: TypeAdapter[list[Reply]] = TypeAdapter(list[Reply])


class AskPage(Begun, ChosenQuestion):
    """A question to ``ask`` as the page asks it."""


def build_router(site: WebServer) -> APIRouter:
    """Build the routes of the page."""
    pages = APIRouter(include_in_schema=False)
    streams: dict[str, Stream[Any]] = {question: Stream(site, f"ask {question}") for question in QUESTIONS}

    @pages.get("/ask")
    async def show_question(request: Request, query: Annotated[AskPage, Query()]) -> HTMLResponse:
        used = [name for name, questions in USED_BY.items() if query.question in questions]
        mistake = await site.check(query, runs=query.run)
        return render_page(
            "ask.html",
            request,
            query=query,
            questions=QUESTIONS,
            used=[*used, "layout"] if query.question in OF_LAYOUT else used,
            mistake=mistake,
        )

    @pages.get("/ask/events")
    async def events(query: Annotated[AskPage, Query()]) -> StreamingResponse:
        stream = streams[query.question]

        def render(replies: Any, _: object) -> str:
            resolved = site.resolve(query)
            chosen = list_open_fields(query.question, counted=is_counted(query.machine), stated=resolved.stated)
            fields = resolved.chosen_batch
            answer = render_replies(query, REPLIES.validate_python(replies), plan_fields=fields)
            return stream.describe(query, open_fields=chosen) + answer

        return stream.answer(query.convert(AskQuestion), render)

    return pages


def render_replies(query: AskPage, replies: Sequence[Any], *, plan_fields: Mapping[str, int]) -> str:
    """Return the answers as HTML; layouts in the first table link to their plans.

    ``plan_fields``: what these plans have in common and the question does not say.
    """
    linked = select_plans(row for reply in replies for row in list_rows(reply))
    return render_fragment(
        "sections.html",
        sections=list_sections(query.question, replies),
        remarks=replies[0].remarks if replies else (),
        to=lambda row: address(query, row, plan_fields) if row in linked else "",
    )


def list_rows(reply: Any) -> Sequence[Any]:
    """Return the records of a reply that a table has in its rows."""
    return list_answers(reply) if isinstance(reply, Lengths) else (reply,)


def select_plans(rows: Iterable[Any]) -> list[Any]:
    """Return the rows whose layout tells the full plan.

    A change of the job leaves the layout as it is, so that several rows have the same one; a pair with such a change
    has the layout of the other change.
    """
    rows = list(rows)
    singles = [row.layout for row in rows if isinstance(row, Change) and not row.together]
    return [
        row for row in rows if not (isinstance(row, Change) and singles.count(row.layout) > (0 if row.together else 1))
    ]


def address(query: AskPage, reply: Any, plan_fields: Mapping[str, int]) -> str:
    """Return the URL of the plan of a reply, or an empty string if it has none."""
    changes: dict[str, Any]
    match query.question, reply:
        case "gpus", QuestionAnswer():
            changes = {"machine": replace_ranks(query.machine, int(reply.value))}
        case "sequence", QuestionAnswer():
            changes = {"seq": int(reply.value)}
        case "micro-batch", QuestionAnswer():
            changes = {}
        case _, FineTune():
            changes = {"adapter": None if reply.method == "full" else reply.method}
        case _, Change():
            changes = {}
        case _:
            return ""
    return query.to_shared().url("/plan", layout=reply.layout, **plan_fields, **changes)
